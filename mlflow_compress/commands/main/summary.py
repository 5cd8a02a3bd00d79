"""Publishes a variant on its main run: headline metrics, verdict, report, figures, tables and the logged model."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlflow_compress.commands.judge.answers_artifact import read_answers
from mlflow_compress.commands.main.stages import Stages, VariantRun
from mlflow_compress.commands.quantize.parameters import QuantizeConfig
from mlflow_compress.commands.quantize.run import size_values
from mlflow_compress.commands.shared.past_runs import described_runtime
from mlflow_compress.commands.shared.stored import logged, read_metadata
from mlflow_compress.config import parameters
from mlflow_compress.config.declarations import NONE
from mlflow_compress.decide.gates import gate_values
from mlflow_compress.decide.scoreboard import KL_DISTANCES
from mlflow_compress.items.named_tasks import TASKS
from mlflow_compress.items.suite import is_task_file, task_parts
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.thinking import ANSWERED_PROBLEMS, questions_table
from mlflow_compress.metrics.thought_length import COST_RATIO
from mlflow_compress.reporting.details import flips_table
from mlflow_compress.reporting.figures import draw_all
from mlflow_compress.reporting.headline import note_markdown
from mlflow_compress.reporting.html import Figure, render_report
from mlflow_compress.reporting.thoughts import MOST_SHOWN, parted_thoughts
from mlflow_compress.scoring.child_process import in_forks
from mlflow_compress.tracking import logged_model, run_names
from mlflow_compress.tracking.evaluations import evaluations, names_of
from mlflow_compress.tracking.live_processes import scratch_folder
from mlflow_compress.tracking.run_names import ANSWERS_PAGE, RECORDS
from mlflow_compress.tracking.task_source import file_source
from mlflow_compress.tracking.views import save_leaderboard

_WITHOUT_ITEMS = ("judge/", "size/", "speed/")  # prefixes of metrics that do not come from the evaluation's items


def _run_params(stages: Stages, *, keeps_weights: bool) -> dict[str, object]:
    """Return the method's settings and the size that came of them, as parameters of the main run.

    MLflow's page of two runs opens on the parameters that differ, in the order of their names. So a setting that only
    this method has is named after `method_args`, and what a reader asks first is a parameter too: the default policy's
    answer, and the size.
    """
    manifest = stages.manifest
    first: dict[str, object] = {run_names.DEFAULT_POLICY: stages.answer.text()}
    if manifest is None:
        return {**first, **stages.settings, "log_weights": NONE}
    common = parameters(QuantizeConfig).keys() - stages.config.compression.method_args.keys()
    settings = {name if name in common else f"method_args/{name}": value for name, value in manifest.settings.items()}
    size = {"bits_per_weight": round(manifest.bits_per_weight, 2)}
    return {**first, **settings, **size, "log_weights": str(keeps_weights).lower()}


def _data_sets(stages: Stages) -> tuple[dict[str, logged_model.DataSet], logged_model.DataSet]:
    """Return the data set of every task and corpus by name, and the data set of the complete evaluation."""
    hashes = read_metadata(stages.tracker.fetch(stages.evaluate, RECORDS)).get("tasks")
    files = {part.stem: part for part in map(Path, task_parts(stages.config.evaluation.tasks)) if is_task_file(part)}

    def source(name: str) -> dict[str, str]:
        if name in files:
            return file_source(files[name])
        return {"task": name, **({"source": TASKS.get(name).source} if name in TASKS.names() else {})}

    by_task = {
        name: logged_model.DataSet(name=name, digest=hashed, source=source(name))
        for name, hashed in (hashes.items() if isinstance(hashes, dict) else ())
    }
    return by_task, logged_model.DataSet(
        name=logged_model.EVALUATION_SET, digest=stages.evaluation, source={"tasks": sorted(by_task)}
    )


def log_model(stages: Stages) -> None:
    """Log the variant's model. Log every metric on both run and model, linked to the data set that it comes from."""
    manifest, served, tracker, run = stages.manifest, stages.served, stages.tracker, stages.run
    entry = logged_model.VariantEntry(
        name=stages.variant,
        checkpoint=Path(stages.checkpoint) if manifest is not None else None,
        served=None if served is None else {**served, run_names.EVALUATE_RUN: stages.evaluate},
        checkpoint_sha256=stages.checkpoint_sha256,
        weight_files=manifest.weight_files if manifest is not None else {},
        dtype=stages.account.setting["dtype"],
        params={
            "model": stages.label,
            "method": stages.method,
            **stages.settings,
            "dtype": stages.account.setting["dtype"],
            "seed": stages.config.source.seed,
        },
        tags={
            run_names.VARIANT: stages.variant,
            run_names.METHOD: stages.method,
            run_names.BASE_MODEL: stages.label,
            run_names.BASE_WEIGHTS: stages.base_weights,
            run_names.EVALUATION: stages.evaluation,
        },
        log_weights=stages.config.log_weights,
    )

    run.log_params(_run_params(stages, keeps_weights=entry.storage == "logged"))
    model = logged_model.log_variant_model(tracker, run.run_id, entry)
    logged_model.log_model_input(
        tracker, [stages.children[s] for s in ("evaluate", "judge") if s in stages.children], model
    )
    by_task, complete = _data_sets(stages)
    logged_model.log_data_sets(tracker, run.run_id, [*by_task.values(), complete])
    values = run_names.on_main_run(_values(stages))
    itemless = {name for name in values if name.startswith(_WITHOUT_ITEMS)}
    logged_model.log_model_values(
        tracker, run.run_id, model, {k: v for k, v in values.items() if k not in itemless}, complete
    )
    logged_model.log_model_values(tracker, run.run_id, model, {k: values[k] for k in values if k in itemless})
    # Values per task are on the evaluate run. They are logged there a second time, linked to the model.
    for name, data_set in by_task.items():
        values = {f"{r.name}/{name}": r.value for r in logged(stages.results) if r.task == name}
        if values:
            logged_model.log_model_values(tracker, stages.evaluate, model, values, data_set)


