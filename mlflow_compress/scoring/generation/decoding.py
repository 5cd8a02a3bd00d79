"""Decodes many sequences, in shards whose texts depend on nothing outside of them.

A shard is some batches of rows. As rows are finished, the next ones take their places, so that a few long answers do
not keep a full batch running. Keys and values stay in the cache. Which rows meet in a forward pass follows from the
shard alone. So a run that is interrupted, and resumes with whole shards, makes the same forward passes as a run that
was not, and ends with the same texts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import numpy as np
import torch

from mlflow_compress.scoring.generation.cached_batch import CachedBatch, reason_not_to_cache
from mlflow_compress.scoring.generation.generation_rows import CausalLM, Ending, GenerationRow, Speed
from mlflow_compress.scoring.generation.sampling import GenerationConfig, RowSampler

logger = logging.getLogger(__name__)

_SHARD = 2  # batches; at most so many answers are lost when a run is killed
_LEAVE = 4  # rows leave when one in so many is done: rows that are done cost time, and so does a removal
_FIRST_STAGE = 32  # tokens of the first stage, where transformers decodes


def decode(
    loaded: CausalLM,
    rows: Sequence[GenerationRow],
    config: GenerationConfig,
    *,
    until: Sequence[str] = (),
    end_tokens: Collection[int] = (),
    label: str = "generate",
    after_shard: Callable[[], None] = lambda: None,
    speed: Speed | None = None,
) -> None:
    """Generate tokens for every row until it is done, in place. A shard whose rows are all done stays as it is.

    A row is done at an end token (the checkpoint's, the tokenizer's, or one of `end_tokens`), when its text holds
    one of `until`, or at `config.max_new_tokens`. `label` names the progress bar. `after_shard` is called after each
    shard. Only then its rows have their texts. `speed` is added to.
    """
    from tqdm import tqdm

    ends = end_tokens_of(loaded.model.generation_config, loaded.tokenizer) | set(end_tokens)
    speed = Speed() if speed is None else speed
    reason = reason_not_to_cache(loaded.model)
    if reason is not None:
        logger.info("With this model, prompts are read again at every stage of decoding: %s", reason)
    work = _with_cache if reason is None else _with_transformers
    with (
        torch.inference_mode(),
        tqdm(total=len(rows), desc=label, unit="answer", disable=None, leave=False) as bar,
    ):
        ending = Ending(loaded.tokenizer, ends, until, config.max_new_tokens, finished=bar.update)
        for shard in shards(rows, config):
            if all(row.done for row in shard):
                bar.update(len(shard))
                continue
            drafts = [row.restarted() for row in shard]
            begin = time.perf_counter()
            work(loaded, drafts, config, ending)
            speed.n_tokens += sum(len(draft.tokens) for draft in drafts)
            speed.seconds += time.perf_counter() - begin
            bar.set_postfix_str(f"{speed.tokens_per_second or 0:.0f} tokens/s")
            for row, draft in zip(shard, drafts, strict=True):
                row.take(draft)
            after_shard()


def shards(rows: Sequence[GenerationRow], config: GenerationConfig) -> list[list[GenerationRow]]:
    """Return the rows in shards, short prompts first. Rows of one prompt are not parted unless they fill a batch."""
    found: list[list[GenerationRow]] = [[]]
    for group in _by_prompt(sorted(rows, key=lambda row: (len(row.prompt), row.prompt)), config.batch_rows):
        if found[-1] and len(found[-1]) + len(group) > _SHARD * config.batch_rows:
            found.append([])
        found[-1] += group
    return found


def _by_prompt(rows: Sequence[GenerationRow], most: int) -> list[list[GenerationRow]]:
    """Return neighbours with one prompt as groups of at most `most` rows."""
    groups = [list(group) for _, group in groupby(rows, key=lambda row: row.prompt)]
    return [group[start : start + most] for group in groups for start in range(0, len(group), most)]


def _with_cache(loaded: CausalLM, rows: Sequence[GenerationRow], config: GenerationConfig, ending: Ending) -> None:
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
    loaded: CausalLM, rows: Sequence[GenerationRow], config: GenerationConfig, ending: Ending
) -> None:
    """Generate every row of a shard with transformers' greedy search, with our sampler in place of its own.

    After each stage the finished rows leave, and the others continue from their own text, which is read again. Every
    stage is twice as long as the one before.
    """
    stage, grown = _FIRST_STAGE, 0
    waiting = list(rows)
    with _own_settings(loaded, ending.end_tokens):
        while waiting:
            step = min(stage, config.max_new_tokens - grown)
            for start in range(0, len(waiting), config.batch_rows):
                _grow(loaded, waiting[start : start + config.batch_rows], config, ending, step)
            grown, stage = grown + step, 2 * stage
            waiting = sorted((row for row in waiting if not row.done), key=lambda row: row.length)


def _grow(
    loaded: CausalLM, batch: Sequence[GenerationRow], config: GenerationConfig, ending: Ending, step: int
) -> None:
    """Add up to `step` tokens to every row of one left-padded batch."""
    length = max(row.length for row in batch)
    ids = torch.zeros((len(batch), length), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(batch):
        ids[i, length - row.length :] = torch.tensor(row.prompt + row.tokens)
        mask[i, length - row.length :] = 1
    extra: dict[str, Any] = {}
    if any(row.temperature > 0 for row in batch):
        u = np.zeros((len(batch), config.max_new_tokens))
        for i, row in enumerate(batch):
            u[i, : len(row.u)] = row.u
        sampler = RowSampler(
            u,
            [row.temperature for row in batch],
            [len(row.tokens) for row in batch],
            prompt_length=length,
            config=config,
            device=loaded.device,
        )
        extra["logits_processor"] = [sampler]
    loaded.model.generate(
        input_ids=ids.to(loaded.device),
        attention_mask=mask.to(loaded.device),
        max_new_tokens=step,
        stopping_criteria=[_Ended(batch, ending)],
        **extra,
    )


class _Ended:
    """Stopping criterion that adds each new token to its row, and says which rows are done."""

    def __init__(self, batch: Sequence[GenerationRow], ending: Ending) -> None:
        self._batch, self._ending = batch, ending

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        for row, token in zip(self._batch, input_ids[:, -1].tolist(), strict=True):
            if not row.done:
                self._ending.add(row, token)
        return torch.tensor([row.done for row in self._batch], device=input_ids.device)


def end_tokens_of(settings: Any, tokenizer: Any) -> set[int]:
    """Return the end tokens of a checkpoint's generation settings and of its tokenizer."""
    named = getattr(settings, "eos_token_id", None)
    ends = set(named if isinstance(named, list) else [] if named is None else [named])
    if tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    return ends


@contextmanager
def _own_settings(loaded: CausalLM, ends: Collection[int]) -> Iterator[None]:
    """Within this block, replace the checkpoint's generation settings, which `generate` would merge into ours."""
    from transformers import GenerationConfig as Settings

    original = loaded.model.generation_config
    # Padding is where the mask is 0, or after an end token: any id will do.
    loaded.model.generation_config = Settings(eos_token_id=sorted(ends) or None, pad_token_id=min(ends, default=0))
    try:
        yield
    finally:
        loaded.model.generation_config = original
