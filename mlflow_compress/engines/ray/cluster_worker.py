"""What an actor of the cluster holds: a model, which scores shards and writes answers. Nothing here knows Ray.

A pass is cut into shards; each is a plan of its own, which can be sent away and computed alone.
"""

import gc
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mlflow_compress.errors import CheckpointError
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.models.memory_alignment import rounding_identity
from mlflow_compress.scoring.baseline_store import (
    CapturedRows,
    CapturedStates,
    SentHead,
    SentStates,
    head_file,
)
from mlflow_compress.scoring.engine import split_for_passes
from mlflow_compress.scoring.engine_identity import code_identity, package_hash
from mlflow_compress.scoring.forward.body import Body, reason_not_to_pack
from mlflow_compress.scoring.forward.by_layer import BodyByLayer, StateSizes, say_reads
from mlflow_compress.scoring.forward.head import LanguageModelHead
from mlflow_compress.scoring.generation.decoding import GenerationJob, decode
from mlflow_compress.scoring.generation.generation_rows import GenerationConfig, GenerationRow
from mlflow_compress.scoring.journal import Arrays, joined_arrays
from mlflow_compress.scoring.plan.packing import NO_PREFIX, PackedBatch, Plan, UnitGroup, group_units
from mlflow_compress.scoring.scoring_pass import ModelRunner, ScoringPass, Targets

_PER_WORKER = (16, 8, 4, 2, 1)
_MOST_AGAIN = 0.05


@dataclass(frozen=True)
class _Shard:
    """Consecutive groups of a plan, as a plan of their own. The same model gives the same rows, bit for bit."""

    first: int  # The groups `first` to `stop` - 1 of the whole plan
    stop: int
    rows: slice  # Its rows in the whole plan
    n_tokens: int
    plan: Plan  # Its `before` holds the packs of earlier shards whose cached prefixes are read here
    targets: Targets  # The targets of its rows, which are numbered from 0


def shards_for(plan: Plan, targets: Targets, head_rows: int, missing: Sequence[int], n_workers: int) -> list[_Shard]:
    """Return the groups `missing` in shards: up to 16 per worker, as long as little is computed twice for them.

    Small shards cost little when a worker is lost, and end at about the same time. But the shards of one subject all
    compute its few-shot examples again. So there are fewer of them, down to one per worker, where that would be more
    than 5 % of all tokens.
    """
    shards: list[_Shard] = []
    for per_worker in _PER_WORKER:
        shards = cut_into_shards(plan, targets, head_rows, missing, per_worker * n_workers)
        again = sum(pack.n_tokens for shard in shards for pack in shard.plan.before)
        if again <= _MOST_AGAIN * sum(shard.n_tokens for shard in shards):
            break
    return shards


def shards_by_layer(
    plan: Plan, targets: Targets, head_rows: int, missing: Sequence[int], n_workers: int, sizes: StateSizes, room: int
) -> list[_Shard]:
    """Return the groups `missing` in shards of one sweep through the layers each: as few as `room` allows.

    A worker reads the weights once for each shard. Every worker gets about as many of them.
    """
    groups = group_units(plan, head_rows)
    for per_worker in count(1):
        shards = cut_into_shards(plan, targets, head_rows, missing, per_worker * n_workers)
        taken = [sum(sizes.taken_by(plan, group) for group in groups[shard.first : shard.stop]) for shard in shards]
        if max(taken, default=0) <= room or len(shards) == len(missing):
            break
    say_reads(len(shards), sizes.waiting, max(taken, default=0), f" on {n_workers} workers")
    return shards


def cut_into_shards(plan: Plan, targets: Targets, head_rows: int, missing: Sequence[int], n: int) -> list[_Shard]:
    """Return about `n` shards with about as many tokens each, which together are the groups `missing`, in order.

    No group of `head_rows` rows is divided. A cut is moved where that saves tokens of cached prefixes, which a shard
    has to compute again.
    """
    groups = group_units(plan, head_rows)
    recomputed = _prefix_tokens(plan)[[group.units.start for group in groups]]
    n_tokens = sum(groups[number].n_tokens for number in missing)
    shards = []
    for run in _runs(missing):
        part = groups[run.start : run.stop]
        share = sum(group.n_tokens for group in part) / n_tokens
        n_here = min(max(1, round(n * share)), len(part))
        starts = [0, *_cuts(part, recomputed[run.start : run.stop], n_here), len(part)]
        shards += [_shard(plan, targets, part[a:b], run.start + a) for a, b in pairwise(starts)]
    return shards


