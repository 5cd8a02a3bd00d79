"""Questions as requests to a server, and its answers as positions: OpenAI's completions, and llama.cpp's own route."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mlflow_compress.scoring.plan.encoding import Encoder
from mlflow_compress.scoring.plan.packing import Ids
from mlflow_compress.transport.replies import NOT_A_COMPLETION, NoReply, Usage, WrongReplyError, read_reply, read_usage

COMPLETIONS, LLAMA_CPP_ROUTE = "OpenAI's completions", "llama.cpp's own /completion"
LOGPROBS = "log-probabilities"  # what a reply is expected to have


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What the server of a model can."""

    server: str  # Name and version, as far as the server tells them
    root: str | None  # What the server says it has loaded under the model's name
    route: str  # How it is asked
    echo: bool = False  # Whether it gives the log-probabilities of a prompt's own tokens, each at its own position
    shifted: bool = False  # Whether it echoes them one position too late, so that its echo cannot be used
    # Whether the list of the token that comes next is the echoed one, so that options of one token share a request
    steps: bool = True
    n_top: int  # Most probable tokens that it shows at a position
    ids_in: bool = True  # Whether prompts are sent, and tokens are named, by their ids; otherwise as text
    ids_out: bool = True
    # Whether it can be made to write a token, and then says the log-probability that the token had before
    forces: bool = False
    drops_first: bool = False  # Whether its echo leaves out the first token of a text
    echo_alone: bool  # Whether it echoes without writing a token
    lists: bool = False  # Whether a request may hold several prompts, so that the options of a question share one
    # Whether it gives those of a prompt by position and id too (vLLM), which is less work for it
    by_position: bool = False
    max_length: int | None  # Tokens of prompt and answer together; None where it does not tell
    probe: tuple[float, ...] = ()  # Log-probabilities of a fixed text, by which the same model is recognised
    chat: bool = False  # Whether conversations are sent as chat completions
    chat_reads_as_ours: bool = False  # Whether the server's chat template makes as many tokens of a message as ours
    answers: str = "as completions"  # How they are sent, and why, in words

    def lines(self, name: str) -> list[str]:
        """Return what a person should know before numbers come."""
        if self.echo:
            each = "a request for 16 longer options" if self.lists else "a request per option"
            echo = f"yes: {each}" + (", and one for all options of one token of a question" if self.steps else "")
        elif self.shifted:
            echo = "shifted by one position, not used: every scored token is a request of its own"
        else:
            echo = "no: every scored token is a request of its own"
        length = f"{self.max_length:,} tokens" if self.max_length else "not told"
        return [
            f"served model  {name} by {self.server}, over {self.route}",
            f"echo          {echo}",
            f"top list      {self.n_top} log-probabilities at a position",
            f"tokens        sent as {'ids' if self.ids_in else 'text'}, named by {'ids' if self.ids_out else 'text'}; "
            "they are ours",
            f"context       {length}",
            f"conversations {self.answers}",
        ]


TopList = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]
"""The most probable next tokens and their log-probabilities, the most probable first."""


@dataclass(frozen=True, eq=False)
class TokenQuestion:
    """Tokens that the server reads, and which log-probabilities are wanted."""

    tokens: Ids
    # Wanted are those of so many of the last tokens (an echo of the prompt); 0: of the token that comes next
    scored: int = 0
    # Where the next token is wanted: a token that the server is made to write, so that it says its log-probability.
    # None: the most probable one.
    forced: int | None = None
    top: int | None = None  # Most probable tokens that are wanted at a position; None: as many as the server shows

    @property
    def content(self) -> dict[str, Any]:
        """Everything that decides the answer of one server."""
        return {"tokens": self.tokens.tolist(), "scored": self.scored, "forced": self.forced, "top": self.top}


@dataclass(frozen=True, eq=False)
class Position:
    """The next-token distribution after some tokens, as far as the server has shown it."""

    logprob: float | None  # Log-probability of the token that follows; None where the server has not said it
    top: TopList

    def to_json(self) -> dict[str, Any]:
        return {"logprob": self.logprob, "ids": self.top[0].tolist(), "logprobs": self.top[1].tolist()}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Position":
        return cls(row["logprob"], (np.asarray(row["ids"], np.int64), np.asarray(row["logprobs"], np.float64)))


