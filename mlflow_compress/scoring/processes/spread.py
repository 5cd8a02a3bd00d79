"""Run a pass: by the leader of a team as shares of all its processes, else here alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.scoring.baseline_store.state_store import StateStore
from mlflow_compress.scoring.checkpointing.journal import Arrays, Journal
from mlflow_compress.scoring.plan.units import Plan
from mlflow_compress.scoring.processes import team
from mlflow_compress.scoring.processes.jobs import CaptureRef, Done, ModelRef, ScoringJob, StoreRef
from mlflow_compress.scoring.processes.shares import Share, shares
from mlflow_compress.scoring.scoring_pass import ScoringPass, Targets

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Spread:
    """Over how many processes a pass went, and why over one where there are more."""

    n_processes: int
    alone: str | None


def run_spread(
    work: ScoringPass,
    plan: Plan,
    targets: Targets,
    *,
    model: LoadedModel,
    baseline: StateStore | LoadedModel | None,
    resume: tuple[Path, Mapping[str, str]] | None,
) -> tuple[Arrays, Spread]:
    """Run every group of a plan and return all results, the same bits however many processes there are.

    Parameters
    ----------
    work : ScoringPass
        Without a journal.
    plan, targets
        As in `ScoringPass.run`.
    model, baseline
        What `work` scores and is compared with.
    resume : (Path, mapping), optional
        Where unfinished results lie, and what they depend on. The number of processes is added: a killed pass goes on
        with as many as it was begun with.

    Raises
    ------
    StoreError
        When the folder holds a pass that was begun with another number of processes, or of another identity.
    WorkerError
        When another process fails.
    """
    helpers = team.current()
    alone = _why_alone(model, baseline) if helpers else None
    parts = [Share(plan, targets)]
    if helpers and alone is None:
        parts = shares(plan, targets, work.head_rows, helpers.size)
        alone = "the work cannot be divided" if len(parts) == 1 else None
    if alone is not None:
        logger.info("%s runs in one process: %s", work.label, alone)
    journals = _journals(resume, len(parts))
    work.journal = Journal(*journals[0]) if journals[0] else None
    if not helpers or len(parts) == 1:
        return work.run(plan, targets), Spread(1, alone)
    jobs = [_job(work, parts[i], i, model, baseline, journals[i]) for i in range(1, len(parts))]
    work.label = f"{work.label}, share 1 of {len(parts)}"
    own, others = helpers.share_out(jobs, lambda: work.run(parts[0].plan, parts[0].targets))
    return _joined(work, own, others), Spread(len(parts), None)


def _why_alone(model: LoadedModel, baseline: StateStore | LoadedModel | None) -> str | None:
    models = [model, *([baseline] if isinstance(baseline, LoadedModel) else [])]
    return "a model made in memory cannot be opened by the others" if any(m.config is None for m in models) else None


def _journals(resume: tuple[Path, Mapping[str, str]] | None, n: int) -> list[tuple[Path, dict[str, str]]] | list[None]:
    """Return folder and identity of each share's journal; the leader's folder holds those of the others."""
    if resume is None:
        return [None] * n
    folder, identity = resume[0].resolve(), {**resume[1], "processes": str(n)}
    return [(folder / f"share-{i}" if i else folder, identity) for i in range(n)]


def _job(
    work: ScoringPass,
    share: Share,
    number: int,
    model: LoadedModel,
    baseline: StateStore | LoadedModel | None,
    journal: tuple[Path, dict[str, str]] | None,
) -> ScoringJob:
    reference = ModelRef.of(model)
    assert reference is not None  # or the pass runs alone
    beside: StoreRef | ModelRef | None = None
    if baseline is not None:
        beside = StoreRef.of(baseline) if isinstance(baseline, StateStore) else ModelRef.of(baseline)
    capture = work.capture
    return ScoringJob(
        share=share,
        model=reference,
        baseline=beside,
        capture=CaptureRef.of(capture, number) if capture else None,
        journal=journal,
        head_rows=work.head_rows,
        seconds=work.seconds,
        label=f"{work.label}, share {number + 1}",
        entropy=work.entropy,
    )


def _joined(work: ScoringPass, own: Arrays, others: list[Done]) -> Arrays:
    for done in others:
        work.n_splits += done.n_splits
        if work.capture is not None and done.captured is not None:
            work.capture.adopt(**done.captured)
    return {name: np.concatenate([own[name], *(done.arrays[name] for done in others)]) for name in own}
