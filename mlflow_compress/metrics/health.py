"""Health of answers: length, cut answers, loops, and other defects that need no judge, paired with the baseline."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mlflow_compress.metrics.core.estimates import Estimate, PairedDifference, Proportion, Resampled, pooled
from mlflow_compress.metrics.core.language import language, script
from mlflow_compress.metrics.core.metric_inputs import AnswerSamples, MetricInputs
from mlflow_compress.metrics.core.metric_registry import MetricKey, keys_of, metric
from mlflow_compress.metrics.core.requirements import SAMPLES, VARIANT
from mlflow_compress.metrics.slices import SlicedDistance, by_slice, slice_key, slicings
from mlflow_compress.metrics.stats.arrays import Bool, Float
from mlflow_compress.metrics.stats.bootstrap import ratio
from mlflow_compress.records import Generations, MetricResult

FEWEST_REPEATS = 3
FEWEST_CHARACTERS = 32
"""A loop is a span that stands at least three times in a row at the end, over 32 characters or more."""


def loop_period(text: str) -> int | None:
    """Return the length of the span that a text repeats until its end, in characters; None where there is none.

    With the text reversed and Z[p] the length of the longest common prefix of it and of its suffix from p on, the last
    ``p + Z[p]`` characters have the period p. The Z-function takes linear time (Gusfield, "Algorithms on Strings, Trees
    and Sequences", 1997, section 1.4). The last repetition may be cut.
    """
    reverse = text.rstrip()[::-1]
    n = len(reverse)
    z = [0] * n
    left = right = 0  # The match that reaches furthest, reverse[left:right] == reverse[:right - left]
    # A longer period has no three repetitions.
    for p in range(1, n // FEWEST_REPEATS + 1):
        length = min(right - p, z[p - left]) if p < right else 0
        while p + length < n and reverse[length] == reverse[p + length]:
            length += 1
        z[p] = length
        if p + length > right:
            left, right = p, p + length
        if p + length >= max(FEWEST_REPEATS * p, FEWEST_CHARACTERS):
            return p
    return None


_FENCE = re.compile(r"^ {0,3}(```+|~~~+)(.*)$", re.MULTILINE)
_ASKS_FOR_JSON = re.compile(r"\b(?:as|in|into|output|produce|return|valid|with)\b[^.?!\n]{0,40}\bJSON\b", re.IGNORECASE)


def _fenced(text: str) -> tuple[list[str], bool]:
    """Return the contents of the fenced blocks of a Markdown text, and whether the last one is left open."""
    blocks, opened, begin = [], "", 0
    for fence in _FENCE.finditer(text):
        mark = fence[1]
        if not opened:
            opened, begin = mark, fence.end()
        elif mark[0] == opened[0] and len(mark) >= len(opened) and not fence[2].strip():
            blocks.append(text[begin : fence.start()])
            opened = ""
    return blocks, bool(opened)


def has_broken_format(question: str, answer: str) -> bool:
    """Return whether an answer leaves a Markdown fence open, or is no valid JSON where the question asks for JSON.

    JSON may stand in fences, or between other words: then it is what goes from the first bracket to the last.
    """
    blocks, is_open = _fenced(answer)
    if is_open or not _ASKS_FOR_JSON.search(question):
        return is_open
    if blocks:
        return not all(map(_is_json, blocks))
    match = re.search(r"[\[{].*[\]}]", answer, re.DOTALL)
    return not (_is_json(answer) or (match is not None and _is_json(match[0])))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


@dataclass(frozen=True)
class SampledAnswer:
    """One sampled answer, and what was asked."""

    question: str  # What the user wrote
    prompt: str  # What the model read
    text: str
    n_tokens: int
    most_tokens: int  # The token limit


def is_unclosed(answer: SampledAnswer) -> bool:
    """Return whether reasoning begins, in the answer or at the end of the prompt, and does not end."""
    begun = answer.prompt.rstrip().endswith("<think>") + answer.text.count("<think>")
    return begun > answer.text.count("</think>")


def _is_in_other_language(answer: SampledAnswer) -> bool:
    for told in (script, language):
        asked, used = told(answer.question), told(answer.text)
        if None not in (asked, used) and asked != used:
            return True
    return False


DEFECTS: dict[str, tuple[str, Callable[[SampledAnswer], bool]]] = {
    "loops": ("that repeat a span until their end", lambda answer: loop_period(answer.text) is not None),
    "empty": ("without any text", lambda answer: not answer.text.strip()),
    "other_language": ("in another script, or surely another language, than the question", _is_in_other_language),
    "unclosed_reasoning": ("whose reasoning (<think>) does not end", is_unclosed),
    "broken_format": (
        "with an open Markdown fence, or invalid JSON where JSON is asked for",
        lambda answer: has_broken_format(answer.question, answer.text),
    ),
}
"""Each kind of defect: what such answers are, and whether one is."""


def defects_of(question: str, answer: str) -> list[str]:
    """Return the kinds of defects that one answer has, as the names in `DEFECTS`."""
    one = SampledAnswer(question, question, answer, 0, 0)
    return [kind for kind, (_, holds) in DEFECTS.items() if holds(one)]


_CUT = ("cut at the token limit", lambda answer: answer.n_tokens >= answer.most_tokens)
_SHARES: dict[str, tuple[str, Callable[[SampledAnswer], bool]]] = {"cut": _CUT, **DEFECTS}

_percent = keys_of("judge", unit="percent", high=100.0, counted="answers")
_length = keys_of("judge", unit="ratio", unchanged=1.0, counted="answers")
_LENGTH_FLOOR = _length(
    "length_ratio_floor",
    "neither",
    "Tokens of the baseline's second sample, relative to its first: the value of an identical model.",
)
_LENGTH = _length(
    "length_ratio",
    "neither",
    "Tokens of the variant's sampled answers, relative to the baseline's.",
    label="Length of answers",
    headline=156,
    on_main_run=False,
    floor=_LENGTH_FLOOR.name,
    noticed="length of answers",
)

_DEFECTS_PCT = _percent(
    "defects_pct",
    "lower",
    "Sampled answers with a defect: a loop, no text, another language, unclosed reasoning, or a broken format.",
    label="Answers with a defect",
    headline=155,
    on_main_run=False,
    difference="judge/defects_delta_pct",
    floor="judge/defects_floor_pct",
)
DEFECTS_BASELINE = _percent("defects_pct_baseline", "neither", "The baseline's share of sampled answers with a defect.")
DEFECTS_DELTA = _percent(
    "defects_delta_pct",
    "lower",
    "Variant minus baseline; Tango's paired score interval.",
    low=-100.0,
    noticed="answers with a defect",
)
_FLOOR = _percent(
    "defects_floor_pct",
    "neither",
    "The baseline's second sample minus its first, as of an identical model.",
    low=-100.0,
)

WORST_SLICE = slice_key(
    "judge/worst_slice_defects_pct",
    "Points by which the variant has more sampled answers with a defect,",
    unit="percent",
    low=-100.0,
    high=100.0,
    counted="answers",
)
KINDS = {
    kind: (
        _percent(f"{kind}_pct", "lower", f"Sampled answers of the variant {what}."),
        _percent(
            f"{kind}_delta_pct",
            "lower",
            f"Answers {what}: variant minus baseline.",
            low=-100.0,
            noticed=f"answers {what}" if kind == "cut" else "",
        ),
    )
    for kind, (what, _) in _SHARES.items()
}


def _found(samples: AnswerSamples, of: Generations) -> tuple[dict[str, Bool], Float]:
    """Return which answers are of each kind, with "defects" for any kind but cut ones, and their numbers of tokens."""
    columns = ("item_id", "prompt", "text", "n_tokens")
    rows = of.table.select(columns).to_pylist()
    answers = [
        SampledAnswer(samples.questions[r["item_id"]], r["prompt"], r["text"], r["n_tokens"], samples.most_tokens)
        for r in rows
    ]
    kinds = {kind: np.array([holds(answer) for answer in answers]) for kind, (_, holds) in _SHARES.items()}
    kinds["defects"] = np.any([kinds[kind] for kind in DEFECTS], axis=0)
    return kinds, np.array([answer.n_tokens for answer in answers], dtype=np.float64)


@metric(
    "health",
    keys=(
        *(_LENGTH, _LENGTH_FLOOR, _DEFECTS_PCT, DEFECTS_BASELINE, DEFECTS_DELTA, _FLOOR, WORST_SLICE),
        *(key for keys in KINDS.values() for key in keys),
    ),
    requires=(VARIANT, SAMPLES),
    source="ours; loops by the Z-function, scripts by the Unicode names of letters, languages by py3langid",
)
def health(inputs: MetricInputs) -> list[MetricResult]:
    """Over the sampled answers of all instructions; every interval is over instructions, whose samples stay together.

    Lengths have the bootstrap's, or, where their ratio never differs (the same answers), that of values up to the token
    limit (`bounded_ratio_interval`).

    The baseline's second sample is drawn as the variant's is. So both floors are what an equal model has. Slices are by
    the category of the instruction, and its script and language.
    """
    samples = inputs.samples
    assert samples is not None  # `requires` has been checked
    groups = samples.instruction
    ours, tokens = _found(samples, samples.baseline)
    theirs, their_tokens = _found(samples, samples.variant)

    def length(of: Float) -> Resampled:
        columns = np.column_stack([of, tokens])
        return Resampled(columns, ratio, groups=groups, most=max(float(samples.most_tokens), columns.max()))

    estimates: dict[MetricKey, Estimate] = {
        _DEFECTS_PCT: Proportion.of(theirs["defects"], groups),
        DEFECTS_BASELINE: Proportion.of(ours["defects"], groups),
        DEFECTS_DELTA: PairedDifference.of(ours["defects"], theirs["defects"], groups),
    }
    for kind, (share, delta) in KINDS.items():
        estimates[share] = Proportion.of(theirs[kind], groups)
        estimates[delta] = PairedDifference.of(ours[kind], theirs[kind], groups)
    if tokens.sum():
        estimates[_LENGTH] = length(their_tokens)
    if samples.baseline_again is not None:
        again, again_tokens = _found(samples, samples.baseline_again)
        estimates[_FLOOR] = PairedDifference.of(ours["defects"], again["defects"], groups)
        if tokens.sum():
            estimates[_LENGTH_FLOOR] = length(again_tokens)
    keys = [(str(task), str(item)) for task, item, *_ in samples.baseline.key_rows()]
    sliced = slicings(
        [task for task, _ in keys],
        [samples.categories.get(item) for _, item in keys],
        [samples.questions[item] for _, item in keys],
    )
    change = SlicedDistance(
        WORST_SLICE,
        theirs["defects"].astype(np.float64) - ours["defects"],
        groups,
        lambda some: PairedDifference.of(ours["defects"][some], theirs["defects"][some], groups[some]),
    )
    return pooled(inputs, estimates) + by_slice(inputs, sliced, [change])
