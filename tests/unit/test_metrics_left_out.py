"""What metrics leave out and count: options without a score, items that the second run was not asked for, no options."""

import json
from dataclasses import replace

import numpy as np
import pytest

from mlflow_compress.decide.gates import gate_values
from mlflow_compress.errors import DataError
from mlflow_compress.metrics import MetricInputs, compute_all, headline, unmet
from mlflow_compress.metrics.core.account import Account, take_account
from mlflow_compress.metrics.core.answer_files import compare_records
from mlflow_compress.metrics.core.item_table import option_means
from mlflow_compress.metrics.core.metric_registry import all_keys
from mlflow_compress.metrics.noise import noise_table
from mlflow_compress.records import RunRecords
from mlflow_compress.reporting.details import details, flips_table
from mlflow_compress.reporting.verdict import verdict
from tests import metric_records
from tests.roundoff import of_sum

FULL = metric_records.inputs(60)
WHOLE = {(r.name, r.task, r.category): r for r in compute_all(FULL)}

SIDES = ("", "_baseline")
# One option of each is longer than the context: (task, item, permutation, option).
TOO_LONG = [
    ("mmlu", "00003", 0, 2),
    ("mmlu", "00004", 1, 0),  # in a shuffle alone
    ("mmlu_six", "00005", 0, 4),
    ("piqa", "00006", 0, 1),
    ("piqa", "00007", 0, 0),
    ("lambada", "00008", 0, 0),
    ("mmlu_orders", "00002", 11, 3),
]


def _without_scores(run: RunRecords, keys=TOO_LONG) -> RunRecords:
    """The run with nulls where an option does not fit, as scoring writes them."""

    def nulled(table, columns):
        found = {name: table.table.column(name).to_pylist() for name in table.SCHEMA.names}
        rows = [i for i, key in enumerate(table.key_rows()) if key in keys]
        for name in columns:
            for row in rows:
                found[name][row] = None
        return type(table).from_columns(found)

    changed = {"option_scores": nulled(run.option_scores, ("loglik", "greedy"))}
    if run.option_distances is not None:
        columns = [name for name in run.option_distances.SCHEMA.names if name not in run.option_distances.KEY]
        changed["option_distances"] = nulled(run.option_distances, columns)
    return replace(run, **changed)


OTHERS = _without_scores(FULL.baseline, [("mmlu", "00010", 0, 1), ("mmlu_six", "00011", 0, 2), *TOO_LONG[5:]])


@pytest.fixture(scope="module")
def cut() -> MetricInputs:
    runs = [_without_scores(run) for run in (FULL.baseline, FULL.variant, FULL.noise)]
    return MetricInputs(*runs, embeddings=FULL.embeddings)


def test_an_option_that_does_not_fit_leaves_its_item_unscored_in_every_metric(cut):
    found = {(r.name, r.task, r.category): r for r in compute_all(cut)}
    assert unmet(cut) == unmet(FULL)
    # Nothing failed, nothing is gone, but for the slice of 20 items that has lost one.
    assert {place[1:] for place in set(WHOLE) - set(found)} == {("mmlu", "physics")}
    assert all("worst_slice" in name for name, *_ in set(WHOLE) ^ set(found))
    lost = {"mmlu": 1, "piqa": 2, "lambada": 1, None: 3}
    for task, n in lost.items():
        for name in ("quality/accuracy", "quality/accuracy_baseline", "quality/accuracy_delta", "distance/flips_pct"):
            assert found[name, task, None].n == WHOLE[name, task, None].n - n, (name, task)
            assert found[name, task, None].n_unscored == n
    for task, n in lost.items():
        for name in ("distance/kl_mean", "distance/acceptance", "distance/kl_clipped_mean"):
            assert found[name, task, None].n == WHOLE[name, task, None].n - n, (name, task)
            assert found[name, task, None].n_unscored == n
    assert found["distance/kl_items", None, None].value == WHOLE["distance/kl_items", None, None].value - 3
    shuffled = found["robustness/shuffle_drop_pct", None, None]
    assert (shuffled.n, shuffled.n_unscored) == (WHOLE["robustness/shuffle_drop_pct", None, None].n - 2, 2)
    assert found["robustness/orders_accuracy", None, None].n_unscored == 1
    assert found["uncertainty/uacc", None, None].n_unscored == 1
    assert found["quality/margin_correct", "piqa", None].n_unscored == 2
    # The second run misses the same: its floor is of the same items.
    assert found["noise/kl_mean", None, None].n == found["distance/kl_mean", None, None].n


def test_tables_of_unscored_options_do_not_fail(cut):
    changed = {(row["task"], row["item_id"]) for row in flips_table(cut)}
    assert not changed & {(task, item) for task, item, permutation, _ in TOO_LONG if permutation == 0}
    assert details(cut, compute_all(cut))["noise_floor"]
    assert compare_records(cut.baseline, cut.variant)["n_unscored"] == 3


