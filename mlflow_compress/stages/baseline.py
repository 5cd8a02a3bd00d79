"""The baseline, evaluated once: found again by its fingerprint in the tracking store, or evaluated and stored."""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from mlflow_compress import __version__
from mlflow_compress.config import EvaluateSettings
from mlflow_compress.metrics.compute import compute_all
from mlflow_compress.metrics.evidence import Evidence
from mlflow_compress.records import RunRecords
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from mlflow_compress.scoring.loading import LoadedModel, tokenizer_hash, weights_hash
from mlflow_compress.scoring.store import StateStore, StateWriter
from mlflow_compress.stages.measure import measure
from mlflow_compress.stages.results import logged, results_json
from mlflow_compress.stages.variant import model_label
from mlflow_compress.tasks.suite import Suite
from mlflow_compress.tracking import names
from mlflow_compress.tracking.store import Tracker

RECORDS, NOISE, STATES = "records", "noise", "states"  # artifact folders of a baseline run


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A stored baseline evaluation: its run, its records, its second run's records, and its captured states."""

    run_id: str
    records: RunRecords
    noise: RunRecords
    states: Path
    fresh: bool


def fingerprint(loaded: LoadedModel, suite: Suite, config: EvaluateSettings) -> dict[str, object]:
    """Return everything that the baseline's numbers depend on; two equal fingerprints may share one evaluation."""
    return {
        "weights": weights_hash(loaded.path),
        "tokenizer": tokenizer_hash(loaded.tokenizer),
        "tasks": suite.hashes(),
        "shots": config.shots,
        "shuffles": config.shuffles,
        "limit": config.limit,
        "seed": config.seed,
        "dtype": str(loaded.dtype),
        "device": loaded.device.type,
        "torch": torch.__version__,
        "engine": __version__,
    }


def digest(content: dict[str, object]) -> str:
    """Return the SHA-256 of a fingerprint."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read(tracker: Tracker, run_id: str, *, fresh: bool) -> Baseline:
    """Read a baseline run back from the store."""
    return Baseline(
        run_id=run_id,
        records=RunRecords.read(tracker.fetch(run_id, RECORDS)),
        noise=RunRecords.read(tracker.fetch(run_id, NOISE)),
        states=tracker.fetch(run_id, STATES),
        fresh=fresh,
    )


def find_or_evaluate(tracker: Tracker, loaded: LoadedModel, suite: Suite, config: EvaluateSettings) -> Baseline:
    """Return the stored baseline with this fingerprint, or evaluate it in a run of its own.

    The run is FINISHED only after records, second run and states are stored, so that an interrupted one is never found.
    The second run has another batch composition: what it differs by is the noise floor of every distance.
    """
    content = fingerprint(loaded, suite, config)
    mark = digest(content)
    found = tracker.find_finished("baseline", **{names.FINGERPRINT: mark})
    if found:
        return _read(tracker, found[0].info.run_id, fresh=False)
    label = model_label(config.model)
    tags = {names.FINGERPRINT: mark, names.BASE_MODEL: label}
    with tracker.run(f"baseline {label}", "baseline", tags, own=False) as run, tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        run.log_params({key: value for key, value in content.items() if key != "tasks"})
        run.log_json(content, "fingerprint.json")
        with StateWriter(work / STATES, loaded) as writer:
            records = measure(Scorer(loaded, ScoringConfig()), suite, capture=writer)
        store = StateStore.open(work / STATES, baseline=loaded)
        other_batches = ScoringConfig(batch_tokens=int(store.manifest.limits["batch_tokens"]) // 2)
        noise = measure(Scorer(loaded, other_batches), suite, baseline=store, generations=False)
        records.write(work / RECORDS)
        noise.write(work / NOISE)
        results = compute_all(Evidence(baseline=records, noise=noise))
        run.log_results(logged(results))
        run.log_json(results_json(results), "metrics.json")
        for name in (RECORDS, NOISE, STATES):
            run.log_folder(work / name, name)
        run.set_note(f"Baseline **{label}**: evaluated once, reused by every variant with the same fingerprint.")
    return _read(tracker, run.run_id, fresh=True)
