"""Publishes a variant on its main run: headline metrics, verdict, report, figures, tables and the logged model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlflow_compress.commands.evaluate.stored import logged, read_metadata
from mlflow_compress.commands.judge.answers_artifact import read_answers
from mlflow_compress.commands.quantize.parameters import QuantizeConfig
from mlflow_compress.commands.quantize.run import size_values
from mlflow_compress.commands.shared.inputs import SERVED_METHOD
from mlflow_compress.commands.shared.past_runs import ServedFacts, described_runtime
from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest
from mlflow_compress.config import parameters
from mlflow_compress.config.declarations import NONE
from mlflow_compress.decide.gates import DECODE_SPEEDUP, KL, MEMORY_RATIO, gate_values
from mlflow_compress.items.named_tasks import TASKS
from mlflow_compress.metrics.core.account import Account
from mlflow_compress.metrics.core.metric_inputs import MetricInputs, MetricSettings, unmet
from mlflow_compress.records import MetricResult, RunRecords
from mlflow_compress.reporting.answers_page import ComparedAnswer
from mlflow_compress.reporting.details import flips_table
from mlflow_compress.reporting.figures import draw_all
from mlflow_compress.reporting.headline import not_computed, note_markdown
from mlflow_compress.reporting.html import render_report
from mlflow_compress.reporting.verdict import verdict
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.evaluations import evaluations, names_of
from mlflow_compress.tracking.logged_model import (
    EVALUATION_SET,
    DataSet,
    VariantEntry,
    log_data_sets,
    log_model_values,
    log_variant_model,
)
from mlflow_compress.tracking.run_names import ANSWERS, NOISE, RECORDS
from mlflow_compress.tracking.store import rounded
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker


@dataclass(frozen=True, kw_only=True)
class StageOutputs:
    """Results of all stages of one variant."""

    label: str  # The baseline's and the variant's short names
    variant: str
    checkpoint: str  # The compressed checkpoint's folder, or the address of a served one
    manifest: CheckpointManifest | None  # The checkpoint's manifest; None of a served one
    served: ServedFacts | None  # What is served; None of a checkpoint
    base_weights: str  # SHA-256 of the baseline's weight files; of a served baseline, the digest of what is known of it
    pooled: Mapping[str, MetricResult]  # The headline results by name, and all results
    results: Sequence[MetricResult]
    children: Mapping[str, str]  # Run id of every stage
    dtype: str  # Dtype in which both models were evaluated
    seed: int  # Seed of bootstrap and splits
    account: Account  # What was asked, and what became of it
    log_weights: str = "auto"  # Whether the checkpoint is stored with the registered model: see `VariantEntry`
    failed: Mapping[str, str] = field(default_factory=dict)  # Error message of every stage that failed

    @property
    def method(self) -> str:
        """The method that has made the variant."""
        return self.manifest.method if self.manifest is not None else SERVED_METHOD

    @property
    def settings(self) -> Mapping[str, object]:
        """The method's settings; of a served variant, who serves what."""
        if self.manifest is not None:
            return self.manifest.settings
        return self.served.settings() if self.served is not None else {}

    @property
    def sizes(self) -> dict[str, float]:
        """Size and cost as metrics; nothing is known of a served variant."""
        return {} if self.manifest is None else size_values(self.manifest)

    @property
    def checkpoint_sha256(self) -> str:
        """SHA-256 of the method, its settings, and the hash of every weight file; of a served one see `ServedFacts`."""
        if self.manifest is None:
            assert self.served is not None
            return self.served.weights
        made = [self.manifest.method, self.manifest.settings, self.manifest.weight_files]
        return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()

    @property
    def verdict(self) -> str:
        """The verdict, as a sentence."""
        made = self.manifest
        ratio, sparsity = (None, None) if made is None else (made.size_ratio, made.sparsity)
        return verdict(self.variant, self.pooled, size_ratio=ratio, sparsity=sparsity, account=self.account)


WITHOUT_ITEMS = ("judge/", "size/", "speed/")  # prefixes of metrics that do not come from the evaluation's items


