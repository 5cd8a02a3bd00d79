"""The evaluate stage: the variant on the same items as its baseline, every distance with its interval."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

from mlflow_compress.config import EvaluateConfig, EvaluateSettings
from mlflow_compress.metrics.compute import compute_all, headline, unmet
from mlflow_compress.metrics.details import details
from mlflow_compress.metrics.evidence import Evidence, MetricSettings
from mlflow_compress.metrics.tables import flips_table
from mlflow_compress.records import MetricResult
from mlflow_compress.report.verdict import verdict
from mlflow_compress.scoring.chat import chat_format
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from mlflow_compress.scoring.loading import LoadConfig, LoadedModel, check_same_tokenizer, load_model
from mlflow_compress.scoring.store import StateStore
from mlflow_compress.stages.about import About, settings_of, write_about
from mlflow_compress.stages.baseline import RECORDS, Baseline, find_or_evaluate
from mlflow_compress.stages.gate_values import gate_values
from mlflow_compress.stages.measure import measure
from mlflow_compress.stages.once import digest
from mlflow_compress.stages.own import log_own_metrics
from mlflow_compress.stages.results import logged, results_json
from mlflow_compress.stages.unfinished import unfinished
from mlflow_compress.stages.variant import model_label, model_path, read_manifest
from mlflow_compress.tasks.base import TaskSettings
from mlflow_compress.tasks.suite import Suite, load_suite
from mlflow_compress.tracking import names
from mlflow_compress.tracking.store import TrackedRun, Tracker
from mlflow_compress.tracking.views import how_to_open


def suite_of(config: EvaluateSettings) -> Suite:
    """Read and check the tasks of a configuration, before any model is loaded."""
    settings = TaskSettings(**{f.name: getattr(config, f.name) for f in fields(TaskSettings)})
    return load_suite(config.tasks, model=config.model, settings=settings)


def as_read_by(loaded: LoadedModel, suite: Suite, system: str = "") -> Suite:
    """Return the suite with chat messages, after a system prompt, in the chat template.

    It is the baseline's, which both models read the same text in.
    """
    if not any(task.chat for task in suite.tasks):
        return suite
    chat = chat_format(loaded.tokenizer)
    return suite.rendered(lambda message: chat.prompt([message], system=system))


def load(path: str, config: Any) -> LoadedModel:
    """Load a model as the configuration says."""
    return load_model(
        LoadConfig(path=path, dtype=config.dtype, device=config.device, trust_remote_code=config.trust_remote_code)
    )


def evidence(config: EvaluateConfig, tracker: Tracker, run: TrackedRun, kept: ExitStack) -> tuple[Evidence, Baseline]:
    """Score the variant, and the baseline where it was not scored before; return everything that metrics read.

    What the tasks' sources say in their own metrics is logged here, while the tasks are at hand. What an interrupted
    run would resume from stays until `kept` is closed, when the records are stored.
    """
    suite = suite_of(config)
    base_model = load(model_path(config.model), config)
    variant_model = load(config.checkpoint, config)
    check_same_tokenizer(base_model, variant_model)
    suite = as_read_by(base_model, suite, config.system_prompt)
    baseline = find_or_evaluate(tracker, base_model, suite, config)
    store = StateStore.open(baseline.states, baseline=base_model)
    del base_model  # its head is in the store; only the variant's memory is needed from here on
    fingerprint = {"variant": variant_model.weights, "baseline": baseline.run_id, "dtype": config.dtype}
    resume = kept.enter_context(unfinished(digest({**fingerprint, "tasks": suite.hashes()})))
    measured = measure(Scorer(variant_model, ScoringConfig()), suite, baseline=store, resume=resume)
    log_own_metrics(run, suite, measured, baseline=baseline.records)
    settings = MetricSettings(seed=config.seed, split_seed=config.seed)
    found = Evidence(baseline=baseline.records, variant=measured.records, noise=baseline.noise, settings=settings)
    return found, baseline


def log_evaluation(run: TrackedRun, found: Evidence, results: Sequence[MetricResult], beside: About) -> None:
    """Log metrics (pooled and by task) and details, records, flips table, and what could not be computed and why."""
    pooled = headline(list(results))
    run.log_results(logged(results))
    run.log_values(gate_values(pooled))
    run.log_json(results_json(results), "metrics.json")
    run.log_json(details(found, results), "details.json")
    run.log_json(flips_table(found), "flips.json")
    skipped = unmet(found)
    if skipped:
        run.log_json(skipped, "not_computed.json")
    with tempfile.TemporaryDirectory() as folder:
        found.subject.write(Path(folder))
        write_about(Path(folder), beside)
        run.log_folder(Path(folder), RECORDS)


def run_evaluate(config: EvaluateConfig) -> str:
    """Run the stage under a run of its own and return what to tell the user.

    Raises
    ------
    MlflowCompressError
        A missing or changed checkpoint, tokenizers that differ, broken tasks, a store that cannot be written.
    """
    tracker = Tracker()
    label = model_label(config.model)
    with tracker.run(f"evaluate {label}", "evaluate", {names.BASE_MODEL: label}) as run:
        manifest = read_manifest(config.checkpoint)
        run.rename(f"evaluate {manifest.label} {label}")
        run.set_tags(
            {names.VARIANT: manifest.label, names.METHOD: manifest.method, names.CHECKPOINT: config.checkpoint}
        )
        run.log_params({"model": config.model, "tasks": config.tasks, "dtype": config.dtype, **settings_of(config)})
        with ExitStack() as kept:
            found, baseline = evidence(config, tracker, run, kept)
            results = compute_all(found)
            log_evaluation(run, found, results, baseline.about)
        sentence = verdict(manifest.label, headline(results), size_ratio=manifest.size_ratio)
        source = "evaluated now" if baseline.fresh else "found in the store"
        run.set_tags({names.VERDICT: sentence, names.BASELINE_RUN: baseline.run_id, "baseline": source})
        run.set_note(sentence)
    return f"{sentence}\nBaseline run {baseline.run_id} ({source}).\n{how_to_open(tracker, run.run_id)}"
