"""The baseline, evaluated once: records, a second run for the noise floor, and the states to compare variants with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from mlflow_compress import __version__
from mlflow_compress.config import EvaluateSettings
from mlflow_compress.metrics.compute import compute_all
from mlflow_compress.metrics.evidence import Evidence
from mlflow_compress.records import RunRecords, columns_hash
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from mlflow_compress.scoring.loading import LoadedModel, tokenizer_hash
from mlflow_compress.scoring.manifest import MANIFEST
from mlflow_compress.scoring.store import StateStore
from mlflow_compress.scoring.writer import StateWriter
from mlflow_compress.stages.about import IN_PROMPTS, About, about, read_about, settings_of, write_about
from mlflow_compress.stages.measure import measure
from mlflow_compress.stages.once import find_or_do
from mlflow_compress.stages.own import log_own_metrics
from mlflow_compress.stages.results import logged, results_json
from mlflow_compress.stages.variant import model_label
from mlflow_compress.tasks.suite import Suite
from mlflow_compress.tracking.names import NOISE, RECORDS
from mlflow_compress.tracking.store import TrackedRun, Tracker

STATES = "states"  # artifact folder of a baseline run, beside RECORDS and NOISE


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A stored baseline evaluation: its run, records with what is beside them, its second run's records, its states."""

    run_id: str
    records: RunRecords
    about: About
    noise: RunRecords
    states: Path
    fresh: bool


def identity(loaded: LoadedModel) -> dict[str, object]:
    """Return what a model's numbers depend on besides the questions: weights, tokenizer, dtype, device, software."""
    return {
        "weights": loaded.weights,
        "tokenizer": tokenizer_hash(loaded.tokenizer),
        "dtype": str(loaded.dtype),
        "device": loaded.device.type,
        "torch": torch.__version__,
        "engine": __version__,
        "records": columns_hash(),
    }


def find_or_evaluate(tracker: Tracker, loaded: LoadedModel, suite: Suite, config: EvaluateSettings) -> Baseline:
    """Return the stored baseline with this fingerprint, or evaluate it in a run of its own.

    The second run has another batch composition: what it differs by is the noise floor of every distance.
    """
    settings = settings_of(config)

    def work(run: TrackedRun, folder: Path, resume: Path) -> None:
        run.log_params({**identity(loaded), **settings})
        states = resume / STATES
        (states / MANIFEST).unlink(missing_ok=True)  # of a run that was interrupted after its first pass: it is resumed
        with StateWriter(states, loaded) as writer:
            measured = measure(Scorer(loaded, ScoringConfig()), suite, capture=writer, resume=resume / RECORDS)
        records = measured.records
        store = StateStore.open(states, baseline=loaded)
        other_batches = ScoringConfig(batch_tokens=int(store.manifest.limits["batch_tokens"]) // 2)
        scorer = Scorer(loaded, other_batches)
        noise = measure(scorer, suite, baseline=store, generations=False, resume=resume / NOISE).records
        run.log_folder(states, STATES)
        records.write(folder / RECORDS)
        write_about(folder / RECORDS, about(loaded, config, suite))
        noise.write(folder / NOISE)
        results = compute_all(Evidence(baseline=records, noise=noise))
        run.log_results(logged(results))
        run.log_json(results_json(results), "metrics.json")
        log_own_metrics(run, suite, measured)

    deciding = {name: value for name, value in settings.items() if name not in IN_PROMPTS}
    fingerprint = {**identity(loaded), **deciding, "tasks": suite.hashes()}
    run_id, fresh = find_or_do(tracker, "baseline", model_label(config.model), fingerprint, work)
    stored = tracker.fetch(run_id, RECORDS)
    return Baseline(
        run_id=run_id,
        records=RunRecords.read(stored),
        about=read_about(stored),
        noise=RunRecords.read(tracker.fetch(run_id, NOISE)),
        states=tracker.fetch(run_id, STATES),
        fresh=fresh,
    )
