"""The panel of thoughts: where a variant parts from the baseline's own thoughts, and what was concluded."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow.compute as pc

from mlflow_compress.metrics.stats.arrays import Float, Int
from mlflow_compress.reasoning import agree, answer_span, conclusion_spans, conclusions, parted, read_answer, read_gold
from mlflow_compress.records import Chains, Generations, RunRecords
from mlflow_compress.reporting.tables import LEVELS

MOST_SHOWN = 8
"""Most questions on a page, over all variants."""

_BEFORE, _AFTER, _LAST = 100, 400, 150  # tokens of a long thought: around the place where models part, and at its end
_CHARACTERS = 4  # as many times more characters of a text whose tokens were not kept
_MOST_NAMED = 4  # different answers

Marked = tuple[str, str]
"""A part of a text and how it looks: "h3" (third shade), "parts", "concluded right", "concluded wrong", "left-out"."""


@dataclass(frozen=True, kw_only=True)
class PartedThought:
    """One question of which much of the probability of being right moved, as both models thought about it."""

    variant: str
    where: str  # Task and item
    question: str
    gold: str
    right: tuple[str, str]  # How many drawn answers of the baseline, and of the variant, are right
    lost: bool  # Fewer of the variant
    answers: tuple[str, str]  # What the drawn answers of both models are
    parts: str  # Where in the baseline's thought the variant would first write something else
    baseline: Sequence[Marked]  # The baseline's thought and answer, shaded by the KL, with what they conclude
    drawn: str  # Which of the variant's drawn answers is shown
    variant_text: Sequence[Marked]  # It, with what it concludes


def parted_thoughts(
    name: str, problems: Sequence[Mapping[str, Any]], baseline: RunRecords, variant: RunRecords, *, most: int
) -> list[PartedThought]:
    """Return the questions of which most probability moved, at most `most`, of those with a chain of the baseline.

    `problems` are the rows of `metrics.thinking.questions_table`. A variant that did not read chains has none.
    """
    chains, distances, scores = baseline.chains, variant.chain_distances, variant.chain_scores
    if chains is None or distances is None or scores is None or baseline.items is None:
        return []
    rules = baseline.items.table.select(["task", "item_id", "rule"]).to_pylist()
    rule_of = {(row["task"], row["item_id"]): row["rule"] for row in rules}
    place = {(task, item): number for number, (task, item, _) in enumerate(chains.key_rows())}
    moved = [
        (abs(row["right_variant"] / row["read_variant"] - row["right_baseline"] / row["read_baseline"]), row)
        for row in problems
        if (row["task"], row["item_id"]) in place and row["read_baseline"] and row["read_variant"]
    ]
    largest = [row for by, row in sorted(moved, key=lambda one: -one[0])[:most] if by > 0.0]

    shown = []
    for row in largest:
        key = row["task"], row["item_id"]
        [chain], rule = chains.table.slice(place[key], 1).to_pylist(), rule_of[key]
        window = {"task": row["task"], "item_id": f"{row['item_id']}/{chain['sample']}"}
        read, would = distances.where(**window), scores.where(**window)
        order = np.argsort(read.column("position"))
        away = np.flatnonzero(~read.column("same_top").astype(bool)[order])
        first = int(away[0]) if len(away) else None
        parts = "the variant would write the same"
        if first is not None:
            token = would.column("argmax")[np.argsort(would.column("position"))][first]
            parts = f"the variant diverges at token {first + 1:,} of {len(order):,}{_instead(chains, int(token))}"

        gold = read_gold(row["answer"], rule)
        theirs = _drawn(variant.generations, row)
        ours = _drawn(baseline.generations, row)[: len(theirs)]
        lost = row["right_variant"] / row["read_variant"] < row["right_baseline"] / row["read_baseline"]
        drawn, text = _telling(theirs, gold, rule, lost=lost)
        shown.append(
            PartedThought(
                variant=name,
                where=f"{row['task']} · {row['item_id']}",
                question=row["question"],
                gold=row["answer"],
                right=(_of(row, "baseline"), _of(row, "variant")),
                lost=lost,
                answers=(_named(ours, rule), _named(theirs, rule)),
                parts=parts,
                baseline=_chain(chain, read.column("kl")[order], first, gold, rule),
                drawn=drawn,
                variant_text=text,
            )
        )
    return shown


def _of(row: Mapping[str, Any], who: str) -> str:
    return f"{row[f'right_{who}']} of {row[f'read_{who}']}"


def _instead(chains: Chains, token: int) -> str:
    """Return what a token reads like, where the baseline has written it somewhere; the page has no tokenizer."""
    written, pieces = (pc.list_flatten(chains.table.column(name)) for name in ("tokens", "pieces"))
    known = [piece for piece in pc.unique(pieces.filter(pc.equal(written, token))).to_pylist() if piece]
    return f", where it would write {known[0]!r}" if known else ""


def _drawn(generations: Generations | None, row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return prompt and text of each drawn answer to a question."""
    assert generations is not None  # its answers have been counted
    rows = generations.where(task=row["task"], item_id=row["item_id"], turn=0).table.to_pylist()
    return [(one["prompt"], one["text"]) for one in sorted(rows, key=lambda one: one["sample"]) if one["sample"] > 0]


