"""Scoring jobs: one share of a pass for another process, the process's runner, and the result.

Jobs and results are plain data (numbers, strings, paths and arrays). Models and baseline stores are not sent. The other
process opens them itself, checks that they are the same, and keeps them open for the next job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow_compress.errors import CheckpointError, StoreError
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.scoring.baseline_store.state_store import StateStore
from mlflow_compress.scoring.baseline_store.state_writer import StateWriter
from mlflow_compress.scoring.checkpointing.journal import Arrays, Journal
from mlflow_compress.scoring.forward.body import split_body_and_head
from mlflow_compress.scoring.processes.shares import Share
from mlflow_compress.scoring.scoring_pass import ModelRunner, ScoringPass


@dataclass(frozen=True, kw_only=True)
class ModelRef:
    """Reference to a model that another process can open.

    Attributes
    ----------
    config : LoadConfig
    weights : str
        SHA-256 that its folder must have (see `identity.weights_hash`).
    """

    config: LoadConfig
    weights: str

    @classmethod
    def of(cls, loaded: LoadedModel) -> ModelRef | None:
        """Return the reference to a loaded model, or None where it exists only in memory."""
        return cls(config=loaded.config, weights=loaded.weights) if loaded.config else None


@dataclass(frozen=True, kw_only=True)
class StoreRef:
    """Reference to a baseline store: its folder, which the other process must reach, and its manifest's digest."""

    folder: Path
    digest: str

    @classmethod
    def of(cls, store: StateStore) -> StoreRef:
        """Return the reference to an open store."""
        return cls(folder=store.folder.resolve(), digest=store.manifest.digest)


@dataclass(frozen=True, kw_only=True)
class CaptureRef:
    """Where a share's states are written: folder, part of the file names, bytes per shard, what the leader stores."""

    folder: Path
    part: str
    shard_bytes: int
    known: Mapping[str, Any] | None

    @classmethod
    def of(cls, writer: StateWriter, share: int) -> CaptureRef:
        """Return where a share writes its states, so that the leader's writer can adopt them."""
        known = {name: value for name, value in writer.progress().items() if name != "shards"}
        return cls(
            folder=writer.folder.resolve(),
            part=writer.part_name(share),
            shard_bytes=writer.shard_bytes,
            known=known if known["kind"] is not None else None,
        )


@dataclass(frozen=True, kw_only=True)
class ScoringJob:
    """A share, and everything that its `ScoringPass` needs.

    Attributes
    ----------
    share : Share
    model : ModelRef
    baseline : StoreRef, ModelRef or None
        A store, or a model that runs on the same batches.
    capture : CaptureRef or None
    journal : (Path, dict) or None
        Folder and identity.
    head_rows, seconds, label, entropy
        As in `ScoringPass`.
    """

    share: Share
    model: ModelRef
    baseline: StoreRef | ModelRef | None
    capture: CaptureRef | None
    journal: tuple[Path, dict[str, str]] | None
    head_rows: int
    seconds: float
    label: str
    entropy: bool


@dataclass(frozen=True)
class JobResult:
    """Result of a share: its arrays, how often memory ran out, and the captured shards (`StateWriter.progress`)."""

    arrays: Arrays
    n_splits: int
    captured: Mapping[str, Any] | None


class JobRunner:
    """Runs jobs. Keeps the models and the store of the last job open for the next one."""

    def __init__(self) -> None:
        self._models: dict[ModelRef, LoadedModel] = {}
        self._stores: dict[StoreRef, StateStore] = {}

    def run(self, job: ScoringJob) -> JobResult:
        """Run one share.

        Raises
        ------
        CheckpointError
            When a model cannot be opened here, or has other weights than the leader's.
        StoreError
            When the baseline store cannot be reached, or is not the leader's.
        """
        wanted = {job.model, job.baseline}
        # Close the others before the next is opened: memory may not hold both.
        self._models = {ref: loaded for ref, loaded in self._models.items() if ref in wanted}
        self._stores = {ref: store for ref, store in self._stores.items() if ref in wanted}
        loaded = self._model(job.model)
        work = ScoringPass(
            runner=_model_runner(loaded),
            head_rows=job.head_rows,
            capture=_writer(job.capture, loaded) if job.capture else None,
            baseline=self._baseline(job.baseline),
            journal=Journal(*job.journal) if job.journal else None,
            seconds=job.seconds,
            progress=False,
            label=job.label,
            entropy=job.entropy,
        )
        arrays = work.run(job.share.plan, job.share.targets)
        return JobResult(arrays, work.n_splits, work.capture.progress() if work.capture else None)

    def _model(self, ref: ModelRef) -> LoadedModel:
        if ref not in self._models:
            loaded = load_model(ref.config)
            if loaded.weights != ref.weights:
                raise CheckpointError(
                    "The checkpoint has other weights than the leading process has loaded", got=ref.config.path
                )
            self._models[ref] = loaded
        return self._models[ref]

    def _baseline(self, ref: StoreRef | ModelRef | None) -> StateStore | ModelRunner | None:
        if isinstance(ref, ModelRef):
            return _model_runner(self._model(ref))
        if ref is not None and ref not in self._stores:
            store = StateStore.open(ref.folder)
            if store.manifest.digest != ref.digest:
                raise StoreError(
                    "The baseline store is not the one that the leading process reads", got=str(ref.folder)
                )
            self._stores[ref] = store
        return self._stores[ref] if ref is not None else None


def _model_runner(loaded: LoadedModel) -> ModelRunner:
    body, head, _ = split_body_and_head(loaded.model)
    return ModelRunner(body, head)


def _writer(ref: CaptureRef, loaded: LoadedModel) -> StateWriter:
    writer = StateWriter(ref.folder, loaded, shard_bytes=ref.shard_bytes, part=ref.part)
    if ref.known is not None:
        writer.restore([], **ref.known)
    return writer
