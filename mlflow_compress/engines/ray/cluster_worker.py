"""What an actor of the cluster holds: a model, which scores shards and writes answers. Nothing here knows Ray."""

from __future__ import annotations

import gc
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from mlflow_compress.engines.ray.shards import Shard
from mlflow_compress.errors import CheckpointError
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.models.memory_alignment import rounding_identity
from mlflow_compress.scoring.baseline_store import (
    CapturedRows,
    CapturedStates,
    SentHead,
    SentStates,
    as_bytes,
    from_bytes,
    head_file,
)
from mlflow_compress.scoring.engine_identity import code_identity, package_hash
from mlflow_compress.scoring.forward.body import reason_not_to_pack, split_body_and_head
from mlflow_compress.scoring.generation.decoding import decode
from mlflow_compress.scoring.generation.generation_rows import GenerationConfig, GenerationRow
from mlflow_compress.scoring.journal import Arrays, joined_arrays
from mlflow_compress.scoring.scoring_pass import ModelRunner, ScoringPass

_OF_TARGETS = "logprob"  # the only result with one value per target; all others have one per row


@dataclass(frozen=True)
class ShardResult:
    """Result of a shard."""

    targets: pa.Table  # One row per target
    rows: pa.Table  # One row per scored position
    states: pa.Table | None  # The states to store: bytes of the row, key and target of each scored position
    n_splits: int  # How often memory ran out

    @classmethod
    def of(cls, arrays: Arrays, captured: Sequence[CapturedRows], n_splits: int) -> ShardResult:
        """Return the tables of a shard's arrays, and of the rows that were captured, if any."""
        targets = pa.table({_OF_TARGETS: arrays[_OF_TARGETS]})
        rows = pa.table({name: values for name, values in arrays.items() if name != _OF_TARGETS})
        return cls(targets, rows, _states_table(captured) if captured else None, n_splits)

    def arrays(self) -> Arrays:
        """Return the arrays, as `ScoringPass` makes them."""
        return {
            name: table.column(name).combine_chunks().to_numpy(zero_copy_only=False)
            for table in (self.targets, self.rows)
            for name in table.column_names
        }

    def captured(self, row: int) -> CapturedRows | None:
        """Return the rows to store; `row` is the number of the first one in the whole pass."""
        if self.states is None:
            return None
        said = {name.decode(): text.decode() for name, text in self.states.schema.metadata.items()}
        raw, keys = (_byte_rows(self.states.column(name)) for name in ("row", "key"))
        targets = np.array(self.states.column("target").combine_chunks())
        rows = from_bytes(raw, said["dtype"], (len(raw), -1))
        return CapturedRows(row, rows, keys, targets, said["kind"], said.get("reason"))


def _states_table(captured: Sequence[CapturedRows]) -> pa.Table:
    rows = torch.cat([part.rows for part in captured])
    first = captured[0]
    said = {"kind": first.kind, "dtype": str(rows.dtype).removeprefix("torch.")}
    if first.reason is not None:
        said["reason"] = first.reason
    columns = {
        "row": _fixed(as_bytes(rows)),
        "key": _fixed(np.concatenate([part.keys for part in captured])),
        "target": pa.array(np.concatenate([part.targets for part in captured])),
    }
    return pa.table(columns).replace_schema_metadata(said)


def _fixed(raw: npt.NDArray[np.uint8]) -> pa.Array:
    """Return one value of fixed width per row of bytes."""
    n, width = raw.shape
    return pa.Array.from_buffers(pa.binary(width), n, [None, pa.py_buffer(np.ascontiguousarray(raw))])


def _byte_rows(column: pa.ChunkedArray) -> npt.NDArray[np.uint8]:
    array = column.combine_chunks()
    width = array.type.byte_width
    raw = np.frombuffer(array.buffers()[1], dtype=np.uint8)
    return raw[array.offset * width : (array.offset + len(array)) * width].reshape(len(array), width)


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


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """How a shard is scored: see `ScoringPass`. `captures` says whether its states are sent back."""

    shard: Shard
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
        loaded = self._model(ref)
        return ModelFacts(split_body_and_head(loaded.model)[2], loaded.stored_config)

    def reason_not_to_pack(self, ref: ModelRef, max_length: int) -> str | None:
        """Return why sequences of this length cannot share their prefixes; None where they can."""
        return reason_not_to_pack(split_body_and_head(self._model(ref).model)[0], max_length)

    def head_file(self, ref: ModelRef) -> bytes:
        """Return the file with the weights of the model's head."""
        return head_file(self._model(ref).model)

    def score(
        self, ref: ModelRef, task: ShardTask, head: SentHead | None, rows: npt.NDArray[np.uint8] | None
    ) -> ShardResult:
        """Score a shard, and compare it with the baseline whose head and rows are given."""
        loaded = self._model(ref)
        body, model_head, _ = split_body_and_head(loaded.model)
        captured = CapturedStates(loaded) if task.captures else None
        scoring = ScoringPass(
            runner=ModelRunner(body, model_head),
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
        decode(with_tokenizer, rows, config, until=until, end_tokens=end_tokens)
        return rows

    def release(self) -> None:
        """Free the memory of the model."""
        self._loaded = self._ref = self._head = None
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

    def _kept(self, head: SentHead) -> SentHead:
        """Return the head that is rebuilt already, if it is the same."""
        if self._head is None or self._head.manifest.digest != head.manifest.digest:
            self._head = head
        return self._head
