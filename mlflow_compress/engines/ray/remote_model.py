"""A model on the workers of a cluster, as the stages see it: its identity here, its weights there."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch

from mlflow_compress.config import EngineConfig
from mlflow_compress.engines.file_model import FileModel, open_request
from mlflow_compress.engines.interface import Abilities, ModelRequest, engine
from mlflow_compress.engines.ray import cluster_worker
from mlflow_compress.engines.ray.workers import WorkerCall, Workers, started_workers
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.models.length_regimes import LengthRegime, length_regimes
from mlflow_compress.models.loading import LightModel, LoadedModel
from mlflow_compress.models.placement import BALANCED, room_for_states
from mlflow_compress.scoring.baseline_store import SentHead, as_bytes
from mlflow_compress.scoring.engine import BaselineOutputs, PassWork
from mlflow_compress.scoring.generation.decoding import GenerationJob
from mlflow_compress.scoring.generation.generation_rows import GenerationRow
from mlflow_compress.scoring.journal import Arrays


@dataclass(frozen=True)
class RemoteModel(FileModel):
    """A model that workers load when they are first asked for it."""

    workers: Workers

    abilities = Abilities(in_this_process=False)

    @classmethod
    def of(cls, light: LightModel, **more: Workers) -> Self:
        """Return the model on the device of its `workers`, or spread over that and its machine's memory and disk."""
        at = more["workers"].device
        device = torch.device("cuda:0" if at == "cuda" else at)
        config = light.config if light.config.device == BALANCED else replace(light.config, device=at)
        return super().of(replace(light, device=device, config=config), **more)

    @property
    def rounding(self) -> dict[str, str]:
        return {name: value for name, value in self.workers.described.items() if name not in self.workers.code}

    def load(self) -> Self:
        """Return the model itself: workers load the weights when they are first needed."""
        return self

    @property
    def stored_config(self) -> dict[str, Any]:
        return self.loaded_facts.stored_config

    @cached_property
    def ref(self) -> cluster_worker.ModelRef:
        return cluster_worker.ModelRef(self.config, self.weights)

    @cached_property
    def loaded_facts(self) -> cluster_worker.ModelFacts:
        """What a worker knows of it once it is loaded."""
        facts: cluster_worker.ModelFacts = self.workers.call("facts", self.ref)
        return facts

    @property
    def execution(self) -> "_ShardedExecution":
        return _ShardedExecution(self)

    def decode(self, job: GenerationJob) -> None:
        """Generate the answers of all rows in place, as `decoding.decode` does: its shards are the workers' tasks."""
        parts = job.unfinished()
        tokenizer = self.workers.share(self.tokenizer)

        def make(number: int) -> WorkerCall:
            fresh = [row.restarted() for row in parts[number]]
            return WorkerCall(
                "decode", (self.ref, tokenizer, fresh, job.config, tuple(job.until), tuple(job.end_tokens))
            )

        begin = time.perf_counter()
        with job.bar(parts) as bar:

            def take(number: int, answered: list[GenerationRow]) -> None:
                nonlocal begin
                seconds, begin = time.perf_counter() - begin, time.perf_counter()
                bar.update(len(answered))
                job.take(parts[number], answered, seconds)
                bar.set_postfix_str(f"{job.speed.tokens_per_second or 0:.0f} tokens/s")

            self.workers.run(len(parts), make, take)


class _ShardedExecution:
    """Runs the passes of one model on workers, shard by shard."""

    def __init__(self, model: RemoteModel) -> None:
        self._model = model
        self._workers = model.workers

    @property
    def whole_model_reason(self) -> str | None:
        return self._model.loaded_facts.whole_model_reason

    def reason_not_to_pack(self, max_length: int, baseline: BaselineOutputs) -> str | None:
        reason: str | None = self._workers.call("reason_not_to_pack", self._model.ref, max_length)
        return reason

    def length_regimes(self, baseline: BaselineOutputs) -> LengthRegime:
        return length_regimes(self._model.configuration())

    def run(self, work: PassWork) -> tuple[Arrays, int]:
        baseline = work.baseline
        if isinstance(baseline, LoadedModel):
            raise UnsupportedError("Workers compare with a stored baseline, not with a model in another process")
        if not work.plan.units:
            return work.empty(), 0
        parts = work.parts()
        missing = parts.missing()
        cut = work.plan, work.targets, work.head_rows, missing, self._workers.n
        sizes = self._model.loaded_facts.by_layer
        if sizes is None:
            shards = cluster_worker.shards_for(*cut)
        else:
            shards = cluster_worker.shards_by_layer(*cut, sizes, room_for_states(self._model.config.max_memory))
        rows = baseline.rows_of(work.plan.keys) if baseline is not None else np.zeros(0, np.int64)
        head = self._workers.share(SentHead.of(baseline)) if baseline is not None and shards else None
        n_splits = 0
        with work.bar(missing) as bar:

            def take(number: int, result: cluster_worker.ShardResult) -> None:
                nonlocal n_splits
                shard, written = shards[number], None
                if work.capture is not None and result.captured is not None:
                    captured = replace(result.captured, row=shard.rows.start)
                    written = work.capture.write(captured, lambda: self._workers.call("head_file", self._model.ref))
                parts.add(shard.first, shard.stop, result.arrays, written)
                n_splits += result.n_splits
                bar.update(shard.n_tokens)

            def make(number: int) -> WorkerCall:
                shard = shards[number]
                task = cluster_worker.ShardTask(
                    shard=shard, head_rows=work.head_rows, entropy=work.entropy, captures=work.capture is not None
                )
                sent = as_bytes(baseline.states(rows[shard.rows])) if baseline is not None else None
                return WorkerCall("score", (self._model.ref, task, head, sent))

            self._workers.run(len(shards), make, take)
        return parts.joined(), n_splits


@engine("ray")
class RayEngine:
    """Runs models on the workers of a Ray cluster, each with a copy."""

    abilities = RemoteModel.abilities

    def __init__(self) -> None:
        self._workers: Workers | None = None  # Those of the outermost block

    @contextmanager
    def started(
        self, running: EngineConfig, *, on_gpu: bool | None, workers: type[cluster_worker.ClusterWorker] | None = None
    ) -> Iterator[Workers]:
        """Yield the workers of the outermost block. When an inner one ends, they free their models.

        Compression may need the memory.
        """
        if self._workers is not None:
            try:
                yield self._workers
            finally:
                self._workers.release()
            return
        with started_workers(running, on_gpu=on_gpu, kind=workers or cluster_worker.ClusterWorker) as self._workers:
            try:
                yield self._workers
            finally:
                self._workers = None

    def open(self, request: ModelRequest) -> RemoteModel:
        assert self._workers is not None, "engine=ray is used outside of a block of `started`"
        spread = request.source.device == BALANCED
        if spread and "cpu" not in request.source.max_memory:
            raise ConfigError(
                "Workers may share a machine's memory, so each worker's share must be given",
                allowed="device=balanced with max_memory, such as cpu=20GiB",
                got=f"max_memory={request.source.max_memory or 'none'}",
            )
        opened = open_request(request, device=BALANCED if spread else "cpu", computes_on=self._workers.device)
        return RemoteModel.of(opened, workers=self._workers)