def _named(replies: Sequence[tuple[str, str]], rule: str) -> str:
    """Return the different answers, the most frequent first, as in "102 (6), 101, none"."""
    answers = Counter(read_answer(answer, rule) if (answer := parted(*reply)[1]) else None for reply in replies)
    named = [f"{answer or 'none'}{f' ({n})' if n > 1 else ''}" for answer, n in answers.most_common(_MOST_NAMED)]
    return ", ".join([*named, *(["others"] if len(answers) > _MOST_NAMED else [])])


def _telling(
    replies: Sequence[tuple[str, str]], gold: str | None, rule: str, *, lost: bool
) -> tuple[str, Sequence[Marked]]:
    """Return which drawn answer is shown, and its text: a wrong one, if possible with the right answer in its thought.

    Of a question that is more often right it is a right one.
    """
    found = []
    for number, reply in enumerate(replies):
        thought, answer = parted(*reply)
        right = bool(answer) and agree(gold, read_answer(answer, rule), rule)
        on_the_way = any(agree(gold, one, rule) for one in conclusions(thought, rule))
        found.append((right is lost, not on_the_way, number))
    other, not_found, number = min(found)
    prompt, text = replies[number]
    kind = "right" if other is lost else "wrong"
    named = f"a {kind} answer" + (", right in the reasoning" if kind == "wrong" and not not_found else "")
    spans = _spans(prompt, text, gold, rule)
    return named, _marked([*text], [""] * len(text), spans, _shown(len(text), spans[0][0] if spans else 0, _CHARACTERS))


def _chain(chain: Mapping[str, Any], kl: Float, first: int | None, gold: str | None, rule: str) -> Sequence[Marked]:
    pieces = chain["pieces"]
    # The root, so that small distances are seen: 1/256 nat is the first shade, 1 nat and more the last.
    levels = np.minimum(np.rint(LEVELS * np.sqrt(np.maximum(kl, 0.0))), LEVELS).astype(int)
    styles = [f"h{level}" if level else "" for level in levels.tolist()]
    if first is not None:
        styles[first] = f"{styles[first]} parts".strip()
    # What the template's prompt begins is not known here, and need not be: pieces say what is thought.
    thought = "".join(pieces[: chain["n_thought"]])
    spans = _spans("", thought + "".join(pieces[chain["n_thought"] :]), gold, rule, start=len(thought))
    return _marked(pieces, styles, spans, _shown(len(pieces), first or 0, 1))


def _spans(
    prompt: str, text: str, gold: str | None, rule: str, *, start: int | None = None
) -> list[tuple[int, int, str]]:
    """Return what a thought concludes and the answer behind it: their characters, and whether they are right."""
    if start is None:
        answer = parted(prompt, text)[1]
        start = text.rindex(answer) if answer else len(text)
    thought, behind = text[:start], text[start:]
    found = [*zip(conclusion_spans(thought, rule), conclusions(thought, rule), strict=True)]
    span = answer_span(behind, rule) if behind.strip() else None
    if span is not None:
        found.append(((start + span[0], start + span[1]), read_answer(behind, rule) or ""))
    return [(*at, f"concluded {'right' if agree(gold, read, rule) else 'wrong'}") for at, read in found]


def _shown(n: int, place: int, times: int) -> list[tuple[int, int]]:
    """Return which tokens of a long text are shown, or characters: those around a place, and the last ones."""
    begin, end, last = place - times * _BEFORE, place + times * _AFTER, n - times * _LAST
    return [(0, n)] if n <= times * (_BEFORE + _AFTER + _LAST) else [(max(begin, 0), min(end, n)), (max(end, last), n)]


def _marked(
    pieces: Sequence[str],
    styles: Sequence[str],
    spans: Sequence[tuple[int, int, str]],
    shown: Sequence[tuple[int, int]],
) -> Sequence[Marked]:
    """Return a text in parts of one look; what is not shown is counted."""
    ends: Int = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    looks = [*styles]
    for begin, end, look in spans:
        first, last = np.searchsorted(ends, begin, side="right"), np.searchsorted(ends, end, side="left")
        for at in range(int(first), int(last) + 1):
            looks[at] = f"{looks[at]} {look}".strip()
    made: list[Marked] = []
    behind = 0
    for begin, end in shown:
        if begin > behind:
            made.append((f" … {begin - behind:,} more … ", "left-out"))
        made += [
            ("".join(pieces[i] for i in same), look) for look, same in groupby(range(begin, end), looks.__getitem__)
        ]
        behind = end
    return [part for part in made if part[0]]
