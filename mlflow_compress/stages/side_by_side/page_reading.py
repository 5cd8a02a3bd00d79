"""Reads what the page over variants shows from the runs of a scoreboard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow_compress.config import EvaluateConfig, JudgeConfig, parameters
from mlflow_compress.config.policy import read_policy
from mlflow_compress.decide.policy_gates import PolicyGates, gates_of, ranking_of, read
from mlflow_compress.decide.promotion import Candidate, decide
from mlflow_compress.decide.scoreboard import Scoreboard
from mlflow_compress.errors import ConfigError
from mlflow_compress.records import Generations, Items, Judgments, OptionDistances, OptionScores, Records, RunRecords
from mlflow_compress.reporting.page.choice import gate_texts
from mlflow_compress.reporting.page.explorer import changes_of
from mlflow_compress.reporting.page.page_content import PageContent, PageVariant
from mlflow_compress.stages.evaluation.eval_metadata import read_metadata
from mlflow_compress.stages.evaluation.result_files import stored_results
from mlflow_compress.stages.model_names import SERVED_METHOD, compresses
from mlflow_compress.stages.promotion.candidate_values import absent_values
from mlflow_compress.stages.side_by_side.answer_settings import ANSWERS_RUN, finished_judge
from mlflow_compress.stages.side_by_side.answer_similarity import answer_similarity
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.logged_values import RESOLVED
from mlflow_compress.tracking.run_names import BASELINE_GRADES, RECORDS
from mlflow_compress.tracking.tracker import Tracker
from mlflow_compress.tracking.views import run_address

_NOT_SHOWN = {"output_dir", "log_weights", "judge", "resume", "config", "checkpoint"}


def page_content(tracker: Tracker, board: Scoreboard, policy_file: str | None = None) -> PageContent:
    """Return everything that the page shows about the variants of a scoreboard, read from their main runs.

    Parameters
    ----------
    tracker : Tracker
    board : Scoreboard
    policy_file : str, optional
        The promotion policy that says which variant to ship; by default that of `promote`.

    Raises
    ------
    ConfigError
        No variant has results, or the policy cannot be used.
    TrackingError
        The results of a run cannot be read.
    """
    if not board.finished:
        reasons = "; ".join(f"{row.name}: {row.reason}" for row in board.rows)
        raise ConfigError("None of these variants has results", got=reasons)
    runs = {row.name: tracker.client.get_run(row.run_id) for row in board.finished}
    children = {name: tracker.children(run.info.run_id) for name, run in runs.items()}
    first = children[board.finished[0].name]
    baseline_run = first["evaluate"].data.tags[run_names.BASELINE_RUN]
    baseline_folder = tracker.fetch(baseline_run, RECORDS)
    baseline = _read(baseline_folder, Items, OptionScores, Generations)
    answers_run = next((j.data.tags[ANSWERS_RUN] for c in children.values() if (j := finished_judge(c))), None)
    settings = _settings(runs)
    variants = []
    for name, run in runs.items():
        judge = finished_judge(children[name])
        answered = None
        if judge is not None and judge.data.tags[ANSWERS_RUN] == answers_run:
            answered = tracker.fetch(judge.info.run_id, RECORDS)
        speed = children[name].get("speed")
        timed = speed if speed is not None and speed.info.status == "FINISHED" else None
        measured = [stage.info.run_id for stage in (children[name]["evaluate"], judge, timed) if stage is not None]
        records = _read(
            tracker.fetch(children[name]["evaluate"].info.run_id, RECORDS), OptionScores, OptionDistances, Generations
        )
        variants.append(
            PageVariant(
                name=name,
                verdict=run.data.tags[run_names.VERDICT],
                run_id=run.info.run_id,
                address=run_address(tracker, run.info.experiment_id, run.info.run_id),
                results=stored_results(tracker, *measured),
                settings=settings[name],
                changes=changes_of(baseline, records) if baseline.items is not None else None,
                answers=_table(answered, Generations) if answered else None,
                grades=_table(answered, Judgments) if answered else None,
            )
        )
    policy = read_policy(policy_file)
    gates = gates_of(policy)
    score, ranked_by = ranking_of(policy.objective)
    candidates = [_candidate(v, runs[v.name], children[v.name], gates) for v in variants]
    answered_by = [v for v in variants if v.answers is not None]
    return PageContent(
        board=board,
        decision=decide(candidates, gates.gates, rules=gates.rules, score=score, ranked_by=ranked_by),
        policy="the default policy" if policy_file is None else f"the policy {Path(policy_file).name}",
        objective=policy.objective.by,
        gates=[*gate_texts(gates.gates), *(["what its further rules require"] if gates.rules else [])],
        variants=variants,
        items=baseline.items,
        answers=_table(tracker.fetch(answers_run, RECORDS), Generations) if answers_run and answered_by else None,
        grades=_baseline_grades(tracker, children),
        setup=_setup(tracker, board.baseline, board.evaluation, baseline_run, baseline_folder),
        similarity=answer_similarity(tracker, board),
        notes=_notes(len(runs), children, len(answered_by)),
    )


def _table(folder: Path, kind: type[Any]) -> Any | None:
    return kind.read(folder) if (folder / f"{kind.NAME}.parquet").is_file() else None


def _read(folder: Path, *kinds: type[Records]) -> RunRecords:
    """Return some tables of a folder of records. Those of corpora are large, and the page does not need them."""
    return RunRecords(**{kind.NAME: _table(folder, kind) for kind in kinds})


def _baseline_grades(tracker: Tracker, children: Mapping[str, Mapping[str, Any]]) -> Judgments | None:
    """Return the grades of the baseline's answers, from the first judge run that has them."""
    for own in children.values():
        judge = finished_judge(own)
        if judge is None:
            continue
        if any(file.path == BASELINE_GRADES for file in tracker.client.list_artifacts(judge.info.run_id)):
            return _table(tracker.fetch(judge.info.run_id, BASELINE_GRADES), Judgments)
    return None


