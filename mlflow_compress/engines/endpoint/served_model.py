"""A model that a server computes, as the stages see it: its identity, its tokenizer, and its answers."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlflow_compress.engines.endpoint.routes import (
    LLAMA_CPP,
    Capabilities,
    Position,
    Route,
    TokenQuestion,
    Vocabulary,
    route_of,
)
from mlflow_compress.errors import DataError, EndpointError
from mlflow_compress.files import parse_json
from mlflow_compress.models.identity import tokenizer_hash
from mlflow_compress.scoring.engine_identity import code_identity
from mlflow_compress.scoring.generation.decoding import shards
from mlflow_compress.scoring.generation.generation_rows import GenerationRow, Speed
from mlflow_compress.scoring.generation.sampling import GenerationConfig
from mlflow_compress.scoring.plan.encoding import Encoder
from mlflow_compress.transport.client import Transport
from mlflow_compress.transport.endpoint import EndpointConfig
from mlflow_compress.transport.replies import NOT_A_COMPLETION, NOT_JSON, NoReply, ReplyCache, Usage, content_key


@dataclass(frozen=True)
class ChatAnswer:
    """What a server has written, after a prompt or a conversation."""

    text: str
    usage: Usage | None


def read_written(body: str) -> ChatAnswer | NoReply:
    """Return the text in the body of a completion; a `NoReply` where there is none, or the body is cut off."""
    return _read(body, lambda choice: choice["text"])


def read_chat(body: str) -> ChatAnswer | NoReply:
    """Return the text in the body of a chat completion; a `NoReply` where there is none, or the body is cut off.

    A model that reasons may have written no visible text: that is an empty answer.
    """
    return _read(body, lambda choice: choice["message"]["content"] or "")


def _read(body: str, text_of: Callable[[Mapping[str, Any]], object]) -> ChatAnswer | NoReply:
    try:
        found = parse_json(body, source="the answer")
        text = text_of(found["choices"][0])
        counted = found.get("usage") or {}
        usage = Usage(int(counted["prompt_tokens"]), int(counted["completion_tokens"])) if counted else None
    except DataError:
        return NoReply(NOT_JSON, f"answered something else than JSON: {body[:80]!r}")
    except (KeyError, IndexError, TypeError, ValueError):
        return NoReply(NOT_A_COMPLETION, f"answered something else than a completion: {body[:80]!r}")
    return ChatAnswer(text, usage) if isinstance(text, str) else NoReply(NOT_A_COMPLETION, "answered no text")


ANSWERS = "served_answers.jsonl"
_BYTES_PER_ID = 4  # what paces requests by tokens counts bytes


@dataclass(frozen=True)
class ServedAnswers:
    """Answers of one served model."""

    endpoint: EndpointConfig
    model: str  # Name of the model there
    route: Route  # How it is asked
    identity: str  # Digest of what is known of the model; the cache's keys begin with it
    folder: Path | None = None  # Where the answers are kept until the records are written; None: in memory alone

    def ask(
        self, questions: Sequence[TokenQuestion], *, label: str, repeat: int = 0, progress: bool = True
    ) -> list[list[Position] | None]:
        """Return the answer to each question, in order; None where no text of the server's terms asks it.

        Equal questions are asked once. Questions with a common beginning follow each other.

        Parameters
        ----------
        questions : sequence of TokenQuestion
        label : str
            Names the progress bar.
        repeat : int
            0 for the first time, 1 to ask the same again.
        progress : bool
            Show a progress bar on a terminal.

        Raises
        ------
        EndpointError
            A request failed for good. What others have returned is kept.
        AlignmentError
            The server reads other tokens than ours.
        """
        from tqdm import tqdm

        cache = ReplyCache(self.folder / ANSWERS if self.folder is not None else None)
        keys = [content_key(model=self.identity, repeat=repeat, **question.content) for question in questions]
        by_key = dict(zip(keys, questions, strict=True))
        requests = {key: self.route.request(question) for key, question in by_key.items() if cache.get(key) is None}
        to_ask = sorted((key for key, request in requests.items() if request), key=lambda key: by_key[key].order)
        if to_ask:
            n_known = len(by_key) - len(requests)
            with (
                Transport(self.endpoint) as transport,
                tqdm(
                    initial=n_known,
                    total=n_known + len(to_ask),
                    desc=label,
                    unit="request",
                    disable=None if progress else True,
                    leave=False,
                ) as bar,
            ):

                async def one(key: str) -> NoReply | None:
                    path, body = requests[key] or ("", {})
                    found = await transport.post(
                        path,
                        body,
                        lambda text: self.route.read(text, by_key[key]),
                        model=self.model,
                        n_bytes=_BYTES_PER_ID * len(by_key[key].tokens),
                    )
                    if isinstance(found, NoReply):
                        return found
                    cache.put(key, {"positions": [position.to_json() for position in found.found]})
                    bar.update(1)
                    return None

                failed = [found for found in transport.for_all(one, to_ask) if found is not None]
            if failed:
                raise EndpointError(
                    f"{len(failed)} of {len(to_ask)} requests to the served model failed: {failed[0].detail}",
                    fix="What was answered is kept: the same command again asks only for the rest",
                )
        rows = {key: cache.get(key) for key in by_key}
        return [_positions(rows[key]) for key in keys]


def _positions(row: dict[str, list[dict[str, object]]] | None) -> list[Position] | None:
    return None if row is None else [Position.from_json(position) for position in row["positions"]]


_MOST_STOPS = 4  # of OpenAI's protocol
SERVED = "served"
"""In place of a dtype: the server has chosen it."""


@dataclass(frozen=True)
class ServedDevice:
    """Where a served model runs, as far as we know."""

    type: str = "endpoint"


@dataclass(frozen=True)
class ServedModel:
    """A model that a server computes."""

    endpoint: EndpointConfig
    name: str  # Its name there
    tokenizer: Any
    vocab_size: int  # Width of the logits and context length of the model whose tokenizer this is
    max_length: int
    path: Path  # Folder of that tokenizer
    can: Capabilities  # What the server can

    @property
    def weights(self) -> str:
        """Digest of what is known of the weights: the name, what the server has loaded under it, and its version."""
        known = json.dumps([self.name, self.can.root, self.can.server])
        return hashlib.sha256(known.encode()).hexdigest()

    @property
    def dtype(self) -> str:
        """The server has chosen it."""
        return SERVED

    @property
    def device(self) -> ServedDevice:
        """Where it runs."""
        return ServedDevice()

    @property
    def rounding(self) -> dict[str, str]:
        """What decides the last bits of its numbers is not known."""
        return {}

    @property
    def engine(self) -> dict[str, str]:
        """Nothing: the server is part of `identity`."""
        return {}

    @property
    def identity(self) -> dict[str, object]:
        """What its numbers depend on, as far as a server tells; no address is part of it."""
        return {
            "weights": self.weights,
            "tokenizer": tokenizer_hash(self.tokenizer),
            "dtype": SERVED,
            "device": self.device.type,
            "served_model": self.name,
            "server": self.can.server,
            "route": self.can.route,
            "top_list": self.can.n_top,
            **code_identity(),
        }

    @property
    def takes_stop_ids(self) -> bool:
        """Whether it takes vLLM's own parameters: token ids that end an answer, and that none does."""
        return self.can.server.startswith(("vLLM", "SGLang"))

    def answers(self, folder: Path | None) -> ServedAnswers:
        """Return what asks it, and keeps the answers in a folder."""
        vocabulary = Vocabulary(Encoder(self.tokenizer, self.max_length), self.vocab_size)
        route = route_of(self.can, model=self.name, root=self.endpoint.root, vocabulary=vocabulary)
        known = json.dumps([self.identity, self.can.n_top], sort_keys=True, default=str)
        return ServedAnswers(self.endpoint, self.name, route, hashlib.sha256(known.encode()).hexdigest(), folder)

    def _prompt(
        self, row: GenerationRow, vocabulary: Vocabulary, stops: Sequence[str], end_tokens: Collection[int]
    ) -> dict[str, object]:
        """Return what a completion is asked with: the prompt, and where to stop."""
        as_ids = self.can.ids_in or self.can.route == LLAMA_CPP
        prompt = row.prompt if as_ids else vocabulary.text(np.asarray(row.prompt, dtype=np.int32))
        if prompt is None:
            raise DataError("A prompt has no text that becomes its tokens again", got=str(row.prompt[:20]))
        return {
            "prompt": prompt,
            **({"stop": list(stops[:_MOST_STOPS])} if stops else {}),
            **({"stop_token_ids": sorted(end_tokens)} if end_tokens and self.takes_stop_ids else {}),
        }

    def decode(
        self,
        rows: Sequence[GenerationRow],
        config: GenerationConfig,
        *,
        until: Sequence[str],
        end_tokens: Collection[int],
        label: str,
        after_shard: Callable[[], None] = lambda: None,
        speed: Speed | None = None,
    ) -> None:
        """Generate the answers of all rows in place.

        Conversations are sent as such where `can.chat` says so; everything else by completions, with a prompt of ours.
        A server draws with its own random numbers, from a seed of the row. So sampled answers repeat where the server
        keeps its promise of seeds; greedy ones need none.
        """
        from tqdm import tqdm

        encoder = Encoder(self.tokenizer, self.max_length)
        vocabulary = Vocabulary(encoder, self.vocab_size)
        stops = [*until, *(self.tokenizer.decode([token]) for token in sorted(end_tokens))]
        speed = Speed() if speed is None else speed
        with (
            Transport(self.endpoint) as transport,
            tqdm(total=len(rows), desc=label, unit="answer", disable=None, leave=False) as bar,
        ):

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
                if self.can.chat and row.messages and whole:
                    path, read = "/chat/completions", read_chat
                    body["messages"] = list(row.messages)
                else:
                    path, read = "/completions", read_written
                    body |= self._prompt(row, vocabulary, stops, end_tokens)
                found = await transport.post(path, body, read, model=self.name, n_bytes=4 * len(row.prompt))
                if isinstance(found, NoReply):
                    return found
                cut = min((found.text.index(end) for end in stops if end in found.text), default=None)
                row.text = found.text[:cut]
                row.tokens = list(self.tokenizer(found.text, add_special_tokens=False)["input_ids"])
                row.done = True
                bar.update(1)
                return None

            for shard in shards(rows, config):
                waiting = [row for row in shard if not row.done]
                bar.update(len(shard) - len(waiting))
                if not waiting:
                    continue
                begin = time.perf_counter()
                failed = [found for found in transport.for_all(one, waiting) if found is not None]
                if failed:
                    raise EndpointError(
                        f"{len(failed)} of {len(waiting)} answers failed: {failed[0].detail}",
                        fix="What was answered before is kept: the same command again asks only for the rest",
                    )
                speed.n_tokens += sum(len(row.tokens) for row in waiting)
                speed.seconds += time.perf_counter() - begin
                after_shard()
