"""A model that a server computes, as the stages see it: its identity, its tokenizer, and its answers."""

import hashlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from mlflow_compress.engines.endpoint import endpoint_scorer, routes
from mlflow_compress.engines.interface import Abilities
from mlflow_compress.errors import AlignmentError, DataError, EndpointError
from mlflow_compress.models.identity import rendering_hash, tokenizer_hash
from mlflow_compress.reasoning import OPEN
from mlflow_compress.records import ItemKey
from mlflow_compress.scoring.baseline_store import StateStore
from mlflow_compress.scoring.engine_identity import code_identity
from mlflow_compress.scoring.generation.decoding import GenerationJob
from mlflow_compress.scoring.generation.generate import CLOSE
from mlflow_compress.scoring.generation.generation_rows import GenerationRow
from mlflow_compress.scoring.plan.encoding import Encoder
from mlflow_compress.scoring.plan.packing import Ids
from mlflow_compress.transport.client import Transport
from mlflow_compress.transport.endpoint import EndpointConfig
from mlflow_compress.transport.replies import (
    NOT_A_COMPLETION,
    NoReply,
    Usage,
    WrongReplyError,
    read_reply,
    read_usage,
    text_and_reasoning,
)


@dataclass(frozen=True)
class ChatAnswer:
    """What a server has written, after a prompt or a conversation."""

    text: str
    usage: Usage | None


@dataclass(frozen=True, kw_only=True)
class AnswerReader:
    """Reads answers. One that is not whole, or of another model or prompt than was asked, is a `NoReply`."""

    model: str  # As in `require_model`
    root: str | None
    most: int  # Longest answer that was asked for, in tokens
    n_sent: int | None = None  # Tokens that the server must read; None: its own template may make others

    def written(self, body: str) -> ChatAnswer | NoReply:
        return self._read(body, lambda choice: choice["text"])

    def chat(self, body: str) -> ChatAnswer | NoReply:
        """Return the text in the body of a chat completion, after the thought that a server gives apart, in its tags.

        So it is the text that other engines give. A thought that was cut has no closing tag.
        """

        def whole(choice: Mapping[str, Any]) -> Any:
            message = choice["message"]
            if not isinstance(message["content"], str | list | None):
                return message["content"]
            text, thought = text_and_reasoning(message)
            if not thought:
                return text
            cut = not text and choice.get("finish_reason") == "length"
            return f"{OPEN}{thought}" if cut else f"{OPEN}{thought}{CLOSE}{text}"

        return self._read(body, whole)

    def _read(self, body: str, text_of: Callable[[Mapping[str, Any]], Any]) -> ChatAnswer | NoReply:
        def read(reply: Any) -> ChatAnswer:
            choice = reply["choices"][0]
            text, finish, usage = text_of(choice), choice.get("finish_reason"), read_usage(reply)
            if not isinstance(text, str):
                raise WrongReplyError(NOT_A_COMPLETION, "answered no text")
            routes.require_model(reply, self.model, self.root)
            if finish in _NOT_WHOLE:
                raise WrongReplyError(routes.NOT_WHOLE, f"ended an answer with {finish!r}")
            if usage is not None and finish == "length" and usage.completion < self.most:
                said = f"cut an answer at {usage.completion} tokens, where {self.most} were asked for"
                raise WrongReplyError(routes.CUT_ANSWER, said)
            if usage is not None and self.n_sent is not None and usage.prompt < self.n_sent:
                raise WrongReplyError(
                    routes.OTHER_TOKENS, f"read {usage.prompt} tokens of a prompt, where {self.n_sent} were sent"
                )
            return ChatAnswer(text, usage)

        return read_reply(body, "a completion", read)


_NOT_WHOLE = ("abort", "content_filter", "error", "tool_calls", "function_call")
"""How an answer ends that is not what the model would have written."""


PROBE_TEXT = "The quick brown fox jumps over 13 lazy dogs. Why? Because 2 + 2 = 4, and a café in São Paulo is open."
_RECOGNISED = 8  # log-probabilities by which a model is recognised


def recognising(tokens: Ids) -> list[routes.TokenQuestion]:
    """Return the questions about `PROBE_TEXT` by whose answers a model is recognised."""
    return [routes.TokenQuestion(tokens[:end]) for end in range(len(tokens) - _RECOGNISED, len(tokens))]


SAME = 0.1
"""Nats within which two answers about one position agree: in batches of another size kernels round otherwise."""


