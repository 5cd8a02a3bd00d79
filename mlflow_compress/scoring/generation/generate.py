"""Generates text in batches: sampled answers, two-turn conversations, short greedy answers.

Of a checkpoint's own generation settings (repetition penalty, temperature, ...) only the end tokens are applied.
"""

import hashlib
import json
import logging
import time
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mlflow_compress.errors import ConfigError
from mlflow_compress.models.identity import IdentifiedModel
from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.reasoning import OPEN
from mlflow_compress.records import Generations, Instruction, TokenAnswers
from mlflow_compress.scoring.generation.chat_format import ChatFormat, chat_format
from mlflow_compress.scoring.generation.decoding import AnyCausalLM, GenerationJob, decode
from mlflow_compress.scoring.generation.generation_rows import (
    GenerationConfig,
    GenerationRow,
    Speed,
    uniforms,
)
from mlflow_compress.scoring.journal import Arrays, Journal
from mlflow_compress.scoring.plan.encoding import Encoder

CLOSE = "</think>"
_SECONDS = 60.0  # between two writings of finished answers; those not yet written are lost with the process

logger = logging.getLogger(__name__)


def reasoning_span(tokenizer: Any, prompt: str, tokens: Sequence[int]) -> tuple[int, int] | None:
    """Return where the reasoning of an answer begins and ends: ``tokens[begin:end]``. None where there is none.

    It begins behind the opening tag, and ends with the closing tag; without a closing tag, with the answer. Some chat
    templates write the opening tag at the end of the prompt. Then the reasoning begins with the answer.
    """

    def first(tag: str) -> int | None:
        """Return the number of tokens up to and with the first tag; None where there is no such tag."""
        if tag not in tokenizer.decode(tokens, skip_special_tokens=False):
            return None
        return bisect_left(
            range(len(tokens) + 1), True, key=lambda n: tag in tokenizer.decode(tokens[:n], skip_special_tokens=False)
        )

    opened, closed = first(OPEN), first(CLOSE)
    if opened is not None:
        begin = opened
    elif prompt.rstrip().endswith(OPEN) or closed is not None:
        begin = 0
    else:
        return None
    end = len(tokens) if closed is None else closed
    return (begin, end) if begin < end else None


class _GenerationCheckpoint:
    """Restores the rows that an earlier run has finished, and saves the rows that this run finishes.

    `folder` serves this generation only; delete it when the answers are saved. Raises `StoreError` when it belongs to
    another generation, or is damaged.
    """

    def __init__(self, folder: Path, loaded: IdentifiedModel, job: GenerationJob) -> None:
        rows = job.rows
        prompts = hashlib.sha256()
        for row in rows:
            prompts.update(f"{row.prompt} {row.temperature} ".encode() + row.u.tobytes())
        identity = {
            "weights": loaded.weights,
            "dtype": str(loaded.dtype),
            "prompts": prompts.hexdigest(),
            "settings": json.dumps(asdict(job.config)),
            "ends": json.dumps([list(job.until), sorted(job.end_tokens)]),
        }
        self._rows = rows
        self._journal = Journal(folder, identity)
        for _, arrays, _ in self._journal.load():
            _fill(rows, arrays)
        self._unwritten = [number for number, row in enumerate(rows) if not row.done]
        self._written = time.monotonic()
        if n_done := len(rows) - len(self._unwritten):
            logger.info("%d of %d answers were already finished", n_done, len(rows))

    def write(self, *, now: bool = False) -> None:
        """Save the rows finished since the last call, if it was long ago, or if `now`."""
        if not now and time.monotonic() - self._written < _SECONDS:
            return
        fresh = [number for number in self._unwritten if self._rows[number].done]
        if fresh:
            self._unwritten = [number for number in self._unwritten if not self._rows[number].done]
            self._journal.append(len(self._rows) - len(self._unwritten), _arrays(self._rows, fresh), {})
        self._written = time.monotonic()


def _arrays(rows: Sequence[GenerationRow], numbers: Sequence[int]) -> Arrays:
    """Return the answers of some rows: values one after the other, and how many of them each row has."""
    chosen = [rows[number] for number in numbers]
    texts = [row.text.encode() for row in chosen]
    return {
        "row": np.asarray(numbers, dtype=np.int64),
        "n_tokens": np.asarray([len(row.tokens) for row in chosen], dtype=np.int64),
        "tokens": np.asarray([token for row in chosen for token in row.tokens], dtype=np.int64),
        "n_ends": np.asarray([len(row.end) for row in chosen], dtype=np.int64),
        "ends": np.asarray([token for row in chosen for token in row.end], dtype=np.int64),
        "n_bytes": np.asarray([len(text) for text in texts], dtype=np.int64),
        "text": np.frombuffer(b"".join(texts), dtype=np.uint8),
    }


