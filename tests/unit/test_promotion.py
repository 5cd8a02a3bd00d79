"""The promotion policy: interval bounds, missing metrics, the gate on KL, no gain in size, ranking."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_compress.config.policy import Policy, Requirements
from mlflow_compress.decide import gates as declared
from mlflow_compress.decide.champion import choice_notes, to_compare
from mlflow_compress.decide.gates import DivergenceGate, Gate, GateNumber, published_gate
from mlflow_compress.decide.promotion import Candidate, GateReading, decide, gates_of, read_gates
from mlflow_compress.decide.scoreboard import Scoreboard, ScoredVariant, scoreboard
from mlflow_compress.decide.separation import ItemScores
from mlflow_compress.metrics import all_keys
from mlflow_compress.records import MetricResult

GATES = [Gate(metric="gate/kl_upper", bound=0.05, label="KL"), Gate(metric="gate/flips", bound=5.0, label="flips")]


def candidate(name: str, *, size: float = 100, kl: float = 0.01, method: str = "awq", **metrics: float) -> Candidate:
    values = {"size/bytes": size, "size/ratio": 1e4 / size, "distance/kl_mean": kl, "gate/kl_upper": kl, **metrics}
    return Candidate(name=name, run_id=name, version="1", method=method, metrics={"gate/flips": 1.0, **values})


def test_the_smallest_passing_wins_then_the_closest_and_none_without_compression_or_numbers() -> None:
    small_but_far = candidate("rtn-3bit", size=50, kl=0.2)
    decision = decide([candidate("awq-8bit", size=200), small_but_far, candidate("awq-4bit", size=100)], GATES)
    assert decision.champion is not None and decision.champion.name == "awq-4bit"
    assert [o.candidate.name for o in decision.outcomes] == ["awq-4bit", "awq-8bit", "rtn-3bit"]
    assert [o.rank for o in decision.outcomes] == [1, 2, None]
    assert decision.outcomes[-1].reasons == ("KL: 0.2 > 0.05", "flips: 1 <= 5")
    kl = GateNumber(gate="KL", value=None, read=0.2, bound=0.05, at_least=False, passed=False)
    assert decision.outcomes[-1].numbers == (kl, replace(kl, gate="flips", read=1.0, bound=5.0, passed=True))
    decision = decide([candidate("a", kl=0.02), candidate("b", kl=0.01)], GATES)
    assert decision.champion is not None and decision.champion.name == "b"
    decision = decide([replace(candidate("noise", size=1, kl=0.0, method="gaussian-noise"), compresses=False)], GATES)
    assert decision.champion is None
    assert "cannot be promoted" in decision.outcomes[0].reasons[0]
    assert decide([candidate("a", **{"gate/flips": math.nan})], GATES).champion is None
    assert decide([], GATES).champion is None


def test_a_smaller_cache_beside_weights_of_the_same_size_is_smaller_too() -> None:
    """It passes behind every variant with smaller weights; larger weights, and a cache as large, do not."""

    def with_cache(name: str, size: float, ratio: float | None) -> Candidate:
        one = candidate(name, size=size)
        cache = {} if ratio is None else {"size/cache_ratio": ratio}
        return replace(one, metrics={**one.metrics, **cache})

    sizes = {
        "half": (10000, 2.0),
        "same": (10000, None),
        "larger": (11000, 2.0),
        "weights": (9000, None),
        "grown": (10000, 0.5),
    }
    decision = decide([with_cache(name, *both) for name, both in sizes.items()], GATES)
    assert [o.candidate.name for o in decision.outcomes if o.passed] == ["weights", "half"]
    said = {o.candidate.name: o.reasons[0] for o in decision.outcomes}
    assert said["half"] == "size: weights as large as the baseline's, a cache 2 times smaller"
    assert said["same"] == said["grown"] == "not smaller than the baseline: the same size on disk"
    assert said["larger"].startswith("not smaller than the baseline: 1.1 times")


def test_a_missing_metric_fails_the_gate() -> None:
    for name in ("gate/kl_upper", "gate/flips", "size/bytes", "size/ratio", "distance/kl_mean"):
        whole = candidate("a")
        partial = Candidate(
            name="a",
            run_id="a",
            version="1",
            method="awq",
            metrics={k: v for k, v in whole.metrics.items() if k != name},
        )
        decision = decide([partial], GATES)
        assert decision.champion is None, name
        assert any(f"{name} is missing" in reason for reason in decision.outcomes[0].reasons)


@given(st.lists(st.tuples(st.floats(1, 9e3), st.floats(0, 0.2)), max_size=8), st.randoms())
def test_the_decision_does_not_depend_on_the_order(values: list[tuple[float, float]], rng: object) -> None:
    candidates = [candidate(f"v{i}", size=size, kl=kl) for i, (size, kl) in enumerate(values)]
    shuffled = list(candidates)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert decide(candidates, GATES) == decide(shuffled, GATES)


@pytest.mark.parametrize(
    ("ratio", "passes", "reason"),
    [
        (1.0, False, "not smaller than the baseline: the same size on disk"),
        (1.004, False, "not smaller than the baseline: the same size on disk"),
        (0.5, False, "not smaller than the baseline: 2 times its size"),
        (1.02, True, "KL: 0.01 <= 0.05"),
    ],
)
def test_what_is_not_smaller_is_not_promoted(ratio: float, passes: bool, reason: str) -> None:
    """A pruned checkpoint that is saved dense (wanda) gains nothing, however close it stays."""
    decision = decide([candidate("wanda", **{"size/ratio": ratio})], GATES)
    assert (decision.champion is not None) == passes
    assert decision.outcomes[0].reasons[0] == reason


KL_GATE = [DivergenceGate(max_kl=0.05, max_outliers_pct=1.0)]


def divergent(name: str = "a", **metrics: float) -> Candidate:
    """Return a candidate without any gate value but the given ones."""
    values = {"distance/flips_pct": 2.0, "distance/kl_clipped_mean": 0.001, "distance/kl_above_clip_pct": 0.0}
    whole = candidate(name, **values)
    kept = {k: v for k, v in whole.metrics.items() if not k.startswith("gate/")}
    return replace(whole, metrics={**kept, **{f"gate/{key}": value for key, value in metrics.items()}})


def test_the_interval_of_the_mean_kl_decides_nothing_and_clipped_values_pass_no_mean_above_the_limit() -> None:
    outliers = {"kl_items": 300, "kl_clipped_upper": 9.0, "kl_above_clip_pct_upper": 99.0}
    assert not decide([divergent(kl_upper=0.04, **outliers)], KL_GATE).outcomes[0].passed
    # Three items of 300 with 7.9 nats: the mean is 0.079, clipped it is 0.01, and 1 % of the items are above.
    one = divergent(kl_items=300, kl_clipped_upper=0.04, kl_above_clip_pct_upper=0.9)
    [outcome] = decide([replace(one, metrics={**one.metrics, "distance/kl_mean": 0.079})], KL_GATE).outcomes
    assert not outcome.passed and outcome.reasons[0] == "KL (mean): 0.079 > 0.05"
    assert decide([replace(one, metrics={**one.metrics, "distance/kl_mean": 0.05})], KL_GATE).outcomes[0].passed


@pytest.mark.parametrize(
    ("clipped", "outliers", "passes"), [(0.05, 1.0, True), (0.051, 0.1, False), (0.01, 1.1, False)]
)
def test_two_bounded_numbers_decide_the_gate_on_kl(clipped: float, outliers: float, passes: bool) -> None:
    one = divergent(kl_items=300, kl_clipped_upper=clipped, kl_above_clip_pct_upper=outliers)
    [outcome] = decide([one], KL_GATE).outcomes
    assert outcome.passed == passes
    assert outcome.reasons[0].startswith("KL clipped per item (upper end): ")
    assert "items above the clip limit in %" in outcome.reasons[1]


@pytest.mark.parametrize("metric", ["distance/kl_mean", "distance/kl_reverse_mean"])
def test_a_mean_kl_without_an_interval_passes_no_gate_on_its_upper_end(metric: str) -> None:
    reading = GateReading(metric=metric, end="upper", task="mmlu")
    results = [MetricResult(metric, 0.01, n=300, task="mmlu")]
    found = read_gates(results, [reading])
    assert found == {} != read_gates(results, [replace(reading, end="value")])
    [check] = Gate(metric=reading.name, bound=0.05, label="x").checks(found)
    assert (
        not check.passed and "as where an item is above 1 nat: give gates on distance/kl_clipped_mean" in check.reason
    )


@pytest.mark.parametrize(
    ("documents", "top", "read"), [(199, 1.0, False), (300, 2.4, True), (300, 2.5, False), (300, None, False)]
)
def test_the_upper_end_of_a_corpus_kl_is_read_of_many_documents_without_a_large_one(
    documents: int, top: float | None, read: bool
) -> None:
    results = [MetricResult("distance/corpus_kl_mean", 0.01, 0.005, 0.02, n=15_000, task="wikitext2")]
    if top is not None:
        name = "distance/corpus_kl_share_top_document_pct"
        results.append(MetricResult(name, top, n=documents, task="wikitext2"))
    reading = GateReading(metric="distance/corpus_kl_mean", end="upper", task="wikitext2")
    found = read_gates(results, [reading])
    assert found == ({reading.name: 0.02} if read else {})
    assert read_gates(results, [replace(reading, end="value")]) != {}
    if not read:
        [check] = Gate(metric=reading.name, bound=0.05, label="x").checks(found)
        assert not check.passed and "or from fewer than 200 documents, or one holds 2.5 % of the mean" in check.reason


@pytest.mark.parametrize("present", [{"kl_clipped_upper": 0.01}, {"kl_above_clip_pct_upper": 0.1}, {}])
def test_half_of_the_two_numbers_is_not_enough(present: dict[str, float]) -> None:
    [outcome] = decide([divergent(kl_items=300, **present)], KL_GATE).outcomes
    assert not outcome.passed and "is missing" in " ".join(outcome.reasons)


def test_without_the_number_of_items_the_gate_on_kl_fails() -> None:
    [outcome] = decide([divergent(kl_upper=0.01)], KL_GATE).outcomes
    assert not outcome.passed and outcome.reasons == ("KL: gate/kl_items is missing",)


def test_generated_answers_have_no_kl_and_are_ranked_by_size_then_flips() -> None:
    def generated(name: str, flips: float) -> Candidate:
        one = divergent(name, kl_items=0)
        kept = {k: v for k, v in one.metrics.items() if k != "distance/kl_mean"}
        return replace(one, metrics={**kept, "distance/flips_pct": flips})

    decision = decide([generated("a", 3.0), generated("b", 2.0)], KL_GATE)
    assert [o.candidate.name for o in decision.outcomes] == ["b", "a"]
    assert decision.outcomes[0].reasons == ("KL: does not apply, every answer of this evaluation is generated",)
    without = replace(decision.outcomes[0].candidate, metrics={"size/bytes": 1, "size/ratio": 4, "gate/kl_items": 0})
    assert decide([without], KL_GATE).outcomes[0].reasons[-1] == "rank: distance/flips_pct is missing"


def test_every_value_that_the_policy_reads_is_declared_by_a_metric() -> None:
    gates = {value for name, value in vars(declared).items() if name.startswith("GATE_")}
    keys = all_keys().values()
    assert gates < {key.gate.name for key in keys if key.gate is not None}
    others = {declared.KL, declared.FLIPS, declared.DECODE_SPEEDUP, declared.PREFILL_SPEEDUP, declared.MEMORY_RATIO}
    assert others <= {key.name for key in keys}


N = 1000
DROP = published_gate("quality/accuracy_delta", 2.0)


def a_candidate(name: str, size: float, drop: float, upper: float) -> Candidate:
    metrics = {"size/bytes": size, "size/ratio": 4.0, "distance/kl_mean": 0.01}
    metrics |= {"quality/accuracy_delta": -drop / 100, "gate/accuracy_drop_pct_upper": upper}
    return Candidate(name=name, run_id=f"run-{name}", version=None, method="rtn", metrics=metrics)


def board(**right: slice) -> Scoreboard:
    """Return the scoreboard of variants that are right on these items, with the KL 0.01 on all."""
    items = np.array([f"{i}" for i in range(N)], dtype=object)
    variants = []
    for name, place in right.items():
        correct = np.zeros(N)
        correct[place] = 1.0
        task, kl, nothing = np.full(N, "t", dtype=object), np.full(N, 0.01), np.zeros(N)
        scores = ItemScores(task, items, correct, kl, flipped=nothing, group=np.arange(N))
        variants.append(ScoredVariant(name=name, method="rtn", run_id=f"run-{name}", items=scores))
    return scoreboard(variants, baseline="b", evaluation="e")


CHOSEN, TIED, NARROW, FAR = (
    a_candidate("chosen", 100, 0.2, 1.9),
    a_candidate("tied", 120, 0.2, 1.2),
    a_candidate("narrow", 90, 0.4, 2.1),
    a_candidate("far", 50, 9.0, 11.0),
)


def test_ties_and_smaller_ones_are_told_with_their_difference() -> None:
    decision = decide([CHOSEN, TIED, NARROW, FAR], [DROP])
    assert decision.champion == TIED  # 1.9 passes alone; among four it does not
    one = a_candidate("chosen", 100, 0.2, 1.0)
    decision = decide([one, TIED, NARROW, FAR], [DROP])
    assert decision.champion == one
    found = choice_notes(
        decision, board(chosen=slice(0, 600), tied=slice(2, 602), narrow=slice(4, 602), far=slice(0, 400))
    )
    assert found == [
        "Tied with tied: neither KL nor right answers tell them apart on these items.",
        "Not narrow, 10 % smaller: accuracy drop in points (upper end): 2.1 > 2, narrowly. Its accuracy differs from "
        "chosen's by -0.20 points [-0.85, +0.37], which chance alone may explain.",
        "Not far, 50 % smaller: accuracy drop in points (upper end): 11 > 2. Its accuracy differs from chosen's by "
        "-20.00 points [-22.59, -17.64].",
    ]
    assert to_compare(decision) == ["run-chosen", "run-tied", "run-narrow", "run-far"]


def test_reasons_are_told_without_items_too_and_nothing_stands_beside_nothing() -> None:
    decision = decide([a_candidate("chosen", 100, 0.2, 1.0), NARROW], [DROP])
    assert choice_notes(decision, None) == [
        "Not narrow, 10 % smaller: accuracy drop in points (upper end): 2.1 > 2, narrowly."
    ]
    assert choice_notes(decide([FAR], [DROP]), None) == to_compare(decide([FAR], [DROP])) == []
    alone = decide([a_candidate("chosen", 100, 0.2, 1.0)], [DROP])
    assert choice_notes(alone, None) == to_compare(alone) == []


def test_what_no_server_reads_is_chosen_only_where_nothing_else_passes() -> None:
    own = replace(a_candidate("own", 50, 0.0, 0.5), served_by=())
    read = replace(a_candidate("read", 100, 0.0, 0.5), served_by=("vllm",))
    decision = decide([own, read], [DROP])
    assert decision.champion == read
    assert choice_notes(decision, None) == ["Not own: only this package reads the format, no server does."]
    assert decide([own], [DROP]).champion == own and choice_notes(decide([own], [DROP]), None) == []


def test_a_policy_s_target_must_read_it() -> None:
    gates = gates_of(Policy(kl=None, gates=(), margins=(), require=Requirements(max_cut_pct=100), target="llama.cpp"))
    known = {"items/unscored_pct": 0.0, "items/cut_pct": 0.0, "distance/flips_pct": 1.0}
    for served_by, why in (
        (("vllm",), "read by vllm"),
        ((), "read by this package alone"),
        (None, "it is not known what loads it"),
        (("llama.cpp", "vllm"), ""),
    ):
        one = replace(CHOSEN, served_by=served_by, metrics={**CHOSEN.metrics, **known})
        [outcome] = decide([one], gates.gates, rules=gates.rules).outcomes
        assert outcome.passed == (not why)
        assert why == "" or outcome.failed == (f"target: llama.cpp does not read it ({why})",)
    assert decide([replace(one, served_by=None, served=True)], gates.gates, rules=gates.rules).champion is not None


def test_of_many_smaller_ones_five_are_told() -> None:
    many = [a_candidate(f"far{i}", 10 + i, 9.0, 11.0) for i in range(8)]
    decision = decide([a_candidate("chosen", 100, 0.0, 0.5), *many], [DROP])
    notes = choice_notes(decision, None)
    assert len(notes) == 6 and notes[-1] == "3 more smaller variants fail too." and notes[0].startswith("Not far7")
    assert len(to_compare(decision)) == 6
