"""Published per-item predictions of real models at fp16, int8 and int4 (shared/data/flips_oracle, MIT licence)."""

import json

import pytest

from mlflow_compress.metrics.stats.significance import count_flips, mcnemar_exact
from tests.shared_data import SHARED, needs_shared

ORACLE = SHARED / "data" / "flips_oracle"

# (model, benchmark, precision, N, correct fp16, correct quantised, c2w, w2c, w2w, exact McNemar p): METRICS.md section 10.
EXPECTED = [
    ("google__gemma-2-2b-it", "mmlu", "int4", 975, 556, 556, 46, 46, 42, 1.0),
    ("Qwen__Qwen2.5-1.5B-Instruct", "mmlu", "int4", 975, 595, 552, 86, 43, 57, 1.919e-4),
    ("Qwen__Qwen2.5-1.5B-Instruct", "arc", "int8", 1000, 753, 762, 5, 14, 9, 0.06357),
]


def _predictions(model: str, precision: str, benchmark: str) -> list[str]:
    return json.loads((ORACLE / f"{model}__{precision}__{benchmark}.json").read_text())["preds"]


@needs_shared
@pytest.mark.parametrize(("model", "bench", "precision", "n", "fp16", "quantised", "c2w", "w2c", "w2w", "p"), EXPECTED)
def test_published_counts_are_reproduced(model, bench, precision, n, fp16, quantised, c2w, w2c, w2w, p):
    gold = [item["answer"] for item in json.loads((ORACLE / "_bench_items.json").read_text())[bench]]
    base, quant = _predictions(model, "fp16", bench), _predictions(model, precision, bench)
    right_b = [a == g for a, g in zip(base, gold, strict=True)]
    right_q = [a == g for a, g in zip(quant, gold, strict=True)]
    found = count_flips(right_b, right_q, base, quant)
    assert (found.n, found.n_correct, sum(right_q)) == (n, fp16, quantised)
    assert (found.c2w, found.w2c, found.w2w) == (c2w, w2c, w2w)
    assert mcnemar_exact(found.c2w, found.w2c) == pytest.approx(p, rel=5e-4)
    assert found.accuracy_delta == (quantised - fp16) / n


@needs_shared
def test_equal_accuracy_hides_one_answer_in_seven():
    # gemma int4 on MMLU: accuracy is unchanged to the item, yet 92 answers flip and 134 change.
    gold = [item["answer"] for item in json.loads((ORACLE / "_bench_items.json").read_text())["mmlu"]]
    base, quant = (_predictions("google__gemma-2-2b-it", p, "mmlu") for p in ("fp16", "int4"))
    found = count_flips(
        [a == g for a, g in zip(base, gold, strict=True)],
        [a == g for a, g in zip(quant, gold, strict=True)],
        base,
        quant,
    )
    assert found.accuracy_delta == 0.0
    assert round(100 * found.flips, 2) == 9.44
    assert found.all_flips is not None and round(100 * found.all_flips, 2) == 13.74
