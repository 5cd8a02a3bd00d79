"""Finds out what the server of a model can, before any number is taken from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import requests

from mlflow_compress.engines.endpoint import routes, served_model
from mlflow_compress.errors import AlignmentError, EndpointError
from mlflow_compress.models.identity import IdentifiedModel
from mlflow_compress.scoring.generation.chat_format import PLAIN, chat_format
from mlflow_compress.scoring.plan.encoding import Encoder
from mlflow_compress.scoring.plan.packing import Ids
from mlflow_compress.transport.client import Transport, may_pass
from mlflow_compress.transport.endpoint import EndpointConfig
from mlflow_compress.transport.replies import NOT_A_COMPLETION, NoReply, read_reply

_SECONDS = 10.0


@dataclass(frozen=True)
class _ServerPages:
    """What a server tells of itself."""

    endpoint: EndpointConfig
    card: Mapping[str, Any]  # What it tells of the model; empty where it tells nothing
    pages: Mapping[str, Mapping[str, Any]]  # By name: "version" (vLLM), "get_server_info" (SGLang), "props" (llama.cpp)

    @classmethod
    def read(cls, endpoint: EndpointConfig, model: str) -> "_ServerPages":
        names = ("version", "get_server_info", "props")
        pages = {name: _page(endpoint, f"{endpoint.root}/{name}") for name in names}
        listed = (_page(endpoint, f"{endpoint.called_url.rstrip('/')}/models") or {}).get("data")
        cards = [card for card in listed if isinstance(card, dict)] if isinstance(listed, list) else []
        by_name = {card["id"]: card for card in reversed(cards) if isinstance(card.get("id"), str)}  # the first counts
        card = by_name.get(model, {})
        # vLLM tells the length of the base alone, and of an adapter the base.
        if card.get("max_model_len") is None and isinstance(card.get("parent"), str):
            card = {**card, "max_model_len": by_name.get(card["parent"], {}).get("max_model_len")}
        return cls(endpoint, card, {name: page for name, page in pages.items() if page is not None})

    @property
    def server(self) -> str:
        """Name and version of the server, as far as it tells them."""
        names = {"props": ("llama.cpp", "build_info"), "get_server_info": ("SGLang", "version")}
        for page, (name, version) in {**names, "version": ("vLLM", "version")}.items():
            if page in self.pages:
                return f"{name} {self.pages[page].get(version, '')}".strip()
        return "a server that does not tell its name"

    @property
    def root(self) -> str | None:
        """What the server says it has loaded under the model's name."""
        told = self.card.get("root") or self.pages.get("props", {}).get("model_path")
        return str(told) if told else None

    @property
    def max_length(self) -> int | None:
        """The server's context length, where it tells it."""
        settings = self.pages.get("props", {}).get("default_generation_settings")
        told = self.card.get("max_model_len") or (settings.get("n_ctx") if isinstance(settings, dict) else None)
        return int(told) if isinstance(told, int) and told > 0 else None

    def tokens_of(self, text: str) -> list[str]:
        """Return llama.cpp's tokens of a text, as servers name them."""
        body: dict[str, str | bool] = {"content": text, "add_special": True}
        try:
            url, headers = f"{self.endpoint.root}/tokenize", _headers(self.endpoint)
            answer = requests.post(url, json=body, headers=headers, timeout=_SECONDS)
            tokens = answer.json()["tokens"] if answer.ok else None
        except (requests.RequestException, ValueError, KeyError, TypeError):
            tokens = None
        if not isinstance(tokens, list):
            raise EndpointError(f"{self.endpoint.where} does not show its tokens", allowed="an answer of /tokenize")
        return [f"token_id:{token}" for token in tokens]


def _headers(endpoint: EndpointConfig) -> dict[str, str]:
    return {"Authorization": f"Bearer {endpoint.key}", **endpoint.headers}


def _page(endpoint: EndpointConfig, url: str) -> dict[str, Any] | None:
    """Return a page that a server may have; None where it has not."""
    try:
        answer = requests.get(url, headers=_headers(endpoint), timeout=_SECONDS)
        content = answer.json() if answer.ok else None
    except (requests.RequestException, ValueError):
        return None
    return content if isinstance(content, dict) else None


_TOPS = (100, 50, 20, 10, 5, 1)
"""Lengths of a top list that are tried, the longest first; servers show up to 20 (vLLM) or 5 (OpenAI) by default."""


