"""Challenger against champion: the difference per item, and whether the alias moves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mlflow_compress.config.policy import ReplacementRule
from mlflow_compress.decide.champion import HeadToHead, Incumbent, head_to_head, settle
from mlflow_compress.decide.promotion import Candidate, CandidateOutcome, Decision
from mlflow_compress.errors import AlignmentError
from mlflow_compress.metrics.stats.intervals import Interval
from mlflow_compress.records import Items, RunRecords
from tests.metric_records import inputs, items

HERE, ELSEWHERE = "a" * 16, "b" * 16


def with_kl(records: RunRecords, change: float) -> RunRecords:
    """Return the records with every KL moved."""
    assert records.option_distances is not None
    table = records.option_distances.table
    columns = {name: table.column(name).to_pylist() for name in table.schema.names}
    columns["kl"] = [kl + change for kl in columns["kl"]]
    return replace(records, option_distances=type(records.option_distances).from_columns(columns))


def test_a_variant_against_itself_differs_by_nothing() -> None:
    variant = inputs(30).variant
    assert variant is not None
    found = head_to_head(variant, variant)
    assert not isinstance(found, str)
    assert (found.kl, found.kl_interval) == (0.0, Interval(0.0, 0.0))
    assert (found.accuracy, found.gained, found.lost) == (0.0, 0, 0)
    assert found.accuracy_interval.low < 0 < found.accuracy_interval.high  # no change in n items is not no change


def test_the_difference_is_challenger_minus_champion_per_item() -> None:
    """Every KL 0.25 nats higher: the difference is exactly that on every item, so that its interval is a point."""
    full = inputs(30)
    assert full.variant is not None
    found = head_to_head(full.variant, with_kl(full.variant, 0.25))
    assert not isinstance(found, str) and found.kl_interval is not None
    assert found.kl == pytest.approx(0.25) and found.kl_interval == pytest.approx((0.25, 0.25))
    back = head_to_head(with_kl(full.variant, 0.25), full.variant)
    assert not isinstance(back, str) and back.kl == pytest.approx(-0.25)


def test_correctness_is_counted_on_the_same_items() -> None:
    """As computed by hand from both models' answers."""
    full = inputs(60)
    assert full.variant is not None
    found = head_to_head(full.baseline, full.variant)  # the baseline has no distances, so that KL is not compared
    assert not isinstance(found, str) and found.kl is None and found.kl_items == 0
    rows = np.flatnonzero(np.isin(full.view.family, full.headline_families) & full.scored_by_both)
    before, after = full.baseline_predictions.correct[rows, 0], full.variant_predictions.correct[rows, 0]
    assert (found.gained, found.lost) == (int((after & ~before).sum()), int((before & ~after).sum()))
    assert found.accuracy == pytest.approx(after.mean() - before.mean()) and found.items == len(rows)


def test_the_order_of_the_records_does_not_matter() -> None:
    full = inputs(30)
    assert full.variant is not None and full.variant.option_distances is not None
    other = with_kl(full.variant, 0.1)
    table = other.option_distances.table  # type: ignore[union-attr]
    turned = replace(
        other, option_distances=type(full.variant.option_distances)(table.take(list(range(len(table)))[::-1]))
    )
    one, two = head_to_head(full.variant, turned), head_to_head(full.variant, other)
    assert not isinstance(one, str) and not isinstance(two, str)
    assert one.kl == pytest.approx(two.kl) and one.kl_interval == pytest.approx(two.kl_interval)
    assert (one.accuracy_interval, one.gained, one.lost) == (two.accuracy_interval, two.gained, two.lost)


def in_groups(records: RunRecords, per_group: int) -> RunRecords:
    """Return the records with every `per_group` items of a task as one group."""
    assert records.items is not None
    table = records.items.table
    names = [f"p{int(item) // per_group}" for item in table.column("item_id").to_pylist()]
    place = table.schema.get_field_index("group_id")
    return replace(records, items=Items(table.set_column(place, table.schema.field("group_id"), [names])))


def test_items_with_a_text_in_common_are_compared_as_groups() -> None:
    full = inputs(60)
    assert full.variant is not None and full.variant.option_distances is not None
    kl = replace(full.baseline, option_distances=with_kl(full.variant, 0.1).option_distances)
    alone, by_two, by_twenty = (head_to_head(in_groups(kl, size), in_groups(full.variant, size)) for size in (1, 2, 20))
    assert not isinstance(alone, str) and not isinstance(by_two, str) and not isinstance(by_twenty, str)
    assert alone == head_to_head(kl, full.variant)
    assert (alone.kl, alone.accuracy) == (pytest.approx(by_two.kl), by_twenty.accuracy)
    assert by_two.accuracy_interval not in (None, alone.accuracy_interval)
    # Twenty items a group leave nine groups in three tasks.
    assert by_twenty.kl_interval is by_twenty.accuracy_interval is None
    assert by_twenty.described.count("no interval") == 2
    found = settle(decision("new"), OLD, ReplacementRule(require="not_worse"), HERE, lambda candidate: by_twenty)
    assert found.outcome == "unchanged" and "because the accuracy has no interval" in found.reasons[0]


