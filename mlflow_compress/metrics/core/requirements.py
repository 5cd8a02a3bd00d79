"""What a metric requires of its inputs: each requirement says why it is not met, in words for the report."""

from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec

from mlflow_compress.metrics.core.metric_inputs import MetricInputs, Requirement
from mlflow_compress.records import RunRecords


def is_of(judge: str, task: str) -> bool:
    """Return whether ratings with this `task` are those of a judge: "<judge>", or "<judge>/<model>" of several."""
    return task == judge or task.startswith(f"{judge}/")


def _given(name: str, reason: str, holds: Callable[[MetricInputs], bool]) -> Requirement:
    return Requirement(name, lambda inputs: None if holds(inputs) else reason)


def _of_each_model(name: str, lacks: str, has: Callable[[MetricInputs, RunRecords], bool]) -> Requirement:
    """Return what the baseline, and the variant where there is one, must have."""

    def missing(inputs: MetricInputs) -> str | None:
        for who, run in (("baseline", inputs.baseline), ("variant", inputs.variant)):
            if run is not None and not has(inputs, run):
                return f"the {who} {lacks}"
        return None

    return Requirement(name, missing)


def _records(kind: str) -> Requirement:
    return _of_each_model(kind, f"has no {kind} records", lambda _, run: bool(len(getattr(run, kind) or ())))


def _distances(kind: str) -> Requirement:
    def missing(inputs: MetricInputs) -> str | None:
        if inputs.variant is None:
            return "no variant"
        return None if len(getattr(inputs.variant, kind) or ()) else f"the variant run has no {kind} records"

    return Requirement(kind, missing)


def family(name: str) -> Requirement:
    """Return the requirement of an item of a family."""
    return _given(
        f"family:{name}",
        f"no item of the family {name}",
        lambda inputs: ITEMS.missing(inputs) is None and bool((inputs.view.family == name).any()),
    )


def package(name: str) -> Requirement:
    """Return the requirement of an installed package."""
    return _given(f"package:{name}", f"the package {name} is not installed", lambda _: find_spec(name) is not None)


def rated_by(judge: str) -> Requirement:
    """Return the requirement of one judge's ratings of the same models."""
    of_judge = _of_each_model(
        f"judgments:{judge}",
        f"has no judgments records of {judge}",
        lambda _, run: any(is_of(judge, task) for task in _judge_tasks(run)),
    )
    return Requirement(of_judge.name, lambda inputs: _JUDGMENTS.missing(inputs) or of_judge.missing(inputs))


def _judge_tasks(run: RunRecords) -> set[str]:
    return set() if run.judgments is None else set(run.judgments.table.column("task").to_pylist())


def _no_predictions(inputs: MetricInputs) -> str | None:
    return "the baseline has no items records" if ITEMS.missing(inputs) else _ANSWERS.missing(inputs)


def _is_shuffled(inputs: MetricInputs, run: RunRecords) -> bool:
    scores = inputs.ordinary_scores(run)
    return scores is not None and bool((scores.column("permutation") > 0).any())


def _any_kl_is_positive(inputs: MetricInputs) -> bool:
    distances = inputs.variant.option_distances if inputs.variant is not None else None
    return distances is not None and bool((distances.column("kl") > 0).any())


def _an_answer_was_graded_twice(inputs: MetricInputs) -> bool:
    judgments = inputs.subject.judgments
    rows = [] if judgments is None else judgments.table.select(["task", "repeat"]).to_pylist()
    return any(is_of("mt_bench", row["task"]) and row["repeat"] > 0 for row in rows)


def _a_pair_was_decided(inputs: MetricInputs) -> bool:
    judgments = inputs.variant.judgments if inputs.variant is not None else None
    rows = [] if judgments is None else judgments.table.select(["task", "item_id", "turn", "score"]).to_pylist()
    read = Counter(
        (r["task"], r["item_id"], r["turn"]) for r in rows if is_of("pairwise", r["task"]) and r["score"] is not None
    )
    return any(n > 1 for n in read.values())