@dataclass(frozen=True)
class _ServerProbe:
    """Asks a server for what it can."""

    endpoint: EndpointConfig
    model: str  # Name of the model there
    vocabulary: routes.Vocabulary  # Of our tokenizer

    @cached_property
    def tokens(self) -> Ids:
        return self.vocabulary.encoder.ids([served_model.PROBE_TEXT])[0]

    def run(self) -> routes.Capabilities:
        """Return what the server can.

        Tokens that are not ours are an `AlignmentError`; a server without log-probabilities that scoring can use, an
        `EndpointError`.
        """
        pages = _ServerPages.read(self.endpoint, self.model)
        server = pages.server
        can = routes.Capabilities(
            server=server,
            root=pages.root,
            route=routes.COMPLETIONS,
            n_top=1,
            echo_alone=server.startswith("vLLM"),
            max_length=pages.max_length,
        )
        with Transport(self.endpoint) as transport:
            if "props" in pages.pages:  # llama.cpp
                can = replace(can, route=routes.LLAMA_CPP_ROUTE, n_top=_TOPS[0])
                self._compare(pages.tokens_of(served_model.PROBE_TEXT), self.tokens.tolist())
            else:
                can = self._echo(transport, can)
                can = self._same_tokens(transport, can)
                can = self._aligned(transport, can)
            if can.echo:
                can = self._together(can)
            else:
                can = replace(can, forces=self._forces(transport, can))
                if not can.forces:
                    raise EndpointError(
                        f"{self.endpoint.where} neither echoes the log-probabilities of a prompt at their own "
                        "positions, nor takes logit_bias to show that of a token: no option can be scored",
                        got=server,
                    )
            route, recognising = self._route(can), served_model.recognising(self.tokens)
            asked = [question for question in recognising if route.request(question) is not None]
            replies = self._ask(transport, can, *asked)
        return replace(can, probe=tuple(float(one[0].top[1][0]) for one in replies if len(one[0].top[1])))

    def _route(self, can: routes.Capabilities) -> routes.Route:
        return routes.route_of(can, model=self.model, root=self.endpoint.root, vocabulary=self.vocabulary)

    def _echoed(self, transport: Transport, can: routes.Capabilities) -> routes.EchoedTokens | NoReply:
        """Return the fixed text as the server echoes it."""
        request = self._route(can).request(routes.TokenQuestion(self.tokens, scored=1))
        if request is None:
            return NoReply("", "no text is these tokens")

        def read(text: str) -> routes.EchoedTokens | NoReply:
            return read_reply(
                text,
                routes.LOGPROBS,
                lambda reply: routes.completions_of(reply, model=self.model, root=can.root, n=1)[0],
            )

        async def once(_: None) -> routes.EchoedTokens | NoReply:
            return await transport.post(*request, read, model=self.model, n_bytes=len(served_model.PROBE_TEXT))

        return transport.for_all(once, [None])[0]

    def _answers(
        self, transport: Transport, can: routes.Capabilities, *requests: Sequence[routes.TokenQuestion]
    ) -> list[list[list[routes.Position]]]:
        """Return the answers to the questions of each request, which must be there."""
        route = self._route(can)

        async def once(questions: Sequence[routes.TokenQuestion]) -> list[list[routes.Position]]:
            request = route.request(*questions)
            if request is None:
                raise EndpointError(f"{self.endpoint.where} cannot be asked for the tokens of the fixed text")
            answer = await transport.post(
                *request,
                lambda text: route.read(text, *questions),
                model=self.model,
                n_bytes=len(served_model.PROBE_TEXT),
            )
            if isinstance(answer, NoReply):
                raise EndpointError(answer.detail)
            return answer.of_questions

        return transport.for_all(once, requests)

    def _ask(
        self, transport: Transport, can: routes.Capabilities, *questions: routes.TokenQuestion
    ) -> list[list[routes.Position]]:
        """Return the answer to each question, which must be there."""
        return [answer for [answer] in self._answers(transport, can, *([question] for question in questions))]

    def _echo(self, transport: Transport, can: routes.Capabilities) -> routes.Capabilities:
        """Return whether prompts may be ids, and how long the top lists are; a server that echoes nothing is an error.

        A request that the server refuses is made with a shorter list, and then with text.
        """
        refusal = NoReply("", f"{self.endpoint.where} takes no prompt of ours")
        for ids_in in (True, False):
            for n_top in _TOPS:
                tried = replace(can, ids_in=ids_in, n_top=n_top)
                echoed = self._echoed(transport, tried)
                if isinstance(echoed, NoReply):
                    refusal = echoed if echoed.reason else refusal
                    if echoed.reason.startswith("http_4") and not may_pass(int(echoed.reason[-3:])):
                        continue
                    if echoed.reason.startswith("http_5") or echoed.reason in ("", NOT_A_COMPLETION):
                        break
                    raise EndpointError(echoed.detail)
                if len(echoed.tokens) <= 1:
                    raise EndpointError(
                        f"{self.endpoint.where} gives log-probabilities of the tokens that it writes, and none of a "
                        "prompt's: every option of a question would score 0",
                        allowed="a server that takes echo with logprobs (vLLM, SGLang, llama-cpp-python), or "
                        "llama.cpp's own",
                        got=can.server,
                    )
                # A server may show fewer than it was asked for, without a word; once may be a fault.
                shown = max(map(len, echoed.tops))
                if shown < n_top and isinstance(again := self._echoed(transport, tried), routes.EchoedTokens):
                    shown = max(shown, *map(len, again.tops))
                return replace(tried, n_top=max(n for n in _TOPS if n <= max(1, min(n_top, shown))))
        raise EndpointError(refusal.detail)

    def _same_tokens(self, transport: Transport, can: routes.Capabilities) -> routes.Capabilities:
        """Return whether tokens are named by ids and the first is left out; other tokens than ours are an error."""
        echoed = self._echoed(transport, replace(can, ids_in=False))
        if isinstance(echoed, NoReply):
            raise EndpointError(f"{self.endpoint.where}: {echoed.detail}")
        ids_out = any(self.vocabulary.id_of(name) is not None and ":" in name for name in echoed.tokens) and all(
            name.startswith("token_id:") for name in echoed.tokens
        )
        ours = self.tokens.tolist()
        drops = self.vocabulary.encoder.adds_bos and not self._names(echoed.tokens[0], ours[0])
        self._compare(echoed.tokens, ours[1:] if drops else ours)
        return replace(can, ids_out=ids_out, drops_first=drops)

    def _names(self, name: str, token: int) -> bool:
        there = self.vocabulary.id_of(name)
        return there == token if there is not None else name == self.vocabulary.encoder.tokenizer.decode([token])

    def _compare(self, names: list[str], ours: list[int]) -> None:
        """Refuse tokens of the fixed text that are not ours. One more may follow: the one that was written."""
        for place, token in enumerate(ours):
            there = names[place] if place < len(names) else "no token"
            known = self.vocabulary.id_of(there)
            if known is None and place < len(names):
                continue  # a text that several tokens have, such as a part of a character
            if known != token:
                text = self.vocabulary.encoder.tokenizer.decode([token])
                raise AlignmentError(
                    f"The tokens of {self.model!r} differ from ours, first at token {place} of "
                    f"{served_model.PROBE_TEXT[:40]!r}...",
                    allowed=f"{token} ({text!r})",
                    got=there,
                    fix="Give its own tokenizer as tokenizer=, and a baseline that has the same",
                )
        if len(names) > len(ours) + 1:
            raise AlignmentError(
                "The server reads more tokens than ours", allowed=f"{len(ours)}", got=f"{len(names)}: {names[-1]!r}"
            )

    def _other_end(self, can: routes.Capabilities) -> tuple[Ids, Ids]:
        """Return two prompts that differ in their last token alone, and can be sent."""
        ours = self.tokens[:-1]
        route = self._route(can)
        for token in self.tokens[:-2].tolist():
            other = np.append(ours[:-1], token).astype(np.int32)
            if token != ours[-1] and route.request(routes.TokenQuestion(other, scored=1)) is not None:
                return ours, other
        raise EndpointError("No two texts differ only in their last token", got=served_model.PROBE_TEXT)

    def _aligned(self, transport: Transport, can: routes.Capabilities) -> routes.Capabilities:
        """Return whether each echoed list is that of its own position.

        The list at the last position follows from the tokens before it. So two prompts that differ in the last token
        have the same list there. llama-cpp-python 0.3.36 shows the list of the next position, except where a BOS token
        is left out.
        """
        one, other = self._other_end(can)
        first, second = self._ask(
            transport, can, routes.TokenQuestion(one, scored=1), routes.TokenQuestion(other, scored=1)
        )
        same = _agree(first[0], second[0])
        if not same:
            return replace(can, shifted=True)
        before = routes.TokenQuestion(one[:-1])
        route = self._route(can)
        askable = route.request(before) is not None
        steps = askable and _agree(self._ask(transport, can, before)[0][0], first[0])
        return replace(can, echo=True, steps=steps)

    def _together(self, can: routes.Capabilities) -> routes.Capabilities:
        """Return the way of asking for several prompts at once that gives the answers that each gets alone.

        It is the one with the least work for the server.
        """
        questions = [routes.TokenQuestion(tokens, scored=1) for tokens in self._other_end(can)]
        lists = replace(can, lists=True)
        # Some servers answer a list with a 5xx: one more try is enough.
        with Transport(replace(self.endpoint, max_retries=min(self.endpoint.max_retries, 1))) as transport:
            alone = self._ask(transport, can, *questions)
            for way in [replace(lists, by_position=True), lists] if can.server.startswith("vLLM") else [lists]:
                try:
                    [together] = self._answers(transport, way, questions)
                except EndpointError:
                    continue
                if all(_agree(one[0], other[0]) for one, other in zip(alone, together, strict=True)):
                    return way
        return can

    def _forces(self, transport: Transport, can: routes.Capabilities) -> bool:
        """Return whether a token that the server is made to write has the log-probability that its list shows."""
        prefix = self.tokens[:-1]
        (shown,) = self._ask(transport, can, routes.TokenQuestion(prefix))
        ids, values = shown[0].top
        if len(ids) < 2:
            return False
        (forced,) = self._ask(transport, can, routes.TokenQuestion(prefix, forced=int(ids[-1])))
        logprob = forced[0].logprob
        return logprob is not None and abs(logprob - float(values[-1])) < served_model.SAME


