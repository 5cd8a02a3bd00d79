"""Items drawn by the baseline's lead: the sampler, and metrics that weight what was drawn or say why they do not."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlflow_compress.config.groups import SampleSize, SamplingConfig
from mlflow_compress.config.policy import KlBounds, MetricGate, Policy
from mlflow_compress.decide.champion import head_to_head
from mlflow_compress.decide.item_sampling import PILOT_ITEMS, ItemSampler, half_width
from mlflow_compress.errors import AlignmentError, ConfigError, DataError
from mlflow_compress.metrics import MetricInputs, compute_all, headline, unmet
from mlflow_compress.metrics.core.account import take_account
from mlflow_compress.metrics.core.answer_files import compare_records
from mlflow_compress.metrics.core.metric_registry import METRICS, NOT_DRAWN
from mlflow_compress.records import Draws, MetricResult, RunRecords
from mlflow_compress.reporting.details import answers_by_margin, details, flips_by_category
from tests import metric_records

FULL = metric_records.inputs(200)
Results = dict[tuple[str, str | None, str | None], MetricResult]


def sampler(size: SampleSize, seed: int = 0) -> ItemSampler:
    return ItemSampler.of_baseline(size, MetricInputs(FULL.baseline), seed=seed)


def inputs(drawn: ItemSampler) -> MetricInputs:
    """What metrics read of the variant, scored on drawn items."""
    variant = replace(FULL.variant, items=FULL.baseline.items).of_items(drawn.keys)
    return replace(FULL, variant=replace(variant, draws=drawn.draws()))


def drawn_until_enough(size: SampleSize) -> tuple[ItemSampler, MetricInputs]:
    found = sampler(size)
    while found.go_on(inputs(found)):
        pass
    return found, inputs(found)


def by_place(results: list[MetricResult]) -> Results:
    return {(r.name, r.task, r.category): r for r in results}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("all", None),
        ("300", SampleSize(count=300)),
        ("width:0.5", SampleSize(width=0.5)),
        ("auto", SampleSize(policy=Policy())),
        ("auto+400+800", SampleSize(policy=Policy(), more=(400, 800))),
    ],
)
def test_the_parameter(text: str, size: SampleSize | None) -> None:
    found = SamplingConfig(items=text)
    assert found.size == size
    assert found.logged == ({} if size is None else {"items": text})


def test_another_policy_is_logged_by_what_it_says(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("kl: none\n")
    found = SamplingConfig(items=f"auto:{file}+500")
    assert found.size == SampleSize(policy=Policy(kl=None), more=(500,))
    assert found.logged == {"items": f"auto:{Policy(kl=None).sha256[:8]}+500"}
    with pytest.raises(ConfigError, match="policy"):
        SamplingConfig(items="auto:missing.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "all+100",
        "auto:",
        "auto+",
        "auto+x",
        "+100",
        "0",
        "-3",
        "some",
        "width",
        "width:0",
        "width:nan",
        "width:inf",
        "1.5",
        "number:3",
    ],
)
def test_a_wrong_number_of_items_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="width:POINTS"):
        SamplingConfig(items=text)


def test_the_asked_number_is_drawn_in_rounds_and_the_records_say_by_which_probability() -> None:
    drawn, found = drawn_until_enough(SampleSize(count=120))
    assert drawn.n_drawn == 120 and len(found.headline_rows) == 120
    probability = 1 / found.design.weight
    low, high = (probability[found.design.stratum == code][0] for code in (0, 9))
    assert low > 2 * high
    # Other graded tasks: at the same share. Those that need all items: none.
    tasks = np.unique(found.view.task, return_counts=True)
    assert dict(zip(*(part.tolist() for part in tasks), strict=True)).keys() == {"mmlu", "piqa", "lambada", "trivia"}
    assert (found.view.task == "lambada").sum() == 6  # 120/400 of 20
    draws = drawn.draws()
    assert len(draws) == len(drawn.keys) == len(set(draws.key_rows()))
    quotient = draws.column("drawn") / draws.column("stratum_size")
    assert draws.column("probability") == pytest.approx(quotient)
    # The published number, from the records alone: weights are inverse probabilities.
    weight = dict(zip(draws.key_rows(), 1 / draws.column("probability"), strict=True))
    rows = found.headline_rows
    keys = [(str(found.view.task[row]), str(found.view.item_id[row])) for row in rows]
    flipped = found.baseline_predictions.correct[rows, 0] != found.variant_predictions.correct[rows, 0]
    w = np.array([weight[key] for key in keys])
    assert headline(compute_all(found))["distance/flips_pct"].value == pytest.approx(100 * (w @ flipped) / w.sum())


def test_the_order_within_a_stratum_is_that_of_every_variant_and_of_no_other_seed() -> None:
    few, many = sampler(SampleSize(count=100)), sampler(SampleSize(count=300))
    assert few.orders == many.orders != sampler(SampleSize(count=100), seed=1).orders
    assert all(sorted(a) == sorted(b) for a, b in zip(few.orders, sampler(few.size, seed=1).orders, strict=True))


def test_drawn_items_estimate_the_values_of_all_items() -> None:
    _, found = drawn_until_enough(SampleSize(count=250))
    some, every = headline(compute_all(found)), headline(compute_all(FULL))
    for name in ("distance/flips_pct", "quality/accuracy", "quality/accuracy_delta", "distance/js_mean"):
        assert some[name].low <= every[name].value <= some[name].high
    # Unweighted they would not: answers of the lowest margins flip most.
    rows = found.headline_rows
    plain = 100 * (found.baseline_predictions.correct[rows, 0] != found.variant_predictions.correct[rows, 0]).mean()
    assert plain > every["distance/flips_pct"].value + 2
    # The floor is that of all items of the second run.
    assert some["noise/flips_pct"] == replace(every["noise/flips_pct"], p=None)


def test_with_all_items_every_number_is_that_of_an_evaluation_of_all_items() -> None:
    drawn, found = drawn_until_enough(SampleSize(count=10**6))
    assert drawn.n_drawn == 400 and found.design is None and found.draws is not None
    every, some = by_place(compute_all(FULL)), by_place(compute_all(found))
    assert len(some) > 100
    noise = {place for place in some if place[0].startswith("noise/")}
    assert {place: some[place] for place in some.keys() - noise} == {p: every[p] for p in some.keys() - noise}
    assert take_account(found).drawn_from is None


def test_a_width_is_reached_or_all_items_are_drawn() -> None:
    drawn, found = drawn_until_enough(SampleSize(width=6.0))
    assert half_width(found) <= 6.0 and drawn.n_drawn < 400
    every, _ = drawn_until_enough(SampleSize(width=0.01))
    assert every.n_drawn == 400


def test_how_many_items_of_a_stratum_are_drawn_does_not_follow_what_was_seen() -> None:
    """Else a stratum without a flip by chance would get few more, and flips would be underestimated."""
    in_rounds, _ = drawn_until_enough(SampleSize(width=4.5))
    at_once = sampler(SampleSize(count=in_rounds.n_drawn))
    assert in_rounds.rounds > 1 and np.abs(in_rounds.drawn - at_once.drawn).max() <= 1  # whole items


def test_items_are_drawn_until_the_policy_is_decided_or_all_are() -> None:
    flips = headline(compute_all(FULL))["distance/flips_pct"].value  # 13 % of 400 items

    def most(limit: float) -> SampleSize:
        gate = MetricGate(metric="distance/flips_pct", at_most=limit)
        return SampleSize(policy=Policy(kl=None, gates=(gate,), margins=()))

    far, _ = drawn_until_enough(most(60.0))
    assert far.n_drawn == PILOT_ITEMS and far.rounds == 1  # surely fewer
    surely_more, _ = drawn_until_enough(most(0.5))
    assert surely_more.n_drawn == PILOT_ITEMS
    at_the_limit, _ = drawn_until_enough(most(flips))
    assert at_the_limit.n_drawn == 400
    # One check that fails surely is enough, whatever the others say.
    both = SampleSize(policy=Policy(kl=KlBounds(max_kl=1e-9), gates=most(flips).policy.gates))  # type: ignore[union-attr]
    assert drawn_until_enough(both)[0].n_drawn < 400
    # A policy that says nothing of items: a point of width.
    nothing = drawn_until_enough(SampleSize(policy=Policy(kl=None, gates=(), margins=())))[0]
    assert nothing.n_drawn == drawn_until_enough(SampleSize(width=1.0))[0].n_drawn


def test_a_further_round_begins_where_an_earlier_run_has_ended() -> None:
    first, _ = drawn_until_enough(SampleSize(count=120))
    at_once, _ = drawn_until_enough(SampleSize(count=120, more=(200, 300)))
    second, _ = drawn_until_enough(SampleSize(count=120, more=(200,)))
    later = sampler(SampleSize(count=120, more=(200, 300)))
    later.begin_after(second.draws())
    assert (later.drawn == second.drawn).all() and set(first.keys) < set(second.keys) < set(at_once.keys)
    while later.go_on(inputs(later)):
        pass
    assert later.keys == at_once.keys and later.n_drawn == 300


def test_metrics_that_need_all_items_are_left_out_and_the_account_says_how_many_were_drawn() -> None:
    drawn, found = drawn_until_enough(SampleSize(count=120))
    left_out = {name for name, reason in unmet(found).items() if reason == NOT_DRAWN}
    assert {"answer_order", "all_orders", "uncertainty", "kl_concentration"} <= left_out
    assert not left_out & {name for name, metric in METRICS.items() if metric.weighted}
    assert "perplexity" not in left_out  # running text is scored whole
    assert answers_by_margin(found) is None and flips_by_category(found) == {}
    assert details(found, compute_all(found))["divergence"]["item_percentiles"] == {}
    account = take_account(found)
    assert account.asked == len(drawn.keys) and account.drawn_from == 440
    assert f"{account.asked} of 440 items drawn by the baseline's lead, with probabilities from 0." in account.sentence


def test_drawn_items_are_weighted_without_their_baseline_too_and_not_compared_one_by_one() -> None:
    _, found = drawn_until_enough(SampleSize(count=120))
    with pytest.raises(DataError, match="unequal probabilities"):
        compare_records(FULL.baseline, found.variant)
    assert "by their intervals only" in str(head_to_head(found.variant, found.variant))
    alone = headline(compute_all(MetricInputs(found.variant)))["quality/accuracy"]
    assert alone.value == headline(compute_all(found))["quality/accuracy"].value and alone.n == 120
    # Draws that do not name every item are refused.
    cut = replace(found.variant, draws=Draws(found.variant.draws.table.slice(1)))
    with pytest.raises(AlignmentError, match="1 only in the variant"):
        compute_all(MetricInputs(FULL.baseline, cut))


def test_records_of_some_items_keep_their_running_text() -> None:
    part = FULL.baseline.of_items([("mmlu", "00000")])
    assert part.items is not None and len(part.items) == 1
    assert part.token_scores is FULL.baseline.token_scores
    assert isinstance(part, RunRecords) and set(part.option_scores.column("item_id")) == {"00000"}  # type: ignore[union-attr]
