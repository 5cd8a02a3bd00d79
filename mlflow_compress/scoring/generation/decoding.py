"""Decodes many sequences, in shards whose texts depend on nothing outside of them.

A shard is some batches of rows. As rows are finished, the next ones take their places, so that a few long answers do
not keep a full batch running. Keys and values stay in the cache. Which rows meet in a forward pass follows from the
shard alone. So a run that is interrupted, and resumes with whole shards, makes the same forward passes as a run that
was not, and ends with the same texts.
"""

import inspect
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, GenerationMixin
from transformers import GenerationConfig as Settings
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from mlflow_compress.errors import UnsupportedError, is_no_memory
from mlflow_compress.models.identity import IdentifiedModel
from mlflow_compress.models.length_regimes import BASE, length_regimes
from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.replaced import replaced
from mlflow_compress.scoring.child_process import in_forks, processes_per_pass
from mlflow_compress.scoring.generation.drawing import draw
from mlflow_compress.scoring.generation.generation_rows import (
    Ending,
    GenerationConfig,
    GenerationRow,
    Speed,
)

Tensor = torch.Tensor
_SPARE = 64  # positions; how much room a cache gets when it is full
_SHARD = 2  # batches; at most so many answers are lost when a run is killed
_LEAVE = 4  # rows leave when one in so many is done: rows that are done cost time, and so does a removal
_FIRST_STAGE = 32  # tokens of the first stage, where transformers decodes
_LONGROPE_ONLY = ("Phi3ForCausalLM",)  # what these prepare in their own way is for scaled positions alone

logger = logging.getLogger(__name__)