def _variants(stages: Stages) -> tuple[list[dict[str, Any]], str]:
    """Return size, distance, speed and memory of every variant of the evaluation, and the name that shows this one."""
    this = (stages.variant, stages.checkpoint_sha256)
    points: dict[tuple[str, str], Mapping[str, float | None]] = {}
    for group in evaluations(stages.tracker, stages.label):
        if group.id == stages.evaluation:
            points = {variant.checkpoint: variant.run.data.metrics for variant in group.variants}
    cost = stages.pooled.get(COST_RATIO.name)
    ends = {} if cost is None else {f"{cost.name}_low": cost.low, f"{cost.name}_high": cost.high}
    points[this] = {**_values(stages), **ends}
    shown = names_of(points)
    measured = sorted(pair for pair in points.items() if not pair[1].keys().isdisjoint(KL_DISTANCES))
    rows = [{"name": shown[key], **values} for key, values in measured]
    return rows, shown[this]


def _values(stages: Stages) -> dict[str, float]:
    """Return the main run's metrics: pooled values, sizes and gate values."""
    pooled = {name: result.value for name, result in stages.pooled.items()}
    sizes = {} if stages.manifest is None else size_values(stages.manifest)  # nothing is known of a served variant
    return {**pooled, **sizes, **gate_values(stages.pooled)}


def _setup(stages: Stages) -> dict[str, Any]:
    speed = stages.children.get("speed")
    runtime = {} if speed is None else described_runtime(stages.tracker.client.get_run(speed))
    fields = ("method", "settings", "format", "base_weights_hash", "calibration", "library_versions", "reload")
    if stages.manifest is not None:
        manifest = asdict(stages.manifest)
        made = {key: manifest[key] for key in fields}
    else:
        made = {"method": stages.method, **stages.settings, "base_weights_hash": stages.base_weights}
    runs = {"variant": stages.run.run_id, "baseline": stages.baseline_run, **stages.children}
    return {
        "baseline": stages.label,
        **made,
        "dtype": stages.account.setting["dtype"],
        "seed": stages.config.source.seed,
        **({"timed in": runtime} if runtime else {}),
        "runs": runs,
    }