def test_paired_figures_and_their_two_sides_are_of_one_set_of_items():
    """Each model lacks other scores: of every metric the variant's value, the baseline's and the change count alike."""
    variant = _without_scores(FULL.variant, TOO_LONG[:4])
    variant = replace(variant, judgments=metric_records.judgments(np.random.default_rng(3), unread=3))
    found = {(r.name, r.task, r.category): r for r in compute_all(replace(FULL, baseline=OTHERS, variant=variant))}
    pairs = 0
    for (name, *part), of_baseline in found.items():
        subject = found.get((name.removesuffix("_baseline"), *part))
        # MT-Bench means are by their published definition over all graded answers of a model; only the change is paired.
        if not name.endswith("_baseline") or subject is None or "margin" in name or "mt_bench" in name:
            continue
        change = found.get((all_keys()[subject.name].difference or f"{subject.name}_delta", *part))
        counts = {r.n for r in (subject, of_baseline, change) if r is not None}
        assert len(counts) == 1, (name, part, counts)
        if change is not None and change.name.endswith("_delta"):
            # numpy adds in pairs: each value is a sum of at most 16 + 8 steps for any number of items here
            rounding = of_sum(32, max(abs(subject.value), abs(of_baseline.value)))
            assert change.value == pytest.approx(subject.value - of_baseline.value, abs=rounding), (name, part)
        pairs += 1
    assert pairs > 25
    margins = [sum(found[f"quality/margin_{a}{b}", None, None].n for a in ("correct", "incorrect")) for b in SIDES]
    assert margins[0] == margins[1]
    accuracy = found["quality/accuracy", None, None]
    assert (accuracy.n, accuracy.n_unscored) == (117, 3)


def test_the_account_says_how_many_items_have_no_score_and_why():
    inputs = MetricInputs(OTHERS, _without_scores(FULL.variant, TOO_LONG[:4]))
    account = take_account(
        inputs,
        cut={("mmlu", "00001"), ("mmlu", "00002"), ("elsewhere", "1")},
        too_long={("piqa", "00006")},
        asked_again={"not a number": 4},
        setting={"baseline": "demo", "dtype": "float32"},
    )
    assert account.asked == len(FULL.baseline.items) and account.cut == 2
    assert account.unscored == {
        "an option is longer than the model's context": 1,
        "the variant gave none": 2,
        "the baseline gave none": 4,
    }
    assert account.scored == account.asked - 7
    assert account.unscored_pct == 700 / account.asked and account.cut_pct == 200 / account.asked
    assert account.sentence == (
        "Account: 7 of 232 items have no score (an option is longer than the model's context: 1, the baseline gave "
        "none: 4, the variant gave none: 2); 72 of the items are questions asked again in another form; 2 of 232 "
        "prompts were cut to the model's context; 600 tokens of text scored, in 24 windows of 24 texts; 4 requests "
        "repeated (not a number: 4). Baseline demo, dtype float32."
    )
    assert Account.from_dict(json.loads(json.dumps(account.to_dict()))) == account
    whole = take_account(FULL)
    assert (whole.unscored, whole.values()) == ({}, {"items/unscored_pct": 0.0, "items/cut_pct": 0.0})
    assert (
        whole.sentence
        == "Account: all 232 items scored; 72 of the items are questions asked again in another form; no prompt cut; "
        "600 tokens of text scored, in 24 windows of 24 texts."
    )
    text_alone = MetricInputs(*(replace(run, items=None) for run in (FULL.baseline, FULL.variant)))
    assert take_account(text_alone).sentence == "Account: 600 tokens of text scored, in 24 windows of 24 texts."
    assert take_account(text_alone).values() == {}
    assert Account(asked=0).sentence == "Account: nothing was asked."


def test_no_verdict_where_too_few_items_have_a_score_and_cut_prompts_are_said():
    pooled = headline(compute_all(FULL))
    lacking = Account(asked=24, unscored={"the variant gave none": 11})
    assert verdict("v", pooled, size_ratio=2.0, account=lacking) == (
        "v: open under the default policy: 45.8 % of the items have no score > 1 %; 2.0x smaller; "
        "11 of 24 items have no score (the variant gave none: 11)"
    )
    plain = verdict("v", pooled, size_ratio=2.0)
    assert verdict("v", pooled, size_ratio=2.0, account=Account(asked=200, cut=2)) == plain
    assert verdict("v", pooled, size_ratio=2.0, account=Account(asked=200, unscored={"x": 2}, cut=2)) == (
        f"{plain}; 2 of 200 items have no score (x: 2)"
    )
    cut = verdict("v", pooled, size_ratio=2.0, account=Account(asked=200, cut=3))
    assert cut.startswith(
        "v: open under the default policy: 1.5 % of the prompts were cut to the model's context > 1 %;"
    )
    assert cut.endswith("; 3 of 200 prompts were cut to the model's context")
    assert pooled["quality/accuracy"].n == 120  # 60 lettered and 60 cloze items; no last words, no generated answers


def test_items_without_any_score_have_no_value():
    every = [(task, item, p, o) for task, item, p, o in FULL.variant.option_scores.key_rows() if task == "piqa"]
    runs = [_without_scores(run, every) for run in (FULL.baseline, FULL.variant)]
    tasks = {r.task for r in compute_all(MetricInputs(*runs)) if r.name in ("quality/accuracy", "distance/kl_mean")}
    assert tasks == {None, "mmlu", "lambada", "trivia"}