def _params(outputs: StageOutputs) -> dict[str, object]:
    """Return the settings of method and evaluation, with "auto" resolved."""
    return {
        "model": outputs.label,
        "method": outputs.method,
        **outputs.settings,
        "dtype": outputs.dtype,
        "seed": outputs.seed,
    }


def _run_params(outputs: StageOutputs, *, keeps_weights: bool) -> dict[str, object]:
    """Return the method's settings and the size that came of them, as parameters of the main run.

    MLflow's page of two runs opens on the parameters that differ, in the order of their names. So a setting that only
    this method has is named after `method_args`, and the size is a parameter too: it comes before almost all others.
    """
    manifest = outputs.manifest
    if manifest is None:
        return {**outputs.settings, "log_weights": NONE}
    common = parameters(QuantizeConfig)
    settings = {name if name in common else f"method_args/{name}": value for name, value in manifest.settings.items()}
    size = {"bits_per_weight": round(manifest.bits_per_weight, 2)}
    return {**settings, **size, "log_weights": str(keeps_weights).lower()}


def _data_sets(
    outputs: StageOutputs, tracker: Tracker, evaluation: str | None
) -> tuple[dict[str, DataSet], DataSet | None]:
    """Return the data set of every task and corpus by name, and the data set of the complete evaluation."""
    hashes = read_metadata(tracker.fetch(outputs.children["evaluate"], RECORDS)).get("tasks")
    by_task = {
        name: DataSet(
            name=name,
            digest=found,
            source={"task": name, **({"source": TASKS.get(name).source} if name in TASKS.names() else {})},
        )
        for name, found in (hashes.items() if isinstance(hashes, dict) else ())
    }
    if evaluation is None:
        return by_task, None
    return by_task, DataSet(name=EVALUATION_SET, digest=evaluation, source={"tasks": sorted(by_task)})


def log_model(outputs: StageOutputs, tracker: Tracker, run: TrackedRun, evaluation: str | None) -> None:
    """Log the variant's model. Log every metric on both run and model, linked to the data set that it comes from.

    - `evaluation`: The evaluation id. It is the digest of the data set "evaluation", which stands for all tasks.
    """
    manifest, served = outputs.manifest, outputs.served
    entry = VariantEntry(
        name=outputs.variant,
        checkpoint=Path(outputs.checkpoint) if manifest is not None else None,
        served=None if served is None else {**served.settings(), run_names.EVALUATE_RUN: served.evaluate_run},
        checkpoint_sha256=outputs.checkpoint_sha256,
        weight_files=manifest.weight_files if manifest is not None else {},
        dtype=outputs.dtype,
        params=_params(outputs),
        tags={
            run_names.VARIANT: outputs.variant,
            run_names.METHOD: outputs.method,
            run_names.BASE_MODEL: outputs.label,
            run_names.BASE_WEIGHTS: outputs.base_weights,
            **({run_names.EVALUATION: evaluation} if evaluation else {}),
        },
        log_weights=outputs.log_weights,
    )
    run.log_params(_run_params(outputs, keeps_weights=entry.keeps_weights))
    model = log_variant_model(tracker, run.run_id, entry)
    by_task, complete = _data_sets(outputs, tracker, evaluation)
    log_data_sets(tracker, run.run_id, [*by_task.values(), *([complete] if complete else [])])
    every = {r.name: rounded(r) for r in outputs.pooled.values()} | gate_values(outputs.pooled) | outputs.sizes
    values = run_names.on_main_run(every)
    itemless = {name for name in values if name.startswith(WITHOUT_ITEMS)}
    log_model_values(tracker, run.run_id, model, {k: v for k, v in values.items() if k not in itemless}, complete)
    log_model_values(tracker, run.run_id, model, {k: values[k] for k in values if k in itemless})
    # Values per task are on the evaluate run. They are logged there a second time, linked to the model.
    for name, data_set in by_task.items():
        values = {f"{r.name}/{name}": rounded(r) for r in logged(outputs.results) if r.task == name}
        if values:
            log_model_values(tracker, outputs.children["evaluate"], model, values, data_set)


