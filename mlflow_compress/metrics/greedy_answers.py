"""Where the greedy answers of two models part, and what both make of the baseline's answer.

The names are those of the divergent token metrics: Deiseroth et al., "Divergent Token Metrics: Measuring degradation to
prune away LLM components - and optimize quantization", arXiv 2311.01544.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.metrics.core import requirements
from mlflow_compress.metrics.core.estimates import Estimates, Number, Proportion, Ratio, by_subset, pooled
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import MetricKey, keys_of, metric
from mlflow_compress.metrics.core.token_groups import check_same_targets, matched, token_groups
from mlflow_compress.metrics.stats.arrays import Bool, Float, Int, finite
from mlflow_compress.metrics.stats.intervals import group_sums, share_interval
from mlflow_compress.records import MetricResult, TokenAnswers, TokenScores, align

_REQUIRES = (
    requirements.VARIANT,
    requirements.GREEDY_ANSWERS,
    requirements.GREEDY_SCORES,
    requirements.GREEDY_DISTANCES,
)
_SOURCE = "Divergent Token Metrics, arXiv 2311.01544"


def first_difference(ours: Sequence[object], theirs: Sequence[object]) -> int | None:
    """Return the index of the first token (or character) that differs, or that only one has; None of equal ones."""
    if ours == theirs:
        return None
    both = zip(ours, theirs, strict=False)
    return next((index for index, (a, b) in enumerate(both) if a != b), min(len(ours), len(theirs)))


@dataclass(frozen=True)
class Forks:
    """Where the variant's greedy answers leave those of the baseline; every array has shape (n_answers,)."""

    time: Int  # Number of the first token that differs, counted from 1. Of equal answers, the number of their tokens
    differs: Bool  # Whether the two answers differ


def forks(inputs: MetricInputs) -> Forks:
    """Return where the answers part, in the baseline's order; other instructions or prompts are an `AlignmentError`."""
    assert inputs.baseline.greedy_answers is not None and inputs.variant is not None  # `requires` has been checked
    assert inputs.variant.greedy_answers is not None
    ours, theirs = inputs.baseline.greedy_answers, inputs.variant.greedy_answers
    theirs = type(theirs)(theirs.table.take(pa.array(align(ours, theirs))))
    prompts = zip(ours.table.column("prompt_tokens"), theirs.table.column("prompt_tokens"), strict=True)
    for row, (prompt, other) in enumerate(prompts):
        if prompt != other:
            raise AlignmentError(
                "Baseline and variant answered different prompts",
                got=str(ours.key_rows()[row]),
                fix="Generate both with the same instructions and prompt format",
            )
    tokens = [answers.table.column("tokens").to_pylist() for answers in (ours, theirs)]
    first = [first_difference(a, b) for a, b in zip(*tokens, strict=True)]
    time = [len(a) if fork is None else fork + 1 for a, fork in zip(tokens[0], first, strict=True)]
    return Forks(np.array(time, dtype=np.int64), np.array([fork is not None for fork in first], dtype=bool))


@dataclass(frozen=True)
class AnswerPlaces:
    """Which answer each scored token belongs to, and where it is in it; every array has shape (n_tokens,)."""

    answer: Int  # Row of the answer in the records of answers
    index: Int  # Place in the answer, from 0


def answer_places(answers: TokenAnswers, scores: TokenScores) -> AnswerPlaces:
    """Return the place of each scored token in its answer; scores that are not of every token are a `DataError`."""
    token_groups(scores)  # refuses repeated tokens
    row_of = {window: row for row, window in enumerate(answers.windows())}
    windows = scores.column("item_id")
    if missing := sorted(set(windows) ^ set(row_of)):
        raise DataError("Answers and their scores do not belong together", got=missing[:3])
    answer = np.array([row_of[window] for window in windows], dtype=np.int64)
    n_prompt, n_tokens = (
        np.array([len(row) for row in answers.table.column(name).to_pylist()], dtype=np.int64)
        for name in ("prompt_tokens", "tokens")
    )
    index = scores.column("position").astype(np.int64) - n_prompt[answer]
    if (index < 0).any() or (np.bincount(answer, minlength=len(n_tokens)) != n_tokens).any():
        raise DataError("The scores are not those of every token of the answers")
    return AnswerPlaces(answer, index)