def _runs(numbers: Sequence[int]) -> Iterator[range]:
    """Yield the ranges of consecutive numbers, in ascending order."""
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield range(numbers[start], numbers[i - 1] + 1)
            start = i


def _cuts(part: Sequence[UnitGroup], recomputed: npt.NDArray[np.int64], n: int) -> list[int]:
    """Return the index of the first group of each shard but the first."""
    done = np.cumsum([0, *(group.n_tokens for group in part)])  # tokens before each group
    cuts: list[int] = []
    for number in range(1, n):
        first = cuts[-1] + 1 if cuts else 1
        last = len(part) - (n - number)
        off = np.abs(done[:-1] - done[-1] * number / n) + recomputed
        cuts.append(first + int(off[first : last + 1].argmin()))
    return cuts


def _prefix_tokens(plan: Plan) -> npt.NDArray[np.int64]:
    """Return, per unit, the tokens of cached prefixes that an earlier unit makes and this or a later unit reads."""
    change = np.zeros(len(plan.units) + 1, dtype=np.int64)
    made: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, unit in enumerate(plan.units):
        if isinstance(unit, PackedBatch):
            if unit.keep != NO_PREFIX:
                made[unit.keep] = number
            if unit.prefix != NO_PREFIX:
                last[unit.prefix] = number
    for prefix, number in last.items():
        n_tokens = plan.units[made[prefix]].n_tokens
        change[made[prefix] + 1] += n_tokens
        change[number + 1] -= n_tokens
    return np.cumsum(change)[:-1]


def _shard(plan: Plan, targets: Targets, part: Sequence[UnitGroup], first: int) -> _Shard:
    units = plan.units[part[0].units.start : part[-1].units.stop]
    rows = slice(part[0].rows.start, part[-1].rows.stop)
    begin, end = np.searchsorted(targets.row, [rows.start, rows.stop])
    # The packs of other shards that make the prefixes which these units read, and the prefixes of those packs.
    made = {u.keep for u in units if isinstance(u, PackedBatch)} | {NO_PREFIX}
    needed: dict[int, PackedBatch] = {}
    for unit in units:
        prefix = unit.prefix if isinstance(unit, PackedBatch) else NO_PREFIX
        while prefix not in made and prefix not in needed:
            needed[prefix] = plan.makers[prefix]
            prefix = plan.makers[prefix].prefix
    return _Shard(
        first=first,
        stop=first + len(part),
        rows=rows,
        n_tokens=sum(group.n_tokens for group in part),
        plan=Plan(units, plan.keys[rows], [], list(needed.values())),
        targets=Targets(targets.row[begin:end] - rows.start, targets.token[begin:end]),
    )


@dataclass(frozen=True, eq=False)
class ShardResult:
    """Result of a shard."""

    arrays: Arrays  # As `ScoringPass` makes them
    captured: CapturedRows | None  # The rows to store, in one piece; numbered from the shard's first
    n_splits: int  # How often memory ran out

    @classmethod
    def of(cls, arrays: Arrays, captured: Sequence[CapturedRows], n_splits: int) -> "ShardResult":
        if not captured:
            return cls(arrays, None, n_splits)
        rows = torch.cat([part.rows for part in captured])
        keys, targets = (np.concatenate([getattr(part, name) for part in captured]) for name in ("keys", "targets"))
        return cls(arrays, CapturedRows(0, rows, keys, targets, captured[0].kind, captured[0].reason), n_splits)


@dataclass(frozen=True)
class ModelRef:
    """A model that every worker can open."""

    config: LoadConfig  # Its path must mean the same folder, or hub id, on every machine
    weights: str  # SHA-256 that the folder must have there (see `identity.weights_hash`)


