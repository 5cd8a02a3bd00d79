"""The table that llama.cpp publishes for Llama-3-8B obeys our propagation of uncertainty.

`tools/perplexity/README.md`, "LLaMA 2 vs. LLaMA 3 Quantization comparison": from each variant's perplexity, the baseline's and
their correlation follow ratio and difference with their uncertainties. Tokens are made that have exactly these moments.
"""

from __future__ import annotations

import numpy as np
import pytest

from mlflow_compress.metrics.corpus import CorpusStatistics, corpus_statistics

# Perplexity, ratio, difference (each with its uncertainty) and correlation in percent.
PUBLISHED = {
    "q2_K": ((9.751568, 0.063312), (1.564849, 0.004525), (3.519934, 0.033863), 89.62),
    "q4_K_M": ((6.407115, 0.039119), (1.028160, 0.000723), (0.175482, 0.004620), 99.34),
    "q6_K": ((6.253382, 0.038078), (1.003490, 0.000296), (0.021748, 0.001852), 99.88),
    "q8_0": ((6.234284, 0.037878), (1.000425, 0.000161), (0.002650, 0.001006), 99.96),
}
# Of the baseline only the value follows (perplexity minus difference); its uncertainty is that of the f16 row.
BASELINE = (6.231634, 0.037828)
N = 400


def statistics(variant: tuple[float, float], correlation: float) -> CorpusStatistics:
    """Reduce N tokens whose nlls have the given perplexities, uncertainties and correlation."""
    rng = np.random.default_rng(0)
    raw = np.column_stack([np.ones(N), rng.standard_normal((N, 2))])
    first, second = np.linalg.qr(raw)[0].T[1:] * np.sqrt(N)  # mean 0, variance 1, uncorrelated
    base = np.log(BASELINE[0]) + BASELINE[1] / BASELINE[0] * np.sqrt(N - 1) * first
    mixed = correlation * first + np.sqrt(1 - correlation**2) * second
    nll = np.log(variant[0]) + variant[1] / variant[0] * np.sqrt(N - 1) * mixed
    share = np.full(N, 0.5)
    return corpus_statistics(
        nll_baseline=base, nll_variant=nll, kl=share, p_baseline=share, p_variant=share, same_top=share > 0
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_ratio_and_difference_with_their_uncertainties(name: str) -> None:
    variant, ratio, difference, percent = PUBLISHED[name]
    found = statistics(variant, percent / 100)
    assert found.correlation == pytest.approx(percent / 100)
    assert found.perplexity_variant == pytest.approx(variant)
    assert found.ratio.value == pytest.approx(ratio[0], abs=1.5e-6)
    assert found.difference.value == pytest.approx(difference[0], abs=1.5e-6)
    # The correlation is printed to a hundredth of a percent, which is much where it is close to one.
    low, high = (statistics(variant, (percent + step) / 100) for step in (0.005, -0.005))
    for part, printed in (("ratio", ratio[1]), ("difference", difference[1])):
        assert 0.99 * getattr(low, part).uncertainty <= printed <= 1.01 * getattr(high, part).uncertainty


def test_every_row_gives_the_same_baseline() -> None:
    for variant, ratio, difference, _ in PUBLISHED.values():
        assert variant[0] - difference[0] == pytest.approx(BASELINE[0], abs=2e-6)
        assert variant[0] / ratio[0] == pytest.approx(BASELINE[0], abs=1e-5)