def test_other_items_are_refused_and_no_items_are_a_reason() -> None:
    full = inputs(30)
    assert full.variant is not None
    with pytest.raises(AlignmentError):
        head_to_head(full.variant, replace(full.variant, items=items(31)))
    assert head_to_head(full.variant, replace(full.variant, items=None)) == "no items were evaluated"


def candidate(name: str) -> Candidate:
    return Candidate(name=name, run_id=f"run-{name}", version=None, method="rtn", metrics={})


def decision(*names: str) -> Decision:
    outcomes = tuple(
        CandidateOutcome(candidate=candidate(name), passed=True, reasons=(), rank=rank)
        for rank, name in enumerate(names, 1)
    )
    return Decision(champion=outcomes[0].candidate if outcomes else None, outcomes=outcomes)


def against(kl: tuple[float, float] | None, accuracy: tuple[float, float], *, items_with_kl: int = 100) -> HeadToHead:
    interval = None if kl is None else Interval(*kl)
    return HeadToHead(
        kl=0.0 if items_with_kl else None,
        kl_interval=interval,
        kl_items=items_with_kl,
        accuracy=0.0,
        accuracy_interval=Interval(*accuracy),
        items=100,
        gained=0,
        lost=0,
    )


OLD = Incumbent(name="old", version="1", run_id="run-old", evaluation=HERE, pinned=False)
EVEN = against((-0.01, 0.01), (-0.02, 0.02))


def settled(
    names: tuple[str, ...], rule: ReplacementRule, *, incumbent: Incumbent | None = OLD, **found: object
) -> tuple[str, str | None]:
    result = settle(decision(*names), incumbent, rule, HERE, lambda c: found.get(c.name, EVEN))  # type: ignore[return-value, arg-type]
    return result.outcome, result.winner.name if result.winner else None


def test_the_first_that_passes_gets_the_alias_by_default() -> None:
    any_ = ReplacementRule()
    assert settled((), any_) == ("nothing", None)
    assert settled(("a", "b"), any_, incumbent=None) == ("promoted", "a")
    assert settled(("a", "b"), any_) == ("promoted", "a")
    assert settled(("old", "a"), any_) == ("unchanged", "old")
    # Where the two cannot be compared, the default rule does not ask for it.
    assert settled(("a",), any_, a="the champion was measured on other items") == ("promoted", "a")


def test_a_pinned_champion_is_not_replaced() -> None:
    pinned = replace(OLD, pinned=True)
    assert settled(("a",), ReplacementRule(), incumbent=pinned) == ("unchanged", None)
    assert settled(("old", "a"), ReplacementRule(), incumbent=pinned) == ("unchanged", "old")


def test_a_champion_of_another_evaluation_can_be_protected() -> None:
    foreign = replace(OLD, evaluation=ELSEWHERE)
    assert settled(("a",), ReplacementRule(), incumbent=foreign) == ("promoted", "a")
    assert settled(("a",), ReplacementRule(replace="same_evaluation"), incumbent=foreign) == ("unchanged", None)
    assert settled(("a",), ReplacementRule(replace="same_evaluation")) == ("promoted", "a")


@pytest.mark.parametrize(
    ("kl", "accuracy", "not_worse", "better"),
    [
        ((-0.02, -0.01), (-0.01, 0.03), True, True),
        ((-0.02, 0.01), (-0.01, 0.03), True, False),
        ((-0.02, 0.011), (-0.01, 0.03), False, False),
        ((-0.02, -0.01), (-0.011, 0.03), False, False),
        (None, (0.0, 0.0), False, False),
    ],
)
def test_the_interval_s_bad_end_decides(
    kl: tuple[float, float] | None, accuracy: tuple[float, float], not_worse: bool, better: bool
) -> None:
    for require, allowed in (("not_worse", not_worse), ("better", better)):
        rule = ReplacementRule(require=require, kl_margin=0.01, accuracy_margin=0.01)  # type: ignore[arg-type]
        assert settled(("a",), rule, a=against(kl, accuracy)) == (("promoted", "a") if allowed else ("unchanged", None))


def test_generated_answers_are_compared_by_accuracy_alone() -> None:
    rule = ReplacementRule(require="better")
    assert settled(("a",), rule, a=against(None, (0.001, 0.02), items_with_kl=0)) == ("promoted", "a")
    assert settled(("a",), rule, a=against(None, (0.0, 0.02), items_with_kl=0)) == ("unchanged", None)


def test_the_next_challenger_is_asked_until_the_champion_s_own_rank() -> None:
    rule = ReplacementRule(require="better")
    good = against((-0.02, -0.01), (0.0, 0.03))
    assert settled(("a", "b"), rule, b=good) == ("promoted", "b")
    assert settled(("a", "old", "b"), rule, b=good) == ("unchanged", "old")
    assert settled(("a", "b"), rule, a="run x has no evaluate run") == ("unchanged", None)
    result = settle(decision("a", "b"), OLD, rule, HERE, lambda c: good if c.name == "b" else EVEN)
    assert (
        "a against the champion 'old' (version 1)" in result.reasons[0]
        and "not shown to be better" in result.reasons[0]
    )
    assert result.compared == good
