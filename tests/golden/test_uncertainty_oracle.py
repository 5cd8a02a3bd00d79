"""LLM-Uncertainty-Bench's published script on real option logits (shared/data/uncertainty_oracle, MIT licence)."""

import json
import math

import numpy as np
import pytest
from scipy.special import softmax

from mlflow_compress.metrics.stats.conformal import SCORES, conformal, conformal_quantile, conformity_scores
from tests.shared_data import SHARED, needs_shared

ORACLE = SHARED / "data" / "uncertainty_oracle"
MODELS = ("Llama-2-13b-hf", "Qwen-7B")
PROMPTS = ("base", "shared", "task")
TOLERANCE = 10_000 * 2.0**-53  # means of at most 10,000 items in float64, whose parts are at most 10


def _inputs():
    data = np.load(ORACLE / "logits.npz")
    gold = np.array(["ABCDEF".index(letter) for letter in data["gold"]])
    return data, gold, data["calibration_index"], data["test_index"]


@needs_shared
@pytest.mark.parametrize("model", MODELS)
def test_reference_mode_equals_the_published_script(model):
    data, gold, calibration, test = _inputs()
    expected = json.loads((ORACLE / "results.json").read_text())[model]
    found = {"Acc": [], "SS": [], "coverage": [], "UAcc": []}
    for prompt in PROMPTS:
        p = softmax(data[f"{model}/{prompt}"], axis=-1)
        answers = p[test].argmax(axis=1)
        assert (answers == 4).mean() == pytest.approx(expected["E_rate"][prompt], abs=TOLERANCE)
        assert (answers == 5).mean() == pytest.approx(expected["F_rate"][prompt], abs=TOLERANCE)
        for score in SCORES:
            r = conformal(p, gold, calibration=calibration, test=test, score=score, alpha=0.1, mode="reference")
            name = score.upper()
            assert r.accuracy == pytest.approx(expected["Acc"][prompt], abs=TOLERANCE)
            assert r.set_size == pytest.approx(expected[f"{name}_set_size"][prompt], abs=TOLERANCE)
            assert r.coverage == pytest.approx(expected[f"{name}_coverage"][prompt], abs=TOLERANCE)
            assert r.uacc == pytest.approx(expected[f"UAcc_{name}"][prompt], abs=TOLERANCE)
            for key, value in (("Acc", r.accuracy), ("SS", r.set_size), ("coverage", r.coverage), ("UAcc", r.uacc)):
                found[key].append(value)
    for key, values in found.items():
        assert np.mean(values) == pytest.approx(expected["mean"][key], abs=TOLERANCE)


@needs_shared
@pytest.mark.parametrize("model", MODELS)
def test_the_mean_of_ratios_is_not_the_ratio_of_means(model):
    # The published UAcc is a mean of six ratios; recomputing it from the published averages is off in the third digit.
    mean = json.loads((ORACLE / "results.json").read_text())[model]["mean"]
    assert abs(mean["Acc"] / mean["SS"] * math.sqrt(6) - mean["UAcc"]) > 1e-3


@needs_shared
def test_the_reference_takes_the_next_rank():
    data, gold, calibration, _ = _inputs()
    scores = conformity_scores(softmax(data["Qwen-7B/base"], axis=-1)[calibration], gold[calibration], "lac")
    # n = 4997: k = ceil(4998 * 0.9) = ceil(4498.2) = 4499. The script's level 4499/4997 falls, at "higher",
    # on index ceil(4499/4997 * 4996) = ceil(4498.1) = 4499 counted from zero: rank 4500.
    ordered = np.sort(scores)
    assert conformal_quantile(scores, 0.1) == ordered[4498]
    assert conformal_quantile(scores, 0.1, mode="reference") == ordered[4499]
