"""What the parent run of a variant shows: headline metrics, verdict, report, figures, tables, a model that loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlflow_compress.compress.manifest import Manifest
from mlflow_compress.metrics.compute import unmet
from mlflow_compress.metrics.evidence import Evidence, MetricSettings
from mlflow_compress.metrics.tables import flips_table
from mlflow_compress.promotion import KL
from mlflow_compress.records import MetricResult, RunRecords
from mlflow_compress.report.figures import draw_all
from mlflow_compress.report.html import render_report
from mlflow_compress.report.text import headline_table, note_markdown
from mlflow_compress.report.verdict import verdict
from mlflow_compress.stages.baseline import NOISE, RECORDS
from mlflow_compress.stages.gate_values import gate_values
from mlflow_compress.stages.quantize import size_values
from mlflow_compress.tracking import names
from mlflow_compress.tracking.registry import log_variant_model
from mlflow_compress.tracking.store import TrackedRun, Tracker


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Everything that the stages of one variant left behind.

    Attributes
    ----------
    label, variant : str
        The baseline's and the variant's short names.
    checkpoint : str
        The compressed checkpoint's folder.
    manifest : Manifest
        Its manifest.
    pooled, results : mapping, sequence
        The headline results by name, and all results.
    children : mapping of str to str
        Run id of every stage.
    dtype : str
        In which both models were evaluated.
    seed : int
        Of bootstrap and splits.
    """

    label: str
    variant: str
    checkpoint: str
    manifest: Manifest
    pooled: Mapping[str, MetricResult]
    results: Sequence[MetricResult]
    children: Mapping[str, str]
    dtype: str
    seed: int

    @property
    def verdict(self) -> str:
        """The verdict in plain words."""
        return verdict(self.variant, self.pooled, size_ratio=self.manifest.size_ratio)


def table(outcome: Outcome) -> str:
    """Return the verdict and the headline table as text."""
    return f"{outcome.verdict}\n\n{headline_table(outcome.pooled, outcome.manifest)}"


def _evidence(outcome: Outcome, tracker: Tracker) -> tuple[Evidence, str]:
    """Read the records of variant, baseline and second baseline run back from the store."""
    evaluate = outcome.children["evaluate"]
    baseline_run = tracker.client.get_run(evaluate).data.tags[names.BASELINE_RUN]
    found = Evidence(
        baseline=RunRecords.read(tracker.fetch(baseline_run, RECORDS)),
        variant=RunRecords.read(tracker.fetch(evaluate, RECORDS)),
        noise=RunRecords.read(tracker.fetch(baseline_run, NOISE)),
        settings=MetricSettings(seed=outcome.seed, split_seed=outcome.seed),
    )
    return found, baseline_run


def _variants(outcome: Outcome, tracker: Tracker) -> list[dict[str, Any]]:
    """Return size and distance of every finished variant of the baseline, newest of each name, and of this one."""
    points: dict[str, Mapping[str, float]] = {outcome.variant: _values(outcome)}
    for run in tracker.find_finished("main", **{names.BASE_MODEL: outcome.label}):
        points.setdefault(run.data.tags[names.VARIANT], run.data.metrics)
    wanted = {"bits_per_weight": "size/bits_per_weight", "bytes": "size/bytes", "kl": KL}
    return [
        {"name": name, **{field: values[key] for field, key in wanted.items() if key in values}}
        for name, values in sorted(points.items())
        if KL in values
    ]


def _values(outcome: Outcome) -> dict[str, float]:
    """Return the parent run's metrics that are not rounded results: sizes and gate bounds, and the pooled values."""
    pooled = {name: result.value for name, result in outcome.pooled.items()}
    return {**pooled, **size_values(outcome.manifest), **gate_values(outcome.pooled)}


def _setup(outcome: Outcome, baseline_run: str, run: TrackedRun) -> dict[str, Any]:
    """Return what a reader needs to repeat the numbers."""
    manifest = asdict(outcome.manifest)
    kept = ("method", "settings", "format", "base_weights_hash", "calibration", "library_versions", "reload")
    runs = {"variant": run.run_id, "baseline": baseline_run, **outcome.children}
    return {
        "baseline": outcome.label,
        **{key: manifest[key] for key in kept},
        "dtype": outcome.dtype,
        "seed": outcome.seed,
        "runs": runs,
    }


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Turn rows into columns; lists become text, since table cells are shown as they are."""
    return {
        name: [" | ".join(row[name]) if isinstance(row[name], list) else row[name] for row in rows] for name in rows[0]
    }


def _log_answers(outcome: Outcome, tracker: Tracker, run: TrackedRun) -> None:
    """Log the variant's answers to the instructions as `outputs.json`, which MLflow compares across runs."""
    if "judge" not in outcome.children:
        return
    records = RunRecords.read(tracker.fetch(outcome.children["judge"], RECORDS)).generations
    if records is not None:
        prompts, texts = records.column("prompt").tolist(), records.column("text").tolist()
        run.log_table({"prompt": prompts, "output": texts}, "outputs.json")


def publish(outcome: Outcome, tracker: Tracker, run: TrackedRun, folder: Path) -> None:
    """Log everything that a person looks at or compares on the variant's parent run.

    Parameters
    ----------
    outcome : Outcome
        What the stages found.
    tracker, run : Tracker, TrackedRun
        The store and the parent run.
    folder : Path
        Scratch folder for figures and report.
    """
    evidence, baseline_run = _evidence(outcome, tracker)
    figures = draw_all(evidence, outcome.results, _variants(outcome, tracker), outcome.variant, folder / "figures")
    changed = flips_table(evidence)
    page = render_report(
        title=f"{outcome.variant} against {outcome.label}",
        verdict=outcome.verdict,
        results=outcome.results,
        figures=figures,
        flips=changed,
        setup=_setup(outcome, baseline_run, run),
        not_computed=unmet(evidence),
        manifest=outcome.manifest,
    )
    report = folder / "report.html"
    report.write_text(page, encoding="utf-8")
    first = sorted(outcome.pooled.values(), key=lambda r: r.name not in names.HEADLINE)
    run.log_results(first)
    run.log_values({**size_values(outcome.manifest), **gate_values(outcome.pooled)})
    run.log_params({"model": outcome.label, "method": outcome.manifest.method, **outcome.manifest.settings})
    run.log_file(report, "report")
    run.log_folder(folder / "figures", "figures")
    if changed:
        run.log_table(_columns(changed), "flips.json")
    _log_answers(outcome, tracker, run)
    reference = {
        "checkpoint": outcome.checkpoint,
        "weight_files": outcome.manifest.weight_files,
        "method": outcome.manifest.method,
        "dtype": outcome.dtype,
    }
    log_variant_model(run.run_id, reference)
    run.set_tags({names.VERDICT: outcome.verdict, names.CHECKPOINT: outcome.checkpoint})
    run.set_note(note_markdown(outcome.verdict, outcome.pooled, outcome.manifest))