def _remarks(outputs: StageOutputs) -> dict[str, Any]:
    """Return what note and report show in addition to the results: gate values, the account, failed stages."""
    return {
        "gates": gate_values(outputs.pooled),
        "account": outputs.account,
        "failed_stages": outputs.failed,
    }


def _not_computed(outputs: StageOutputs, tracker: Tracker, evaluated: Mapping[str, str]) -> dict[str, str]:
    """Return the reason for each metric that no stage has computed."""
    reasons: dict[str, Mapping[str, str] | str] = {}
    for stage in ("judge", "speed"):
        run_id = outputs.children.get(stage)
        absent = f"the {stage} stage {'failed' if stage in outputs.failed else 'was not run'}"
        reasons[stage] = tracker.fetch_json(run_id, "not_computed.json") if run_id else absent
    return not_computed(outputs.results, evaluated=evaluated, judged=reasons["judge"], timed=reasons["speed"])


def _read_inputs(outputs: StageOutputs, tracker: Tracker) -> tuple[MetricInputs, str]:
    """Return the records of variant, baseline and noise run from the store, and the id of the baseline's run."""
    evaluate = outputs.children["evaluate"]
    baseline_run = tracker.client.get_run(evaluate).data.tags[run_names.BASELINE_RUN]
    inputs = MetricInputs(
        baseline=RunRecords.read(tracker.fetch(baseline_run, RECORDS)),
        variant=RunRecords.read(tracker.fetch(evaluate, RECORDS)),
        noise=RunRecords.read(tracker.fetch(baseline_run, NOISE)),
        settings=MetricSettings(seed=outputs.seed, split_seed=outputs.seed),
    )
    return inputs, baseline_run


def _read_judged(outputs: StageOutputs, tracker: Tracker) -> MetricInputs | None:
    """Return the records of the judge stage that figures need: both models' greedy answers; None without them."""
    judge = outputs.children.get("judge")
    greedy = None if judge is None else tracker.client.get_run(judge).data.tags.get(run_names.BASELINE_GREEDY_RUN)
    if judge is None or greedy is None:
        return None
    return MetricInputs(
        baseline=RunRecords.read(tracker.fetch(greedy, RECORDS)), variant=RunRecords.read(tracker.fetch(judge, RECORDS))
    )


def _variants(outputs: StageOutputs, tracker: Tracker, evaluation: str | None) -> tuple[list[dict[str, Any]], str]:
    """Return size, distance, speed and memory of every variant of the evaluation, and the name that shows this one."""
    this = (outputs.variant, outputs.checkpoint_sha256)
    points: dict[tuple[str, str], Mapping[str, float]] = {}
    for group in evaluations(tracker, outputs.label):
        if group.id == evaluation:
            points = {variant.checkpoint: variant.run.data.metrics for variant in group.variants}
    points[this] = _values(outputs)
    shown = names_of(points)
    wanted = {
        "bits_per_weight": "size/bits_per_weight",
        "bytes": "size/bytes",
        "kl": KL,
        "decode_speedup": DECODE_SPEEDUP,
        "memory_ratio": MEMORY_RATIO,
    }
    rows: list[dict[str, Any]] = [
        {"name": shown[key], **{field: values[metric] for field, metric in wanted.items() if metric in values}}
        for key, values in sorted(points.items())
        if KL in values
    ]
    return rows, shown[this]


def _values(outputs: StageOutputs) -> dict[str, float]:
    """Return the main run's metrics, not rounded: pooled values, sizes and gate values."""
    pooled = {name: result.value for name, result in outputs.pooled.items()}
    return {**pooled, **outputs.sizes, **gate_values(outputs.pooled)}


