"""The baseline, evaluated once: records, a second run for the noise floor, and the states to compare variants with."""

from __future__ import annotations

import gc
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from mlflow_compress.config import EvaluateConfig
from mlflow_compress.items.suite import Suite
from mlflow_compress.metrics.core.compute import compute_all
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.models.identity import IdentifiedModel, tokenizer_hash
from mlflow_compress.models.light_model import LightModel
from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.models.memory_alignment import rounding_identity
from mlflow_compress.records import RunRecords
from mlflow_compress.scoring.baseline_store.state_store import StateStore
from mlflow_compress.scoring.baseline_store.state_writer import StateWriter
from mlflow_compress.scoring.baseline_store.store_manifest import MANIFEST
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from mlflow_compress.scoring.engine_identity import engine_identity
from mlflow_compress.stages.evaluation import run_model as measuring
from mlflow_compress.stages.evaluation.eval_metadata import (
    IN_PROMPTS,
    EvalMetadata,
    about,
    read_about,
    settings_of,
    write_about,
)
from mlflow_compress.stages.evaluation.harness_metrics import log_harness_metrics
from mlflow_compress.stages.evaluation.noise_sample import noise_sample
from mlflow_compress.stages.evaluation.open_models import load
from mlflow_compress.stages.evaluation.result_files import logged, results_json
from mlflow_compress.stages.evaluation.run_model import ModelOutputs, measure
from mlflow_compress.stages.get_or_create import digest, get_or_create_run
from mlflow_compress.stages.model_names import model_label
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.run_names import NOISE, RECORDS
from mlflow_compress.tracking.store import OpenRun, Store

STATES = "states"  # artifact folder of a baseline run, beside RECORDS and NOISE


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A stored baseline evaluation.

    Attributes
    ----------
    run_id : str
    evaluation : str
        Id of what was asked of which baseline and how (16 hexadecimal digits): runs that share it may be compared.
    records, about
        What the baseline answered, and what is known beside it.
    noise : RunRecords
        Of the second run, on a sample of the items.
    states : Path or None
        What variants are compared with, see `StateStore`; None where every answer is generated.
    fresh : bool
        Whether it was evaluated now, not found in the store.
    """

    run_id: str
    evaluation: str
    records: RunRecords
    about: EvalMetadata
    noise: RunRecords
    states: Path | None
    fresh: bool


def identity(model: IdentifiedModel) -> dict[str, object]:
    """Return what a model's numbers depend on besides the questions: weights, tokenizer, dtype, device, software."""
    generation = model.path / "generation_config.json"
    ends = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
    return {
        "weights": model.weights,
        "tokenizer": tokenizer_hash(model.tokenizer),
        "ends of answers": ends,
        "dtype": str(model.dtype),
        "device": model.device.type,
        **engine_identity(model.path),
        "measure": hashlib.sha256(Path(str(measuring.__file__)).read_bytes()).hexdigest(),
    }


def _measure_twice(
    loaded: LoadedModel, suite: Suite, config: EvaluateConfig, resume: Path
) -> tuple[ModelOutputs, RunRecords, Path | None]:
    """Return what the baseline answered, the records of its second run on a sample, and the folder of its states.

    Where every answer is generated no token is scored: there are no states then, and nothing for a noise floor.
    """
    sample = noise_sample(suite, config.evaluation.noise_items, seed=config.source.seed)
    if not suite.is_scored:
        measured = measure(Scorer(loaded, ScoringConfig()), suite, resume=resume / RECORDS)
        return measured, RunRecords(items=sample.items), None
    states = resume / STATES
    (states / MANIFEST).unlink(missing_ok=True)  # of a run that was interrupted after its first pass: it is resumed
    with StateWriter(states, loaded) as writer:
        measured = measure(Scorer(loaded, ScoringConfig()), suite, capture=writer, resume=resume / RECORDS)
    captured = StateStore.open(states, baseline=loaded)
    other_batches = ScoringConfig(batch_tokens=int(captured.manifest.limits["batch_tokens"]) // 2)
    scorer = Scorer(loaded, other_batches)
    noise = measure(scorer, sample, baseline=captured, generations=False, resume=resume / NOISE).records
    return measured, noise, states


def find_or_evaluate(store: Store, model: LightModel, suite: Suite, config: EvaluateConfig) -> Baseline:
    """Return the stored baseline with this fingerprint, or evaluate it in a run of its own.

    The weights are loaded only to be evaluated, and are out of memory again when this returns. The second run has
    another batch composition: what it differs by is the noise floor of every distance.
    """
    settings = settings_of(config)
    deciding = {name: value for name, value in settings.items() if name not in IN_PROMPTS}
    asked = {**identity(model), **deciding, "tasks": suite.hashes()}
    evaluation = digest(asked)[:16]

    def work(run: OpenRun, folder: Path, resume: Path) -> None:
        run.set_tags({run_names.EVALUATION: evaluation})
        run.log_params({**identity(model), **settings, "noise_items": config.evaluation.noise_items})
        measured, noise, states = _measure_twice(load(model), suite, config, resume)
        if states is not None:
            run.log_folder(states, STATES)
        records = measured.records
        records.write(folder / RECORDS)
        write_about(folder / RECORDS, about(model, config, suite))
        noise.write(folder / NOISE)
        results = compute_all(MetricInputs(baseline=records, noise=noise))
        run.log_results(logged(results))
        run.log_json(results_json(results), "metrics.json")
        log_harness_metrics(run, suite, measured)

    # Threads and processor decide the last bits: a baseline of others is evaluated again, and stays comparable.
    fingerprint = {**asked, "noise_items": config.evaluation.noise_items, "rounding": rounding_identity(model.device)}
    run_id, fresh = get_or_create_run(store, "baseline", model_label(config.source.model), fingerprint, work)
    if fresh:
        gc.collect()  # modules refer to each other: without it, two models would be in memory when the variant loads
    stored = store.fetch(run_id, RECORDS)
    return Baseline(
        run_id=run_id,
        evaluation=evaluation,
        records=RunRecords.read(stored),
        about=read_about(stored),
        noise=RunRecords.read(store.fetch(run_id, NOISE)),
        states=store.fetch(run_id, STATES) if suite.is_scored else None,
        fresh=fresh,
    )