class CachedBatch:
    """Rows that grow by one token a step, with a model for which `reason_not_to_cache` is None.

    Rows are right-aligned, as in transformers' `generate`. A mask hides what is before a row's beginning. So a row's
    logits depend on the other rows by rounding only.
    """

    def __init__(self, loaded: LoadedModel, config: GenerationConfig, ending: Ending) -> None:
        self.rows: list[GenerationRow] = []
        self._loaded, self._config, self._ending = loaded, config, ending
        self._accepted = inspect.signature(loaded.model.forward).parameters
        self._layers: list[Any] = []

    def regroup(self, fresh: Sequence[GenerationRow]) -> None:
        """Remove the rows that are done, and add others, each with its next token. Equal prompts are read once."""
        kept = [i for i, row in enumerate(self.rows) if not row.done]
        parts = [(self._layers, torch.tensor(kept))] if kept else []
        # What is cached: everything but a row's last token. A row that goes on has its own text read with its prompt.
        texts = [(*row.prompt, *row.tokens) for row in fresh]
        length = max([*(self.rows[i].length - 1 for i in kept), *map(len, texts)])
        if fresh:
            prompts = list(dict.fromkeys(texts))
            which = torch.tensor([prompts.index(text) for text in texts])
            layers, logits = self._read(prompts)
            parts.append((layers, which))
            self._add(fresh, logits.index_select(0, which.to(logits.device)))
        n_layers = len(parts[0][0])
        self._layers = [_joined([(layers[i], rows) for layers, rows in parts], length) for i in range(n_layers)]
        self.rows = [*(self.rows[i] for i in kept), *fresh]

    def step(self) -> None:
        """Add a token to every row that is not done. The others are computed too, and ignored."""
        n_cached = self._layers[0].get_seq_length()
        lengths = [row.length for row in self.rows]
        last = [row.tokens[-1] if row.tokens else 0 for row in self.rows]
        self._add(self.rows, self._forward(torch.tensor(last)[:, None], lengths, n_cached + 1, self._layers))

    def _read(self, prompts: Sequence[tuple[int, ...]]) -> tuple[list[Any], Tensor]:
        """Return the cache's layers after the prompts, and the logits of the next tokens."""
        ids = _left_padded(prompts)
        layers = [
            GrowingLayer() if type(layer) is DynamicLayer else layer
            for layer in DynamicCache(config=self._loaded.model.config).layers
        ]
        return layers, self._forward(ids, [len(prompt) for prompt in prompts], ids.shape[1], layers)

    def _forward(self, ids: Tensor, lengths: Sequence[int], n_keys: int, layers: list[Any]) -> Tensor:
        """Return the logits after the last token of `ids`, whose rows have `lengths` tokens in all."""
        begin = n_keys - torch.tensor(lengths)[:, None]
        # `generate` gives padding the position 0 too.
        positions = (torch.arange(n_keys - ids.shape[1], n_keys) - begin).clamp(min=0)
        inputs = {
            "input_ids": ids,
            "attention_mask": (torch.arange(n_keys) >= begin).long(),
            **({"position_ids": positions} if "position_ids" in self._accepted else {}),
        }
        output = self._loaded.model(
            **{name: tensor.to(self._loaded.device) for name, tensor in inputs.items()},
            past_key_values=Cache(layers=layers),
            use_cache=True,
            **({"logits_to_keep": 1} if "logits_to_keep" in self._accepted else {}),
            return_dict=True,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _add(self, rows: Sequence[GenerationRow], logits: Tensor) -> None:
        """Choose the next token of each row that is not done, and add it."""
        # Rows that are done are computed as greedy ones.
        temperatures = [0.0 if row.done else row.temperature for row in rows]
        u = [row.u[len(row.tokens)] if t > 0 else 0.0 for row, t in zip(rows, temperatures, strict=True)]
        chosen = draw(
            logits,
            torch.tensor(u, dtype=torch.float64).to(logits.device),
            torch.tensor(temperatures, dtype=torch.float32).to(logits.device),
            top_k=self._config.top_k,
            top_p=self._config.top_p,
        )
        for row, token in zip(rows, chosen.tolist(), strict=True):
            if not row.done:
                self._ending.add(row, token)


def _left_padded(sequences: Iterable[Sequence[int]]) -> Tensor:
    return pad_sequence([torch.tensor(ids) for ids in sequences], batch_first=True, padding_side="left")


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of the cache with spare room. transformers' own copies everything at each token."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values, each (rows, heads, tokens, size), and return all of them."""
        n = self.get_seq_length()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            self._room = (key_states, value_states)
            return key_states, value_states
        stop = n + key_states.shape[-2]
        if stop > self._room[0].shape[-2]:
            self._room = (_with_spare(self.keys, stop), _with_spare(self.values, stop))
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, n:stop] = new
        self.keys, self.values = (room[:, :, :stop] for room in self._room)
        return self.keys, self.values

    def replace(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = self._room = (keys, values)


def _with_spare(cached: Tensor, stop: int) -> Tensor:
    room = cached.new_empty((*cached.shape[:2], stop + _SPARE, cached.shape[-1]))
    room[:, :, : cached.shape[-2]] = cached
    return room


def _joined(parts: Sequence[tuple[Any, Tensor]], length: int) -> Any:
    """Return one layer with the given rows of each part, all of them `length` tokens long."""
    layer = parts[0][0]
    stored = min(length, layer.sliding_window - 1) if layer.is_sliding else length
    keys, values = (
        torch.cat([_right_aligned(getattr(part, name), rows, stored) for part, rows in parts])
        for name in ("keys", "values")
    )
    if isinstance(layer, GrowingLayer):
        layer.replace(keys, values)
    else:
        layer.keys, layer.values, layer.cumulative_length = keys, values, length
    return layer


def _right_aligned(cached: Tensor, rows: Tensor, length: int) -> Tensor:
    """Return rows of cached keys or values with `length` tokens: cut at the beginning, or zeros put before it."""
    short = cached[:, :, max(cached.shape[-2] - length, 0) :]
    return torch.nn.functional.pad(short.index_select(0, rows.to(short.device)), (0, 0, length - short.shape[-2], 0))


def reason_not_to_cache(model: Any) -> str | None:
    """Return why `CachedBatch` cannot decode with this model as transformers' `generate` would; None if it can."""
    own = type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    if own and type(model).__name__ not in _LONGROPE_ONLY:
        return "its inputs are prepared in a way of its own"
    if model.is_remote_code():
        return "its code comes with the checkpoint"
    accepted = inspect.signature(model.forward).parameters
    if "past_key_values" not in accepted or "attention_mask" not in accepted or hasattr(model, "logits_at"):
        return "it keeps its caches itself"
    config = model.config.get_text_config(decoder=True)
    kinds = {type(layer) for layer in DynamicCache(config=config).layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    if kinds:
        return f"its cache has layers of another kind ({', '.join(sorted(kind.__name__ for kind in kinds))})"
    if getattr(config, "attention_chunk_size", None):
        return "its attention is cut at fixed positions"
    return None


@dataclass(frozen=True, kw_only=True)
class GenerationJob:
    """Rows to be generated in place, and how their answers end: what every engine decodes, shard by shard."""

    rows: Sequence[GenerationRow]
    config: GenerationConfig
    until: Sequence[str] = ()  # Texts that end an answer
    end_tokens: Collection[int] = ()  # Tokens that do, besides those of the checkpoint and the tokenizer
    label: str = "generate"
    speed: Speed = field(default_factory=Speed)  # Is added to
    after_shard: Callable[[], None] = lambda: None  # Called when the rows of a shard have their texts

    def unfinished(self) -> list[list[GenerationRow]]:
        """Return the shards that have a row to generate."""
        return [shard for shard in shards(self.rows, self.config) if not all(row.done for row in shard)]

    def bar(self, waiting: Sequence[Sequence[GenerationRow]]) -> Any:
        """Return the bar of all answers, those outside of the `waiting` shards being there."""
        from tqdm import tqdm

        n = len(self.rows)
        there = n - sum(map(len, waiting))
        return tqdm(initial=there, total=n, desc=self.label, unit="answer", disable=None, leave=False)

    def take(self, shard: Sequence[GenerationRow], drafts: Sequence[GenerationRow], seconds: float) -> None:
        """Take over the answers of a shard, which took so many seconds more."""
        self.speed.n_tokens += sum(len(draft.tokens) for draft in drafts)
        self.speed.seconds += seconds
        for row, draft in zip(shard, drafts, strict=True):
            row.take(draft)
        self.after_shard()


def decode(loaded: LoadedModel, job: GenerationJob) -> None:
    """Generate tokens for every row until it is done, in place. A shard whose rows are all done stays as it is.

    A row is done at an end token, when its text holds one of `job.until`, or at `max_new_tokens`. A row that may become
    so long that its rotary frequencies change is decoded by transformers, in one call and with rows of its length only:
    what is cached stays as it was computed, unless the model's own code computes it again.
    """
    ends = end_tokens_of(loaded.model.generation_config, loaded.tokenizer) | set(job.end_tokens)
    reason = reason_not_to_cache(loaded.model)
    if reason is not None:
        logger.info("With this model, prompts are read again at every stage of decoding: %s", reason)
    work = _with_cache if reason is None else _with_transformers
    unfinished = job.unfinished()
    regime = length_regimes(loaded.configuration())
    with torch.inference_mode(), job.bar(unfinished) as bar:
        ending = Ending(loaded.tokenizer, ends, job.until, job.config.max_new_tokens, finished=bar.update)
        begin = time.perf_counter()
        processes = processes_per_pass() if loaded.device.type == "cpu" else 1

        def drafts_of(number: int) -> Iterator[tuple[int, list[GenerationRow]]]:
            drafts = [row.restarted() for row in unfinished[number]]
            # A last token is not read.
            changing = [row for row in drafts if regime(len(row.prompt) + job.config.max_new_tokens - 1) != BASE]
            if len(changing) < len(drafts):
                steady = [row for row in drafts if row not in changing]
                _as_memory_allows(work, loaded, steady, job.config, ending)
            _in_one_call(loaded, changing, job.config, ending)
            yield number, drafts

        numbers = list(range(len(unfinished)))
        shared = processes > 1 and len(unfinished) > 1
        made = in_forks(drafts_of, numbers, processes) if shared else chain.from_iterable(map(drafts_of, numbers))
        for number, drafts in made:
            if shared:
                bar.update(len(drafts))  # what a fork says to its own bar is not seen
            job.take(unfinished[number], drafts, time.perf_counter() - begin)
            bar.set_postfix_str(f"{job.speed.tokens_per_second or 0:.0f} tokens/s")
            begin = time.perf_counter()


def shards(rows: Sequence[GenerationRow], config: GenerationConfig) -> list[list[GenerationRow]]:
    """Return the rows in shards, short prompts first. Rows of one prompt are not parted unless they fill a batch."""
    parts: list[list[GenerationRow]] = [[]]
    for group in _by_prompt(sorted(rows, key=lambda row: (len(row.prompt), row.prompt)), config.batch_rows):
        if parts[-1] and len(parts[-1]) + len(group) > _SHARD * config.batch_rows:
            parts.append([])
        parts[-1] += group
    return parts


def _by_prompt(rows: Sequence[GenerationRow], most: int) -> list[list[GenerationRow]]:
    """Return neighbours with one prompt as groups of at most `most` rows."""
    groups = [list(group) for _, group in groupby(rows, key=lambda row: row.prompt)]
    return [group[start : start + most] for group in groups for start in range(0, len(group), most)]


def _as_memory_allows(
    work: Callable[[LoadedModel, Sequence[GenerationRow], GenerationConfig, Ending], None],
    loaded: LoadedModel,
    rows: Sequence[GenerationRow],
    config: GenerationConfig,
    ending: Ending,
) -> None:
    """Let `work` generate every row. Where memory runs out, half as many go on together, from the texts they have."""
    most = config.batch_rows
    while unfinished := [row for row in rows if not row.done]:
        try:
            work(loaded, unfinished, replace(config, batch_rows=most), ending)
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is one
            if not is_no_memory(error):
                raise
            longest = max(row.length for row in unfinished)
            if most == 1:
                raise UnsupportedError(
                    f"Memory ran out on one answer of {longest} tokens with its prompt",
                    fix="Allow shorter answers, or use a smaller dtype or another device",
                ) from error
        if any(not row.done for row in rows):  # behind the handler, whose error holds what was cached
            most = max(1, min(most, len(unfinished)) // 2)
            logger.warning("Memory ran out on answers of up to %d tokens; going on with %d at once", longest, most)
            if loaded.device.type == "cuda":
                torch.cuda.empty_cache()


def _with_cache(loaded: LoadedModel, rows: Sequence[GenerationRow], config: GenerationConfig, ending: Ending) -> None:
    """Generate every row of a shard; a row is computed once, and the rows of one prompt share its prompt."""
    waiting = _by_prompt(rows, config.batch_rows)
    batch = CachedBatch(loaded, config, ending)
    while waiting or not all(row.done for row in batch.rows):
        n_done = sum(row.done for row in batch.rows)
        if n_done * _LEAVE >= len(batch.rows):
            fresh: list[GenerationRow] = []
            while waiting and len(batch.rows) - n_done + len(fresh) + len(waiting[0]) <= config.batch_rows:
                fresh += waiting.pop(0)
            batch.regroup(fresh)
        else:
            batch.step()


def _with_transformers(
    loaded: LoadedModel, rows: Sequence[GenerationRow], config: GenerationConfig, ending: Ending
) -> None:
    """Generate every row of a shard with transformers' greedy search, with our sampler in place of its own.

    After each stage the finished rows leave, and the others continue from their own text, which is read again. Every
    stage is twice as long as the one before.
    """
    stage, grown = _FIRST_STAGE, 0
    waiting = list(rows)
    while waiting:
        step = min(stage, config.max_new_tokens - grown)
        for start in range(0, len(waiting), config.batch_rows):
            _grow(loaded, waiting[start : start + config.batch_rows], config, ending, step)
        grown, stage = grown + step, 2 * stage
        waiting = sorted((row for row in waiting if not row.done), key=lambda row: row.length)


def _in_one_call(loaded: LoadedModel, rows: Sequence[GenerationRow], config: GenerationConfig, ending: Ending) -> None:
    """Generate every row of a shard with transformers' greedy search, as `_with_transformers`, but without stages.

    A batch has rows of one length, so that each has the rotary frequencies that it would have alone.
    """
    for _, group in groupby(sorted(rows, key=lambda row: row.length), key=lambda row: row.length):
        alike = list(group)
        for start in range(0, len(alike), config.batch_rows):
            _grow(loaded, alike[start : start + config.batch_rows], config, ending, config.max_new_tokens)


def _grow(
    loaded: LoadedModel, batch: Sequence[GenerationRow], config: GenerationConfig, ending: Ending, step: int
) -> None:
    """Add up to `step` tokens to every row of one left-padded batch."""
    ids = _left_padded([row.prompt + row.tokens for row in batch])
    length = ids.shape[1]
    mask = torch.arange(length) >= length - torch.tensor([row.length for row in batch])[:, None]
    extra: dict[str, Any] = {}
    if any(row.temperature > 0 for row in batch):
        extra["logits_processor"] = [_RowSampler(batch, config, prompt_length=length, device=loaded.device)]

    def ended(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Add each new token to its row, and say which rows are done."""
        for row, token in zip(batch, input_ids[:, -1].tolist(), strict=True):
            if not row.done:
                ending.add(row, token)
        return torch.tensor([row.done for row in batch], device=input_ids.device)

    # In place of the checkpoint's own settings, which `generate` would merge into ours. Padding is where the mask is 0,
    # or after an end token: any id will do.
    ends = ending.end_tokens
    settings = Settings(eos_token_id=sorted(ends) or None, pad_token_id=min(ends, default=0))
    with replaced(loaded.model, "generation_config", settings):
        loaded.model.generate(
            input_ids=ids.to(loaded.device),
            attention_mask=mask.long().to(loaded.device),
            max_new_tokens=step,
            stopping_criteria=[ended],
            **extra,
        )


class _RowSampler:
    """Logits processor that leaves only the drawn token, so that transformers' greedy search takes it.

    A row's next random number is that of the number of tokens which it already has. `prompt_length` is the padded
    length of the batch's input.
    """

    def __init__(
        self, batch: Sequence[GenerationRow], config: GenerationConfig, *, prompt_length: int, device: Any
    ) -> None:
        u = np.zeros((len(batch), config.max_new_tokens))
        for i, row in enumerate(batch):
            u[i, : len(row.u)] = row.u
        self._u = torch.from_numpy(u).to(device)
        self._temperature = torch.tensor([row.temperature for row in batch], dtype=torch.float32, device=device)
        self._offset = torch.tensor([len(row.tokens) - prompt_length for row in batch], device=device)
        self._config = config

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        u = self._u.gather(1, (self._offset + input_ids.shape[1])[:, None])[:, 0]
        chosen = draw(scores, u, self._temperature, top_k=self._config.top_k, top_p=self._config.top_p)
        return torch.full_like(scores, float("-inf")).scatter_(1, chosen[:, None], 0.0)


def end_tokens_of(settings: Any, tokenizer: Any) -> set[int]:
    """Return the end tokens of a checkpoint's generation settings and of its tokenizer."""
    named = getattr(settings, "eos_token_id", None)
    ends = set(named if isinstance(named, list) else [] if named is None else [named])
    if tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    return ends


class RemoteCausalLM(IdentifiedModel, Protocol):
    """Interface of a model that is not in this process, and decodes where it is (`engines.ray.remote_model`)."""

    def decode(self, job: GenerationJob) -> None:
        """Generate the answers of all rows in place, as `decoding.decode` does."""


AnyCausalLM = LoadedModel | RemoteCausalLM
