"""From records to predictions: rules, ties, and every broken input named.

The sample that the noise run scores, and the metrics that read it.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_compress.commands.evaluate.baseline import noise_sample
from mlflow_compress.errors import AlignmentError, ConfigError, DataError
from mlflow_compress.items.suite import Suite
from mlflow_compress.items.task import Corpus, Task, item_row
from mlflow_compress.metrics import MetricInputs, compute_all
from mlflow_compress.metrics.core import item_table
from mlflow_compress.metrics.core.requirements import NOISE, OPTION_DISTANCES, SHUFFLES
from mlflow_compress.metrics.core.token_groups import check_same_targets, matched, token_groups
from mlflow_compress.metrics.stats.arrays import finite, same_length
from mlflow_compress.records import Items, OptionDistances, OptionScores, Request, RunRecords, TokenScores, align
from mlflow_compress.registry import Registry
from mlflow_compress.reporting.details import details
from tests import metric_records
from tests.metric_records import QUICK, score_of

FULL = metric_records.inputs(12)


def _edit(records, row, **changes):
    rows = records.table.to_pylist()
    rows[row] = {**rows[row], **changes}
    return type(records).from_rows(rows)


def _without(records, *rows):
    kept = [r for i, r in enumerate(records.table.to_pylist()) if i not in rows]
    return type(records).from_rows(kept)


def _with_scores(scores: OptionScores) -> MetricInputs:
    return MetricInputs(FULL.baseline, replace(FULL.variant, option_scores=scores))


@QUICK
@given(st.floats(-100, 100))
def test_the_top_margin_is_that_of_the_probabilities(shift):
    # ln p plus a constant has the softmax p: 0.5 - 0.3 and, where an option is impossible, 0.75 - 0.25.
    with np.errstate(divide="ignore"):
        values = np.log([[0.2, 0.5, 0.3], [0.75, 0.25, 0.0]]) + shift
    assert item_table.top_margin(values) == pytest.approx([0.2, 0.5])
    assert np.isnan(item_table.top_margin(np.array([[1.0, -np.inf, -np.inf]]))).all()


def test_array_checks_name_what_is_wrong():
    with pytest.raises(DataError, match="nll must be a non-empty array"):
        finite("nll", [])
    with pytest.raises(DataError, match=r"2 NaN or infinite value\(s\), the first at \[1\]"):
        finite("nll", [0.0, np.nan, np.inf])
    # An overflowing sum of finite values is not a defect of the values.
    assert finite("big", [1.7e308, 1.7e308]).tolist() == [1.7e308, 1.7e308]
    with pytest.raises(DataError, match="'b': 2"):
        same_length(a=[1], b=[1, 2])


def test_length_normalisation_changes_the_answer():
    # Totals -10 and -12 over 5 and 15 characters, 5 and 6 bytes: -2 and -0.8 a character, -2 and -2 a byte (a tie, which
    # the first option wins); the plain rule takes the first option too. With 4 bytes the first has -2.5 a byte.
    item = FULL.baseline.items.where(task="piqa").table.slice(0, 1).to_pylist()[0]
    rows = [
        score_of(item["item_id"], o, value, task="piqa", n_tokens=3, n_chars=(5, 15)[o], n_bytes=(5, 6)[o])
        for o, value in enumerate((-10.0, -12.0))
    ]
    shorter = [{**rows[0], "n_bytes": 4}, rows[1]]
    for rule, records, letter in (
        ("loglik", rows, 0),
        ("loglik_per_char", rows, 1),
        ("loglik_per_byte", rows, 0),
        ("loglik_per_byte", shorter, 1),
    ):
        view = item_table.ItemTable(Items.from_rows([{**item, "rule": rule}]))
        found, _ = item_table.predict(view, RunRecords(option_scores=OptionScores.from_rows(records)))
        assert found.letter[0, 0] == letter, rule
    no_text = OptionScores.from_rows([{**row, "n_bytes": 0} for row in rows])
    with pytest.raises(DataError, match="no characters"):
        item_table.option_grid(view, no_text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  Paris. ", "paris"),
        ("The  Eiffel-Tower!", "the eiffeltower"),
        ("$1,234.50", "1234.5"),
        ("1234.5", "1234.5"),
        ("-5", "-5.0"),
        ("12%", "12.0"),
        ("18.", "18.0"),
        ("3.5", "3.5"),
        ("35", "35.0"),
        ("", ""),
        ("5 apples", "5 apples"),
    ],
)
def test_normalised_answers(text, expected):
    assert item_table.normalise_answer(text) == expected


def test_exact_match_reads_the_first_sample_and_counts_the_rest_apart():
    items = FULL.baseline.items.where(family="exact")
    fixed = _edit(_edit(FULL.baseline.generations, 0, text=" ANSWER 0! "), 1, text="wrong")
    found, grid = item_table.predict(item_table.ItemTable(items), RunRecords(generations=_without(fixed, 2)))
    assert grid is None
    assert found.correct[:2, 0].tolist() == [True, False]
    assert found.scored[:4, 0].tolist() == [True, True, False, True]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_broken_log_likelihoods_are_refused_by_name(value):
    with pytest.raises(DataError, match=r"1 log-likelihoods are NaN or infinite; the first belongs to mmlu/00000"):
        compute_all(_with_scores(_edit(FULL.variant.option_scores, 2, loglik=value)))


def test_partly_scored_items_are_refused_and_unscored_ones_counted_apart():
    with pytest.raises(DataError, match=r"3 of 4 options.*mmlu/00000"):
        compute_all(_with_scores(_without(FULL.variant.option_scores, 1)))
    rows = [i for i, r in enumerate(FULL.variant.option_scores.key_rows()) if r[:2] == ("mmlu", "00003")]
    found = {
        r.name: r
        for r in compute_all(_with_scores(_without(FULL.variant.option_scores, *rows)))
        if r.task == "mmlu" and r.category is None
    }
    for name in ("quality/accuracy", "quality/accuracy_baseline", "distance/flips_pct", "robustness/shuffle_drop_pct"):
        assert (found[name].n, found[name].n_unscored) == (11, 1)


def test_duplicates_strangers_and_other_answer_orders_are_refused():
    scores = FULL.variant.option_scores
    with pytest.raises(AlignmentError, match="Duplicate keys"):
        compute_all(_with_scores(OptionScores.concat([scores, OptionScores(scores.table.slice(0, 1))])))
    with pytest.raises(AlignmentError, match=r"belong to no item.*mmlu/nobody"):
        compute_all(_with_scores(_edit(scores, 0, item_id="nobody")))
    with pytest.raises(DataError, match="an option that its item does not have"):
        compute_all(_with_scores(_edit(scores, 0, option=7)))
    with pytest.raises(AlignmentError, match="Duplicate keys in the items"):
        item_table.ItemTable(Items.concat([FULL.baseline.items, Items(FULL.baseline.items.table.slice(0, 1))]))
    first = [i for i, k in enumerate(scores.key_rows()) if k[:3] == ("mmlu", "00000", 1)]
    contents = [scores.table.column("content")[i].as_py() for i in first]
    swapped = scores
    for i, content in zip(first, reversed(contents), strict=True):
        swapped = _edit(swapped, i, content=content)
    with pytest.raises(AlignmentError, match="different answer orders"):
        compute_all(_with_scores(swapped))


def test_generations_and_items_are_checked():
    answers = FULL.variant.generations
    twice = type(answers).concat([answers, type(answers)(answers.table.slice(0, 1))])
    with pytest.raises(AlignmentError, match=r"Duplicate keys in the generations.*trivia/00000"):
        compute_all(MetricInputs(FULL.baseline, replace(FULL.variant, generations=twice)))
    with pytest.raises(DataError, match="empty"):
        item_table.ItemTable(Items.concat([]))
    for gold in (None, 4):
        with pytest.raises(DataError, match="no valid gold"):
            item_table.ItemTable(_edit(FULL.baseline.items, 0, gold=gold))


@pytest.mark.parametrize(
    ("column", "value"),
    [("prompt", "5-shot prompt"), ("gold", 2), ("options", ["a", "b", "c", "e"]), ("rule", "greedy")],
)
def test_models_that_saw_other_items_are_refused(column, value):
    changed = replace(FULL.variant, items=_edit(FULL.variant.items, 0, **{column: value}))
    with pytest.raises(AlignmentError, match=rf"differ in the {column} of 1 item.*mmlu/00000"):
        MetricInputs(FULL.baseline, changed)


def test_missing_items_and_other_tokens_are_refused():
    with pytest.raises(AlignmentError, match="1 only in the baseline"):
        MetricInputs(FULL.baseline, replace(FULL.variant, items=_without(FULL.variant.items, 0)))
    ours = FULL.baseline.token_scores
    with pytest.raises(AlignmentError, match=r"different target tokens at 1 positions.*wiki/w000 position 3"):
        check_same_targets(ours, _edit(ours, 3, target=5))
    with pytest.raises(AlignmentError, match="1 only in the baseline"):
        check_same_targets(ours, _without(ours, 0))
    with pytest.raises(AlignmentError, match="Duplicate"):
        token_groups(TokenScores.concat([ours, TokenScores(ours.table.slice(0, 1))]))
    with pytest.raises(DataError, match="empty"):
        token_groups(TokenScores.concat([]))
    with pytest.raises(DataError, match="NaN"):
        compute_all(MetricInputs(RunRecords(token_scores=_edit(ours, 0, nll=float("nan")))))


def test_distances_average_options_and_refuse_nan():
    view = FULL.view
    distances = FULL.variant.option_distances
    values = item_table.option_means(view, distances, "kl")
    mine = distances.where(task="mmlu", item_id="00004", permutation=0).column("kl")
    assert values[4] == pytest.approx(mine.sum() / 4)
    assert np.isnan(values[view.family == "exact"]).all()
    with pytest.raises(DataError, match="kl distances hold NaN"):
        item_table.option_means(view, _edit(distances, 5, kl=float("nan")), "kl")
    with pytest.raises(DataError, match="3 of 4 options"):
        item_table.option_means(view, OptionDistances(distances.table.slice(1)), "kl")


def test_evidence_says_what_is_missing():
    empty = MetricInputs(RunRecords())
    for part in ("view", "variant_predictions"):
        with pytest.raises(DataError):
            getattr(empty, part)
    with pytest.raises(DataError, match="no option distances"):
        empty.distance("kl")
    only_text = MetricInputs(RunRecords(items=FULL.baseline.items, generations=FULL.baseline.generations))
    with pytest.raises(DataError, match="no option scores"):
        only_text.grid("baseline")
    assert only_text.missing(SHUFFLES) == "the baseline was not scored under shuffled answer orders"
    assert only_text.missing(NOISE) == "no second run of the baseline"
    assert MetricInputs(FULL.baseline, FULL.baseline).missing(OPTION_DISTANCES) is not None


def test_tokens_join_in_any_order():
    ours, theirs = FULL.baseline.token_scores, FULL.variant.token_scores
    moved = TokenScores(theirs.table.take(np.random.default_rng(0).permutation(len(theirs))))
    np.testing.assert_array_equal(matched(ours, moved, "nll"), theirs.column("nll"))
    check_same_targets(ours, moved)
    assert len(np.unique(token_groups(moved).window)) == 24


def task(name: str, n: int) -> Task:
    rows = [
        item_row(name, "cloze", "loglik", {"id": str(i), "category": None}, question="q", prompt="p") for i in range(n)
    ]
    shared = {"permutation": 0, "content": 0, "context": "p", "continuation": " x", "n_chars": 1, "n_bytes": 1}
    requests = tuple(Request(task=name, item_id=str(i), option=o, **shared) for i in range(n) for o in range(2))
    return Task(name=name, family="cloze", items=Items.from_rows(rows), requests=requests)


def drawn(suite: Suite) -> list[list[str]]:
    return [part.items.column("item_id").tolist() for part in suite.tasks]


def test_a_seeded_draw_of_each_task_with_all_its_requests() -> None:
    suite = Suite(tasks=(task("a", 50), task("b", 50), task("c", 3)), corpora=())
    sample = noise_sample(suite, 10, seed=1)
    a, b, c = drawn(sample)
    assert len(set(a)) == len(set(b)) == 10 and a != b and c == ["0", "1", "2"]
    assert a == sorted(a, key=int)  # in the order of the task
    assert [r.item_id for r in sample.tasks[0].requests] == [i for i in a for _ in range(2)]
    assert drawn(noise_sample(suite, 10, seed=1)) == [a, b, c]
    assert drawn(noise_sample(suite, 10, seed=2))[0] != a
    alone = Suite(tasks=(task("b", 50),), corpora=())
    assert drawn(noise_sample(alone, 10, seed=1)) == [b]  # whatever else is evaluated
    assert noise_sample(suite, 0, seed=1) is suite


@pytest.mark.parametrize(("asked", "n", "tokens"), [(None, 3, 1536), (1000, 3, 1000), (None, 1, 1024)])
def test_the_first_windows_of_a_corpus_and_the_first_documents(asked: int | None, n: int, tokens: int) -> None:
    rolling = replace(task("r", 0), requests=(), documents=("one", "two", "three", "four"))
    suite = Suite(tasks=(rolling,), corpora=(Corpus(name="c", text="t", max_tokens=asked),))
    sample = noise_sample(suite, n, seed=0)
    assert sample.corpora[0].max_tokens == tokens and sample.tasks[0].documents == rolling.documents[:n]


def test_metrics_compare_and_count_what_the_noise_run_covers() -> None:
    full = metric_records.inputs(40)
    whole = {r.name: r for r in compute_all(full) if r.name.startswith("noise/")}
    kept = {row["item_id"] for row in full.noise.items.table.to_pylist()[::4]}
    windows = set(sorted(set(full.noise.token_scores.column("item_id")))[:2])
    noise = replace(
        full.noise,
        items=full.noise.items.where(item_id=kept),
        option_scores=full.noise.option_scores and full.noise.option_scores.where(item_id=kept),
        option_distances=full.noise.option_distances and full.noise.option_distances.where(item_id=kept),
        token_scores=full.noise.token_scores.where(item_id=windows),
        token_distances=full.noise.token_distances and full.noise.token_distances.where(item_id=windows),
        generations=None,
    )
    partial = replace(full, noise=noise)
    results = compute_all(partial)
    found = {r.name: r for r in results if r.name.startswith("noise/")}
    assert found.keys() == whole.keys()
    assert all(found[name].n < whole[name].n for name in whole)
    assert found["noise/flips_pct"].n_unscored == whole["noise/flips_pct"].n_unscored == 0
    # Everything that is no floor is as it was.
    rest = [r for r in compute_all(full) if not r.name.startswith("noise/")]
    assert [r for r in results if not r.name.startswith("noise/")] == rest
    floors = {row["name"]: row["floor"] for row in details(partial, results)["noise_floor"]}
    assert floors["distance/kl_mean"] == found["noise/kl_mean"].value


def scores(ids: list[str]) -> OptionScores:
    return OptionScores.from_rows([score_of(i, 0, -1.5, greedy=True) for i in ids])


def test_parquet_round_trip(tmp_path: Path) -> None:
    records = RunRecords(option_scores=scores(["a", "b"]))
    assert [p.name for p in records.write(tmp_path)] == ["option_scores.parquet"]
    assert RunRecords.read(tmp_path).option_scores == records.option_scores
    assert not list(tmp_path.glob("*.partial"))


def test_align_puts_the_variant_in_order_and_names_what_is_missing() -> None:
    assert align(scores(["a", "b", "c"]), scores(["c", "a", "b"])).tolist() == [1, 2, 0]
    with pytest.raises(AlignmentError, match=r"1 only in the baseline \[\('t', 'b', 0, 0\)\], 1 only in the variant"):
        align(scores(["a", "b"]), scores(["a", "x"]))


@pytest.mark.parametrize("twice", [0, 1])
def test_align_refuses_duplicates(twice: int) -> None:
    pair = [scores(["a", "b"]), scores(["a", "b"])]
    pair[twice] = scores(["a", "a"])
    with pytest.raises(AlignmentError, match="Duplicate"):
        align(*pair)


def test_missing_broken_and_foreign_files_and_columns_are_data_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No option_scores records"):
        OptionScores.read(tmp_path)
    with pytest.raises(DataError, match="No records in the folder"):
        RunRecords.read(tmp_path)
    (tmp_path / "option_scores.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match="cannot be read"):
        OptionScores.read(tmp_path)
    with pytest.raises(DataError, match="lack columns"):
        OptionScores.from_columns({"task": ["t"]})


def test_where_takes_a_value_or_several() -> None:
    found = scores(["a", "b", "c"])
    assert found.where(item_id="b").column("item_id").tolist() == ["b"]
    assert found.where(item_id=["a", "c"]).column("item_id").tolist() == ["a", "c"]
    assert len(found.where(permutation=np.int16(3))) == 0


def test_registry_names_the_nearest_and_refuses_doubles() -> None:
    registry: Registry[int] = Registry("thing", "mlflow_compress.items")
    registry.register("alpha")(1)
    assert registry.get("alpha") == 1
    with pytest.raises(ConfigError, match=r"Unknown thing. Allowed: alpha. Got: 'alhpa'. Did you mean 'alpha'\?"):
        registry.get("alhpa")
    with pytest.raises(ValueError, match="twice"):
        registry.register("alpha")(2)


# 0.0213 +- 0.002: two digits of the half-width are 0.0020, so four decimals; without an interval six digits.