@dataclass(frozen=True)
class ModelFacts:
    """What a worker knows of a model that it has loaded."""

    whole_model_reason: str | None  # As in `Execution`
    stored_config: dict[str, Any]  # As in `LoadedModel`
    by_layer: StateSizes | None  # Where it is scored layer by layer, because it does not fit


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """How a shard is scored: see `ScoringPass`. `captures` says whether its states are sent back."""

    shard: _Shard
    head_rows: int
    entropy: bool
    captures: bool


class ClusterWorker:
    """Holds the model that was asked for last, and computes with it."""

    def __init__(self, device: str, n_threads: int) -> None:
        torch.set_num_threads(n_threads)
        self._device = torch.device(device)
        self._ref: ModelRef | None = None
        self._loaded: LoadedModel | None = None
        self._split: tuple[Body, LanguageModelHead, str | None] | None = None  # Of the model
        self._head: SentHead | None = None

    def describe(self) -> dict[str, str]:
        """Return what must be equal for all workers, so that it does not matter which one computes what."""
        return {**rounding_identity(self._device), **self.code()}

    @staticmethod
    def code() -> dict[str, str]:
        """Return what must also be as in the process that hands out tasks: our code, and versions of libraries."""
        return {**code_identity(), "package": package_hash()}

    def facts(self, ref: ModelRef) -> ModelFacts:
        """Return what is known of a model once it is loaded."""
        body, _, whole_model_reason = self._parts(ref)
        sizes = body.sizes if isinstance(body, BodyByLayer) else None
        return ModelFacts(whole_model_reason, self._model(ref).stored_config, sizes)

    def reason_not_to_pack(self, ref: ModelRef, max_length: int) -> str | None:
        return reason_not_to_pack(self._parts(ref)[0], max_length)

    def head_file(self, ref: ModelRef) -> bytes:
        return head_file(self._model(ref).model)

    def score(
        self, ref: ModelRef, task: ShardTask, head: SentHead | None, rows: npt.NDArray[np.uint8] | None
    ) -> ShardResult:
        """Score a shard, and compare it with the baseline whose head and rows are given."""
        captured = CapturedStates(self._model(ref)) if task.captures else None
        scoring = ScoringPass(
            runner=ModelRunner(*self._parts(ref)[:2]),
            head_rows=task.head_rows,
            capture=captured,
            baseline=SentStates(self._kept(head), rows) if head is not None and rows is not None else None,
            entropy=task.entropy,
        )
        results = joined_arrays([arrays for _, arrays in scoring.run(task.shard.plan, task.shard.targets)])
        return ShardResult.of(results, captured.parts if captured is not None else [], scoring.n_splits)

    def decode(
        self,
        ref: ModelRef,
        tokenizer: Any,
        rows: list[GenerationRow],
        config: GenerationConfig,
        until: Sequence[str],
        end_tokens: Collection[int],
    ) -> list[GenerationRow]:
        """Return the rows with their answers; `tokenizer` is used in place of the model's own."""
        loaded = self._model(ref)
        with_tokenizer = LoadedModel(loaded.model, tokenizer, loaded.path, loaded.dtype, loaded.device, loaded.config)
        decode(with_tokenizer, GenerationJob(rows=rows, config=config, until=until, end_tokens=end_tokens))
        return rows

    def release(self) -> None:
        self._loaded = self._ref = self._split = self._head = None
        gc.collect()  # modules have reference cycles
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _model(self, ref: ModelRef) -> LoadedModel:
        if self._loaded is None or self._ref != ref:
            self.release()  # memory may not hold two
            loaded = load_model(ref.config)
            if loaded.weights != ref.weights:
                raise CheckpointError(
                    "The checkpoint has other weights on this worker's machine",
                    got=ref.config.path,
                    fix="Put it on a disk that all machines share",
                )
            self._loaded, self._ref = loaded, ref
        return self._loaded

    def _parts(self, ref: ModelRef) -> tuple[Body, LanguageModelHead, str | None]:
        """Return what `split_for_passes` does, once a model: it tries out what the model can."""
        loaded = self._model(ref)
        if self._split is None:
            self._split = split_for_passes(loaded)
        return self._split

    def _kept(self, head: SentHead) -> SentHead:
        """Return the head that is rebuilt already, if it is the same."""
        if self._head is None or self._head.manifest.digest != head.manifest.digest:
            self._head = head
        return self._head
