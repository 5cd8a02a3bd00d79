"""Properties that every registered metric must have: a new metric fails here until it declares itself and behaves."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest

from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.metrics import (
    METRICS,
    AnswerEmbeddings,
    Metric,
    MetricInputs,
    MetricKey,
    MetricSettings,
    all_keys,
    compute_all,
    headline,
    key,
    metric,
    unmet,
)
from mlflow_compress.metrics.core.requirements import ITEMS
from mlflow_compress.metrics.health import KINDS
from mlflow_compress.records import MetricResult, OptionScores, Records, RunRecords
from tests import metric_records, written_records
from tests.roundoff import of_sum

ROUNDING = of_sum(4096)  # of values of size 1: the records have fewer rows

# What every key must be for a variant that equals its baseline. A key of a new metric that is in neither set below
# fails `test_no_key_was_forgotten`: decide where it belongs.
IDENTITY = {
    "quality/accuracy_delta": 0.0,
    "quality/mcnemar_p": 1.0,
    "quality/perplexity_ratio": 1.0,
    "distance/flips_pct": 0.0,
    "distance/all_flips_pct": 0.0,
    "distance/worst_slice_flips_pct": 0.0,
    "distance/worst_slice_kl_clipped": 0.0,
    "quality/worst_slice_drop_pct": 0.0,
    "distance/c2w_pct": 0.0,
    "distance/w2c_pct": 0.0,
    "distance/w2w_pct": 0.0,
    "distance/changed_correct_pct": 0.0,
    "distance/changed_incorrect_pct": 0.0,
    "distance/kl_mean": 0.0,
    "distance/kl_clipped_mean": 0.0,
    "distance/kl_above_clip_pct": 0.0,
    "distance/kl_reverse_mean": 0.0,
    "distance/js_mean": 0.0,
    "distance/acceptance": 1.0,
    "distance/top1_agreement": 1.0,
    "distance/top10_agreement": 1.0,
    "distance/rbo10": 1.0,
    "distance/corpus_top10_agreement": 1.0,
    "distance/corpus_rbo10": 1.0,
    "distance/corpus_kl_mean": 0.0,
    "distance/traces_kl": 0.0,
    "distance/corpus_kl_p99": 0.0,
    "distance/corpus_kl_max": 0.0,
    "distance/corpus_acceptance": 1.0,
    "distance/corpus_top1_agreement": 1.0,
    "distance/corpus_dp_mean_pct": 0.0,
    "distance/corpus_dp_rms_pct": 0.0,
    "robustness/shuffle_drop_delta_pct": 0.0,
    "robustness/content_consistency_delta": 0.0,
    "robustness/position_bias_delta": 0.0,
    "robustness/orders_accuracy_delta": 0.0,
    "robustness/orders_robust_accuracy_delta": 0.0,
    "robustness/orders_agreement_delta": 0.0,
    "robustness/orders_position_bias_delta": 0.0,
    "uncertainty/uacc_delta": 0.0,
    "uncertainty/set_size_delta": 0.0,
    "judge/identical_answers_pct": 100.0,
    "judge/share_of_divergent_tokens_pct": 0.0,
    "judge/kl_greedy": 0.0,
    "judge/kl_to_fork": 0.0,
    "judge/mt_bench_delta": 0.0,
    "judge/similarity_unweighted": 1.0,
    "judge/similarity": 1.0,
    "judge/rouge_l": 1.0,
    "judge/bleu": 100.0,
    "judge/refusals_delta_pct": 0.0,
    "judge/refusal_flips_pct": 0.0,
    "judge/refusals_begun_pct": 0.0,
    "judge/refusals_ended_pct": 0.0,
    "judge/refusals_mcnemar_p": 1.0,
    "judge/sampled_refusals_delta_pct": 0.0,
    "judge/length_ratio": 1.0,
    "judge/defects_delta_pct": 0.0,
    **{f"judge/{kind}_delta_pct": 0.0 for kind in KINDS},
    "speed/prefill_ratio_batch_1": 1.0,
    "speed/prefill_ratio_batch_8": 1.0,
    "speed/decode_ratio_batch_1": 1.0,
    "speed/decode_ratio_batch_8": 1.0,
    "speed/memory_peak_ratio": 1.0,
    "noise/flips_pct": 0.0,
    "noise/all_flips_pct": 0.0,
    "noise/kl_mean": 0.0,
    "noise/top1_agreement": 1.0,
    "noise/corpus_kl_mean": 0.0,
    "noise/traces_kl": 0.0,
    "noise/corpus_top1_agreement": 1.0,
    "noise/corpus_dp_rms_pct": 0.0,
}
# One model alone: with a variant equal to the baseline, the plain key equals its `_baseline` twin.
SINGLE = {
    "quality/accuracy",
    "quality/perplexity",
    "quality/margin_correct",
    "quality/margin_incorrect",
    "robustness/shuffle_drop_pct",
    "robustness/content_consistency",
    "robustness/position_bias",
    "robustness/orders_accuracy",
    "robustness/orders_robust_accuracy",
    "robustness/orders_agreement",
    "robustness/orders_position_bias",
    "uncertainty/uacc",
    "uncertainty/set_size",
    "uncertainty/coverage",
    "uncertainty/dont_know_pct",
    "uncertainty/none_of_these_pct",
    "judge/mt_bench",
    "judge/consistency",
    "judge/refusals_pct",
    "judge/mixed_refusals_pct",
    "judge/defects_pct",
    "speed/prefill_tokens_per_second_batch_1",
    "speed/prefill_tokens_per_second_batch_8",
    "speed/decode_tokens_per_second_batch_1",
    "speed/decode_tokens_per_second_batch_8",
    "speed/first_token_ms",
    "speed/token_gap_ms_p50",
    "speed/token_gap_ms_p95",
    "speed/token_gap_ms_p99",
    "speed/memory_peak_mb",
}
ALONE = {
    "distance/certain_pct",  # of identical models, an answer whose best letters are nearly alike is not certain
    "distance/kl_items",
    "distance/kl_share_top_item_pct",  # of identical models none exists: every KL is 0
    "distance/kl_share_top_percent_pct",
    "distance/corpus_kl_share_top_document_pct",
    "robustness/shuffle_accuracy",
    "uncertainty/set_size_kept",
    "uncertainty/coverage_kept",
    "judge/mt_bench_turn1",
    "judge/mt_bench_turn2",
    "judge/first_divergent_token",  # of identical models none exists
    "judge/kl_behind_fork",
    "judge/share_of_divergent_tokens_floor_pct",
    "judge/similarity_floor",
    "judge/length_ratio_floor",
    "judge/defects_floor_pct",
    "judge/sampled_refusals_pct",
    "judge/sampled_refusals_floor_pct",
    *(f"judge/{kind}_pct" for kind in KINDS),
    "judge/similarity_rouge_pearson",  # of identical models none exists: nothing varies
    "judge/similarity_rouge_spearman",
}

# Computed only where it is asked for. BERTScore needs a model: its identity test is in test_metrics_tools.
ON_REQUEST = {
    "judge/bert_score",
    "judge/worst_slice_defects_pct",  # needs instructions of several categories: test_metrics_slices
    "distance/logged_parted_pct",  # needs logged conversations: test_logged_conversations
    *(found.name for found in METRICS.get("tools").keys),  # needs prompts with tools: test_tool_calls
    # Need answers behind a thought: test_metrics_thinking.
    *(found.name for name in ("thinking", "thought_length") for found in METRICS.get(name).keys),
    # Need the baseline's own thoughts: test_metrics_chains.
    *(found.name for name in ("chain_kl", "chain_places") for found in METRICS.get(name).keys),
    *(f"{of}/chain_{what}" for of in ("noise", "engine") for what in ("kl", "parted_pct")),
    # Needs long contexts: test_long_context.
    *(f"{of}/long_kl{end}" for of in ("distance", "noise", "engine") for end in ("", "_slope")),
    # Where vLLM runs both models: test_metrics_tools.
    *(name.replace("noise/", "engine/") for name in IDENTITY if name.startswith("noise/")),
    # Several judge models, repeated gradings, comparisons in pairs: tests in test_metrics_judges.
    "judge/mt_bench_panel",
    "judge/mt_bench_panel_baseline",
    "judge/mt_bench_panel_delta",
    "judge/agreement_kappa",
    "judge/agreement_alpha",
    "judge/mt_bench_noise",
    "judge/mt_bench_noise_sd",
    "judge/win_rate",
    "judge/wins",
    "judge/losses",
    "judge/pairwise_consistency",
    "judge/pairwise_first",
    "judge/pairwise_second",
    # Of served models only, whose whole distributions are not seen: tests in test_endpoint_scoring.
    "distance/kl_top100",
    "distance/kl_top20",
    "distance/kl_top5",
    "distance/top_kept_mass",
    "distance/top_rests_clipped",
    "noise/kl_top100",
    "noise/kl_top20",
    "noise/kl_top5",
    "served/flips_pct",
    "served/all_flips_pct",
    "served/kl_top100",
    "served/kl_top20",
    "served/kl_top5",
}

FULL = written_records.inputs(60)
RESULTS = compute_all(FULL)
SAME = headline(compute_all(written_records.identical(60)))


def test_no_key_was_forgotten():
    placed = set(IDENTITY) | SINGLE | {f"{name}_baseline" for name in SINGLE} | ALONE | ON_REQUEST
    assert placed == set(all_keys())


def test_full_evidence_meets_every_need_and_every_key_is_returned():
    assert unmet(FULL) == {
        "bert_score": "no bertscore_model was given",
        "chain_kl": "the baseline has no chains records",
        "chain_places": "the baseline has no chains records",
        "engine_distance": "transformers itself ran both models",
        "judge_noise": "no answer was graded more than once",
        "judge_panel": "fewer than two judge models graded the answers",
        "logged_answers": "no item of the family logged",
        "long_context": "no item of the family long_text",
        "kl_top_k": "the variant run has no option_bounds records",
        "served_noise": "no server was asked for the variant twice",
        "thinking": "no item of the family thinking",
        "thought_length": "no item of the family thinking",
        "tools": "no item has tools (tasks=tools)",
        "win_rate": "the answers were not compared in pairs (judges=pairwise)",
    }
    assert {r.name for r in RESULTS} == set(all_keys()) - ON_REQUEST
    assert set(headline(RESULTS)) == set(all_keys()) - ON_REQUEST


@pytest.mark.parametrize("name", METRICS.names())
def test_declaration_is_complete(name):
    found = METRICS.get(name)
    assert found.keys and found.requires and found.source
    assert found.function.__doc__
    for declared in found.keys:
        section, _, rest = declared.name.partition("/")
        assert (
            section
            in {
                "quality",
                "distance",
                "robustness",
                "uncertainty",
                "judge",
                "noise",
                "engine",
                "served",
                "speed",
                "tools",
                "reasoning",
            }
            and rest
        )
        assert declared.low < declared.high and declared.unit and declared.meaning.endswith(".")
        assert declared.high == {"share": 1.0, "percent": 100.0}.get(declared.unit, declared.high)
        assert declared.name.endswith("_pct") == (declared.unit == "percent") or declared.name.endswith("_pct_baseline")
        assert key(declared.name) == declared


def test_what_a_key_says_about_tables_and_gates_holds():
    keys = all_keys()
    rows = [k for k in keys.values() if k.headline is not None]
    assert len({k.headline for k in rows}) == len(rows), "two metrics want the same place in the headline table"
    gates = [k.gate.name for k in keys.values() if k.gate is not None]
    assert len(set(gates)) == len(gates) and all(name.startswith("gate/") for name in gates)
    shown = {k.name for k in rows} | {k.difference for k in rows}
    for k in keys.values():
        assert {k.difference, k.floor} - {None} <= set(keys), k.name
        assert not k.leaderboard or k.name in shown, f"{k.name} is a column, but has no place among the rows"
        if k.name in IDENTITY and k.headline is not None:
            assert k.unchanged == IDENTITY[k.name], k.name
        if k.difference is not None:
            assert f"{k.name}_baseline" in keys, k.name
            assert keys[k.difference].unchanged == IDENTITY.get(k.difference, float(k.difference.endswith("_ratio")))


def test_no_key_is_declared_twice():
    names = [k.name for _, metric in METRICS.items() for k in metric.keys]
    assert len(names) == len(set(names))
    # An MLflow run stays readable. Each stage's run has its own: the judges', the speed's, and the evaluation's others.
    judged, timed = ({n for n in set(names) - ON_REQUEST if n.startswith(stage)} for stage in ("judge/", "speed/"))
    assert len(judged) < 55 and len(timed) < 50 and len(set(names) - ON_REQUEST - judged - timed) < 100


def test_values_lie_in_bounds_and_intervals_hold_them():
    for r in RESULTS:
        declared = key(r.name)
        assert math.isfinite(r.value)
        assert declared.low <= r.value <= declared.high, r.name
        assert r.n > 0
        if r.low is not None:
            assert r.high is not None or r.name == "judge/first_divergent_token"  # fewer than half may ever part
            near = min(1e-9, ROUNDING * max(1.0, abs(r.value)))
            assert r.low - near <= r.value <= (math.inf if r.high is None else r.high) + near, r


@pytest.mark.parametrize(("name", "expected"), sorted(IDENTITY.items()))
def test_identical_models_have_no_distance(name, expected):
    assert SAME[name].value == pytest.approx(expected, abs=ROUNDING)


@pytest.mark.parametrize("name", sorted(SINGLE))
def test_identical_models_have_equal_single_values(name):
    assert SAME[name].value == SAME[f"{name}_baseline"].value


def _shuffled(run: RunRecords, seed: int) -> RunRecords:
    rng = np.random.default_rng(seed)
    parts = {}
    for f in fields(run):
        part = getattr(run, f.name)
        if isinstance(part, Records):
            parts[f.name] = type(part)(part.table.take(rng.permutation(len(part))))
    return replace(run, **parts)


def test_row_order_does_not_matter():
    moved = MetricInputs(
        _shuffled(FULL.baseline, 1),
        _shuffled(FULL.variant, 2),
        _shuffled(FULL.noise, 3),
        embeddings=FULL.embeddings,
        samples=FULL.samples,
    )
    assert len(compute_all(moved)) == len(RESULTS)
    for ours, theirs in zip(RESULTS, compute_all(moved), strict=True):
        assert (ours.name, ours.task, ours.category, ours.n) == (theirs.name, theirs.task, theirs.category, theirs.n)
        assert ours.value == pytest.approx(theirs.value, rel=ROUNDING, abs=ROUNDING)


@pytest.mark.parametrize("n", [1, 2])
def test_very_few_items_give_finite_values_within_bounds(n):
    # `Metric.compute` itself refuses anything else; warnings are errors.
    few = compute_all(metric_records.inputs(n, windows=2, per_window=1))
    assert {"quality/accuracy", "distance/flips_pct", "distance/kl_mean"} <= set(headline(few))
    if n == 1:
        assert headline(few)["distance/acceptance"].low is not None  # two tasks, so two items
        assert headline(few)["distance/corpus_kl_mean"].low is None
        assert headline(few)["distance/kl_clipped_mean"].high < 1.0


def test_all_ties_take_the_first_option_for_both_models():
    def tied(run: RunRecords) -> RunRecords:
        columns = {name: run.option_scores.column(name) for name in OptionScores.SCHEMA.names}
        columns["loglik"] = np.full(len(run.option_scores), -2.0)
        return replace(run, option_scores=OptionScores.from_columns(columns))

    found = compute_all(MetricInputs(tied(FULL.baseline), tied(FULL.variant), tied(FULL.noise)))
    by_task = {(r.name, r.task): r for r in found if r.category is None}
    assert by_task["quality/accuracy", "mmlu"].value == 0.25  # the gold cycles through the options
    assert by_task["distance/all_flips_pct", "mmlu"].value == 0.0
    assert by_task["quality/margin_correct", "mmlu"].value == 0.0
    assert by_task["robustness/orders_accuracy", None].value == 0.25


def test_equal_input_gives_equal_output():
    assert compute_all(written_records.inputs(60)) == RESULTS


def test_swapping_the_models_mirrors_the_change():
    e = FULL.embeddings
    swapped = MetricInputs(
        replace(FULL.variant, option_distances=None, token_distances=None),
        FULL.baseline,
        embeddings=AnswerEmbeddings(e.task, e.item_ids, e.variant, e.baseline),
        samples=replace(FULL.samples, baseline=FULL.samples.variant, variant=FULL.samples.baseline),
    )
    there, back = headline(RESULTS), headline(compute_all(swapped))
    deltas = {name for name in all_keys() if name.endswith(("_delta", "_delta_pct"))} - ON_REQUEST
    assert deltas <= set(there) and len(deltas) >= 10
    for name in sorted(deltas):
        assert back[name].value == pytest.approx(-there[name].value), name
    # What each model is by itself does not depend on which one is called the baseline.
    for name in sorted(SINGLE):
        twin = f"{name}_baseline"
        assert (back[name].value, back[twin].value) == (there[twin].value, there[name].value), name
    for name in (
        "distance/flips_pct",
        "distance/all_flips_pct",
        "distance/w2w_pct",
        "quality/mcnemar_p",
        "judge/rouge_l",
        "judge/refusal_flips_pct",
        "judge/refusals_mcnemar_p",
        "judge/similarity",
        "judge/similarity_unweighted",
        "judge/similarity_rouge_pearson",
        "judge/similarity_rouge_spearman",
    ):
        assert back[name].value == pytest.approx(there[name].value)
    assert back["distance/c2w_pct"].value == there["distance/w2c_pct"].value
    assert back["judge/refusals_begun_pct"].value == there["judge/refusals_ended_pct"].value
    assert back["quality/perplexity_ratio"].value == pytest.approx(1 / there["quality/perplexity_ratio"].value)


def test_flips_identities():
    h = {name: result.value for name, result in headline(RESULTS).items()}
    flips, delta = h["distance/flips_pct"], 100 * h["quality/accuracy_delta"]
    n = headline(RESULTS)["distance/flips_pct"].n
    assert flips >= abs(delta)
    assert h["distance/c2w_pct"] == pytest.approx((flips - delta) / 2)
    assert h["distance/all_flips_pct"] == pytest.approx(flips + h["distance/w2w_pct"])
    assert round(n * flips / 100) % 2 == round(n * abs(delta) / 100) % 2


def test_a_baseline_alone_reports_itself_and_nothing_is_computed_from_nothing():
    alone = MetricInputs(FULL.baseline)
    names = set(headline(compute_all(alone)))
    assert {"quality/accuracy", "quality/perplexity", "robustness/shuffle_drop_pct", "uncertainty/uacc"} <= names
    assert not any(name.startswith("distance/") or name.endswith("_baseline") for name in names)
    assert unmet(alone)["flips"] == "no variant to compare"
    assert (
        headline(compute_all(alone))["quality/accuracy"].value == headline(RESULTS)["quality/accuracy_baseline"].value
    )
    assert compute_all(MetricInputs(RunRecords())) == []
    assert set(unmet(MetricInputs(RunRecords(), RunRecords()))) == set(METRICS.names())


def test_unknown_keys_and_keys_of_two_metrics_are_refused_by_name(monkeypatch):
    with pytest.raises(ConfigError, match="quality/accuracy"):
        key("quality/acuracy")
    monkeypatch.setitem(METRICS._objects, "mine", METRICS.get("accuracy"))
    with pytest.raises(ConfigError, match=r"'accuracy' and 'mine' declare the same key. Got: 'quality/accuracy'"):
        all_keys()


def test_a_result_that_is_not_declared_or_out_of_bounds_is_refused():
    accuracy = METRICS.get("accuracy")
    undeclared = replace(accuracy, function=lambda _: [replace(accuracy.compute(FULL)[0], name="quality/other")])
    with pytest.raises(ConfigError, match="quality/other"):
        undeclared.compute(FULL)
    good = accuracy.compute(FULL)[0]
    broken = replace(accuracy, function=lambda _: [replace(good, value=1.5)])
    with pytest.raises(DataError, match="bounds"):
        broken.compute(FULL)
    with pytest.raises(DataError, match="finite"):
        replace(accuracy, function=lambda _: [replace(good, value=float("nan"))]).compute(FULL)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"gate": True}, "wrong gate. Allowed: a GateValue"),
        ({"direction": "down"}, "wrong direction. Allowed: higher, lower, neither. Got: 'down'"),
        ({"name": "distance/my flips"}, "'distance/my flips' of a metric declares a wrong name"),
        ({"name": "flips"}, "wrong name"),
        ({"headline": "first", "label": "Flips"}, "wrong headline. Allowed: a whole number"),
        ({"headline": 3}, "wrong label"),
        ({"low": 2.0, "high": 1.0}, "wrong low"),
    ],
)
def test_a_wrong_key_is_refused_where_it_is_declared(wrong, named):
    with pytest.raises(ConfigError, match=named):
        MetricKey(**{"name": "distance/mine", "unit": "share", "meaning": "Mine.", **wrong})


@pytest.mark.parametrize("wrong", [{"requires": ("items",)}, {"keys": ["distance/mine"]}, {"requires": ITEMS}])
def test_a_wrong_declaration_is_refused_before_anything_is_computed(wrong):
    with pytest.raises(ConfigError, match="A metric declares wrong"):
        metric("mine", **{"keys": (), "requires": (ITEMS,), "source": "test", **wrong})


@pytest.mark.parametrize(
    ("formula", "error", "said"),
    [
        (lambda _: {}["flips"], ConfigError, "failed with KeyError"),
        (lambda _: 0.5, ConfigError, "did not return results"),
        (lambda _: [MetricResult("distance/other", 0.0, n=1)], ConfigError, "returned a key that it does not declare"),
        (lambda _: [MetricResult("distance/mine", 9.0, n=1)], DataError, "left its bounds"),
    ],
)
def test_what_goes_wrong_in_a_plug_ins_formula_names_the_plug_in_and_its_file(formula, error, said, monkeypatch):
    declared = MetricKey(name="distance/mine", unit="share", high=1.0, meaning="Mine.")
    mine = Metric(declares=(declared,), requires=(ITEMS,), source="test", function=formula)
    monkeypatch.setitem(METRICS._objects, "mine", mine)
    monkeypatch.setitem(METRICS._modules, "mine", __name__)
    with pytest.raises(error) as raised:
        compute_all(FULL)
    assert said in str(raised.value) and "metric 'mine' of" in str(raised.value) and __file__ in str(raised.value)


@pytest.mark.parametrize("bad", [{"level": 1.0}, {"alpha": 0.0}, {"resamples": 10}, {"method": "magic"}])
def test_settings_are_checked(bad):
    with pytest.raises(ConfigError):
        MetricSettings(**bad)