def check_same_model(now: Mapping[str, object], earlier: object) -> None:
    """Refuse a model that answers a fixed text otherwise than an earlier one of its name, by the `facts` of both."""
    then = earlier.get("probe") if isinstance(earlier, dict) else None
    probe = now["probe"]
    assert isinstance(probe, list | tuple)
    if not isinstance(then, list | tuple) or len(then) != len(probe):
        return
    if any(abs(float(a) - b) > SAME for a, b in zip(then, probe, strict=True)):
        raise AlignmentError(
            f"The served model {now['served_model']!r} gives other answers than before under this name",
            allowed=", ".join(f"{float(value):.2f}" for value in then),
            got=", ".join(f"{value:.2f}" for value in probe),
            fix="Serve each variant under its own name, and give that as served_model",
        )


_MOST_STOPS = 4  # of OpenAI's protocol
SERVED = "served"
"""In place of a dtype: the server has chosen it."""


@dataclass(frozen=True)
class ServedModel:
    """A model that a server computes."""

    endpoint: EndpointConfig
    name: str  # Its name there
    tokenizer: Any
    vocab_size: int  # Width of the logits and context length of the model whose tokenizer this is
    max_length: int
    path: Path  # Folder of that tokenizer
    can: routes.Capabilities  # What the server can
    listed: Collection[ItemKey] | None = None  # Items whose lists are asked for; None: of all

    abilities: ClassVar[Abilities] = Abilities(
        whole_distributions=False, served=True, places_itself=True, own_kernels=False, repeats=False
    )
    dtype: ClassVar[str] = SERVED
    device: ClassVar[SimpleNamespace] = SimpleNamespace(type="endpoint")
    rounding: ClassVar[dict[str, str]] = {}
    own_kernels: ClassVar[None] = None  # the server was asked what it can when this was opened
    engine: ClassVar[dict[str, str]] = {}  # the server is part of `identity`

    @property
    def weights(self) -> str:
        """Digest of what is known of the weights: the name, what the server has loaded under it, and its version."""
        known = json.dumps([self.name, self.can.root, self.can.server])
        return hashlib.sha256(known.encode()).hexdigest()

    @property
    def identity(self) -> dict[str, object]:
        """What its numbers depend on, as far as a server tells; no address is part of it."""
        return {
            "weights": self.weights,
            "tokenizer": tokenizer_hash(self.tokenizer),
            "chat_template": rendering_hash(self.tokenizer),
            "max_length": self.max_length,
            "dtype": SERVED,
            "device": self.device.type,
            "served_model": self.name,
            "server": self.can.server,
            "route": self.can.route,
            "top_list": self.can.n_top,
            **code_identity(),
        }

    @property
    def answer_identity(self) -> dict[str, object]:
        return {"chat_completions": self.can.chat}

    @property
    def at_server(self) -> "ServedModel":
        return self

    def load(self) -> "ServedModel":
        return self

    def with_lists_for(self, items: Collection[ItemKey]) -> "ServedModel":
        return replace(self, listed=items)

    def scorer(
        self, loaded: "ServedModel", *, after: endpoint_scorer.TopLists | None = None
    ) -> endpoint_scorer.EndpointScorer:
        return endpoint_scorer.EndpointScorer(loaded, repeat=0 if after is None else 1, listed=self.listed)

    def capture(self, folder: Path, loaded: "ServedModel") -> AbstractContextManager[Path]:
        """Return a block without effect: the scorer writes the pass into the folder at once."""
        return nullcontext(folder)

    def stored(self, folder: Path) -> endpoint_scorer.TopLists:
        return endpoint_scorer.ShownLists(folder)

    def comparable_with(self, stored: object) -> endpoint_scorer.TopLists | None:
        if isinstance(stored, StateStore):
            return endpoint_scorer.StoredStates(stored)
        return stored if isinstance(stored, endpoint_scorer.ShownLists) else None

    def server_identity(self) -> dict[str, object]:
        return {"served_model": self.name, "weights": self.weights, **asdict(self.can)}

    def recognise(self, earlier: object) -> None:
        """Refuse a server that answers a fixed text otherwise than it did; see `check_same_model`."""
        check_same_model(self.server_identity(), earlier)

    def require_unchanged(self) -> None:
        """Refuse a server that answers a fixed text otherwise than when it was opened: its model was exchanged."""
        tokens = Encoder(self.tokenizer, self.max_length).ids([PROBE_TEXT])[0]
        replies = self.answers(None).ask(recognising(tokens), label="the same model")
        now = [float(answer[0].top[1][0]) for answer in replies if answer is not None and len(answer[0].top[1])]
        check_same_model({**self.server_identity(), "probe": now}, self.server_identity())

    def notice(self) -> str:
        return "\n".join(self.can.lines(self.name))

    @property
    def takes_stop_ids(self) -> bool:
        """Whether it takes vLLM's own parameters: token ids that end an answer, and that none does."""
        return self.can.server.startswith(("vLLM", "SGLang"))

    def answers(self, folder: Path | None) -> endpoint_scorer.ServedAnswers:
        vocabulary = routes.Vocabulary(Encoder(self.tokenizer, self.max_length), self.vocab_size)
        route = routes.route_of(self.can, model=self.name, root=self.endpoint.root, vocabulary=vocabulary)
        known = json.dumps([self.identity, self.can.n_top], sort_keys=True, default=str)
        identity = hashlib.sha256(known.encode()).hexdigest()
        return endpoint_scorer.ServedAnswers(self.endpoint, self.name, route, self.can.lists, identity, folder)

    def _prompt(
        self, row: GenerationRow, vocabulary: routes.Vocabulary, stops: Sequence[str], end_tokens: Collection[int]
    ) -> dict[str, object]:
        """Return what a completion is asked with: the prompt, and where to stop."""
        as_ids = self.can.ids_in or self.can.route == routes.LLAMA_CPP_ROUTE
        prompt = row.prompt if as_ids else vocabulary.text(np.asarray(row.prompt, dtype=np.int32))
        if prompt is None:
            raise DataError("No text encodes to the tokens of a prompt", got=str(row.prompt[:20]))
        return {
            "prompt": prompt,
            **({"stop": list(stops[:_MOST_STOPS])} if stops else {}),
            **({"stop_token_ids": sorted(end_tokens)} if end_tokens and self.takes_stop_ids else {}),
        }

    def decode(self, job: GenerationJob) -> None:
        """Generate the answers of all rows in place.

        Conversations are sent as such where `can.chat` says so; everything else by completions, with a prompt of ours.
        A server draws with its own random numbers, from a seed of the row. So sampled answers repeat where the server
        keeps its promise of seeds; greedy ones need none.
        """
        config, encoder = job.config, Encoder(self.tokenizer, self.max_length)
        vocabulary = routes.Vocabulary(encoder, self.vocab_size)
        stops = [*job.until, *(self.tokenizer.decode([token]) for token in sorted(job.end_tokens))]
        waiting = [[row for row in shard if not row.done] for shard in job.unfinished()]
        with Transport(self.endpoint) as transport, job.bar(waiting) as bar:

            async def one(row: GenerationRow) -> NoReply | None:
                drawn = {"seed": int(row.u[0] * 2**31), "top_p": config.top_p} if row.temperature > 0 else {}
                body = {
                    "model": self.name,
                    "max_tokens": config.max_new_tokens,
                    "temperature": row.temperature,
                    **drawn,
                }
                # A prompt that fills its room may have been cut on the left, which no conversation can be.
                whole = len(row.prompt) + config.max_new_tokens < self.max_length
                as_chat = self.can.chat and bool(row.messages) and whole
                n_sent = len(row.prompt) if not as_chat or self.can.chat_reads_as_ours else None
                reader = AnswerReader(model=self.name, root=self.can.root, most=config.max_new_tokens, n_sent=n_sent)
                if as_chat:
                    path, read = "/chat/completions", reader.chat
                    body["messages"] = list(row.messages)
                else:
                    path, read = "/completions", reader.written
                    body |= self._prompt(row, vocabulary, stops, job.end_tokens)
                reply = await transport.post(path, body, read, model=self.name, n_bytes=4 * len(row.prompt))
                if isinstance(reply, NoReply):
                    return reply
                cut = min((reply.text.index(end) for end in stops if end in reply.text), default=None)
                row.text = reply.text[:cut]
                row.tokens = list(self.tokenizer(reply.text, add_special_tokens=False)["input_ids"])
                row.done = True
                bar.update(1)
                return None

            for shard in waiting:
                begin = time.perf_counter()
                failed = [refused for refused in transport.for_all(one, shard) if refused is not None]
                if failed:
                    raise EndpointError(
                        f"{len(failed)} of {len(shard)} answers failed: {failed[0].detail}",
                        fix="Earlier answers are saved: the same command asks only for the rest",
                    )
                job.take(shard, shard, time.perf_counter() - begin)