def _fill(rows: Sequence[GenerationRow], arrays: Arrays) -> None:
    """Take over the answers that `_arrays` has returned."""
    parts = (
        np.split(arrays[values], np.cumsum(arrays[counts])[:-1])
        for values, counts in (("tokens", "n_tokens"), ("ends", "n_ends"), ("text", "n_bytes"))
    )
    for number, tokens, end, text in zip(arrays["row"].tolist(), *parts, strict=True):
        row = rows[number]
        row.tokens, row.end, row.text, row.done = tokens.tolist(), end.tolist(), text.tobytes().decode(), True


def generate(
    loaded: AnyCausalLM,
    prompts: Sequence[str],
    config: GenerationConfig,
    *,
    until: Sequence[str] = (),
    resume: Path | None = None,
) -> list[list[str]]:
    """Return the texts of `generate_rows`."""
    rows = generate_rows(loaded, prompts, config, until=until, resume=resume)
    return [[row.text for row in several] for several in rows]


def generate_rows(
    loaded: AnyCausalLM,
    prompts: Sequence[str],
    config: GenerationConfig,
    *,
    until: Sequence[str] = (),
    end_tokens: Collection[int] = (),
    resume: Path | None = None,
) -> list[list[GenerationRow]]:
    """Return `config.samples` continuations of every prompt, up to one of `until`, an end token or the limit.

    `until` itself is cut off. With a `resume` folder, answers that an interrupted call has finished are read from it.

    The tokenizer adds its special tokens to the prompts. A prompt that is longer than the model's context is truncated
    on the left, and a warning is logged.

    Deterministic under `config.seed`: a row's random numbers depend only on seed, prompt and sample number. The other
    rows of a batch change logits by rounding only (about 1e-6), which can matter at an exact tie. Which rows meet
    depends on the prompts and the settings, not on interruptions (see `decoding`).
    """
    draws = [(prompt, sample, config.temperature) for prompt in prompts for sample in range(config.samples)]
    rows = _rows(loaded, draws, config, special=True)
    _decode(loaded, GenerationJob(rows=rows, config=config, until=until, end_tokens=end_tokens), resume)
    return [rows[i : i + config.samples] for i in range(0, len(rows), config.samples)]


def generate_replies(
    loaded: AnyCausalLM, prompts: Sequence[str], config: GenerationConfig, chat: ChatFormat
) -> list[GenerationRow]:
    """Return the next answer of every conversation that `chat` has rendered: its text, and tokens read and written."""
    rows = _rows(
        loaded, [(prompt, 0, config.temperature) for prompt in prompts], config, special=chat.adds_special_tokens
    )
    _decode(loaded, GenerationJob(rows=rows, config=config, until=chat.until, end_tokens=chat.end_tokens))
    return rows


def generate_until(
    loaded: AnyCausalLM,
    prompts: Sequence[str],
    *,
    until: Sequence[str] = ("\n",),
    max_new_tokens: int = 32,
    batch_rows: int = 64,
    resume: Path | None = None,
) -> list[str]:
    """Return the greedy continuation of every prompt; see `generate`."""
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, temperature=0.0, samples=1, batch_rows=batch_rows, top_k=0, top_p=1.0
    )
    texts = generate(loaded, prompts, config, until=until, resume=resume)
    return [text for [text] in texts]


