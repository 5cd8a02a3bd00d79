"""What a reader of the scoreboard must know before a decision."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mlflow_compress.decide.gates import KL
from mlflow_compress.decide.scoreboard.scored_variant import ScoredVariant
from mlflow_compress.decide.scoreboard.separation import Separation
from mlflow_compress.metrics.kl_tail import TOP_ITEM, TRUSTED_ITEMS, TRUSTED_TOP_PCT

Kind = Literal[
    "failed", "unsupported", "unlike_answers", "few_items", "one_item", "fewer_bits_beat_more", "not_told_apart"
]


@dataclass(frozen=True, kw_only=True)
class ScoreWarning:
    """One warning: its kind, a sentence, and the variants that it is about."""

    kind: Kind
    text: str
    variants: tuple[str, ...]


def score_warnings(
    variants: Sequence[ScoredVariant],
    separations: Sequence[Separation],
    groups: Mapping[str, Sequence[Sequence[str]]],
) -> tuple[ScoreWarning, ...]:
    """Return every warning.

    Variants without results, answers that are not compared, few items, fewer bits that beat more, groups of equals.
    """
    return (
        *_without_results(variants),
        *(
            ScoreWarning(kind="unlike_answers", text=f"{v.name}: {v.left_out}", variants=(v.name,))
            for v in variants
            if v.left_out
        ),
        *_few_items(variants),
        *_one_item(variants),
        *_fewer_bits(variants, separations),
        *_not_told_apart(groups),
    )


def _without_results(variants: Sequence[ScoredVariant]) -> list[ScoreWarning]:
    verbs = {"failed": "failed", "unsupported": "was not started"}
    return [
        ScoreWarning(
            kind="failed" if v.status == "failed" else "unsupported",
            text=f"{v.name} {verbs[v.status]}: {v.reason.removesuffix('.')}",
            variants=(v.name,),
        )
        for v in variants
        if v.status != "finished"
    ] + [
        ScoreWarning(kind="failed", text=f"{v.name} is not complete: {v.reason.removesuffix('.')}", variants=(v.name,))
        for v in variants
        if v.status == "finished" and v.reason
    ]


def _few_items(variants: Sequence[ScoredVariant]) -> list[ScoreWarning]:
    few = {v.name: len(v.items.task) for v in variants if v.items is not None and len(v.items.task) < TRUSTED_ITEMS}
    if not few:
        return []
    n = min(few.values())
    text = f"{n:,} {'item is' if n == 1 else 'items are'} too few for a decision: with fewer than {TRUSTED_ITEMS}, "
    text += "intervals of the KL can be too narrow"
    return [ScoreWarning(kind="few_items", text=text, variants=tuple(few))]


def _one_item(variants: Sequence[ScoredVariant]) -> list[ScoreWarning]:
    """Return a warning where one item holds so much of a mean KL that its interval cannot be trusted."""
    held = {v.name: v.results[TOP_ITEM.name].value for v in variants if TOP_ITEM.name in v.results}
    found = {name: share for name, share in held.items() if share >= TRUSTED_TOP_PCT}
    if not found:
        return []
    text = f"one item holds up to {max(found.values()):.0f} % of the mean KL of {_and(tuple(found))}: "
    text += "its interval can be too narrow"
    return [ScoreWarning(kind="one_item", text=text, variants=tuple(found))]


def _fewer_bits(variants: Sequence[ScoredVariant], separations: Sequence[Separation]) -> list[ScoreWarning]:
    apart = {frozenset((s.first, s.second)): s.kl is not None and s.kl.significant for s in separations}
    measured = [v for v in variants if v.bits is not None and KL in v.results]
    found = []
    for one, other in itertools.combinations(measured, 2):
        fewer, more = sorted((one, other), key=lambda v: v.bits or 0.0)
        if fewer.method != more.method or fewer.bits == more.bits:
            continue
        low, high = fewer.results[KL].value, more.results[KL].value
        if low < high:
            sure = "" if apart.get(frozenset((fewer.name, more.name))) else ", which is within the noise"
            text = f"{fewer.name} has fewer bits than {more.name} and a smaller KL ({low:.3g} < {high:.3g}){sure}"
            found.append(ScoreWarning(kind="fewer_bits_beat_more", text=text, variants=(fewer.name, more.name)))
    return found


def _not_told_apart(groups: Mapping[str, Sequence[Sequence[str]]]) -> list[ScoreWarning]:
    return [
        ScoreWarning(
            kind="not_told_apart", text=f"{_and(group)} cannot be told apart by their KL", variants=tuple(group)
        )
        for group in groups.get(KL, ())
    ]


def _and(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