def _top_list(logprobs: Mapping[int, float], most: int) -> TopList:
    """Return the `most` highest log-probabilities; of equal ones those of the lower token ids."""
    best = sorted(logprobs.items(), key=lambda pair: (-pair[1], pair[0]))[:most]
    return np.asarray([i for i, _ in best], np.int64), np.asarray([v for _, v in best], np.float64)


@dataclass(frozen=True, eq=False)
class Wanted:
    """Scored positions: the row of each, the tokens that lead to it, and the tokens whose log-probability is wanted."""

    prefix: Mapping[int, Ids]  # By row
    tokens: Mapping[int, Sequence[int]]  # By row
    # Echoes that answer many rows at once, with the row of each scored position in `rows`
    whole: Sequence[TokenQuestion]
    rows: Sequence[npt.NDArray[np.int64]]  # Rows of each of `whole`


def wanted(
    inputs: Sequence[Ids],
    targets: Sequence[Ids],
    rows: Sequence[npt.NDArray[np.int64]],
    tops: Sequence[int | None],
    *,
    echo: bool,
    steps: bool,
) -> Wanted:
    """Return what has to be asked.

    Options of one token share their prompt: one question for the token that comes next shows most of them, and the
    server's prefix cache serves it. A longer continuation is one echo. Without `echo` every position is a question.

    Where one option of a question is longer, all of them are echoes: so none takes two questions, and they may share a
    request.

    Of each sequence, `inputs` are read, the last `len(targets)` tokens are predicted, and `rows` has the row of each.
    `tops` are the lists wanted with an echo, which costs the server as much at every token of the prompt; another
    question shows a whole list always. `echo` and `steps` are the server's `Capabilities`.
    """
    longer = {int(places[0]) for predicted, places in zip(targets, rows, strict=True) if len(predicted) > 1}
    prefix: dict[int, Ids] = {}
    tokens: dict[int, list[int]] = {}
    whole: list[TokenQuestion] = []
    whole_rows: list[npt.NDArray[np.int64]] = []
    for read, predicted, places, top in zip(inputs, targets, rows, tops, strict=True):
        if echo and not (steps and len(predicted) == 1 and int(places[0]) not in longer):
            tokens_read = np.append(read, predicted[-1]).astype(np.int32)
            whole.append(TokenQuestion(tokens_read, scored=len(predicted), top=top))
            whole_rows.append(places)
            continue
        start = len(read) - len(predicted) + 1
        for offset, (row, token) in enumerate(zip(places.tolist(), predicted.tolist(), strict=True)):
            prefix[row] = read[: start + offset]
            if token not in tokens.setdefault(row, []):
                tokens[row].append(token)
    return Wanted(prefix, tokens, whole, whole_rows)


_BIAS = 100.0  # what OpenAI's protocol allows at most
_ID_PREFIX = "token_id:"
_NEVER = -9998.0
"""Servers write -9999, or the lowest float, where a probability is 0: no log-probability."""
_MASS_ROUNDING = 0.05  # p log p summed, of an entropy of 10 nats, times the roundoff of bfloat16 (2^-8)
_AGREEING = 0.1  # nats between two places of one reply; in bfloat16 two values of -20 are 0.08 apart
_ROUNDING = 0.01  # nats by which rounding, in bfloat16 too, can lift a log-probability above 0

# Faults of replies that say something, but not what was asked: reasons of a `NoReply`, beside those of `replies`.
_NULL, _NOT_FINITE, _ABOVE_ZERO, _SHORT_LIST = "null", "not_finite", "above_zero", "short_list"
_OTHER_MODEL, OTHER_TOKENS, _NO_TOKEN = "other_model", "other_tokens", "no_token"
CUT_ANSWER, NOT_WHOLE = "cut_answer", "not_whole"
_ABOVE_ONE, _CONTRADICTION = "above_one", "contradiction"