def generate_two_turns(
    loaded: AnyCausalLM,
    instructions: Sequence[Instruction],
    config: GenerationConfig,
    *,
    temperatures: Mapping[str, float] | None = None,
    turns: Literal[1, 2] = 2,
    system: str = "",
    resume: Path | None = None,
    speed: Speed | None = None,
) -> Generations:
    """Return the answers to the first one or two turns of every instruction; the second sees the first answer.

    The tokenizer's chat template renders the conversation. Categories that `temperatures` does not name use
    `config.temperature`. An interrupted call resumes from the folder `resume`; delete it when the records are saved.
    The tokens that this call generates, and its time, are added to `speed`.
    """
    by_category = temperatures or {}
    style = chat_format(loaded.tokenizer)
    conversations: list[tuple[Instruction, int, list[str]]] = [
        (item, sample, []) for item in instructions for sample in range(config.samples)
    ]
    records: list[dict[str, Any]] = []
    for turn in range(turns):
        open_ones = [conversation for conversation in conversations if len(conversation[0].turns) > turn]
        draws = []
        for item, sample, said in open_ones:
            said.append(item.turns[turn])
            temperature = by_category.get(item.category, config.temperature)
            draws.append((style.prompt(said, system=system), sample, temperature))
        rows = _rows(loaded, draws, config, special=style.adds_special_tokens)
        for row, (_, _, said) in zip(rows, open_ones, strict=True):
            row.messages = style.messages(said, system=system)
        job = GenerationJob(
            rows=rows,
            config=config,
            until=style.until,
            end_tokens=style.end_tokens,
            label=f"turn {turn + 1}",
            speed=speed or Speed(),
        )
        _decode(loaded, job, resume / f"turn-{turn + 1}" if resume else None)
        for (item, sample, said), (prompt, _, _), row in zip(open_ones, draws, rows, strict=True):
            said.append(row.text.strip())
            key = {"task": "instructions", "item_id": item.item_id, "turn": turn, "sample": sample}
            records.append({**key, "prompt": prompt, "text": said[-1], "n_tokens": len(row.tokens)})
    return Generations.from_rows(records)


def generate_answers(
    loaded: AnyCausalLM,
    instructions: Sequence[Instruction],
    config: GenerationConfig,
    *,
    task: str,
    system: str = "",
    resume: Path | None = None,
) -> TokenAnswers:
    """Return the answers to the first turn of every instruction, as tokens; otherwise as `generate_two_turns`."""
    style = chat_format(loaded.tokenizer)
    units = [(item, sample) for item in instructions for sample in range(config.samples)]
    prompts = [style.prompt([item.turns[0]], system=system) for item, _ in units]
    draws = [(prompt, sample, config.temperature) for prompt, (_, sample) in zip(prompts, units, strict=True)]
    rows = _rows(loaded, draws, config, special=style.adds_special_tokens)
    job = GenerationJob(rows=rows, config=config, until=style.until, end_tokens=style.end_tokens, label=task)
    _decode(loaded, job, resume)
    records = []
    for (item, sample), prompt, row in zip(units, prompts, rows, strict=True):
        written = row.tokens + row.end
        begin, end = reasoning_span(loaded.tokenizer, prompt, written) or (None, None)
        records.append(
            {
                "task": task,
                "item_id": item.item_id,
                "sample": sample,
                "prompt_tokens": row.prompt,
                "tokens": written,
                "text": row.text,
                "reasoning_begin": begin,
                "reasoning_end": end,
            }
        )
    return TokenAnswers.from_rows(records)


def _decode(loaded: AnyCausalLM, job: GenerationJob, resume: Path | None = None) -> None:
    """Generate every row; with a `resume` folder, read finished rows from it, and save them shard by shard."""
    checkpoint = None if resume is None else _GenerationCheckpoint(resume, loaded, job)
    if checkpoint is not None:
        job = replace(job, after_shard=checkpoint.write)
    try:
        decode(loaded, job) if isinstance(loaded, LoadedModel) else loaded.decode(job)
    finally:
        if checkpoint is not None:
            checkpoint.write(now=True)


def _rows(
    loaded: AnyCausalLM, draws: Sequence[tuple[str, int, float]], config: GenerationConfig, *, special: bool
) -> list[GenerationRow]:
    """Return one row per (prompt, sample, temperature)."""
    room = loaded.max_length - config.max_new_tokens
    if room < 1:
        raise ConfigError(
            "max_new_tokens leaves no room for a prompt",
            allowed=f"at most {loaded.max_length - 1} with this model",
            got=config.max_new_tokens,
        )
    encoder = Encoder(loaded.tokenizer, loaded.max_length, loaded.vocab_size)
    encoded = encoder.ids_of((prompt for prompt, _, _ in draws), special=special)
    cut = sum(len(ids) > room for ids in encoded.values())
    if cut:
        logger.warning(
            "%d of %d prompts are longer than %d tokens and are truncated on the left", cut, len(encoded), room
        )
    rows = []
    for prompt, sample, temperature in draws:
        tokens = encoded[prompt][-room:].tolist() or [encoder.prefix_token]
        if tokens == [None]:
            raise ConfigError("A prompt is empty, and the tokenizer has no BOS or EOS token to start from")
        u = uniforms(config.seed, prompt, sample, config.max_new_tokens) if temperature > 0 else np.empty(0)
        rows.append(GenerationRow(prompt=tokens, temperature=temperature, u=u))
    return rows