def publish(stages: Stages) -> VariantRun:
    """Log everything that people read or compare on the variant's main run, and return it."""
    tracker, run = stages.tracker, stages.run
    with scratch_folder(tracker.uri) as folder:
        _log_all(stages, folder)
    # After the headline: MLflow's page of two runs opens on the metric that was logged first.
    evaluated = tracker.look_up(stages.evaluate).metrics
    items = {run_names.N_ITEMS: evaluated[run_names.N_ITEMS]} if run_names.N_ITEMS in evaluated else {}
    run.log_values({**items, **stages.account.values()})
    save_leaderboard(tracker.client, run.run_id)
    return stages.found()


def _log_all(stages: Stages, folder: Path) -> None:
    tracker, run, judge = stages.tracker, stages.run, stages.children.get("judge")
    variants, shown = _variants(stages)
    inputs, results, judged = stages.inputs, stages.results, None
    of_judge = {} if judge is None else tracker.client.get_run(judge).data.tags
    if judge is not None and (greedy := of_judge.get(run_names.BASELINE_GREEDY_RUN)) is not None:
        judged = MetricInputs(baseline=stages.read(greedy), variant=stages.read(judge))

    def draw(_: int) -> Iterator[list[Figure]]:
        yield []
        yield draw_all(inputs, results, variants, shown, folder / "figures", judged)

    drawn = in_forks(draw, [0], 1) if sys.platform == "linux" else draw(0)
    next(drawn)  # a fork has begun, and draws while this process logs the model
    weights = {run_names.BASE_WEIGHTS: stages.base_weights, run_names.CHECKPOINT_SHA256: stages.checkpoint_sha256}
    made = stages.manifest
    readers = None if made is None else made.served_by
    run.set_tags(weights if readers is None else {**weights, run_names.SERVED_BY: ",".join(readers) or NONE})
    log_model(stages)
    figures, flips = next(drawn), flips_table(inputs)
    has_answers = judge is not None and any(file.path == ANSWERS_PAGE for file in tracker.client.list_artifacts(judge))
    asked = tracker.child_ids(run.run_id).get("judge")  # also of a stage that failed: what it took was paid
    problems = questions_table(inputs) if inputs.missing(*ANSWERED_PROBLEMS) is None else []
    page = render_report(
        title=f"{stages.variant} against {stages.label}",
        verdict=stages.verdict,
        results=stages.results,
        figures=figures,
        flips=flips,
        setup=_setup(stages),
        not_computed=stages.not_computed,
        manifest=stages.manifest,
        judge_values={} if asked is None else tracker.look_up(asked).metrics,
        answers=read_answers(tracker, judge) if judge is not None and has_answers else [],
        account=stages.account,
        failed_stages=stages.failed,
        thoughts=parted_thoughts(stages.variant, problems, inputs.baseline, inputs.subject, most=MOST_SHOWN),
    )
    report = folder / "report.html"
    report.write_text(page, encoding="utf-8")
    run.log_file(report, "report")

    if figures:
        run.log_figures(folder / "figures", [figure.path.stem for figure in figures])
    if flips:  # lists become text, because MLflow shows table cells as they are
        texts = [{k: " | ".join(v) if isinstance(v, list) else v for k, v in row.items()} for row in flips]
        run.log_table({name: [row[name] for row in texts] for name in flips[0]}, "flips.json")
    if judge is not None and run_names.HIDDEN not in of_judge:
        answers = stages.read(judge).generations
        if answers is not None:  # MLflow's UI compares this table between runs
            table = {"prompt": answers.column("prompt").tolist(), "output": answers.column("text").tolist()}
            run.log_table(table, "outputs.json")
    run.set_tags({run_names.VERDICT: stages.verdict, run_names.CHECKPOINT: stages.checkpoint})
    sentence = stages.verdict
    if (served := stages.served) is not None:
        loaded = f" (loaded from {stages.facts['root']})" if stages.facts["root"] else ""
        where = f"at {served['endpoint']}, by {served['server']}, over {served['route']}"
        sentence += f" Served: {served['served_model']}{loaded} {where}."
    note = note_markdown(sentence, stages.pooled, stages.manifest, account=stages.account, failed_stages=stages.failed)
    run.set_note(note)