def _log_probability(value: object) -> float | None:
    """Return a log-probability; None where the server says that the probability is 0."""
    if value is None:
        raise WrongReplyError(_NULL, "gave null in place of a log-probability")
    number = float(value)  # type: ignore[arg-type]  # what is no number is an error that `read_reply` names
    if not math.isfinite(number):
        raise WrongReplyError(_NOT_FINITE, f"gave {number} in place of a log-probability")
    if number > _ROUNDING:
        raise WrongReplyError(_ABOVE_ZERO, f"gave {number} in place of a log-probability, which is at most 0")
    return number if number > _NEVER else None


def require_model(reply: Mapping[str, Any], model: str, root: str | None) -> None:
    """Refuse a reply of another model than the one asked for, or `root`: what the server says it has loaded there."""
    named = reply.get("model")
    if named not in (None, "", model, root):
        raise WrongReplyError(_OTHER_MODEL, f"answered as the model {named!r}, where {model!r} was asked for")


def _require_distribution(known: Mapping[int, float]) -> None:
    """Refuse a list of tokens that are together more probable than 1."""
    if (mass := sum(map(math.exp, known.values()))) > 1 + _MASS_ROUNDING:
        raise WrongReplyError(_ABOVE_ONE, f"showed top tokens with a probability of {mass:.2f} together")


@dataclass(frozen=True, eq=False)
class _Positions:
    """The answers to the questions of one request: of each, one position per wanted token."""

    of_questions: list[list[Position]]
    usage: Usage | None = None


class Route(Protocol):
    """Interface of how a server is asked."""

    def request(self, *questions: TokenQuestion) -> tuple[str, dict[str, Any]] | None:
        """Return path and body of the request; None where a question cannot be asked in the server's terms.

        Several questions must be echoes with one `top`, of a server that takes `Capabilities.lists`.
        """

    def read(self, body: str, *questions: TokenQuestion) -> _Positions | NoReply:
        """Return the answers in a response's body; a `NoReply` where one of them has a fault."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens as text and back."""

    encoder: Encoder  # Of our tokenizer
    size: int  # Number of ids

    @cached_property
    def ids(self) -> Mapping[str, int]:
        """The id of every text that is one token alone. A text of several tokens tells none of them."""
        texts = [self.encoder.tokenizer.decode([i]) for i in range(self.size)]
        ids: dict[str, int] = {}
        several: set[str] = set()
        for number, text in enumerate(texts):
            several |= {text} & ids.keys()
            ids[text] = number
        return {text: number for text, number in ids.items() if text not in several}

    def text(self, tokens: Ids) -> str | None:
        """Return the text that becomes these tokens again; None where there is none."""
        first = self.encoder.prefix_token
        bare = tokens[1:] if self.encoder.adds_bos and len(tokens) and int(tokens[0]) == first else tokens
        text = str(self.encoder.tokenizer.decode(bare, clean_up_tokenization_spaces=False))
        return text if text and np.array_equal(self.encoder.ids([text])[0], tokens) else None

    def id_of(self, name: str) -> int | None:
        """Return the id of a token as a server names it; None for a text that is no token, or several."""
        if name.startswith(_ID_PREFIX):
            number = name.removeprefix(_ID_PREFIX)
            return int(number) if number.isdecimal() else None
        return self.ids.get(name)


