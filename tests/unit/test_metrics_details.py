"""What stands behind the headline values: noise, conformal sets by score, corpora, corrected tests."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax
from statsmodels.stats.multitest import multipletests
from transformers import AutoModel, AutoTokenizer

from mlflow_compress.errors import CheckpointError, DataError
from mlflow_compress.judges.encoders import embedded_folder
from mlflow_compress.metrics import METRICS, MetricInputs, MetricSettings, compute_all, headline
from mlflow_compress.metrics.core.requirements import BERTSCORE_MODEL
from mlflow_compress.metrics.stats.bootstrap import resample_counts
from mlflow_compress.metrics.stats.conformal import SCORES, conformal, split
from mlflow_compress.metrics.text import authors_layer, bert_score
from mlflow_compress.metrics.uncertainty import scored_rows, six_probabilities, split_seed
from mlflow_compress.records import Items, MetricResult, OptionScores, RunRecords
from mlflow_compress.reporting.details import conformal_table, corpus_table, details, divergence_table
from tests import metric_records
from tests.unit.scoring_models import U, rounding_of

FULL = metric_records.inputs(60)


def _two_prompts() -> MetricInputs:
    """The six-option items under two prompt methods."""

    def twice(run: RunRecords) -> RunRecords:
        def copy(table):
            rows = table.where(task="mmlu_six").table.to_pylist()
            return type(table).from_rows([*rows, *({**row, "task": "mmlu_six_shared"} for row in rows)])

        scores = copy(run.option_scores).table.to_pylist()
        rng = np.random.default_rng(1)
        for row in scores:
            if row["task"] == "mmlu_six_shared":
                row["loglik"] -= float(rng.random())
        return RunRecords(items=copy(run.items), option_scores=OptionScores.from_rows(scores))

    return MetricInputs(twice(FULL.baseline), twice(FULL.variant))


def test_every_prompt_method_and_score_has_a_row_and_their_mean_is_the_metric():
    inputs = _two_prompts()
    table, results = conformal_table(inputs, n_splits=20), headline(compute_all(inputs))
    assert len(table) == 2 * 2 * 2
    for model, suffix in (("baseline", "_baseline"), ("variant", "")):
        rows = [row for row in table if row["model"] == model]
        for name in ("uacc", "set_size", "coverage"):
            assert np.mean([row[name] for row in rows]) == pytest.approx(results[f"uncertainty/{name}{suffix}"].value)
        for row in rows:
            assert row["uacc"] == pytest.approx(row["accuracy"] / row["set_size"] * math.sqrt(6))
            for name, spread in row["splits"].items():
                low, high = spread["interval"]
                assert low <= spread["mean"] <= high, name
    # The pooled value over two prompt methods has an interval too.
    found = results["uncertainty/uacc"]
    assert found.low is not None and found.low < found.value < found.high
    json.dumps(table, allow_nan=False)


def test_a_row_against_the_steps_it_is_made_of():
    (row,) = [r for r in conformal_table(FULL, n_splits=5) if (r["model"], r["score"]) == ("variant", "aps")]
    six = FULL.variant.option_scores.where(task="mmlu_six").table.to_pylist()
    logits = np.array([[r["loglik"] for r in six if r["item_id"] == f"{i:05d}"] for i in range(60)])
    gold = np.arange(60) % 4
    calibration, test = split(60, seed=row["split_seed"])
    found = conformal(softmax(logits, axis=-1), gold, calibration=calibration, test=test, score="aps")
    assert (row["n"], row["set_size"], row["coverage"]) == (30, found.set_size, found.coverage)
    # The coverage is the mean of the classes' coverages, weighted by their sizes.
    sizes = np.bincount(gold[test], minlength=4)
    by_class = [row["coverage_by_class"][letter] for letter in "ABCD"]
    assert (sizes * by_class).sum() / 30 == pytest.approx(found.coverage)
    assert conformal_table(MetricInputs(RunRecords(items=FULL.baseline.items.where(task="piqa")))) == []


def test_a_split_is_drawn_from_the_seed_and_the_items_alone():
    rows = scored_rows(FULL, next(iter(FULL.subsets(("lettered_six",), categories=()))))
    found = split_seed(FULL, rows)
    assert found == split_seed(replace(FULL, variant=None), rows)  # all variants share it
    assert found != split_seed(FULL, rows[1:])
    assert found != split_seed(replace(FULL, settings=MetricSettings(split_seed=7)), rows)
    assert {row["split_seed"] for row in conformal_table(_two_prompts(), n_splits=2)} == {found}  # so do prompts


def test_a_tiny_calibration_set_has_no_finite_threshold():
    few = [
        RunRecords(
            items=r.items.where(item_id=["00000", "00001"]),
            option_scores=r.option_scores.where(item_id=["00000", "00001"]),
        )
        for r in (FULL.baseline, FULL.variant)
    ]
    table = conformal_table(MetricInputs(*few), n_splits=3)
    assert {row["threshold"] for row in table} == {None} and {row["set_size"] for row in table} == {6.0}
    alone = [
        RunRecords(items=r.items.where(item_id="00000"), option_scores=r.option_scores.where(item_id="00000"))
        for r in few
    ]
    assert conformal_table(MetricInputs(*alone)) == []


def test_the_same_items_under_two_prompts_hold_no_more_than_once():
    def twice(table):
        rows = table.where(task="mmlu_six").table.to_pylist()
        return type(table).from_rows([*rows, *({**row, "task": "mmlu_six_shared"} for row in rows)])

    once, both = (
        {(r.name, r.task): (r.low, r.high) for r in compute_all(inputs) if r.name.startswith("uncertainty/")}
        for inputs in (
            FULL,
            MetricInputs(
                *(
                    RunRecords(items=twice(r.items), option_scores=twice(r.option_scores))
                    for r in (FULL.baseline, FULL.variant)
                )
            ),
        )
    )
    for name, task in once:
        if task is None:
            assert once[name, None] == pytest.approx(both[name, None]), name
            assert both[name, "mmlu_six"] == pytest.approx(both[name, None]), name


def test_the_thresholds_are_taken_anew_in_every_resample():
    """Each resample again, row for row: its calibration items set the thresholds, its test items are judged by them."""
    inputs = replace(FULL, settings=MetricSettings(resamples=200))
    rows = scored_rows(inputs, next(iter(inputs.subsets(("lettered_six",), categories=()))))
    gold = inputs.view.gold[rows]
    calibration, test = split(len(rows), seed=split_seed(inputs, rows))
    values = {"uacc": [], "set_size": [], "coverage": [], "coverage_kept": []}
    draws = zip(
        *(np.concatenate([*resample_counts(len(part), 200, seed)]) for part, seed in ((calibration, 1), (test, 0))),
        strict=True,
    )
    for of_calibration, of_test in draws:
        drawn = {
            "calibration": np.repeat(calibration, of_calibration.astype(int)),
            "test": np.repeat(test, of_test.astype(int)),
        }
        base, variant = (six_probabilities(inputs, side, rows) for side in ("baseline", "variant"))
        own = [conformal(variant, gold, score=score, **drawn) for score in SCORES]
        for name in ("uacc", "set_size", "coverage"):
            values[name].append(np.mean([getattr(found, name) for found in own]))
        thresholds = [conformal(base, gold, score=score, **drawn).threshold for score in SCORES]
        kept = [
            conformal(variant, gold, score=k, threshold=q, **drawn) for k, q in zip(SCORES, thresholds, strict=True)
        ]
        values["coverage_kept"].append(np.mean([found.coverage for found in kept]))
    found = {r.name: (r.low, r.high) for r in compute_all(inputs) if r.task is None}
    for name, of_resamples in values.items():
        assert found[f"uncertainty/{name}"] == pytest.approx(tuple(np.quantile(of_resamples, [0.025, 0.975]))), name


def test_every_corpus_has_every_statistic():
    table = corpus_table(FULL)
    assert [row["task"] for row in table] == ["news", "wiki"]
    by_task = {(r.name, r.task): r for r in compute_all(FULL)}
    for row in table:
        assert row["n"] == 300
        value = by_task["quality/perplexity", row["task"]].value
        assert row["perplexity_variant"][0] == pytest.approx(value)
        assert row["kl_percentiles"]["99"] == pytest.approx(by_task["distance/corpus_kl_p99", row["task"]].value)
        assert sum(row["differences"]["counts"]) == 300
    json.dumps(table, allow_nan=False)
    assert corpus_table(MetricInputs(FULL.baseline)) == []


def _p(value: float, task: str | None, category: str | None = None) -> MetricResult:
    return MetricResult(name="quality/mcnemar_p", value=value, task=task, category=category)


def test_holm_over_tasks():
    # Four tests: 0.01 x 4, 0.02 x 3, 0.03 x 2 and 0.4, each at least the one before; the pooled value is none of them.
    four = [_p(0.01, "a"), _p(0.4, "b"), _p(0.001, None), _p(0.03, "c"), _p(0.02, "d")]
    found = details(MetricInputs(RunRecords()), four)["mcnemar_p_holm"]
    assert found == pytest.approx({"a": 0.04, "b": 0.4, "c": 0.06, "d": 0.06})
    results = compute_all(FULL)
    raw = {r.task: r.value for r in results if r.name == "quality/mcnemar_p" and r.task}
    expected = dict(zip(raw, multipletests(list(raw.values()), method="holm")[1], strict=True))
    assert details(FULL, results)["mcnemar_p_holm"] == pytest.approx(expected)


def test_details_are_json_and_say_nothing_where_there_is_nothing():
    json.dumps(details(FULL, compute_all(FULL)), allow_nan=False)
    empty = MetricInputs(RunRecords(), RunRecords())
    found = details(empty, compute_all(empty))
    spread = found.pop("divergence")
    assert found == {"noise_floor": [], "conformal": [], "corpus": [], "mcnemar_p_holm": {}}
    assert spread == {"item_percentiles": {}, "by_margin": [], "by_probability": []}


def test_the_spread_of_the_kl():
    found = divergence_table(FULL)
    kl = np.concatenate(
        [
            FULL.variant.option_distances.where(task=task, permutation=0).column("kl").reshape(60, -1).mean(axis=1)
            for task in ("mmlu", "piqa")
        ]
    )
    for share in (0, 1, 50, 99.9, 100):
        assert found["item_percentiles"][f"{share:g}"] == pytest.approx(np.percentile(kl, share))
    assert sum(row["n"] for row in found["by_margin"]) == 120
    assert sum(row["n"] for row in found["by_probability"]) == 600
    assert {"left", "right", "n", "mean", "low", "high"} == set(found["by_margin"][0])


def test_six_options_are_asked_for():
    items = FULL.baseline.items.where(task="mmlu_six").table.to_pylist()
    broken = Items.from_rows([{**item, "options": item["options"][:5]} for item in items])
    run = RunRecords(
        items=broken,
        option_scores=OptionScores.from_rows(
            [r for r in FULL.baseline.option_scores.where(task="mmlu_six").table.to_pylist() if r["option"] < 5]
        ),
    )
    with pytest.raises(Exception, match="does not have six options"):
        compute_all(MetricInputs(run))


TEXTS = ["The river ends in the sea.", "Nine plus four is thirteen."]
COSINE = 2 * 384 * U  # of two equal vectors of 384 entries: their product, and their length, in float32
OTHER = ["The river flows into a lake.", "Bread."]


@pytest.fixture(scope="module")
def model() -> tuple[str, int]:
    """The embedded encoder and its last layer."""
    folder = embedded_folder()
    return str(folder), authors_layer("embedded", folder)


def test_equal_texts_have_one(model):
    assert bert_score(TEXTS, TEXTS, *model) == pytest.approx(1.0, abs=COSINE)


def test_equals_greedy_matching_by_hand(model):
    folder, layer = model
    tokenizer, encoder = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()

    def embed(text: str) -> torch.Tensor:
        with torch.inference_mode():
            out = encoder(**tokenizer(text, return_tensors="pt"), output_hidden_states=True).hidden_states[layer][0]
        return torch.nn.functional.normalize(out, dim=1)

    def read(output: Any) -> torch.Tensor:
        return torch.nn.functional.normalize(output.hidden_states[layer][0], dim=1)

    wanted, errors = [], []
    encoder.config.output_hidden_states = True
    for reference, text in zip(TEXTS, OTHER, strict=True):
        likeness = embed(text) @ embed(reference).T
        # The marks at both ends may be matched, but have no weight of their own, as in bert_score.
        precision, recall = likeness.amax(dim=1)[1:-1].mean().item(), likeness.amax(dim=0)[1:-1].mean().item()
        wanted.append(2 * precision * recall / (precision + recall))
        errors += [
            rounding_of(encoder, tokenizer(x, return_tensors="pt")["input_ids"], read) for x in (reference, text)
        ]
    ours = bert_score(TEXTS, OTHER, *model)
    # An entry moves by its error, here and there, and a cosine by the norms of both vectors' errors: sqrt(384) of them.
    assert ours == pytest.approx(wanted, abs=2 * 2 * 384**0.5 * max(errors))
    assert (ours < 0.95).all()


def test_metric_of_both_models_answers(model):
    full = metric_records.inputs(30)
    asked = replace(full, settings=MetricSettings(resamples=200, bertscore_model=model))
    assert asked.missing(BERTSCORE_MODEL) is None
    results = METRICS.get("bert_score").compute(asked)
    assert {r.name for r in results} == {"judge/bert_score"}
    assert 0 < results[0].value < 1
    assert results[0].low is not None and results[0].low <= results[0].value <= results[0].high
    same = metric_records.identical(full)
    alike = METRICS.get("bert_score").compute(replace(same, settings=asked.settings))
    assert alike[0].value == pytest.approx(1.0, abs=COSINE)


def test_no_texts_are_refused(model):
    with pytest.raises(DataError, match="at least one pair"):
        bert_score([], [], *model)


def test_layers_are_those_of_the_authors_and_a_folder_without_a_model_is_refused(tmp_path):
    assert authors_layer("roberta-large", embedded_folder()) == 17
    assert authors_layer("embedded", embedded_folder()) == 6
    with pytest.raises(CheckpointError, match="Not a model that BERTScore can use"):
        authors_layer("mine", tmp_path)