def _agree(one: routes.Position, other: routes.Position) -> bool:
    """Return whether two top lists are of one distribution."""
    there = dict(zip(other.top[0].tolist(), other.top[1].tolist(), strict=True))
    both = [(value, there[i]) for i, value in zip(one.top[0].tolist(), one.top[1].tolist(), strict=True) if i in there]
    enough = 2 * len(both) > min(len(one.top[0]), len(other.top[0]))
    return enough and all(abs(a - b) < served_model.SAME for a, b in both)


ChatWanted = Literal["auto", "true", "false"]
_TURN = "What is the capital of France? Why?"


def _probe_chat(
    endpoint: EndpointConfig, model: str, tokenizer: Any, wanted: ChatWanted, can: routes.Capabilities
) -> routes.Capabilities:
    """Return what the server `can`, with whether conversations are sent as chat completions, and why.

    They are where the server has that route, the tokenizer has a chat template, and the server's own template makes as
    many tokens of a message as ours. A baseline and a variant must read the same prompt.

    `wanted` "true" makes an error of what stands in the way, but for other tokens, which it accepts.
    """
    if wanted == "false":
        return replace(can, answers="as completions, in our chat template (endpoint_args: chat=false)")
    style = chat_format(tokenizer)
    if style.name == PLAIN:
        if wanted == "true":
            raise EndpointError("Chat completions are requested, but the tokenizer has no chat template")
        return replace(can, answers="as completions: the tokenizer has no chat template")
    answer = _ask(endpoint, served_model.AnswerReader(model=model, root=can.root, most=1))
    if isinstance(answer, str):
        if wanted == "true":
            raise EndpointError(
                f"{endpoint.where} gives no chat completions: {answer}", fix="Leave out chat of endpoint_args"
            )
        return replace(can, answers="as completions, in our chat template: the server gives no chat completions")
    ours = len(Encoder(tokenizer, 1 << 30).ids([style.prompt([_TURN])], special=False)[0])
    theirs = answer.usage.prompt if answer.usage is not None else None
    if theirs != ours and wanted == "auto":
        read = "an unknown number of" if theirs is None else theirs
        said = f"as completions: the server's chat template makes {read} tokens of a message, ours {ours}"
        return replace(can, answers=said)
    differs = f"which is not ours: {theirs} tokens of a message, and ours makes {ours}"
    agree = "which reads as ours" if theirs == ours else differs
    said = f"as chat completions, in the server's chat template, {agree}"
    return replace(can, chat=True, chat_reads_as_ours=theirs == ours, answers=said)