@dataclass(frozen=True)
class _CompletionsRoute:
    """OpenAI's completions."""

    model: str  # Name of the model there
    vocabulary: Vocabulary
    can: Capabilities

    def request(self, *questions: TokenQuestion) -> tuple[str, dict[str, Any]] | None:
        prompts = [q.tokens.tolist() if self.can.ids_in else self.vocabulary.text(q.tokens) for q in questions]
        if None in prompts:
            return None
        first = questions[0]
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompts if len(prompts) > 1 else prompts[0],
            "max_tokens": 0 if first.scored and self.can.echo_alone else 1,
            "temperature": 0,
            "logprobs": self._n_top(first),
        }
        if first.scored:
            body["echo"] = True
        if first.scored and self.can.by_position:
            body |= {"prompt_logprobs": body.pop("logprobs"), "return_token_ids": True}
        if first.forced is not None:
            body["logit_bias"] = {str(first.forced): _BIAS}
        if self.can.ids_out:
            body["return_tokens_as_token_ids"] = True
        return "/completions", body

    def read(self, body: str, *questions: TokenQuestion) -> _Positions | NoReply:
        def read(reply: Any) -> _Positions:
            completions = completions_of(reply, model=self.model, root=self.can.root, n=len(questions))
            usage, n_sent = completions[0].usage, sum(len(question.tokens) for question in questions)
            if usage is not None and usage.prompt != n_sent:
                raise WrongReplyError(OTHER_TOKENS, f"read {usage.prompt} tokens of a prompt, where {n_sent} were sent")
            return _Positions([self._answer(*pair) for pair in zip(completions, questions, strict=True)], usage)

        return read_reply(body, LOGPROBS, read)

    def _n_top(self, question: TokenQuestion) -> int:
        return self.can.n_top if question.top is None else min(question.top, self.can.n_top)

    def _answer(self, told: "EchoedTokens", question: TokenQuestion) -> list[Position]:
        n_top = self._n_top(question)
        if not question.scored:
            if not told.tokens:
                if told.finish != "stop":  # an answer that ends at once is told without a token
                    raise WrongReplyError(_NO_TOKEN, "wrote no token where one was asked for")
                return [Position(None, _top_list({}, 0))]
            written = self._position(told, 0, n_top)
            said = question.forced is not None and self.vocabulary.id_of(told.tokens[0]) == question.forced
            return [written if said else Position(None, written.top)]
        n = len(question.tokens) - self.can.drops_first
        if not n <= len(told.tokens) <= n + 1:
            raise WrongReplyError(OTHER_TOKENS, f"echoed {len(told.tokens)} tokens of a prompt of {n}")
        sent = question.tokens[int(self.can.drops_first) :].tolist()
        for place, (name, token) in enumerate(zip(told.tokens, sent, strict=False)):
            there = self.vocabulary.id_of(name)
            if there is not None and there != token:
                raise WrongReplyError(OTHER_TOKENS, f"echoed {name!r} as token {place}, where {token} was sent")
        return [self._position(told, place, n_top) for place in range(n - question.scored, n)]

    def _position(self, told: "EchoedTokens", place: int, n_top: int) -> Position:
        shown = {self.vocabulary.id_of(name): _log_probability(value) for name, value in told.tops[place].items()}
        # Tokens with one text between them have one entry: only such a text explains a shorter list.
        if len(shown) < min(n_top, self.vocabulary.size) and None not in shown:
            raise WrongReplyError(_SHORT_LIST, f"showed {len(shown)} top log-probabilities of {n_top} asked for")
        known = {token: value for token, value in shown.items() if token is not None and value is not None}
        _require_distribution(known)
        logprob, there = _log_probability(told.logprobs[place]), told.tops[place].get(told.tokens[place])
        if logprob is not None and there is not None and abs(logprob - float(there)) > _AGREEING:  # type: ignore[arg-type]
            raise WrongReplyError(
                _CONTRADICTION, f"gave a token {logprob} alone and {there} in the list of its position"
            )
        return Position(logprob, _top_list(known, n_top))


@dataclass(frozen=True, eq=False)
class EchoedTokens:
    """Tokens of a completion, as the server names them, with their log-probabilities and top lists."""

    tokens: list[str]
    logprobs: list[object]  # As they came: `_log_probability` checks those that are wanted
    tops: Sequence[Mapping[str, object]]
    finish: str | None
    usage: Usage | None  # Of all completions of the response


