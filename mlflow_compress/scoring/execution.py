"""Where the passes of a model run: in this process, or elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from tqdm.auto import tqdm

from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.scoring.baseline_store import StateStore, StateWriter, StoredModel
from mlflow_compress.scoring.forward.body import reason_not_to_pack, split_body_and_head
from mlflow_compress.scoring.generation.decoding import RemoteCausalLM
from mlflow_compress.scoring.journal import Arrays, PassParts, joined_arrays
from mlflow_compress.scoring.plan.packing import Plan, group_units
from mlflow_compress.scoring.scoring_pass import DISTANCES, ModelRunner, ScoringPass, Targets

Baseline = StateStore | LoadedModel | None


@dataclass(frozen=True, kw_only=True)
class PassWork:
    """A pass over a plan."""

    plan: Plan
    targets: Targets
    head_rows: int  # See `ScoringPass`
    entropy: bool  # See `ScoringPass`
    label: str  # Names the pass in the progress bar
    baseline: Baseline  # What the model is compared with
    capture: StateWriter | None  # Stores the model's states
    resume: tuple[Path, Mapping[str, str]] | None  # Folder of unfinished results, and what they depend on
    seconds: float  # How often this process writes its results there
    progress: bool  # Show a progress bar on a terminal

    def parts(self) -> PassParts:
        """Return the finished parts of an interrupted run, to which this run adds its own."""
        return PassParts(len(group_units(self.plan, self.head_rows)), self.resume, self.capture, label=self.label)

    def bar(self, missing: list[int]) -> tqdm:
        """Return the progress bar of the whole pass, in tokens."""
        groups = group_units(self.plan, self.head_rows)
        return tqdm(
            initial=self.plan.n_tokens - sum(groups[number].n_tokens for number in missing),
            total=self.plan.n_tokens,
            desc=self.label,
            unit="tok",
            unit_scale=True,
            disable=None if self.progress else True,
        )

    def empty(self) -> Arrays:
        """Return the results of a plan without groups."""
        names = ["logprob", "argmax", *(["entropy"] if self.entropy else [])]
        return {name: np.zeros(0) for name in (*names, *(DISTANCES if self.baseline is not None else ()))}


class Execution(Protocol):
    """Interface of what runs the passes of one model."""

    @property
    def whole_model_reason(self) -> str | None:
        """Why the whole model runs instead of its body, and the head at scored positions; None where it does not."""

    def reason_not_to_pack(self, max_length: int, baseline: Baseline) -> str | None:
        """Return why sequences of this length cannot share their prefixes; None where they can."""

    def run(self, work: PassWork) -> tuple[Arrays, int]:
        """Run what an interrupted run has not finished. Return all results, and how often memory ran out."""


class RunsElsewhere(StoredModel, RemoteCausalLM, Protocol):
    """Interface of a model that is not in this process."""

    @property
    def execution(self) -> Execution:
        """Where its passes run."""


class InThisProcess:
    """Runs passes with a loaded model."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._body, self._head, self.whole_model_reason = split_body_and_head(loaded.model)

    def reason_not_to_pack(self, max_length: int, baseline: Baseline) -> str | None:
        """Return why sequences of this length cannot share their prefixes; None where they can."""
        reason = reason_not_to_pack(self._body, max_length)
        if reason is None and isinstance(baseline, LoadedModel):
            reason = reason_not_to_pack(split_body_and_head(baseline.model)[0], max_length)
        return reason

    def run(self, work: PassWork) -> tuple[Arrays, int]:
        """Run what an interrupted run has not finished; write the results down as they come."""
        base = work.baseline
        compared = ModelRunner(*split_body_and_head(base.model)[:2]) if isinstance(base, LoadedModel) else base
        return run_pass(work, ModelRunner(self._body, self._head), compared)


def run_pass(work: PassWork, runner: ModelRunner, baseline: StateStore | ModelRunner | None) -> tuple[Arrays, int]:
    """Run a pass with a head in this process, as `Execution.run` does; write the results down as they come."""
    scoring = ScoringPass(
        runner=runner, head_rows=work.head_rows, capture=work.capture, baseline=baseline, entropy=work.entropy
    )
    groups = group_units(work.plan, work.head_rows)
    if not groups:
        return work.empty(), 0
    parts = work.parts()
    missing = parts.missing()
    to_do = set(missing)
    fresh: list[Arrays] = []
    written = time.monotonic()
    with work.bar(missing) as bar:
        for number, results in scoring.run(work.plan, work.targets, missing):
            fresh.append(results)
            bar.update(groups[number].n_tokens)
            if number + 1 not in to_do or (work.resume is not None and time.monotonic() - written >= work.seconds):
                captured = work.capture.take() if work.capture is not None else None
                parts.add(number + 1 - len(fresh), number + 1, joined_arrays(fresh), captured)
                fresh, written = [], time.monotonic()
    return parts.joined(), scoring.n_splits