ITEMS = _given("items", "the baseline has no items", lambda inputs: bool(len(inputs.baseline.items or ())))
CALLS_TOOLS = _given(
    "calls_tools",
    "no item has tools (tasks=tools)",
    lambda inputs: ITEMS.missing(inputs) is None and bool(inputs.view.families(lambda family: family.calls)),
)
VARIANT = _given("variant", "no variant to compare", lambda inputs: inputs.variant is not None)
NOISE = _given("noise", "no second run of the baseline", lambda inputs: inputs.noise is not None)
ASKED_AGAIN = _given(
    "asked_again", "no server was asked for the variant twice", lambda inputs: inputs.asked_again is not None
)
ENGINE = _given("engine", "transformers itself ran both models", lambda inputs: inputs.engine is not None)
EMBEDDINGS = _given("embeddings", "no answer embeddings", lambda inputs: inputs.embeddings is not None)
SAMPLES = _given("samples", "no sampled answers", lambda inputs: inputs.samples is not None)
BERTSCORE_MODEL = _given(
    "bertscore_model", "no bertscore_model was given", lambda inputs: bool(inputs.settings.bertscore_model)
)
TRACES = _given(
    "traces",
    "the baseline wrote no text of its own (tasks=traces)",
    lambda inputs: bool(len(inputs.baseline.traces or ())),
)

# The model that a run is about. Beside a served one, a baseline that is not served is not timed.
TIMINGS = _given("timings", "nothing was timed", lambda inputs: bool(len(inputs.subject.timings or ())))
POSITIVE_KL = _given("positive_kl", "the KL of every item is 0: no item holds a share of it", _any_kl_is_positive)
JUDGE_REPEATS = _given("judge_repeats", "no answer was graded more than once", _an_answer_was_graded_twice)
SEVERAL_JUDGES = _given(
    "several_judges",
    "fewer than two judge models graded the answers",
    lambda inputs: sum(task.startswith("mt_bench/") for task in _judge_tasks(inputs.subject)) > 1,
)
COMPARISONS = _given(
    "comparisons",
    "the answers were not compared in pairs (judges=pairwise)",
    lambda inputs: inputs.variant is not None and any(is_of("pairwise", task) for task in _judge_tasks(inputs.variant)),
)
DECIDED = _given("decided", "no comparison has a verdict that can be read in both orders", _a_pair_was_decided)

OPTION_SCORES, TOKEN_SCORES = _records("option_scores"), _records("token_scores")
_JUDGMENTS, GENERATIONS, SERVING_MEMORY = _records("judgments"), _records("generations"), _records("serving_memory")
GREEDY_ANSWERS, GREEDY_SCORES = _records("greedy_answers"), _records("greedy_scores")
GREEDY_DISTANCES = _distances("greedy_distances")
CHAINS, CHAIN_SCORES, CHAIN_DISTANCES = _records("chains"), _records("chain_scores"), _distances("chain_distances")
OPTION_DISTANCES, TOKEN_DISTANCES = _distances("option_distances"), _distances("token_distances")
OPTION_BOUNDS = _distances("option_bounds")  # From lists of most probable tokens
_ANSWERS = _of_each_model(
    "answers",
    "has neither option scores nor generations",
    lambda _, run: run.has_answers,
)
PREDICTIONS = Requirement("predictions", _no_predictions)
SHUFFLES = _of_each_model("shuffles", "was not scored under shuffled answer orders", _is_shuffled)
# Option distances, where any item has options to score
ITEM_DISTANCES = Requirement(
    "item_distances",
    lambda inputs: OPTION_DISTANCES.missing(inputs) if (inputs.view.n_options > 0).any() else None,
)

OF_ITEMS = frozenset({ITEMS, PREDICTIONS, OPTION_SCORES, OPTION_DISTANCES, OPTION_BOUNDS, GENERATIONS, ITEM_DISTANCES})
"""What metrics of items require. One that does not weight is left out where items were drawn: see `Metric.weighted`."""
