"""Run a scoring pass on all processes of a team, or in this process if there is no team."""

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
from mlflow_compress.scoring.processes import team as process_team
from mlflow_compress.scoring.processes.scoring_jobs import CaptureRef, JobResult, ModelRef, ScoringJob, StoreRef
from mlflow_compress.scoring.processes.shares import Share, cut_into_shares
from mlflow_compress.scoring.scoring_pass import ScoringPass, Targets

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProcessUse:
    """How many processes ran a pass, and why only one where more were started."""

    n_processes: int
    single_process_reason: str | None


def run_distributed(
    work: ScoringPass,
    plan: Plan,
    targets: Targets,
    *,
    model: LoadedModel,
    baseline: StateStore | LoadedModel | None,
    resume: tuple[Path, Mapping[str, str]] | None,
) -> tuple[Arrays, ProcessUse]:
    """Run every group of a plan and return all results: the same bits for any number of processes.

    Parameters
    ----------
    work : ScoringPass
        Without a journal.
    plan, targets
        As in `ScoringPass.run`.
    model, baseline
        The model that `work` scores, and the baseline that it is compared with.
    resume : (Path, mapping), optional
        Folder of unfinished results, and what they depend on. The number of processes is added to it, because a killed
        pass resumes with the number that it was started with.

    Raises
    ------
    StoreError
        When the folder holds a pass with another number of processes, or of another identity.
    WorkerError
        When another process fails.
    """
    team = process_team.current()
    reason = _single_process_reason(model, baseline) if team is not None else None
    parts = [Share(plan, targets)]
    if team is not None and reason is None:
        parts = cut_into_shares(plan, targets, work.head_rows, team.size)
        reason = "the plan has only one group" if len(parts) == 1 else None
    if reason is not None:
        logger.info("%s runs in one process: %s", work.label, reason)
    journals = _journals(resume, len(parts))
    work.journal = Journal(*journals[0]) if journals[0] else None
    if team is None or len(parts) == 1:
        return work.run(plan, targets), ProcessUse(1, reason)
    jobs = [_job(work, parts[i], i, model, baseline, journals[i]) for i in range(1, len(parts))]
    work.label = f"{work.label}, share 1 of {len(parts)}"
    own, others = team.share_out(jobs, lambda: work.run(parts[0].plan, parts[0].targets))
    return _joined(work, own, others), ProcessUse(len(parts), None)


def _single_process_reason(model: LoadedModel, baseline: StateStore | LoadedModel | None) -> str | None:
    models = [model, *([baseline] if isinstance(baseline, LoadedModel) else [])]
    return (
        "other processes cannot open a model that exists only in memory"
        if any(m.config is None for m in models)
        else None
    )


def _journals(resume: tuple[Path, Mapping[str, str]] | None, n: int) -> list[tuple[Path, dict[str, str]]] | list[None]:
    """Return folder and identity of each share's journal; the other journals are inside the leader's folder."""
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
    assert reference is not None  # otherwise the pass runs in one process
    baseline_ref: StoreRef | ModelRef | None = None
    if baseline is not None:
        baseline_ref = StoreRef.of(baseline) if isinstance(baseline, StateStore) else ModelRef.of(baseline)
    capture = work.capture
    return ScoringJob(
        share=share,
        model=reference,
        baseline=baseline_ref,
        capture=CaptureRef.of(capture, number) if capture else None,
        journal=journal,
        head_rows=work.head_rows,
        seconds=work.seconds,
        label=f"{work.label}, share {number + 1}",
        entropy=work.entropy,
    )


def _joined(work: ScoringPass, own: Arrays, others: list[JobResult]) -> Arrays:
    for done in others:
        work.n_splits += done.n_splits
        if work.capture is not None and done.captured is not None:
            work.capture.adopt(**done.captured)
    return {name: np.concatenate([own[name], *(done.arrays[name] for done in others)]) for name in own}