@dataclass(frozen=True)
class _ForcedTokens:
    """Both models on every token of the baseline's greedy answers; every array has shape (n_tokens,)."""

    places: AnswerPlaces
    kl: Float  # ``KL(P_b || P_q)`` in nats
    divergent: Bool  # Whether the variant's most probable token, or the baseline's own, is not the token of the answer
    divergent_baseline: Bool


def forced_tokens(inputs: MetricInputs) -> _ForcedTokens:
    """Return what both models make of the baseline's greedy answers under teacher forcing."""
    run, variant = inputs.baseline, inputs.variant
    assert run.greedy_answers is not None and run.greedy_scores is not None  # `requires` has been checked
    assert variant is not None and variant.greedy_scores is not None and variant.greedy_distances is not None
    ours = run.greedy_scores
    check_same_targets(ours, variant.greedy_scores)
    target = ours.column("target")
    return _ForcedTokens(
        answer_places(run.greedy_answers, ours),
        finite("the KL of greedy answers", matched(ours, variant.greedy_distances, "kl")),
        matched(ours, variant.greedy_scores, "argmax") != target,
        ours.column("argmax") != target,
    )


@dataclass(frozen=True)
class Survival:
    """The share of answers that are still the same; it falls at each of `times`. Every array has shape (n_times,)."""

    times: Int  # The distinct numbers of the token at which answers part, in ascending order
    share: Float  # Share of the answers that are the same up to this token and with it
    low: Float  # Its interval, that of a share
    high: Float

    @property
    def median(self) -> float | None:
        """The first token up to which at least half of the answers have parted; None where fewer ever do."""
        return self._first(self.share)

    @property
    def median_interval(self) -> tuple[float | None, float | None]:
        """The tokens at which the interval of the share contains a half; an end that no token reaches is None.

        Source: Brookmeyer and Crowley, "A confidence interval for the median survival time", Biometrics 1982.
        """
        return self._first(self.low), self._first(self.high)

    def _first(self, curve: Float) -> float | None:
        below = np.flatnonzero(curve <= 0.5)
        return float(self.times[below[0]]) if len(below) else None


def still_equal(answers: Forks, *, level: float = 0.95) -> Survival:
    """Return the share of the n answers that have not parted at token t: ``1 - #(parted at t or before)/n``.

    Answers that end equal never part: they count as the same at every t. So do those that are cut at the token limit,
    behind which nothing is asked. Nothing is censored, so that the curve is a share, with `share_interval`.
    """
    n = len(answers.time)
    times, parted = np.unique(answers.time[answers.differs], return_counts=True)
    same = n - np.cumsum(parted)
    ends = np.array([share_interval(int(k), n, level=level) for k in same], dtype=np.float64).reshape(-1, 2)
    return Survival(times, same / n, ends[:, 0], ends[:, 1])


_FDT = MetricKey(
    name="judge/first_divergent_token",
    direction="higher",
    low=1.0,
    unit="tokens",
    meaning="Median number of the first token that differs between both models' greedy answers (FDT).",
    label="First divergent token",
    headline=161,
    unchanged=np.inf,
    counted="answers",
)


@metric(
    "first_divergent_token",
    keys=(_FDT,),
    requires=(requirements.VARIANT, requirements.GREEDY_ANSWERS),
    source=f"{_SOURCE}; here tokens are counted from 1, both models decode freely, and answers that are "
    "equal to their end never part",
)
def first_divergent_token(inputs: MetricInputs) -> list[MetricResult]:
    """``FDT = min {t : G_b(t) != G_q(t)}`` for the greedy answers G of both models to one prompt; its median.

    The end token counts: an answer that ends where the other goes on differs there. There is no result where so few
    answers differ that fewer than half ever part, and no upper end where the interval of that share holds a half.
    """
    forked = forks(inputs)
    curve = still_equal(forked, level=inputs.settings.level)
    if curve.median is None:
        return []
    low, high = curve.median_interval
    return [replace(r, low=low, high=high) for r in pooled(inputs, {_FDT: Number(curve.median, len(forked.time))})]


_IDENTICAL = MetricKey.percent(
    "judge/identical_answers_pct",
    "higher",
    "Greedy answers of the variant that equal the baseline's, token for token to the end.",
    label="Same greedy answer",
    headline=160,
    unchanged=100.0,
    counted="answers",
)


