"""Published numbers of real models (`published/README.md`).

Predictions at fp16, int8 and int4; ConSCompF of given embeddings; LLM-Uncertainty-Bench's script on option logits.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax

from mlflow_compress.items.suite import load_suite
from mlflow_compress.items.task import TaskSettings
from mlflow_compress.metrics.conscompf import consistency, similarity
from mlflow_compress.metrics.stats.conformal import SCORES, conformal, conformal_quantile, conformity_scores
from mlflow_compress.metrics.stats.significance import count_flips, mcnemar_exact
from tests.shared_data import PUBLISHED

FLIPS = json.loads((PUBLISHED / "flips.json").read_text())

# (model, benchmark, precision, N, correct fp16, correct quantised, c2w, w2c, w2w, exact McNemar p): METRICS.md section 10.
EXPECTED = [
    ("gemma-2-2b-it", "mmlu", "int4", 975, 556, 556, 46, 46, 42, 1.0),
    ("Qwen2.5-1.5B-Instruct", "mmlu", "int4", 975, 595, 552, 86, 43, 57, 1.919e-4),
    ("Qwen2.5-1.5B-Instruct", "arc", "int8", 1000, 753, 762, 5, 14, 9, 0.06357),
]


@pytest.mark.parametrize(("model", "bench", "precision", "n", "fp16", "quantised", "c2w", "w2c", "w2w", "p"), EXPECTED)
def test_published_counts_are_reproduced(model, bench, precision, n, fp16, quantised, c2w, w2c, w2w, p):
    gold, base, quant = (list(FLIPS[bench][name]) for name in ("gold", f"{model} fp16", f"{model} {precision}"))
    right_b = [a == g for a, g in zip(base, gold, strict=True)]
    right_q = [a == g for a, g in zip(quant, gold, strict=True)]
    found = count_flips(right_b, right_q, base, quant)
    assert (found.n, found.n_correct, sum(right_q)) == (n, fp16, quantised)
    assert (found.c2w, found.w2c, found.w2w) == (c2w, w2c, w2w)
    assert mcnemar_exact(found.c2w, found.w2c) == pytest.approx(p, rel=5e-4)
    assert found.w2c - found.c2w == quantised - fp16


def test_equal_accuracy_hides_one_answer_in_seven():
    # gemma int4 on MMLU: accuracy is unchanged to the item, yet 92 answers flip and 134 change.
    gold, base, quant = (list(FLIPS["mmlu"][name]) for name in ("gold", "gemma-2-2b-it fp16", "gemma-2-2b-it int4"))
    found = count_flips(
        [a == g for a, g in zip(base, gold, strict=True)],
        [a == g for a, g in zip(quant, gold, strict=True)],
        base,
        quant,
    )
    assert found.w2c == found.c2w
    assert round(100 * (found.c2w + found.w2c) / found.n, 2) == 9.44
    assert found.w2w is not None
    assert round(100 * (found.c2w + found.w2c + found.w2w) / found.n, 2) == 13.74


def test_both_weightings_and_every_instruction():
    data, expected = np.load(PUBLISHED / "conscompf.npz"), json.loads((PUBLISHED / "conscompf.json").read_text())
    found = similarity(data["a"], data["b"])
    # Theirs are products of 384 terms in float32, each divided by two lengths, with independent roundings: sqrt(384) U
    # for a cosine (Higham and Mary 2019, theorem 2.4), and what is averaged or weighted by such is no farther off.
    bound = 384**0.5 * 2.0**-24
    np.testing.assert_allclose(found.cosine, expected["similarity_per_instruction"], atol=bound)
    np.testing.assert_allclose(consistency(data["a"]), expected["consistency_a"], atol=bound)
    np.testing.assert_allclose(consistency(data["b"]), expected["consistency_b"], atol=bound)
    assert found.mean("unweighted") == pytest.approx(expected["similarity_mean"], abs=bound)
    assert found.mean("reference") == pytest.approx(expected["weighted_reference_mean"], abs=bound)
    assert found.mean() == pytest.approx(expected["weighted_equation4_mean"], abs=bound)


MODELS = ("Llama-2-13b-hf", "Qwen-7B")
PROMPTS = ("base", "shared", "task")
TOLERANCE = 10_000 * 2.0**-53  # means of at most 10,000 items in float64, whose parts are at most 10


def _inputs():
    data = np.load(PUBLISHED / "uncertainty.npz")
    return data, data["gold"], data["calibration_index"], data["test_index"]


@pytest.mark.parametrize("model", MODELS)
def test_reference_mode_equals_the_published_script(model):
    data, gold, calibration, test = _inputs()
    expected = json.loads((PUBLISHED / "uncertainty.json").read_text())[model]
    found = {"Acc": [], "SS": [], "coverage": [], "UAcc": []}
    for prompt in PROMPTS:
        p = softmax(data[f"{model} {prompt}"].astype(np.float32), axis=-1)
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


@pytest.mark.parametrize("model", MODELS)
def test_the_mean_of_ratios_is_not_the_ratio_of_means(model):
    # The published UAcc is a mean of six ratios; recomputing it from the published averages is off in the third digit.
    mean = json.loads((PUBLISHED / "uncertainty.json").read_text())[model]["mean"]
    assert abs(mean["Acc"] / mean["SS"] * math.sqrt(6) - mean["UAcc"]) > 1e-3


def test_the_reference_takes_the_next_rank():
    data, gold, calibration, _ = _inputs()
    scores = conformity_scores(
        softmax(data["Qwen-7B base"].astype(np.float32), axis=-1)[calibration], gold[calibration], "lac"
    )
    # n = 4997: k = ceil(4998 * 0.9) = ceil(4498.2) = 4499. The script's level 4499/4997 falls, at "higher",
    # on index ceil(4499/4997 * 4996) = ceil(4498.1) = 4499 counted from zero: rank 4500.
    ordered = np.sort(scores)
    assert conformal_quantile(scores, 0.1) == ordered[4498]
    assert conformal_quantile(scores, 0.1, mode="reference") == ordered[4499]


PROMPT_HASHES = {
    ("QA", 0, "base"): "fd2b6d91bf85811d",
    ("QA", 0, "shared"): "d19929f979222fe0",
    ("QA", 0, "task"): "b3715d10a61589a6",
    ("QA", 3, "base"): "e872c7b4c8bf810b",
    ("QA", 3, "shared"): "e33d8e80f4679980",
    ("QA", 3, "task"): "e9bd363ad783a3e0",
    ("RC", 0, "base"): "98f608e681faf9d2",
    ("RC", 0, "shared"): "c8cd597894a76157",
    ("RC", 0, "task"): "f938e04cc2bf2a64",
    ("RC", 3, "base"): "3cdb9bb71a4ac41e",
    ("RC", 3, "shared"): "e10103e7957d5a5f",
    ("RC", 3, "task"): "ab21052deb245873",
    ("CI", 0, "base"): "98f608e681faf9d2",
    ("CI", 0, "shared"): "c8cd597894a76157",
    ("CI", 0, "task"): "96ce4e85224ab647",
    ("CI", 3, "base"): "3cdb9bb71a4ac41e",
    ("CI", 3, "shared"): "e10103e7957d5a5f",
    ("CI", 3, "task"): "216da757aa2b4b00",
    ("DRS", 0, "base"): "1509e0b2630daf54",
    ("DRS", 0, "shared"): "7e3bb26a02fa0098",
    ("DRS", 0, "task"): "4f401561d81fe8ff",
    ("DRS", 3, "base"): "2d50a17c2e68e80d",
    ("DRS", 3, "shared"): "ffd7f2c001773b66",
    ("DRS", 3, "task"): "67f098f4fc33d61e",
    ("DS", 0, "base"): "58a35904b4aded6b",
    ("DS", 0, "shared"): "226e11d6831522a6",
    ("DS", 0, "task"): "a88158f970f4bd3b",
    ("DS", 3, "base"): "c2e926c8df53eccb",
    ("DS", 3, "shared"): "6398caa980d1ef00",
    ("DS", 3, "task"): "609a0e2d3f8d3fed",
}


def row(kind: str, number: int, split: str) -> dict[str, Any]:
    made = {
        "id": f"{split}{number}",
        "category": "anything",
        "kind": kind,
        "split": split,
        "question": f"Which one is number {number} ?",
        "choices": [f"{number}{word} " for word in ("one", "two", "three", "four")],
        "answer": number % 4,
    }
    return made if kind == "QA" else {**made, "context": f" First line {number}.\nSecond line."}


@pytest.mark.parametrize(("kind", "shots", "method"), PROMPT_HASHES)
def test_prompts_are_the_published_ones(tmp_path: Path, kind: str, shots: int, method: str) -> None:
    rows = [row(kind, number, "dev") for number in range(3)] + [row(kind, 9, "test")]
    path = tmp_path / "made.jsonl"
    path.write_text("".join(json.dumps(made) + "\n" for made in rows))
    settings = TaskSettings(
        num_fewshot=shots, num_shuffles=0, prompt_style=method if method != "shared" else "base,shared"
    )
    six = load_suite(str(path), model="m", settings=settings).tasks[-1]
    assert six.name == f"made_{method}_six"
    [prompt] = {request.context for request in six.requests}
    assert hashlib.sha256(prompt.encode()).hexdigest()[:16] == PROMPT_HASHES[kind, shots, method]
