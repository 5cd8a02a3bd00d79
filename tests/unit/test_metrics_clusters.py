"""Items in groups: design effects, the tests and intervals that know them, and where the groups come from."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import statsmodels.api as sm
from scipy.stats import beta, norm, t
from statsmodels.stats.proportion import proportion_confint

from mlflow_compress import demo
from mlflow_compress.commands.gate.run import blocks, shuffled
from mlflow_compress.errors import DataError
from mlflow_compress.items.suite import load_suite
from mlflow_compress.items.task import Corpus, TaskSettings
from mlflow_compress.metrics import MetricInputs, MetricSettings, compute_all, headline
from mlflow_compress.metrics.core.account import take_account
from mlflow_compress.metrics.core.estimates import Mean, PairedDifference, Proportion, Resampled
from mlflow_compress.metrics.core.metric_registry import compute
from mlflow_compress.metrics.core.token_groups import token_groups
from mlflow_compress.metrics.stats import intervals
from mlflow_compress.metrics.stats.bootstrap import first_column, resample_counts
from mlflow_compress.metrics.stats.conformal import resampled_quantiles, split
from mlflow_compress.metrics.stats.sequential import BoundedCheck, ItemGroups, p_values
from mlflow_compress.metrics.stats.significance import grouped_mcnemar_mid_p, mcnemar_mid_p
from mlflow_compress.metrics.uncertainty import split_groups
from mlflow_compress.models.loading import LoadConfig, load_model
from mlflow_compress.records import Items, RunRecords, TokenScores
from mlflow_compress.reporting.details import conformal_table
from mlflow_compress.scoring.plan.corpus_windows import cut
from mlflow_compress.scoring.plan.encoding import Encoder
from tests import metric_records

SETTINGS = MetricSettings(resamples=500)
RNG = np.random.default_rng(3)
GROUPS = np.repeat(np.arange(40), RNG.integers(1, 9, 40))
HITS = RNG.random(len(GROUPS)) < np.repeat(RNG.beta(0.3, 1.2, 40), np.bincount(GROUPS))
ALONE = np.arange(len(GROUPS))


def test_design_effect_by_hand() -> None:
    # Groups of 2, 2 and 1 with sums 2, 1, 0: mean 3/5, e = 0.8, -0.2, -0.6, sum(e^2) = 1.04, sum((x - m)^2) = 1.2.
    found = intervals.design_effect([1, 1, 1, 0, 0], [7, 7, 5, 5, 6])
    assert found.effect == pytest.approx(1.5 * 1.04 / 1.2) and found.n_groups == 3
    assert found.df == pytest.approx(min(2, 1.2 * 1.04**2 / (0.8**4 + 0.2**4 + 0.6**4)))
    assert intervals.design_effect([0, 0, 0, 0, 0], [0, 0, 1, 1, 2]).effect == 9 / 5  # nothing varies: the groups count
    assert intervals.design_effect([1, 0, 1, 0], [0, 0, 1, 1]).effect == 1.0  # alike by chance adds no items
    # One event in 7 groups of 2: e is 6/7, and six times -1/7.
    for even, factor in ((False, 1.2), (True, 3.0)):
        found = intervals.design_effect([1] + [0] * 13, np.repeat(np.arange(7), 2), even=even)
        assert found.df == pytest.approx(factor * (6 / 7) ** 2 / ((6 / 7) ** 4 + 6 / 7**4))


def test_design_effect_of_drawn_items_is_that_of_all_items() -> None:
    # m = 1/2, e = 2, -2; sum(e²) = 8 less 4 · 2 · 1/4; over sum(w (x - m)²) = 2; times 2/(2 - 1)
    assert intervals.design_effect([1, 1, 0, 0], [0, 0, 1, 1], np.full(4, 2.0)).effect == 6.0
    assert intervals.design_effect([0, 0, 0], [0, 0, 1], np.full(3, 2.0)).effect == (16 + 4 - 6) / 6  # nothing varies
    rng = np.random.default_rng(0)
    x, groups = np.repeat(rng.random(400) < 0.2, 5), np.repeat(np.arange(400), 5)
    share = np.where(np.arange(2000) % 2, 0.3, 0.1)
    drawn = [rng.random(2000) < share for _ in range(200)]
    found = [intervals.design_effect(x[some], groups[some], 1 / share[some]).effect for some in drawn]
    unweighted = [intervals.design_effect(x[some], groups[some]).effect for some in drawn]
    assert intervals.design_effect(x, groups).effect == pytest.approx(5, rel=0.01)
    assert np.mean(found) == pytest.approx(5, rel=0.05)  # a little above, as the larger one of two estimates
    assert np.mean(unweighted) < 2.5  # of groups of five, few of whose items were drawn


def test_design_effect_is_the_larger_one_of_two_and_wilson_of_groups_that_of_fewer_items() -> None:
    model = sm.OLS(HITS.astype(float), np.ones(len(HITS)))
    robust = model.fit(cov_type="cluster", cov_kwds={"groups": GROUPS, "use_correction": False}).bse[0] ** 2
    plain = HITS.var() / len(HITS)
    sizes, d = np.bincount(GROUPS), HITS - HITS.mean()
    pairs = [(i, j) for i, j in itertools.permutations(range(len(d)), 2) if GROUPS[i] == GROUPS[j]]
    alike = sum(d[i] * d[j] / (sizes[GROUPS[i]] - 1) for i, j in pairs) / sum(d[sizes[GROUPS] > 1] ** 2)
    of_pairs = 1 + alike * ((sizes**2).sum() / len(d) - 1)
    effect = intervals.design_effect(HITS, GROUPS)
    assert effect.effect == pytest.approx(of_pairs) and of_pairs > robust / plain * 40 / 39 > 1.2
    equal = np.arange(len(HITS)) // 4  # of groups of one size the two are the same but for G/(G - 1)
    robust = model.fit(cov_type="cluster", cov_kwds={"groups": equal, "use_correction": False}).bse[0] ** 2
    count = len(np.unique(equal))
    assert intervals.design_effect(HITS, equal).effect == pytest.approx(robust / plain * count / (count - 1))
    n, count = len(HITS) / effect.effect, HITS.sum() / effect.effect
    expected = proportion_confint(count, n, alpha=2 * norm.sf(t.ppf(0.975, effect.df)), method="wilson")
    assert intervals.wilson(int(HITS.sum()), len(HITS), effect=effect) == pytest.approx(expected)
    # The lower end, on the side of the nearer bound, is Clopper and Pearson's of the same count.
    exact = beta.ppf(norm.sf(t.ppf(0.975, effect.df)), count, n - count + 1)
    assert Proportion.of(HITS, GROUPS).at(SETTINGS, 1.0) == (HITS.mean(), pytest.approx((exact, expected[1])))


def test_items_that_stand_alone_are_as_before() -> None:
    other = np.roll(HITS, 3)
    change = PairedDifference.of(HITS, other, ALONE)
    gained, lost, n = int((other & ~HITS).sum()), int((HITS & ~other).sum()), len(HITS)
    assert change.at(SETTINGS, 1.0) == ((gained - lost) / n, tuple(intervals.paired_difference(gained, lost, n)))
    assert change.p_value.value == mcnemar_mid_p(lost, gained)
    assert Proportion.of(HITS, ALONE) == Proportion(int(HITS.sum()), n)
    for groups in (None, ALONE):
        values = RNG.permutation(np.linspace(0.0, 1.0, n))
        assert Mean(values, groups=groups).at(SETTINGS, 1.0)[1] == SETTINGS.interval(values)
        column = Resampled(values[:, None], first_column, groups=groups)
        assert column.at(SETTINGS, 1.0)[1] == SETTINGS.interval(values[:, None])


@pytest.mark.parametrize("size", [2, 5])
def test_copies_of_an_item_add_nothing(size: int) -> None:
    values = RNG.gamma(0.5, 0.1, 60)
    copies, groups = np.repeat(values, size), np.repeat(np.arange(60), size)
    skewed = SETTINGS.skewed_interval(values)
    assert Mean(copies, skewed=True, groups=groups).at(SETTINGS, 1.0)[1] == pytest.approx(skewed)
    bounded = intervals.bounded_mean_interval(values, high=2.0)
    assert Mean(copies, groups=groups, bounds=(0.0, 2.0)).at(SETTINGS, 1.0)[1] == pytest.approx(bounded)
    d = np.repeat(RNG.choice([-1, 0, 1], 60, p=[0.1, 0.7, 0.2]), size)
    lost, gained = int((d < 0).sum() / size), int((d > 0).sum() / size)
    assert grouped_mcnemar_mid_p(d, groups) == pytest.approx(mcnemar_mid_p(lost, gained))
    # Of an interval's n only the variance's factor G/(G - 1) is left.
    change = PairedDifference.of(d < 0, d > 0, groups)
    assert change.effect is not None and change.effect.effect == pytest.approx(size * 60 / 59)
    check = BoundedCheck(name="x", limit=0.3)
    few = np.minimum(values, 1.0)
    grouped = p_values(check, np.repeat(few, size), ItemGroups(groups, size), error=0.05, n_checks=1)
    for ours, alone in zip(grouped, p_values(check, few, error=0.05, n_checks=1), strict=True):
        assert ours == pytest.approx(alone)


def test_grouped_mcnemar_counts_all_signs() -> None:
    d, groups = np.array([1, 1, -1, 0, 1, 1, -1, -1, -1, 1]), np.array([0, 0, 0, 1, 2, 2, 3, 3, 4, 5])
    sums = np.bincount(groups, weights=d)
    all_sums = np.abs([np.dot(signs, sums) for signs in itertools.product((-1, 1), repeat=len(sums))])
    observed = abs(sums.sum())
    expected = (all_sums > observed).mean() + (all_sums == observed).mean() / 2
    assert grouped_mcnemar_mid_p(d, groups) == pytest.approx(expected)
    assert grouped_mcnemar_mid_p([1, -1, 0], [0, 0, 1]) == 1.0  # no group changed


def test_few_groups_have_no_interval() -> None:
    groups = np.repeat(np.arange(intervals.FEWEST_GROUPS - 1), 10)
    hits, values = RNG.random(len(groups)) < 0.2, RNG.random(len(groups))
    for estimate in (
        Proportion.of(hits, groups),
        PairedDifference.of(hits, ~hits, groups),
        Mean(values, groups=groups),
        Mean(values, groups=groups, bounds=(0.0, 1.0)),
        Resampled(values[:, None], first_column, groups=groups),
    ):
        assert estimate.at(SETTINGS, 1.0)[1] is None and np.isfinite(estimate.at(SETTINGS, 1.0)[0])


def test_bounded_sums_are_checked() -> None:
    with pytest.raises(DataError, match="must lie in"):
        intervals.bounded_mean_interval([1.0, 2.5], [2, 2])
    assert intervals.bounded_mean_interval([0.0] * 30, [3] * 30) == intervals.bounded_mean_interval([0.0] * 30)


def _grouped(inputs: MetricInputs, size: int, of: str = "mmlu") -> MetricInputs:
    """The same records, with `size` items of one task in a group."""
    table = inputs.baseline.items.table
    names = [
        f"passage {int(item) // size}" if task == of else None
        for task, item in zip(table.column("task").to_pylist(), table.column("item_id").to_pylist(), strict=True)
    ]
    place = table.column_names.index("group_id")
    items = Items(table.set_column(place, "group_id", pa.array(names, pa.string())))
    return replace(inputs, baseline=replace(inputs.baseline, items=items), variant=replace(inputs.variant, items=items))


def test_groups_change_intervals_and_no_value() -> None:
    alone = replace(metric_records.inputs(), settings=SETTINGS)
    grouped = _grouped(alone, 2)
    before, after = ({(r.name, r.task, r.category): r for r in compute_all(inputs)} for inputs in (alone, grouped))
    assert before.keys() == after.keys()
    same = {name for name in before if before[name] == after[name]}
    # A test's p-value, and the largest share of a group in place of an item's, are about groups themselves.
    assert {name for name, *_ in before if before[name, *_].value != after[name, *_].value} <= {
        "quality/mcnemar_p",
        "distance/kl_share_top_item_pct",
    }
    largest = [found["distance/kl_share_top_item_pct", "mmlu", None].value for found in (before, after)]
    assert largest[0] < largest[1] < 2 * largest[0]
    changed = set(before) - same
    assert {task for _, task, _ in changed} == {None, "mmlu"}  # no other task's
    moved = {name for name, task, category in changed if task == "mmlu" and category is None}
    assert {
        "quality/accuracy",
        "quality/accuracy_delta",
        "distance/flips_pct",
        "distance/all_flips_pct",
        "distance/js_mean",
        "distance/kl_clipped_mean",
        "robustness/shuffle_accuracy",
    } <= moved
    few = {(r.name, r.task): r for r in compute_all(_grouped(alone, 4))}
    assert few["distance/flips_pct", "mmlu"].low is None  # 15 groups
    assert few["distance/flips_pct", "piqa"].low is not None


def test_conformal_splits_and_draws_take_whole_groups() -> None:
    alone = replace(metric_records.inputs(100), settings=SETTINGS)
    for size, known in ((2, True), (3, False)):  # 50 groups are 25 on a side, 34 are 17
        grouped = _grouped(alone, size, "mmlu_six")
        rows = np.flatnonzero(grouped.view.task == "mmlu_six")
        calibration, test = split(len(rows), groups=split_groups(grouped, rows))
        codes = grouped.view.group[rows]
        assert not set(codes[calibration]) & set(codes[test]) and len(calibration) + len(test) == 100
        found = {r.name: r for r in compute("uncertainty", grouped) if r.task == "mmlu_six"}
        assert all((result.low is not None) == known for result in found.values())
    [row, *_] = conformal_table(_grouped(alone, 2, "mmlu_six"))
    both = {r.name: r.value for r in compute("uncertainty", _grouped(alone, 2, "mmlu_six")) if r.task == "mmlu_six"}
    uacc = [r["uacc"] for r in conformal_table(_grouped(alone, 2, "mmlu_six")) if r["model"] == row["model"]]
    assert np.mean(uacc) == pytest.approx(both["uncertainty/uacc_baseline"])


def test_copies_of_an_item_in_one_group_add_nothing() -> None:
    """Four copies of each item: drawn by groups the thresholds spread as those of the items alone."""
    scores = np.random.default_rng(1).random(50)
    alone = resampled_quantiles(scores, np.concatenate([*resample_counts(50, 2000, 0)]), 0.1)
    copies, groups = np.repeat(scores, 4), np.repeat(np.arange(50), 4)
    together = resampled_quantiles(copies, np.concatenate([*resample_counts(50, 2000, 0)])[:, groups], 0.1)
    apart = resampled_quantiles(copies, np.concatenate([*resample_counts(200, 2000, 0)]), 0.1)
    assert together.std() == pytest.approx(alone.std(), rel=0.2) and apart.std() < 0.75 * together.std()
    # Groups of several sizes: the rank goes by how many items are drawn. 9 of 9 have rank 9, 4 of 4 have none.
    found = resampled_quantiles([1.0, 2.0, 3.0], np.array([[3.0, 3.0, 3.0], [2.0, 1.0, 1.0]]), 0.1)
    assert found.tolist() == [3.0, np.inf]


def test_the_account_counts_the_groups() -> None:
    inputs = metric_records.inputs()
    n = len(inputs.view)
    assert take_account(inputs).groups is None and "groups" not in take_account(inputs).sentence
    account = take_account(_grouped(inputs, 2))
    assert account.groups == n - 30
    assert f"they are in {n - 30:,} groups that share a text or source;" in account.sentence
    assert type(account).from_dict(json.loads(json.dumps(account.to_dict()))) == account


def test_a_passage_or_a_given_group_is_the_group(tmp_path: Path) -> None:
    def question(n: int, **more: str) -> dict[str, object]:
        return {"id": f"q{n}", "category": "c", "question": f"Q{n}?", "choices": list("abcd"), "answer": 0, **more}

    def task(rows: list[dict[str, object]]) -> tuple[list[str | None], str]:
        path = tmp_path / "mine.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        suite = load_suite(str(path), model="m", settings=TaskSettings(num_fewshot=0, num_shuffles=0, seed=1))
        return suite.tasks[0].items.table.column("group_id").to_pylist(), suite.hashes["mine"]

    plain, unnamed = task([question(0), question(1)])
    assert plain == [None, None]
    named, other = task([question(0, group_id="a"), question(1)])
    assert named == ["a", None] and other != unnamed
    texts = ("A long story. ", "A long story.", "Another.")
    first, second, third = task([question(n, kind="RC", context=text) for n, text in enumerate(texts)])[0]
    assert first == second != third and first is not None
    assert task([question(0, kind="RC", context="x", group_id="a")])[0] == ["a"]


def _tokens(names: list[str], rng: np.random.Generator) -> TokenScores:
    """Three tokens in each window, of one corpus."""
    n = 3 * len(names)
    columns = {"target": np.zeros(n), "nll": rng.gamma(2.0, 1.0, n), "p_target": np.full(n, 0.5)}
    keys = {"task": ["c"] * n, "item_id": np.repeat(names, 3), "position": np.tile([1, 2, 3], len(names))}
    return TokenScores.from_columns({**keys, **columns, "argmax": np.zeros(n), "entropy": np.zeros(n)})


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["0.0", "0.1", "7.2", "7.10"], [0, 0, 1, 1]),  # document and window
        (["q/1/0", "q/1/1", "q/2/0"], [0, 0, 1]),  # prompt and sample
        ([str(n) for n in range(4999)], [0] * 4999),  # one text
        ([str(n) for n in range(5000)], [n // 250 for n in range(5000)]),  # 20 stretches of a long one
    ],
)
def test_documents_of_windows(names: list[str], expected: list[int]) -> None:
    groups = token_groups(_tokens(names, RNG))
    assert np.unique(groups.document, return_inverse=True)[1].tolist() == np.repeat(expected, 3).tolist()


def test_perplexity_is_a_function_of_a_mean_over_documents() -> None:
    names = [f"{n // 3}.{n}" for n in range(90)]
    scores = _tokens(names, np.random.default_rng(1))
    inputs = MetricInputs(RunRecords(token_scores=scores), settings=SETTINGS)
    found = headline(compute_all(inputs))["quality/perplexity"]
    sums, sizes = intervals.group_sums(scores.column("nll"), np.repeat(np.arange(30), 9))
    interval = SETTINGS.skewed_interval(sums, sizes)
    assert interval is not None and (found.low, found.high) == pytest.approx(np.exp(interval))
    assert found.value == pytest.approx(np.exp(scores.column("nll").mean()))
    # The exact shift of a mean: every nll plus log 2 doubles the perplexity and both ends.
    twice = TokenScores(scores.table.set_column(4, "nll", pa.array(scores.column("nll") + np.log(2.0))))
    doubled = headline(compute_all(MetricInputs(RunRecords(token_scores=twice), settings=SETTINGS)))
    other = doubled["quality/perplexity"]
    assert (other.value, other.low, other.high) == pytest.approx((2 * found.value, 2 * found.low, 2 * found.high))
    few = RunRecords(token_scores=TokenScores(scores.table.slice(0, 9 * 19)))
    assert headline(compute_all(MetricInputs(few, settings=SETTINGS)))["quality/perplexity"].low is None
    assert "in 57 windows of 19 texts (no intervals: too few, as they count as 19 of one size, and 20 are needed)" in (
        take_account(MetricInputs(few)).sentence
    )


def test_windows_are_named_after_the_documents_in_which_they_begin() -> None:
    model = load_model(LoadConfig(path=str(demo.MODEL_DIR), dtype="float32", device="cpu"))
    encoder = Encoder(model.tokenizer, model.max_length)
    documents = ["The river is long. " * 30, "A short one. ", "Nobody saw the tall gate of the town. " * 40]
    corpus = Corpus.of("c", documents, between="\n")
    assert corpus.text == "\n".join(documents) and [corpus.text[s] for s in corpus.starts] == ["T", "A", "N"]
    of_token = encoder.documents(corpus.text, corpus.starts)
    assert of_token is not None and len(of_token) == len(encoder.ids([corpus.text])[0])
    assert (np.diff(of_token) >= 0).all() and set(of_token) == {0, 1, 2}
    named, plain = (cut(encoder, corpus.text, window=16, starts=starts) for starts in (corpus.starts, ()))
    assert all((a == b).all() for a, b in zip(named.ids, plain.ids, strict=True))
    firsts = [n * 16 + places[0] for n, places in enumerate(plain.scored)]
    assert named.names == [f"{of_token[first]}.{n}" for n, first in enumerate(firsts)]
    assert replace(corpus, starts=()).content_hash() != corpus.content_hash()


def test_the_demo_s_corpus_has_a_document_per_paragraph() -> None:
    [corpus] = load_suite("demo", model="demo", settings=TaskSettings(num_fewshot=0, num_shuffles=0, seed=1)).corpora
    assert isinstance(corpus, Corpus)
    assert corpus.text == (demo.DATA_DIR / "corpus.txt").read_text()
    assert all(corpus.text[start - 2 : start] == "\n\n" for start in corpus.starts[1:]) and len(corpus.starts) > 400


def test_a_gate_looks_at_whole_groups() -> None:
    keys = [("t", f"{n:02d}") for n in range(30)]
    alone, pairs = {key: n for n, key in enumerate(keys)}, {key: n // 3 for n, key in enumerate(keys)}
    order = shuffled(keys, pairs, seed=5)
    assert sorted(order) == keys and order != keys
    assert [pairs[key] for key in order] == [pairs[key] for key in order[::3] for _ in range(3)]
    assert shuffled(keys[::-1], pairs, seed=5) == order
    assert [len(block) for _, block in blocks(order, pairs, 10)] == [12, 12, 6]
    assert [(n, len(block)) for n, block in blocks(keys, alone, 20)] == [(0, 20), (1, 10)]
    assert shuffled([], {}, seed=0) == []
