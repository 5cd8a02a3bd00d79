"""Requirements of metrics, and the reason if the inputs do not meet one."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from mlflow_compress.errors import ConfigError

if TYPE_CHECKING:
    from mlflow_compress.metrics.core.metric_inputs import MetricInputs
    from mlflow_compress.records import RunRecords


def missing(inputs: MetricInputs, requirement: str) -> str | None:
    """Return why a requirement is not met, or None where it is.

    - "items", "variant", "noise", "engine", "asked_again", "embeddings", "bertscore_model": they are there.
    - "family:<name>": the baseline has an item of that family. "package:<name>": the package is installed.
    - "shuffles": every model was scored under shuffled answer orders. "positive_kl": the KL of some item is above 0.
    - "predictions", "option_scores", "token_scores", "judgments", "generations": records of the baseline and, where
      there is one, of the variant.
    - "judgments:<judge>": ratings of that judge, of the same models. "several_judges": grades of two judge models or
      more. "judge_repeats": an answer was graded more than once. "comparisons": verdicts on pairs of answers.
    - "greedy_answers", "greedy_scores": greedy answers as tokens, and scores on the baseline's, of the same models;
      "greedy_distances": the variant's. "traces": the baseline's own sampled answers.
    - "timings": the model that a run is about was timed. A baseline that is not served was not, beside a served one.
    - "option_bounds": the variant's bounds, from lists of most probable tokens.
    - "option_distances", "token_distances": the variant's distances; "item_distances": the former, where any item has
      options to score; "noise_option_distances", "noise_token_distances": those of the second baseline run.
    """
    if requirement.startswith("family:"):
        family = requirement.removeprefix("family:")
        items = inputs.baseline.items
        found = items is not None and len(items) > 0 and bool((inputs.view.family == family).any())
        return None if found else f"no item of the family {family}"
    if requirement.startswith("package:"):
        package = requirement.removeprefix("package:")
        return None if find_spec(package) is not None else f"the package {package} is not installed"
    if requirement.startswith("judgments:"):
        return _judged(inputs, requirement.removeprefix("judgments:"))
    if requirement not in _CHECKS:
        allowed = [*_CHECKS, "family:<name>", "package:<name>", "judgments:<judge>"]
        raise ConfigError("Unknown requirement of a metric", allowed=allowed, got=requirement)
    return _CHECKS[requirement](inputs)


def _judged(inputs: MetricInputs, judge: str) -> str | None:
    reason = _CHECKS["judgments"](inputs)
    if reason is not None:
        return reason
    for who, run in (("baseline", inputs.baseline), ("variant", inputs.variant)):
        if run is not None and not any(is_of(judge, task) for task in _judge_tasks(run)):
            return f"the {who} has no judgments records of {judge}"
    return None


def is_of(judge: str, task: str) -> bool:
    """Return whether ratings with this `task` are those of a judge: "<judge>", or "<judge>/<model>" of several."""
    return task == judge or task.startswith(f"{judge}/")


def _judge_tasks(run: RunRecords) -> set[str]:
    return set() if run.judgments is None else set(run.judgments.table.column("task").to_pylist())


def _several_judges(inputs: MetricInputs) -> str | None:
    models = [task for task in _judge_tasks(inputs.subject) if task.startswith("mt_bench/")]
    return None if len(models) > 1 else "fewer than two judge models graded the answers"


def _judge_repeats(inputs: MetricInputs) -> str | None:
    judgments = inputs.subject.judgments
    rows = [] if judgments is None else judgments.table.select(["task", "repeat"]).to_pylist()
    repeated = any(is_of("mt_bench", row["task"]) and row["repeat"] > 0 for row in rows)
    return None if repeated else "no answer was graded more than once"


def _comparisons(inputs: MetricInputs) -> str | None:
    found = inputs.variant is not None and any(is_of("pairwise", task) for task in _judge_tasks(inputs.variant))
    return None if found else "the answers were not compared in pairs (judges=pairwise)"


def _has(attribute: str) -> Callable[[MetricInputs], str | None]:
    def check(inputs: MetricInputs) -> str | None:
        for who, run in (("baseline", inputs.baseline), ("variant", inputs.variant)):
            if run is not None and not len(getattr(run, attribute) or ()):
                return f"the {who} has no {attribute} records"
        return None

    return check


def _distance(who: str, attribute: str) -> Callable[[MetricInputs], str | None]:
    def check(inputs: MetricInputs) -> str | None:
        run = inputs.variant if who == "variant" else inputs.noise
        if run is None:
            return "no variant" if who == "variant" else "no second run of the baseline"
        return None if len(getattr(run, attribute) or ()) else f"the {who} run has no {attribute} records"

    return check


def _predictions(inputs: MetricInputs) -> str | None:
    if inputs.baseline.items is None or not len(inputs.baseline.items):
        return "the baseline has no items records"
    for who, run in (("baseline", inputs.baseline), ("variant", inputs.variant)):
        if run is not None and not len(run.option_scores or ()) and not len(run.generations or ()):
            return f"the {who} has neither option scores nor generations"
    return None


def _shuffles(inputs: MetricInputs) -> str | None:
    for who, run in (("baseline", inputs.baseline), ("variant", inputs.variant)):
        scores = inputs.ordinary_scores(run) if run is not None else None
        if run is not None and (scores is None or not (scores.column("permutation") > 0).any()):
            return f"the {who} was not scored under shuffled answer orders"
    return None


def _positive_kl(inputs: MetricInputs) -> str | None:
    found = inputs.variant.option_distances if inputs.variant is not None else None
    moved = found is not None and bool((found.column("kl") > 0).any())
    return None if moved else "the KL of every item is 0: no item holds a share of it"


def _item_distances(inputs: MetricInputs) -> str | None:
    if not (inputs.view.n_options > 0).any():
        return None
    return _distance("variant", "option_distances")(inputs)


_CHECKS: dict[str, Callable[[MetricInputs], str | None]] = {
    "items": lambda e: None if e.baseline.items is not None and len(e.baseline.items) else "the baseline has no items",
    "variant": lambda e: None if e.variant is not None else "no variant to compare",
    "noise": lambda e: None if e.noise is not None else "no second run of the baseline",
    "asked_again": lambda e: None if e.asked_again is not None else "no server was asked for the variant twice",
    "engine": lambda e: None if e.engine is not None else "transformers itself ran both models",
    "embeddings": lambda e: None if e.embeddings is not None else "no answer embeddings",
    "bertscore_model": lambda e: None if e.settings.bertscore_model else "no bertscore_model was given",
    "predictions": _predictions,
    "shuffles": _shuffles,
    "positive_kl": _positive_kl,
    "item_distances": _item_distances,
    "option_scores": _has("option_scores"),
    "token_scores": _has("token_scores"),
    "judgments": _has("judgments"),
    "several_judges": _several_judges,
    "judge_repeats": _judge_repeats,
    "comparisons": _comparisons,
    "generations": _has("generations"),
    "greedy_answers": _has("greedy_answers"),
    "greedy_scores": _has("greedy_scores"),
    "greedy_distances": _distance("variant", "greedy_distances"),
    "timings": lambda e: None if len(e.subject.timings or ()) else "nothing was timed",
    "serving_memory": _has("serving_memory"),
    "traces": lambda e: (
        None if len(e.baseline.traces or ()) else "the baseline wrote no text of its own (tasks=traces)"
    ),
    "option_bounds": _distance("variant", "option_bounds"),
    "option_distances": _distance("variant", "option_distances"),
    "token_distances": _distance("variant", "token_distances"),
    "noise_option_distances": _distance("noise", "option_distances"),
    "noise_token_distances": _distance("noise", "token_distances"),
}
