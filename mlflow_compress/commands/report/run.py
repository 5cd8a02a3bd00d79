"""The report stage: one page over the variants of an evaluation, read from their runs."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mlflow_compress import files as atomic
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.commands.report.parameters import ReportConfig
from mlflow_compress.commands.shared.past_runs import candidate_of, results_of
from mlflow_compress.commands.shared.scores import (
    ANSWERS_RUN,
    answer_setting,
    common,
    finished_judge,
    score_runs,
    unlike,
)
from mlflow_compress.commands.shared.stored import read_metadata
from mlflow_compress.commands.shared.tabular import ScoredVariants
from mlflow_compress.config import parameters
from mlflow_compress.config.policy import AnomalyRule, Policy, Requirements, read_policy
from mlflow_compress.decide import promotion
from mlflow_compress.decide.champion import choice_notes
from mlflow_compress.decide.scoreboard import Scoreboard, ScoredVariant, ScoreRow
from mlflow_compress.errors import AlignmentError, ConfigError
from mlflow_compress.metrics.conscompf import ModelSimilarity, model_similarity
from mlflow_compress.records import (
    ChainDistances,
    Chains,
    ChainScores,
    Draws,
    Embeddings,
    Generations,
    Items,
    Judgments,
    OptionDistances,
    OptionScores,
    Records,
    RunRecords,
)
from mlflow_compress.reporting.page import variants_page
from mlflow_compress.reporting.page.page_content import PageContent, PageVariant, changes_of
from mlflow_compress.reporting.scoreboard_text import scoreboard_csv
from mlflow_compress.reporting.thoughts import MOST_SHOWN, PartedThought, parted_thoughts
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.run_names import BASELINE_GRADES, EMBEDDING_FILES, HIDDEN, RECORDS
from mlflow_compress.tracking.store import RESOLVED
from mlflow_compress.tracking.tracker import Snapshot, Tracker
from mlflow_compress.tracking.views import shared_run_address


@dataclass(frozen=True, kw_only=True)
class VariantsReport(ScoredVariants):
    """What `report` wrote."""

    board: Scoreboard  # The variants side by side, and which of them can be told apart
    decision: promotion.Decision  # What the default gates say; nothing was promoted
    choice: str  # What the policy chooses, and why
    path: Path  # The file

    def __getitem__(self, name: str) -> ScoreRow:
        return {row.name: row for row in self.board.rows}[name]

    @property
    def summary(self) -> str:
        from mlflow_compress.reporting.scoreboard_text import finding

        return f"{finding(self.board)}."

    @property
    def scores(self) -> Scoreboard:
        return self.board

    def to_dict(self) -> dict[str, Any]:
        return {"path": str(self.path), "scoreboard": self.board.to_dict(), "decision": asdict(self.decision)}

    def as_text(self) -> str:
        from mlflow_compress.reporting.scoreboard_text import scoreboard_text, wrapped

        said = [line for text in (self.choice, self.summary) for line in wrapped(text)]
        return "\n\n".join(["\n".join(said), scoreboard_text(self.board), f"Report: {self.path}"])


R = TypeVar("R", bound=Records)


def answer_similarity(
    tracker: Tracker, board: Scoreboard, children: Mapping[str, Mapping[str, Any]]
) -> ModelSimilarity | None:
    """Return the similarity of the answers of the baseline and all variants; None if no variant's can be compared.

    A variant without answers, with answers of another setting, or embedded by another encoder is left out by name.
    """
    settings, left_out = {}, {}
    for row in board.finished:
        judge = finished_judge(children[row.name])
        if judge is not None and (setting := answer_setting(judge)) is not None:
            settings[row.name] = setting
        else:
            left_out[row.name] = "no finished judge stage embedded its answers"
    left_out |= unlike(settings)
    models: dict[str, npt.NDArray[np.floating]] = {}
    ids: tuple[str, ...] = ()
    for name in settings:
        if name in left_out:
            continue
        folder = tracker.fetch(children[name]["judge"].info.run_id, EMBEDDING_FILES)
        if not models:
            # Two samples of the baseline: their similarity is that of a model to itself.
            _, models["baseline"] = Embeddings.read(folder / "baseline").by_instruction()
            ids, models["baseline, second sample"] = Embeddings.read(folder / "again").by_instruction()
        instructions, vectors = Embeddings.read(folder / "variant").by_instruction()
        if instructions != ids:
            raise AlignmentError("Two variants with one setting answered different instructions", got=name)
        # One that is called as the baseline's rows are is told apart from them.
        models[f"{name} (variant)" if name in models else name] = vectors
    if not models:
        return None
    return model_similarity(models, encoder=common(settings).encoder, left_out=left_out)


def page_content(tracker: Tracker, board: Scoreboard, policy: Policy, policy_file: str | None) -> PageContent:
    """Return everything that the page shows about the variants of a scoreboard, read from their main runs."""
    if not board.finished:
        reasons = "; ".join(f"{row.name}: {row.reason}" for row in board.rows)
        raise ConfigError("None of these variants has results", got=reasons)
    runs = {row.name: tracker.run_of(str(row.run_id)) for row in board.finished}
    children = {name: tracker.children_of(run) for name, run in runs.items()}
    first = children[board.finished[0].name]
    baseline_run = first["evaluate"].data.tags[run_names.BASELINE_RUN]
    baseline_folder = tracker.fetch(baseline_run, RECORDS)
    baseline = _read(baseline_folder, Items, OptionScores, Generations, Chains)
    judges = filter(None, map(finished_judge, children.values()))
    answers_run = next((judge.data.tags[ANSWERS_RUN] for judge in judges), None)
    settings = _settings(runs)
    variants = [
        _page_variant(tracker, name, run, children[name], settings[name], baseline, answers_run)
        for name, run in runs.items()
    ]

    gates = promotion.gates_of(policy, policy_file)
    makes = {row.name: None if row.made_once else 1 + len(row.luck.runs if row.luck else ()) for row in board.finished}
    candidates = []
    for v in variants:
        read = promotion.read_gates(v.results, gates.readings)
        candidates.append(candidate_of(v.name, runs[v.name], read, children[v.name], makes=makes[v.name]))
    answered_by = [v for v in variants if v.answers is not None]
    required, tasks = policy.require, read_metadata(baseline_folder).get("tasks")
    further = (required, policy.anomalies) != (Requirements(), AnomalyRule())
    decision = gates.decide(candidates)
    return PageContent(
        board=board,
        decision=decision,
        beside=choice_notes(decision, board, gates.gates),
        policy="the default policy" if policy_file is None else f"the policy {Path(policy_file).name}",
        objective=policy.objective.by,
        gates=[
            *variants_page.gate_texts(gates.gates),
            f"at most {required.max_unscored_pct:g} % of the items without a score",
            f"at most {required.max_cut_pct:g} % of the prompts cut",
            *(["what its further rules require"] if further else []),
        ],
        variants=variants,
        items=baseline.items,
        answers=_table(tracker.fetch(answers_run, RECORDS), Generations) if answers_run and answered_by else None,
        grades=_baseline_grades(tracker, children),
        setup={
            "baseline": board.baseline,
            "evaluation": board.evaluation,
            "baseline's run": baseline_run,
            **dict(sorted(tracker.run_of(baseline_run).data.params.items())),
            **({"hash of task": tasks} if isinstance(tasks, dict) else {}),
        },
        similarity=answer_similarity(tracker, board, children),
        thoughts=_parted_thoughts(tracker, children, baseline) if baseline.chains is not None else [],
        notes=_notes(len(runs), children, len(answered_by)),
    )


def _page_variant(
    tracker: Tracker,
    name: str,
    run: Any,
    stages: Mapping[str, Any],
    settings: Mapping[str, str],
    baseline: RunRecords,
    answers_run: str | None,
) -> PageVariant:
    """Return what the page shows about one variant; answers only if they are to the prompts of `answers_run`."""
    judge, speed = finished_judge(stages), stages.get("speed")
    answered = None
    if judge is not None and judge.data.tags[ANSWERS_RUN] == answers_run and HIDDEN not in judge.data.tags:
        answered = tracker.fetch(judge.info.run_id, RECORDS)
    timed = speed if speed is not None and speed.info.status == "FINISHED" else None
    measured = [stage for stage in (stages["evaluate"], judge, timed) if stage is not None]
    folder = tracker.fetch(stages["evaluate"].info.run_id, RECORDS)
    # Answers that were not drawn are no changes, and no missing answers either: the page shows the numbers alone.
    has_all = baseline.items is not None and not (folder / f"{Draws.NAME}.parquet").is_file()
    records = _read(folder, OptionScores, OptionDistances, Generations) if has_all else None

    return PageVariant(
        name=name,
        verdict=run.data.tags[run_names.VERDICT],
        run_id=run.info.run_id,
        address=shared_run_address(tracker.uri, run.info.experiment_id, run.info.run_id),
        results=results_of(tracker, measured),
        settings=settings,
        changes=changes_of(baseline, records) if records is not None else None,
        answers=_table(answered, Generations) if answered else None,
        grades=_table(answered, Judgments) if answered else None,
    )


def _parted_thoughts(
    tracker: Tracker, children: Mapping[str, Mapping[str, Any]], baseline: RunRecords
) -> list[PartedThought]:
    """Return where thoughts of the variants part from the baseline's, as many as a page shows."""
    thoughts: list[PartedThought] = []
    for name, stages in children.items():
        if len(thoughts) < MOST_SHOWN:
            evaluation = stages["evaluate"]
            records = _read(tracker.fetch(evaluation.info.run_id, RECORDS), Generations, ChainScores, ChainDistances)
            problems = tracker.json_of(evaluation, "problems.json")
            thoughts += parted_thoughts(name, problems, baseline, records, most=max(1, MOST_SHOWN // len(children)))
    return thoughts


def _table(folder: Path, kind: type[R]) -> R | None:
    return kind.read(folder) if (folder / f"{kind.NAME}.parquet").is_file() else None


def _read(folder: Path, *kinds: type[Records]) -> RunRecords:
    """Return some tables of a folder of records. Those of corpora are large, and the page does not need them."""
    tables: dict[str, Any] = {kind.NAME: _table(folder, kind) for kind in kinds}
    return RunRecords(**tables)


def _baseline_grades(tracker: Tracker, children: Mapping[str, Mapping[str, Any]]) -> Judgments | None:
    """Return the grades of the baseline's answers, from the first judge run that has them."""
    for judge in filter(None, map(finished_judge, children.values())):
        if any(file.path == BASELINE_GRADES for file in tracker.client.list_artifacts(judge.info.run_id)):
            return _table(tracker.fetch(judge.info.run_id, BASELINE_GRADES), Judgments)
    return None


def _settings(runs: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the settings of compression in which variants differ, and method and bits, by variant."""
    shared = {*parameters(EvaluateConfig), *parameters(JudgeConfig), run_names.DEFAULT_POLICY}
    shared |= {"output_dir", "log_weights", "judge", "resume", "config", "checkpoint"}
    every = {}
    for name, run in runs.items():
        params = run.data.params
        final = params | {key.removeprefix(RESOLVED): v for key, v in params.items() if key.startswith(RESOLVED)}
        own = {key: value for key, value in final.items() if key not in shared and not key.startswith(RESOLVED)}
        every[name] = {key: value for key, value in own.items() if value != "none"}
    differing = ["method", "bits"]
    for key in dict.fromkeys(key for settings in every.values() for key in settings):
        if key not in differing and len({settings.get(key) for settings in every.values()}) > 1:
            differing.append(key)
    return {name: {key: settings[key] for key in differing if key in settings} for name, settings in every.items()}


def _notes(n: int, children: Mapping[str, Mapping[str, Any]], answered: int) -> list[str]:
    """Return what the page leaves out."""
    notes = []
    judges = list(filter(None, map(finished_judge, children.values())))
    judged, hidden = len(judges), sum(HIDDEN in judge.data.tags for judge in judges)
    if hidden:
        notes.append(f"The answers of {hidden} variants to logged questions are not shown (show_logged)")
    if judged - hidden > answered:
        others = judged - hidden - answered
        notes.append(f"The answers of {others} variants are not shown: they answered other instructions")
    if 0 < judged < n:
        notes.append(f"{n - judged} of {n} variants have no answers to instructions: no judge stage finished")
    return notes


SCOREBOARD = "scoreboard.json"  # artifact of a sweep's run
_ACCEPTED = "ids of main runs of one evaluation, or of a sweep's run"


def run_report(config: ReportConfig, store: str | None = None) -> VariantsReport:
    """Write the page over variants, or its tables, and return them. Inside `mlflow run`, the file is logged too.

    `store` is the address of the store; by default the one that MLflow is configured for.
    """
    path = Path(config.output).expanduser().resolve()
    text_of = _writer(config.format, path)
    run_ids = [run_id.strip() for run_id in (config.runs or "").split(",") if run_id.strip()]
    if not run_ids:
        raise ConfigError("No run to report on", allowed=_ACCEPTED, fix="Give the ids of runs: report RUN [RUN ...]")
    if not path.parent.is_dir():
        raise ConfigError("The folder of the report does not exist", got=str(path.parent), fix="Make it first")
    tracker = Tracker(config.experiment, store)
    policy = read_policy(config.policy)
    runs = Snapshot(tracker, run_ids)
    content = page_content(runs, _scored(runs, run_ids, policy.margin), policy, config.policy)
    text = text_of(content)
    report = VariantsReport(
        board=content.board, decision=content.decision, choice=variants_page.choice_and_reason(content), path=path
    )
    if "MLFLOW_RUN_ID" not in os.environ:
        atomic.write(path, text.encode())
        return report
    tags = {run_names.BASE_MODEL: content.board.baseline, run_names.EVALUATION: content.board.evaluation}
    with tracker.run(f"report {content.title}", "report", tags) as run:
        atomic.write(path, text.encode())
        run.log_file(path, "report")
        run.set_note(report.summary)
    return report


def _writer(form: str, path: Path) -> Callable[[PageContent], str]:
    """Return the function that writes the wanted form; "auto" goes by the file's suffix."""
    writers: dict[str, Callable[[PageContent], str]] = {
        "html": variants_page.render_page,
        "md": variants_page.page_markdown,
        "csv": lambda content: scoreboard_csv(content.board),
        "json": lambda content: json.dumps(variants_page.content_values(content), indent=1, allow_nan=False) + "\n",
    }
    chosen = path.suffix.removeprefix(".").lower() if form == "auto" else form
    if chosen not in writers:
        raise ConfigError(
            "The report's file name does not show its format",
            allowed=[f".{name}" for name in writers],
            got=path.name,
            fix="Give another name, or the format",
        )
    return writers[chosen]


def _scored(tracker: Tracker, run_ids: Sequence[str], margin: float) -> Scoreboard:
    """Return the scoreboard of the given runs; a sweep's run stands for its variants, also those it has found."""
    runs: list[str] = []
    names: dict[str, str] = {}
    others: dict[str, ScoredVariant] = {}
    for run_id in run_ids:
        run = tracker.look_up(run_id)
        run_id, stage = run.run_id, run.tags.get(run_names.STAGE)
        if stage not in ("main", "sweep"):
            raise ConfigError(
                "This run is neither a main run nor a sweep", allowed=_ACCEPTED, got=f"{run_id}, of stage {stage}"
            )
        if stage == "main":
            runs.append(run_id)
            continue
        for row in tracker.fetch_json(run_id, SCOREBOARD)["rows"]:
            if row["run_id"] is None:
                told = {key: row[key] for key in ("name", "method", "bits", "status", "reason")}
                others[row["name"]] = ScoredVariant(**told)
            else:
                runs += [row["run_id"], *(row.get("luck") or {"runs": ()})["runs"]]
                names[row["run_id"]] = row["name"]
    _check_alike(tracker, runs)
    return score_runs(tracker, runs, others=list(others.values()), names=names, margin=margin)


def _check_alike(tracker: Tracker, runs: Sequence[str]) -> None:
    """Refuse runs of several evaluations, and say in what these differ."""
    groups: dict[str, tuple[str, str]] = {}  # by evaluation: a run, and its baseline's run
    for run_id in runs:
        tags = tracker.run_of(run_id).data.tags
        if run_names.EVALUATION in tags:
            groups.setdefault(tags[run_names.EVALUATION], (run_id, tags[run_names.BASELINE_RUN]))
    if len(groups) < 2:
        return
    (one, left), (other, right), *_ = groups.values()
    a, b = (tracker.run_of(run_id).data.params for run_id in (left, right))
    differing = [f"{key} is {a.get(key)} and {b.get(key)}" for key in sorted({*a, *b}) if a.get(key) != b.get(key)]
    raise ConfigError(
        f"Runs {one[:8]} and {other[:8]} were evaluated differently, so their numbers cannot be compared",
        allowed=_ACCEPTED,
        got="; ".join(differing) or "tasks with different items",
    )