def _candidate(variant: PageVariant, run: Any, children: Mapping[str, Any], gates: PolicyGates) -> Candidate:
    """Return a variant as a candidate of the policy, as `promote` does; the page registers nothing."""
    method = run.data.tags[run_names.METHOD]
    metrics = run.data.metrics
    return Candidate(
        name=variant.name,
        run_id=variant.run_id,
        version=None,
        method=method,
        metrics={**metrics, **read(variant.results, gates.readings)},
        items=int(metrics[run_names.ITEMS]) if run_names.ITEMS in metrics else None,
        compresses=compresses(method),
        served=method == SERVED_METHOD,
        stages=frozenset(stage for stage, child in children.items() if child.info.status == "FINISHED"),
        absent=absent_values(children.get("speed")),
    )


def _settings(runs: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the settings of compression in which variants differ, and method and bits, by variant."""
    shared = {*parameters(EvaluateConfig), *parameters(JudgeConfig), *_NOT_SHOWN}
    every = {name: _final(run.data.params, shared) for name, run in runs.items()}
    names = dict.fromkeys(["method", "bits", *(key for found in every.values() for key in found)])
    differing = [
        key for key in names if key in ("method", "bits") or len({found.get(key) for found in every.values()}) > 1
    ]
    return {name: {key: found[key] for key in differing if key in found} for name, found in every.items()}


def _final(params: Mapping[str, str], without: set[str]) -> dict[str, str]:
    """Return parameters with their resolved values; one that is "none" is not there."""
    final = {**params, **{k.removeprefix(RESOLVED): v for k, v in params.items() if k.startswith(RESOLVED)}}
    return {k: v for k, v in final.items() if k not in without and not k.startswith(RESOLVED) and v != "none"}


def _setup(tracker: Tracker, label: str, evaluation: str | None, baseline_run: str, folder: Path) -> dict[str, Any]:
    """Return how the evaluation was made: what the baseline's run says, and the hashes of the tasks."""
    measured = dict(sorted(tracker.client.get_run(baseline_run).data.params.items()))
    tasks = read_metadata(folder).get("tasks")
    return {
        "baseline": label,
        "evaluation": evaluation,
        "baseline's run": baseline_run,
        **measured,
        **({"hash of task": tasks} if isinstance(tasks, dict) else {}),
    }


def _notes(n: int, children: Mapping[str, Mapping[str, Any]], answered: int) -> list[str]:
    """Return what the page leaves out."""
    notes = []
    judged = sum(finished_judge(own) is not None for own in children.values())
    if judged > answered:
        notes.append(f"The answers of {judged - answered} variants are not shown: they answered other instructions")
    if 0 < judged < n:
        notes.append(f"{n - judged} of {n} variants have no answers to instructions: no judge stage finished")
    return notes
