"""Loads an earlier evaluation from its run or from a folder of records; compares two, and forecasts flips from two."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mlflow_compress.commands.evaluate.result import Evaluation
from mlflow_compress.commands.shared.stored import EvalMetadata, read_metadata, stored_results
from mlflow_compress.commands.shared.tabular import Tabular
from mlflow_compress.compression.checkpoint_manifest import MANIFEST_FILE, CheckpointManifest
from mlflow_compress.config import check_text
from mlflow_compress.decide.gates import DELTA, FLIPS, Gate, gate_values, standard_gates
from mlflow_compress.decide.promotion import PolicyAnswer, policy_answer
from mlflow_compress.errors import AlignmentError, ConfigError, DataError, TrackingError
from mlflow_compress.files import read_json_object
from mlflow_compress.items.sources.question_files import read_jsonl
from mlflow_compress.metrics.core import answer_files
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import compute_all, unmet
from mlflow_compress.metrics.stats.arrays import Bool
from mlflow_compress.metrics.stats.flip_model import forecast_flips
from mlflow_compress.metrics.stats.intervals import FEWEST_GROUPS
from mlflow_compress.records import MetricResult, RunRecords
from mlflow_compress.reporting.tables import Table
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.run_names import RECORDS
from mlflow_compress.tracking.store import is_run_id, require_runs

if TYPE_CHECKING:
    from mlflow_compress.tracking.tracker import Tracker


@dataclass(frozen=True)
class Comparison(Tabular):
    """How the answers of two models differ: accuracy, flips, McNemar's test, pooled and by task."""

    results: Mapping[str, Any]  # As `compare_answers` describes it
    names: tuple[str, str] = ("baseline", "variant")  # Of both sides

    def __getitem__(self, name: str) -> Any:
        """Return one number: "flips_pct", "accuracy_delta", "mcnemar_p"."""
        return self.results[name]

    @property
    def answer(self) -> PolicyAnswer:
        """What the default policy's gates on flips and accuracy answer; there is no KL of answers alone."""
        (low, high), (least, most) = (
            self.results[name] or (None, None) for name in ("flips_pct_interval", "accuracy_delta_interval")
        )
        n = self.results["n"]
        pooled = {
            FLIPS: MetricResult(FLIPS, self.results["flips_pct"], low, high, n=n),
            DELTA: MetricResult(DELTA, self.results["accuracy_delta"], least, most, n=n),
        }
        values = {name: one.value for name, one in pooled.items()} | gate_values(pooled)
        gates = [gate for gate in standard_gates() if isinstance(gate, Gate)]
        return policy_answer([check for gate in gates for check in gate.checks(values)], n)

    @property
    def _verdict(self) -> str:
        baseline, variant = self.names
        alone = "" if self.answer.word == "fails" else " in flips and accuracy"
        return f"{variant} against {baseline}: {self.answer.text('the default policy' + alone)}"

    @property
    def summary(self) -> str:
        compared = self.results
        accuracies = f"{100 * compared['accuracy_baseline']:.2f} % -> {100 * compared['accuracy_variant']:.2f} %"
        flips = f"{compared['flips_pct']:.2f} % of {compared['n']:,} answers flipped"
        more = f"; {compared['n_unscored']} more items have no answer" if compared["n_unscored"] else ""
        return f"{self._verdict}; {flips}; accuracy {accuracies} (McNemar p = {compared['mcnemar_p']:.4g}){more}"

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return one row for all items, whose task is None, and one per task."""
        tasks = self.results.get("tasks", {})
        whole = {name: value for name, value in self.results.items() if name != "tasks"}
        every = list(dict.fromkeys([*whole, *(name for task in tasks.values() for name in task)]))
        parts = [(None, whole), *tasks.items()]
        return [{"task": task, **{name: values.get(name) for name in every}} for task, values in parts]

    def to_dict(self) -> dict[str, Any]:
        return dict(self.results)

    def as_text(self) -> str:
        compared = self.results
        points, flips = compared["accuracy_delta_interval"], compared["flips_pct_interval"]
        change = "" if points is None else f" [{100 * points[0]:+.2f}, {100 * points[1]:+.2f}]"
        shares = "" if flips is None else f" [{flips[0]:.2f}, {flips[1]:.2f}]"
        grouped = compared["n_groups"] < compared["n"]
        w2w = "" if compared["w2w"] is None else f", wrong to another wrong {compared['w2w']}"
        accuracies = f"{100 * compared['accuracy_baseline']:.2f} % -> {100 * compared['accuracy_variant']:.2f} %"
        lines = [
            f"{self._verdict}.",
            f"items      {compared['n']:,}"
            + (f" in {compared['n_groups']} groups" if grouped else "")
            + (f" ({compared['n_unscored']} more without an answer)" if compared["n_unscored"] else ""),
            f"accuracy   {accuracies}, difference {100 * compared['accuracy_delta']:+.2f} points{change}",
            f"flips      {compared['flips_pct']:.2f} %{shares}: "
            f"right to wrong {compared['c2w']}, wrong to right {compared['w2c']}{w2w}",
            f"McNemar    p = {compared['mcnemar_p']:.4g}",
        ]
        if compared["all_flips_pct"] is not None:
            lines.insert(4, f"all flips  {compared['all_flips_pct']:.2f} %")
        if points is None:
            lines.append(f"intervals  none: too few groups, as they count as fewer than {FEWEST_GROUPS} of one size")
        if compared.get("rule"):
            lines.append(f"scored by  {compared['rule']}")
        return "\n".join(lines)


_ACCEPTED = (
    "a run id, a folder of Parquet records, samples_*.jsonl of lm-evaluation-harness, or JSONL of id, pred, gold"
)


_LOG = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl")


def _harness_results(log: Path) -> tuple[EvalMetadata, Mapping[str, Any]]:
    """Return what the results beside a sample log say of its task: what must be equal, and its settings.

    The harness writes both with one date into one folder. Nothing is known of a log that was renamed or moved away.
    """
    name = _LOG.fullmatch(log.name)
    beside = [] if name is None else sorted(log.parent.glob(f"*_{name['date']}.json"))
    if name is None or not beside:
        return {}, {}
    results, found = read_json_object(beside[0]), []
    for what in ("configs", "versions", "n-shot"):
        part = results.get(what)
        if not isinstance(part, dict) or name["task"] not in part:
            raise DataError(f"{beside[0]} has no {what} of {name['task']}", fix="Give it as the harness wrote it")
        found.append(part[name["task"]])
    config, version, shots = found
    if not isinstance(config, dict):
        raise DataError(f"The configs of {beside[0]} are no objects", fix="Give it as the harness wrote it")
    return {"task": name["task"], "version": version, "shots": shots}, config


def _read(source: str, store: str | None) -> tuple[str, Path | tuple[list[answer_files.Answer], EvalMetadata]]:
    """Return one side: its name, and the folder of its records, or its answers and what is known of their task."""
    check_text("run, folder or file", source)
    path = Path(source)
    if source and path.is_dir():
        return path.name or source, path
    if path.is_file():
        rows = read_jsonl(path)
        if "filtered_resps" not in rows[0]:
            return path.name, (answer_files.answers_from_rows(rows), {})
        known, config = _harness_results(path)
        return path.name, (answer_files.answers_from_harness(rows, config), known)
    if is_run_id(source):
        opened = store_with(source, store)
        run = opened.look_up_stage(source, "evaluate")
        name = run.tags.get(run_names.VARIANT, run.tags.get(run_names.BASE_MODEL, source))
        return name, opened.fetch(run.run_id, RECORDS)
    raise ConfigError("Nothing to compare by this name", allowed=_ACCEPTED, got=source)


def store_with(run_id: str, store: "Tracker | str | None") -> "Tracker":
    """Return a store, unless it is known not to have the run."""
    if isinstance(store, str | None):
        require_runs([run_id], store)
    from mlflow_compress.tracking.tracker import opened  # imports MLflow, which names of files do not need

    return opened(store)


def _check_comparable(baseline: EvalMetadata, variant: EvalMetadata) -> None:
    """Refuse two evaluations with different tokenizers, few-shot settings or tasks. Entries of one side are ignored."""
    for part in sorted(baseline.keys() & variant.keys()):
        if baseline[part] != variant[part]:
            raise AlignmentError(
                f"The two evaluations differ in their {part}",
                allowed=str(baseline[part]),
                got=variant[part],
                fix="Evaluate both with the same tokenizer and settings",
            )


def compare(baseline: str, variant: str, store: str | None = None) -> Comparison:
    """Return accuracy, flips and the other answer comparisons of two evaluations, with intervals."""
    (first, left), (second, right) = _read(baseline, store), _read(variant, store)
    names = (first, second)
    if isinstance(left, Path) and isinstance(right, Path):
        _check_comparable(read_metadata(left), read_metadata(right))
        return Comparison(answer_files.compare_records(RunRecords.read(left), RunRecords.read(right)), names)
    if isinstance(left, Path) or isinstance(right, Path):
        raise AlignmentError("One side has records and the other answers", fix="Give two of the same kind")
    (before, of_left), (after, of_right) = left, right
    _check_comparable(of_left, of_right)
    return Comparison(answer_files.compare_answers(before, after), names)


_LOAD_EVALUATION_ACCEPTED = "the id of a main, evaluate or baseline run, or a folder of Parquet records"


def from_folder(folder: Path) -> Evaluation:
    """Return the evaluation of a folder of records, without a comparison to a baseline."""
    inputs = MetricInputs(baseline=RunRecords.read(folder))
    return Evaluation(
        name=folder.name,
        results=tuple(compute_all(inputs)),
        not_computed=unmet(inputs),
        records_folder=folder,
    )


def from_run(run_id: str, store: "Tracker | str | None" = None) -> Evaluation:
    """Return the evaluation of a run. For the main run of a variant, that is the evaluation of its evaluate stage."""
    if not is_run_id(run_id):
        raise ConfigError("There is no evaluation of this name", allowed=_LOAD_EVALUATION_ACCEPTED, got=run_id)
    opened = store_with(run_id, store)
    run = opened.look_up_stage(run_id, "evaluate")
    stage = run.tags.get(run_names.STAGE)
    if stage not in ("evaluate", "baseline"):
        raise ConfigError(
            "This run has no evaluation", allowed=_LOAD_EVALUATION_ACCEPTED, got=f"{run_id}, a run of stage {stage}"
        )
    results = tuple(stored_results(opened, run.run_id))
    records = opened.fetch(run.run_id, RECORDS)
    base_model = run.tags[run_names.BASE_MODEL]
    common: dict[str, Any] = {"results": results, "records_folder": records, "run": opened.link(run.run_id)}
    if stage == "baseline":
        return Evaluation(name=base_model, evaluation_id=run.tags.get(run_names.EVALUATION), **common)
    baseline_run = run.tags[run_names.BASELINE_RUN]
    folder = Path(run.tags.get(run_names.CHECKPOINT, ""))
    not_computed: dict[str, str] = {}
    with suppress(TrackingError):  # a run that computed all metrics has no such file
        not_computed = opened.fetch_json(run.run_id, "not_computed.json")
    return Evaluation(
        name=run.tags[run_names.VARIANT],
        not_computed=not_computed,
        baseline=base_model,
        verdict=run.tags[run_names.VERDICT],
        manifest=CheckpointManifest.read(folder, verify=False) if (folder / MANIFEST_FILE).is_file() else None,
        baseline_records_folder=opened.fetch(baseline_run, RECORDS),
        baseline_run_id=baseline_run,
        evaluation_id=run.tags.get(run_names.EVALUATION),
        baseline_found=True,
        variant_found_in=run.run_id,
        **common,
    )


@dataclass(frozen=True)
class Forecast(Tabular):
    """The flips to expect of a variant on items that it was not run on."""

    variant: str
    n_run: int  # Items of the variant's own evaluation that it is made from
    # In percent, with the interval of what would be seen, by task; of several tasks first all together, as None. There
    # are no intervals where the variant was run on fewer than three parts: how much parts differ is then not known
    flips: Sequence[MetricResult]

    @property
    def summary(self) -> str:
        """What is expected over all items, in one sentence."""
        overall = self.flips[0]
        expected = f"{overall.value:.1f} % of {overall.n:,} answers are expected to flip"
        return f"{self.variant}: {expected}, from {self.n_run:,} that were run"

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return one row per task; of several tasks, first one of all, whose task is None."""
        return [{"task": x.task, "n": x.n, "flips_pct": x.value, "low": x.low, "high": x.high} for x in self.flips]

    def as_text(self) -> str:
        """Return the sentence, and a row per task."""
        rows = [{"task": x.task or "all", "items": x.n, "answers flipped": x} for x in self.flips]
        without = [] if self.flips[0].low is not None else ["No intervals: it was run on fewer than three categories."]
        return "\n".join([self.summary, "", *Table.of(rows).lines(), *without])


