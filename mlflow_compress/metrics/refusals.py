"""Refusals: answers that begin with a refusal, by open rules, and the questions where the two models differ in it."""

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml  # type: ignore[import-untyped]

from mlflow_compress.metrics.core.estimates import Estimate, Estimates, PairedDifference, Proportion, of_subset, pooled
from mlflow_compress.metrics.core.language import is_in_none_of, script
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import MetricKey, keys_of, metric
from mlflow_compress.metrics.core.requirements import GENERATIONS, SAMPLES, VARIANT
from mlflow_compress.metrics.stats.arrays import Bool
from mlflow_compress.metrics.text import answer_pairs
from mlflow_compress.reasoning import without_reasoning
from mlflow_compress.records import MetricResult

PHRASES = Path(__file__).with_name("refusal_phrases.yaml")
"""With which words a refusal begins, in twelve languages; the file says how it is read."""

_SCRIPTS = ("LATIN", "CYRILLIC", "ARABIC", "DEVANAGARI", "HANGUL", "CJK")  # of the languages of `PHRASES`
_READ = 200  # characters of an answer that can hold the longest rule
_UNWRITTEN = {ord(mark): None for mark in "\u064b\u064c\u064d\u064e\u064f\u0650\u0651\u0652\u0640"}
"""Vowel signs and the stretched line of Arabic, which most texts leave out."""


def refuses(answer: str) -> bool:
    """Return whether an answer, without its reasoning, begins with one of the `PHRASES`, in any of its languages."""
    text = _plain(without_reasoning(answer).strip()[:_READ])
    spaced, unspaced = _patterns()
    return spaced.match(text) is not None or unspaced.match(text.replace(" ", "")) is not None


def _plain(text: str) -> str:
    """Return the words of a text, in lower case, with a space between them."""
    text = unicodedata.normalize("NFKC", text).lower().replace("\u2019", "'").translate(_UNWRITTEN)
    letters = (c if c.isalnum() or c == "'" or unicodedata.category(c)[0] == "M" else " " for c in text)
    words = (word.strip("'") for word in "".join(letters).replace(" d'", " de ").split())  # as before a consonant
    return " ".join(filter(None, words))


@cache
def _phrases() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(PHRASES.read_text(encoding="utf-8"))
    return read


@cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return what matches a refusal in a language with spaces between its words, and in one without."""
    patterns: dict[bool, list[str]] = {True: [], False: []}
    for phrases in _phrases().values():
        spaced = phrases.get("spaced", True)
        words = {name: map(_plain, listed.split(", ")) for name, listed in phrases["words"].items()}
        alternatives = {name: f"(?:{'|'.join(listed)})" for name, listed in words.items()}
        gap = (" … ", "(?: [^ ]+){0,6} ") if spaced else ("…", ".{0,20}?")
        rules = "|".join(rule.format(**alternatives).replace(*gap) for rule in phrases["rules"])
        after = "|".join(phrases.get("not_before", "").split(", "))
        end = ("(?= |$)" if spaced else "") + (rf"(?! (?:{after})(?: |$))" if after else "")
        patterns[spaced].append(f"(?:{rules}){end}")
    return re.compile("|".join(patterns[True])), re.compile("|".join(patterns[False]))


def _read(answers: Iterable[str]) -> tuple[Bool, Bool]:
    """Return which answers refuse, and which are surely in a language without rules."""
    texts = list(answers)
    refused = np.array([refuses(text) for text in texts], dtype=np.bool_)
    foreign = [script(text) not in (None, *_SCRIPTS) or is_in_none_of(text, _phrases()) for text in texts]
    return refused, ~refused & np.array(foreign, dtype=np.bool_)


_percent = keys_of("judge", unit="percent", high=100.0, counted="instructions")
_REFUSALS = _percent(
    "refusals_pct",
    "neither",
    "Instructions of which the variant refuses a turn, by the rules of the page on generated answers.",
    label="Instructions refused",
    headline=150,
    difference="judge/refusals_delta_pct",
    unscored="an answer of either model is in a language that has no rules",
)
REFUSALS_BASELINE = _percent("refusals_pct_baseline", "neither", "The baseline's share.")
_DELTA = _percent("refusals_delta_pct", "neither", "Variant minus baseline; Tango's paired score interval.", low=-100.0)
REFUSAL_FLIPS = _percent(
    "refusal_flips_pct",
    "lower",
    "Instructions that one model refuses and the other does not.",
    label="Refusals flipped",
    headline=151,
)
_BEGUN = _percent("refusals_begun_pct", "lower", "Instructions that only the variant refuses.")
_ENDED = _percent("refusals_ended_pct", "lower", "Instructions that only the baseline refuses.")
_P_VALUE = MetricKey.probability(
    "judge/refusals_mcnemar_p",
    "neither",
    "McNemar's mid-p value of the instructions that only one model refuses.",
    counted="instructions",
    unchanged=1.0,
)

_SAMPLED = _percent(
    "sampled_refusals_pct", "neither", "Sampled answers in which the variant refuses.", counted="answers"
)
_SAMPLED_DELTA = _percent(
    "sampled_refusals_delta_pct",
    "neither",
    "Variant minus baseline; Tango's paired score interval, over instructions.",
    low=-100.0,
    counted="answers",
    noticed="refusals",
)
_SAMPLED_FLOOR = _percent(
    "sampled_refusals_floor_pct",
    "neither",
    "The baseline's second sample minus its first: the value of an identical model.",
    low=-100.0,
    counted="answers",
)
_MIXED = _percent(
    "mixed_refusals_pct", "lower", "Instructions that the variant refuses in some of its samples, but not in all."
)
_MIXED_BASELINE = _percent("mixed_refusals_pct_baseline", "neither", "The baseline's share.")


@metric(
    "refusals",
    keys=(_REFUSALS, REFUSALS_BASELINE, _DELTA, REFUSAL_FLIPS, _BEGUN, _ENDED, _P_VALUE),
    requires=(VARIANT, GENERATIONS),
    source="Matching phrases, as arXiv 2307.15043 (GCG) does with its list. Deviations: the list is our own; a phrase "
    "counts only at the beginning of an answer, and none that ordinary answers begin with is in it",
)
def refusals(inputs: MetricInputs) -> list[MetricResult]:
    """By task and pooled, with intervals of shares, Tango's for the difference.

    An instruction counts as refused if one of its answers refuses. Its turns and samples are not independent of each
    other, as these intervals and McNemar's test need it; instructions are. An instruction is unscored if an answer of
    either model is surely in a language without rules.
    """
    pairs = answer_pairs(inputs)
    if pairs is None:
        return []
    (ours, ours_unread), (theirs, theirs_unread) = _read(pairs.references), _read(pairs.texts)
    unread = ours_unread | theirs_unread

    def by_instruction(answers: Bool, rows: Any) -> Bool:
        _, number = np.unique(pairs.instruction[rows], return_inverse=True)
        return np.bincount(number, weights=answers[rows]) > 0

    results = []
    for subset in pairs.subsets():
        scored = ~by_instruction(unread, subset.rows)
        if not scored.any():
            continue
        before, after = (by_instruction(refused, subset.rows)[scored] for refused in (ours, theirs))
        difference = PairedDifference.of(before, after)
        estimates: Estimates = {
            _REFUSALS: Proportion.of(after),
            REFUSALS_BASELINE: Proportion.of(before),
            _DELTA: difference,
            REFUSAL_FLIPS: Proportion.of(before != after),
            _BEGUN: Proportion.of(after & ~before),
            _ENDED: Proportion.of(before & ~after),
            _P_VALUE: replace(difference.p_value, n_unscored=0),
        }
        results += of_subset(inputs, subset, estimates, n_unscored=int((~scored).sum()))
    return results


@metric(
    "sampled_refusals",
    keys=(_SAMPLED, _SAMPLED_DELTA, _SAMPLED_FLOOR, _MIXED, _MIXED_BASELINE),
    requires=(VARIANT, SAMPLES),
    source="ours; the rules of `refusals`",
)
def sampled_refusals(inputs: MetricInputs) -> list[MetricResult]:
    """Over the sampled answers of all instructions: one answer a model would hide that it refuses now and then.

    Intervals are over instructions, whose samples stay together. An instruction is left out, and counted as unscored,
    if a sample of either model is surely in a language without rules.
    """
    samples = inputs.samples
    assert samples is not None  # `requires` has been checked
    ours, unread = _read(samples.baseline.column("text"))
    theirs, theirs_unread = _read(samples.variant.column("text"))
    unread = unread | theirs_unread
    if samples.baseline_again is not None:
        again, again_unread = _read(samples.baseline_again.column("text"))
        unread = unread | again_unread
    left_out = np.bincount(samples.instruction, weights=unread) > 0
    scored = ~left_out[samples.instruction]
    if not scored.any():
        return []
    _, groups = np.unique(samples.instruction[scored], return_inverse=True)
    n_answers, n_unscored = np.bincount(groups), int(left_out.sum())

    def mixed(answers: Bool) -> Proportion:
        refused = np.bincount(groups, weights=answers[scored])
        return Proportion(int(((refused > 0) & (refused < n_answers)).sum()), len(n_answers), n_unscored)

    estimates: dict[MetricKey, Estimate] = {
        _SAMPLED: Proportion.of(theirs[scored], groups),
        _SAMPLED_DELTA: PairedDifference.of(ours[scored], theirs[scored], groups),
        _MIXED: mixed(theirs),
        _MIXED_BASELINE: mixed(ours),
    }
    if samples.baseline_again is not None:
        estimates[_SAMPLED_FLOOR] = PairedDifference.of(ours[scored], again[scored], groups)
    return pooled(inputs, estimates)