def _ask(endpoint: EndpointConfig, reader: served_model.AnswerReader) -> served_model.ChatAnswer | str:
    """Return the answer to a fixed message; the reason where there is none."""
    model = reader.model
    body = {"model": model, "messages": [{"role": "user", "content": _TURN}], "max_tokens": 1, "temperature": 0}

    async def once(transport: Transport) -> served_model.ChatAnswer | NoReply:
        return await transport.post("/chat/completions", body, reader.chat, model=model, n_bytes=len(_TURN))

    try:
        # Some servers answer a missing template with a 5xx: one more try is enough.
        with Transport(replace(endpoint, max_retries=min(endpoint.max_retries, 1))) as transport:
            answer: served_model.ChatAnswer | NoReply = transport.for_all(once, [transport])[0]
    except EndpointError as error:
        return str(error)
    return answer.detail if isinstance(answer, NoReply) else answer


def open_served_model(
    endpoint: EndpointConfig, name: str, reader: IdentifiedModel, *, chat: ChatWanted = "auto"
) -> served_model.ServedModel:
    """Return a served model, after its server was asked what it can.

    Prompts are made by the tokenizer of `reader`, whose weights are not read. `chat` as in `_probe_chat`.
    """
    vocabulary = routes.Vocabulary(Encoder(reader.tokenizer, reader.max_length), reader.vocab_size)
    can = _ServerProbe(endpoint, name, vocabulary).run()
    can = _probe_chat(endpoint, name, reader.tokenizer, chat, can)
    return served_model.ServedModel(
        endpoint, name, reader.tokenizer, reader.vocab_size, reader.max_length, reader.path, can
    )