def completions_of(reply: Any, *, model: str, root: str | None, n: int) -> list[EchoedTokens]:
    """Return the tokens of the `n` completions in a response, by their index.

    A `WrongReplyError` where there are others, or of another model (see `require_model`).
    """
    require_model(reply, model, root)
    choices = sorted(reply["choices"], key=lambda choice: choice.get("index", 0))
    if n > 1 and [choice.get("index") for choice in choices] != [*range(len(choices))]:
        raise WrongReplyError(NOT_A_COMPLETION, f"does not say which of {n} prompts each completion is of")
    completions = [_tokens_of(choice, read_usage(reply)) for choice in choices]
    if len(completions) != n:
        raise WrongReplyError(NOT_A_COMPLETION, f"gave {len(completions)} completions of {n} prompts")
    return completions


def _tokens_of(choice: Mapping[str, Any], usage: Usage | None) -> EchoedTokens:
    told = choice["logprobs"]
    if told is None:
        told = _by_position(choice["prompt_token_ids"], choice["prompt_logprobs"])
    names, values = list(map(str, told["tokens"])), list(told["token_logprobs"])
    tops = [top if isinstance(top, dict) else {} for top in told.get("top_logprobs") or [{}] * len(names)]
    if not len(names) == len(values) == len(tops):
        raise WrongReplyError(_SHORT_LIST, "gave another number of tokens than of log-probabilities")
    return EchoedTokens(names, values, tops, choice.get("finish_reason"), usage)


def _by_position(ids: Sequence[int], shown: Sequence[Mapping[str, Any] | None]) -> dict[str, list[Any]]:
    """Return vLLM's log-probabilities of a prompt, by position and token id, in the form of an echo."""
    names = [f"{_ID_PREFIX}{token}" for token in ids]
    tops = [{f"{_ID_PREFIX}{token}": one["logprob"] for token, one in (at or {}).items()} for at in shown]
    values = [top[name] if top else None for name, top in zip(names, tops, strict=True)]
    return {"tokens": names, "token_logprobs": values, "top_logprobs": tops}


@dataclass(frozen=True)
class _LlamaCppRoute:
    """llama.cpp's own server, which ignores `echo`: the token that comes next, or one that it is made to write.

    Its log-probabilities are those of the logits, before any sampler and any bias.
    """

    root: str  # The server's address, without ``/v1``
    model: str  # Name of the model there
    can: Capabilities
    vocab_size: int

    def request(self, *questions: TokenQuestion) -> tuple[str, dict[str, Any]] | None:
        [question] = questions
        if question.scored:
            return None
        body: dict[str, Any] = {
            "prompt": question.tokens.tolist(),
            "n_predict": 1,
            "n_probs": self.can.n_top,
            "temperature": 0,
            "cache_prompt": True,
        }
        if question.forced is not None:
            body["logit_bias"] = [[question.forced, _BIAS]]
        return f"{self.root}/completion", body

    def read(self, body: str, *questions: TokenQuestion) -> _Positions | NoReply:
        [question] = questions

        def read(reply: Any) -> _Positions:
            require_model(reply, self.model, self.can.root)
            n_read, n_sent = reply.get("tokens_evaluated"), len(question.tokens)
            if reply.get("truncated") or n_read not in (None, n_sent):
                raise WrongReplyError(OTHER_TOKENS, f"read {n_read} tokens of a prompt, where {n_sent} were sent")
            written = reply["completion_probabilities"][0]
            top = {int(row["id"]): _log_probability(row["logprob"]) for row in written["top_logprobs"]}
            n_asked = min(self.can.n_top, self.vocab_size)
            if len(top) < n_asked:
                raise WrongReplyError(_SHORT_LIST, f"showed {len(top)} top log-probabilities of {n_asked} asked for")
            known = {token: value for token, value in top.items() if value is not None}
            _require_distribution(known)
            logprob = _log_probability(written["logprob"])
            said = question.forced == int(written["id"])
            return _Positions([[Position(logprob if said else None, _top_list(known, self.can.n_top))]])

        return read_reply(body, LOGPROBS, read)


def route_of(can: Capabilities, *, model: str, root: str, vocabulary: Vocabulary) -> Route:
    """Return how a server with these capabilities is asked."""
    if can.route == LLAMA_CPP_ROUTE:
        return _LlamaCppRoute(root, model, can, vocabulary.size)
    return _CompletionsRoute(model, vocabulary, can)