@metric(
    "identical_answers",
    keys=(_IDENTICAL,),
    requires=(requirements.VARIANT, requirements.GREEDY_ANSWERS),
    source="ours; the answers without a first divergent token (arXiv 2311.01544)",
)
def identical_answers(inputs: MetricInputs) -> list[MetricResult]:
    """``100 #(equal answers)/n``, a share; two answers that are cut at the token limit are equal up to there."""
    forked = forks(inputs)
    return pooled(inputs, {_IDENTICAL: Proportion(int((~forked.differs).sum()), len(forked.time))})


_FLOOR = MetricKey.percent(
    "judge/share_of_divergent_tokens_floor_pct",
    "neither",
    "The same share for the baseline on its own answers: near ties that rounding decides.",
    counted="tokens",
)
_SDT = MetricKey.percent(
    "judge/share_of_divergent_tokens_pct",
    "lower",
    "Tokens of the baseline's greedy answers that are not the variant's most probable ones (SDT, teacher forcing).",
    label="Divergent tokens",
    headline=162,
    floor=_FLOOR.name,
    counted="tokens",
)


@metric(
    "share_of_divergent_tokens",
    keys=(_SDT, _FLOOR),
    requires=_REQUIRES,
    source=f"{_SOURCE}; under teacher forcing on the baseline's answer",
)
def share_of_divergent_tokens(inputs: MetricInputs) -> list[MetricResult]:
    """``SDT = 100 #{t : argmax q(. | prompt, x_<t) != x_t} / T`` on the baseline's greedy answers x, T tokens in all.

    One forward pass and no decoding. The first such token of an answer is its first divergent token, up to rounding.
    The interval is the studentised bootstrap's over answers.
    """
    forced = forced_tokens(inputs)
    columns = {_SDT: forced.divergent, _FLOOR: forced.divergent_baseline}
    return pooled(
        inputs,
        {key: Ratio(*group_sums(100.0 * of_key, forced.places.answer)) for key, of_key in columns.items()},
    )


_kl_key = keys_of("judge", unit="nats", counted="tokens")
_ALL = _kl_key(
    "kl_greedy",
    "lower",
    "Mean KL(baseline || variant) per token of the baseline's greedy answers, over the whole vocabulary.",
)
BEFORE = _kl_key(
    "kl_to_fork",
    "lower",
    "Mean KL per token of the baseline's greedy answers, up to and including the first divergent token.",
)
_BEHIND = _kl_key(
    "kl_behind_fork", "lower", "Mean KL per token of the baseline's greedy answers, after the first divergent token."
)


@metric(
    "kl_at_fork",
    keys=(_ALL, BEFORE, _BEHIND),
    requires=_REQUIRES,
    source="ours; the divergence of eq. 1 of Accuracy is Not All You Need, on the text of arXiv 2311.01544",
)
def kl_at_fork(inputs: MetricInputs) -> list[MetricResult]:
    """Means over tokens under teacher forcing; the studentised bootstrap draws answers.

    The token at which the answers part counts to the part before: there both models still read the same text that both
    would have written. Equal answers are wholly before. Behind the fork the variant reads a text that it would not have
    written. There is no result for a part without tokens.
    """
    forced = forced_tokens(inputs)
    before = forced.places.index < forks(inputs).time[forced.places.answer]
    parts = {_ALL: np.ones(len(before), dtype=bool), BEFORE: before, _BEHIND: ~before}
    return pooled(
        inputs,
        {
            key: Ratio(*group_sums(forced.kl[part], forced.places.answer[part]))
            for key, part in parts.items()
            if part.any()
        },
    )


_PARTED = MetricKey.percent(
    "distance/logged_parted_pct",
    "lower",
    "Logged answers in which the most probable token differs at least once.",
    label="Logged answers parted",
    headline=28,
    on_main_run=False,
    by_task=True,
    counted="answers",
    on_request=True,
)


@metric(
    "logged_answers",
    keys=(_PARTED,),
    requires=(requirements.ITEMS, requirements.VARIANT, requirements.OPTION_DISTANCES, requirements.family("logged")),
    source="ours; the first divergent token of greedy decoding, on text that was logged",
    weighted=True,
)
def logged_answers(inputs: MetricInputs) -> list[MetricResult]:
    """Share of the logged answers that greedy decoding of both models, forced along them, does not follow alike."""
    same = inputs.distance("same_top")

    def parted(rows: Int) -> Estimates:
        return {_PARTED: Proportion.of(same[rows] < 1.0, inputs.units(rows))}

    return by_subset(inputs, parted, scored=same == same, families=("logged",))