def forecast_of(variant: Evaluation, other: Evaluation) -> Forecast:
    """Return the flips to expect of a variant on the items of another evaluation that its own does not have."""
    if variant.baseline_records_folder is None:
        raise ConfigError("A forecast needs the evaluation of a variant", got=f"{variant.name}, which has no baseline")
    folder = other.baseline_records_folder or other.records_folder
    sides = (variant.baseline, variant.baseline_records_folder), (other.baseline or other.name, folder)
    _check_comparable(*({"baseline": name, "tokenizer": read_metadata(f).get("tokenizer")} for name, f in sides))
    ran = MetricInputs(RunRecords.read(variant.baseline_records_folder), RunRecords.read(variant.records_folder))
    before, after = ran.baseline_predictions, ran.variant_predictions
    known = np.isfinite(before.lead[:, 0]) & after.scored[:, 0]
    there = MetricInputs(RunRecords.read(folder))
    leads = there.baseline_predictions.lead[:, 0]
    new = np.isfinite(leads) & ~np.isin(there.view.keys, ran.view.keys)
    if not known.any():
        raise ConfigError("The variant's evaluation has no items with options", got=variant.name)
    if not new.any():
        raise ConfigError(
            "There is no item to forecast: the variant was run on all of them",
            fix="Give an evaluation of the same baseline that has other items with options",
        )
    flipped = before.correct[known, 0] != after.correct[known, 0]
    forecast = forecast_flips(before.lead[known, 0], flipped, _parts(ran, known), leads[new], _parts(there, new))
    tasks = there.view.task[new]
    each: list[tuple[str | None, Bool]] = [(name, tasks == name) for name in dict.fromkeys(tasks)]
    whole: list[tuple[str | None, Bool]] = [(None, np.ones(len(tasks), dtype=bool))] if len(each) > 1 else []
    flips = []
    for task, rows in [*whole, *each]:
        share, interval = forecast.share(rows)
        low, high = (None, None) if interval is None else (100 * interval.low, 100 * interval.high)
        flips.append(MetricResult("distance/flips_pct", 100 * share, low, high, task=task, n=int(rows.sum())))
    return Forecast(variant=variant.name, n_run=int(known.sum()), flips=flips)


def _parts(inputs: MetricInputs, rows: Bool) -> npt.NDArray[np.str_]:
    view = inputs.view  # a part is a category of a task
    return np.array([f"{a}\x1f{b}" for a, b in zip(view.task[rows], view.category[rows], strict=True)])