def test_a_nan_is_still_an_error():
    table = FULL.variant.option_distances
    columns = {name: table.table.column(name).to_pylist() for name in table.SCHEMA.names}
    columns["kl"][0] = None
    columns["kl"][5] = float("nan")
    with pytest.raises(DataError, match="NaN"):
        option_means(FULL.view, type(table).from_columns(columns), "kl")


# --- a second run on a sample


def _sampled(noise: RunRecords, items: set[str], windows: set[str] | None) -> RunRecords:
    chosen = {
        name: getattr(noise, name).where(item_id=items) for name in ("items", "option_scores", "option_distances")
    }
    tokens = {
        name: getattr(noise, name).where(item_id=windows) if windows else None
        for name in ("token_scores", "token_distances")
    }
    return replace(noise, **chosen, **tokens, generations=None, judgments=None)


@pytest.mark.parametrize("windows", [None, {"w001", "w007", "w010"}])
@pytest.mark.parametrize("with_items", [True, False])
def test_the_second_run_may_be_a_sample(windows, with_items):
    kept = {f"{i:05d}" for i in (1, 4, 5, 9, 17, 40, 41, 58)}
    noise = _sampled(FULL.noise, kept, windows)
    found = MetricInputs(FULL.baseline, FULL.variant, noise if with_items else replace(noise, items=None))
    pooled = headline(compute_all(found))
    assert (pooled["noise/kl_mean"].n, pooled["noise/kl_mean"].n_unscored) == (16, 0)
    assert (pooled["noise/flips_pct"].n, pooled["noise/flips_pct"].n_unscored) == (16, 0)
    kl = noise.option_distances.where(task=["mmlu", "piqa"], permutation=0)
    by_item = {}
    for (task, item, *_), value in zip(kl.key_rows(), kl.column("kl"), strict=True):
        by_item.setdefault((task, item), []).append(value)
    assert pooled["noise/kl_mean"].value == pytest.approx(np.mean([np.mean(v) for v in by_item.values()]))
    if windows:
        assert pooled["noise/corpus_kl_mean"].n == 75
        assert pooled["noise/corpus_kl_mean"].value == pytest.approx(noise.token_distances.column("kl").mean())
    else:
        assert "noise/corpus_kl_mean" not in pooled
    # The variant's own values are of all items.
    assert pooled["distance/kl_mean"].n == 120
    floors = {row["name"]: row["floor"] for row in noise_table(found, compute_all(found))}
    assert floors["distance/kl_mean"] is not None
    assert (floors["distance/corpus_kl_mean"] is None) == (windows is None)


def test_every_metric_bears_a_sampled_second_run():
    sample = _sampled(FULL.noise, {"00001", "00002"}, {"w003"})
    full, few = compute_all(FULL), compute_all(replace(FULL, noise=sample))
    strip = [r for r in few if not r.name.startswith("noise/")]
    assert strip == [r for r in full if not r.name.startswith("noise/")]


# --- suites without multiple choice


def _only(family: str) -> MetricInputs:
    chosen = FULL.baseline.items.where(family=family)
    tasks = sorted(set(chosen.column("task")))

    def part(run: RunRecords) -> RunRecords:
        names = ("option_scores", "option_distances", "generations")
        kept = {
            name: getattr(run, name).where(task=tasks) if getattr(run, name) is not None else None for name in names
        }
        kept = {name: table if table is not None and len(table) else None for name, table in kept.items()}
        return RunRecords(items=chosen, **kept)

    return MetricInputs(part(FULL.baseline), part(FULL.variant), part(FULL.noise))


def test_generated_answers_alone_are_the_headline_and_pass_gates_without_a_kl():
    found = _only("exact")
    pooled = headline(compute_all(found))
    by_task = {r.name: r for r in compute_all(found) if r.task == "trivia"}
    for name in ("quality/accuracy", "quality/accuracy_delta", "quality/mcnemar_p", "distance/flips_pct"):
        assert (pooled[name].value, pooled[name].n) == (by_task[name].value, 20)
    assert "distance/all_flips_pct" not in pooled and "distance/kl_mean" not in pooled
    assert pooled["distance/flips_pct"].value == compare_records(found.baseline, found.variant)["flips_pct"]
    gates = gate_values(pooled)
    assert set(gates) == {"gate/kl_items", "gate/flips_pct_upper", "gate/accuracy_drop_pct_upper"}
    assert gates["gate/kl_items"] == 0


def test_last_words_alone_have_a_headline_with_a_kl_unless_it_was_not_measured():
    pooled = headline(compute_all(_only("last_word")))
    assert pooled["quality/accuracy"].n == pooled["distance/kl_mean"].n == 20
    assert gate_values(pooled)["gate/kl_items"] == 20
    found = _only("last_word")
    lost = replace(found, variant=replace(found.variant, option_distances=None))
    assert "gate/kl_items" not in gate_values(headline(compute_all(lost)))
    assert "option_distances" in unmet(lost)["kl_items"]