def _setup(outputs: StageOutputs, tracker: Tracker, baseline_run: str, run: TrackedRun) -> dict[str, Any]:
    """Return the settings and versions with which the numbers can be reproduced."""
    speed = outputs.children.get("speed")
    runtime = {} if speed is None else described_runtime(tracker.client.get_run(speed))
    fields = ("method", "settings", "format", "base_weights_hash", "calibration", "library_versions", "reload")
    if outputs.manifest is not None:
        manifest = asdict(outputs.manifest)
        made = {key: manifest[key] for key in fields}
    else:
        made = {"method": outputs.method, **outputs.settings, "base_weights_hash": outputs.base_weights}
    runs = {"variant": run.run_id, "baseline": baseline_run, **outputs.children}
    return {
        "baseline": outputs.label,
        **made,
        "dtype": outputs.dtype,
        "seed": outputs.seed,
        **({"timed in": runtime} if runtime else {}),
        "runs": runs,
    }


def _judge_values(tracker: Tracker, run: TrackedRun) -> Mapping[str, float]:
    """Return the metrics of the judge's run, also of one that failed: what it took was paid; empty without one."""
    judge = tracker.child_ids(run.run_id).get("judge")
    return {} if judge is None else tracker.look_up(judge).metrics


def _answers(outputs: StageOutputs, tracker: Tracker) -> list[ComparedAnswer]:
    """Return both models' answers side by side; none where no judge stage finished."""
    judge = outputs.children.get("judge")
    if judge is None or not any(file.path == ANSWERS for file in tracker.client.list_artifacts(judge)):
        return []
    return read_answers(tracker, judge)


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows as columns. Lists become text, because MLflow shows table cells as they are."""
    return {
        name: [" | ".join(row[name]) if isinstance(row[name], list) else row[name] for row in rows] for name in rows[0]
    }


def _log_answers(outputs: StageOutputs, tracker: Tracker, run: TrackedRun) -> None:
    """Log the variant's answers to the instructions as `outputs.json`. MLflow's UI compares this table between runs."""
    if "judge" not in outputs.children:
        return
    records = RunRecords.read(tracker.fetch(outputs.children["judge"], RECORDS)).generations
    if records is not None:
        prompts, texts = records.column("prompt").tolist(), records.column("text").tolist()
        run.log_table({"prompt": prompts, "output": texts}, "outputs.json")


def publish(outputs: StageOutputs, tracker: Tracker, run: TrackedRun, folder: Path) -> dict[str, str]:
    """Log everything that people read or compare on the variant's main run."""
    inputs, baseline_run = _read_inputs(outputs, tracker)
    evaluation = tracker.client.get_run(outputs.children["evaluate"]).data.tags.get(run_names.EVALUATION)
    variants, shown = _variants(outputs, tracker, evaluation)
    figures = draw_all(inputs, outputs.results, variants, shown, folder / "figures", _read_judged(outputs, tracker))
    flips = flips_table(inputs)
    skipped = _not_computed(outputs, tracker, unmet(inputs))
    page = render_report(
        title=f"{outputs.variant} against {outputs.label}",
        verdict=outputs.verdict,
        results=outputs.results,
        figures=figures,
        flips=flips,
        setup=_setup(outputs, tracker, baseline_run, run),
        not_computed=skipped,
        manifest=outputs.manifest,
        judge_values=_judge_values(tracker, run),
        answers=_answers(outputs, tracker),
        **_remarks(outputs),
    )
    report = folder / "report.html"
    report.write_text(page, encoding="utf-8")
    run.set_tags(
        {
            run_names.BASE_WEIGHTS: outputs.base_weights,
            run_names.CHECKPOINT_SHA256: outputs.checkpoint_sha256,
        }
    )
    log_model(outputs, tracker, run, evaluation)
    run.log_file(report, "report")
    if figures:
        run.log_figures(folder / "figures", [figure.path.stem for figure in figures])
    if flips:
        run.log_table(_columns(flips), "flips.json")
    _log_answers(outputs, tracker, run)
    run.set_tags({run_names.VERDICT: outputs.verdict, run_names.CHECKPOINT: outputs.checkpoint})
    sentence = outputs.verdict if outputs.served is None else f"{outputs.verdict} Served: {outputs.served.text}."
    run.set_note(note_markdown(sentence, outputs.pooled, outputs.manifest, **_remarks(outputs)))
    return skipped
