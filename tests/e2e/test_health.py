"""The health of answers on the embedded model: a 2-bit variant is told from an 8-bit one by health alone."""

from pathlib import Path

import pytest

import mlflow_compress as mc
from mlflow_compress.records import MetricResult

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def health(bits: int, folder: Path) -> dict[str, MetricResult]:
    variant = mc.compress(method="rtn", bits=bits, output_dir=str(folder / f"{bits}-bit"), store=folder / "store")
    return dict(
        mc.judge(variant, judges="similarity", answer_args={"judge_max_tokens": 8}, store=folder / "store").pooled
    )


def test_two_bits_are_told_from_eight(tmp_path: Path) -> None:
    eight, two = health(8, tmp_path), health(2, tmp_path)
    for name, unchanged in (("judge/length_ratio", 1.0), ("judge/cut_delta_pct", 0.0)):
        low, high = eight[name].low, eight[name].high
        assert low is not None and high is not None and low <= unchanged <= high, eight[name]
        assert two[name].low is not None and two[name].low > unchanged, two[name]
    assert two["judge/loops_pct"].value > eight["judge/loops_pct"].value == 0.0
