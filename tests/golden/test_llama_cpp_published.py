"""The tables that llama.cpp publishes obey our propagation of uncertainty.

`tools/perplexity/README.md`: from each variant's perplexity, the baseline's and their correlation follow ratio and difference with
their uncertainties; from the share of equal top tokens and the number of scored tokens follows its uncertainty. Tokens are
made that have exactly these moments.
"""

import numpy as np
import pytest

from mlflow_compress.metrics.stats.corpus_statistics import CorpusStatistics, corpus_statistics

# "LLaMA 2 vs. LLaMA 3 Quantization comparison" and "LLaMA 3 BF16 vs. FP16 comparison": model; perplexity, ratio, difference (each
# with its uncertainty) and correlation in percent.
PUBLISHED = {
    "q2_K": ("L3", (9.751568, 0.063312), (1.564849, 0.004525), (3.519934, 0.033863), 89.62),
    "q4_K_M": ("L3", (6.407115, 0.039119), (1.028160, 0.000723), (0.175482, 0.004620), 99.34),
    "q6_K": ("L3", (6.253382, 0.038078), (1.003490, 0.000296), (0.021748, 0.001852), 99.88),
    "q8_0": ("L3", (6.234284, 0.037878), (1.000425, 0.000161), (0.002650, 0.001006), 99.96),
    "L2 q4_K_M": ("L2", (5.877078, 0.032781), (1.014242, 0.000432), (0.082526, 0.002530), 99.71),
    "L2 q6_K": ("L2", (5.808494, 0.032425), (1.002406, 0.000191), (0.013941, 0.001110), 99.94),
    "L2 q8_0": ("L2", (5.798542, 0.032366), (1.000689, 0.000107), (0.003990, 0.000624), 99.98),
    "BF16": ("L3 bf16", (6.227711, 0.037833), (1.000404, 0.000086), (0.002517, 0.000536), 99.990),
}
# Of the L3 baseline only the value follows (perplexity minus difference); its uncertainty is that of the f16 row. That of L2 is
# printed where the variant's perplexity should stand: "L2 7b q2_K" has the baseline's, 5.794552 +- 0.032298.
BASELINES = {"L3": (6.231634, 0.037828), "L2": (5.794552, 0.032298), "L3 bf16": (6.225194, 0.037771)}
N = 400
HALF = 0.5e-6  # of a unit of the last printed digit


def statistics(baseline: tuple[float, float], variant: tuple[float, float], correlation: float) -> CorpusStatistics:
    """Reduce N tokens whose nlls have the given perplexities, uncertainties and correlation."""
    rng = np.random.default_rng(0)
    raw = np.column_stack([np.ones(N), rng.standard_normal((N, 2))])
    first, second = np.linalg.qr(raw)[0].T[1:] * np.sqrt(N)  # mean 0, variance 1, uncorrelated
    base = np.log(baseline[0]) + baseline[1] / baseline[0] * np.sqrt(N - 1) * first
    mixed = correlation * first + np.sqrt(1 - correlation**2) * second
    nll = np.log(variant[0]) + variant[1] / variant[0] * np.sqrt(N - 1) * mixed
    share = np.full(N, 0.5)
    return corpus_statistics(
        nll_baseline=base, nll_variant=nll, kl=share, p_baseline=share, p_variant=share, same_top=share > 0
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_ratio_and_difference_with_their_uncertainties(name: str) -> None:
    model, variant, ratio, difference, percent = PUBLISHED[name]
    baseline = BASELINES[model]
    found = statistics(baseline, variant, percent / 100)
    assert found.correlation == pytest.approx(percent / 100)
    assert found.perplexity_variant == pytest.approx(variant)
    # Three printed numbers, each to half a unit of the sixth decimal.
    assert found.ratio.value == pytest.approx(ratio[0], abs=3 * HALF)
    assert found.difference.value == pytest.approx(difference[0], abs=3 * HALF)
    # The correlation is printed to a hundredth of a percent (BF16: a thousandth), which is much where it is close to one.
    half = 0.0005 if name == "BF16" else 0.005
    low, high = (statistics(baseline, variant, (percent + step) / 100) for step in (half, -half))
    for part, printed in (("ratio", ratio[1]), ("difference", difference[1])):
        assert 0.99 * getattr(low, part).uncertainty <= printed <= 1.01 * getattr(high, part).uncertainty


def test_every_row_gives_the_same_baseline() -> None:
    for model, variant, ratio, difference, _ in PUBLISHED.values():
        assert variant[0] - difference[0] == pytest.approx(BASELINES[model][0], abs=3 * HALF)
        # The quotient changes by half a unit times its derivatives: 1 / ratio, and perplexity / ratio squared.
        moved = HALF * (1 / ratio[0] + variant[0] / ratio[0] ** 2 + 1)
        assert variant[0] / ratio[0] == pytest.approx(BASELINES[model][0], abs=moved)
    # "L2 7b q2_K": ratio and difference belong to a perplexity of 6.420104, not to the printed 5.794552.
    true = 5.794552 + 0.625552
    assert true == pytest.approx(6.420104)
    assert true / 1.107955 == pytest.approx(5.794552, abs=HALF * (2 / 1.107955 + true / 1.107955**2 + 1))


# "LLaMA 3 8b Scoreboard": perplexity and its difference to the baseline, every row.
SCOREBOARD = """
6.233160 0.001524, 6.234284 0.002650, 6.253382 0.021748, 6.288607 0.056974, 6.336598 0.104964,
6.337857 0.106223, 6.363224 0.131591, 6.382937 0.151303, 6.407115 0.175482, 6.409697 0.178064,
6.455593 0.223959, 6.459705 0.228071, 6.500529 0.268895, 6.682737 0.451103, 6.700147 0.468514,
6.671223 0.439590, 6.734255 0.502622, 6.787876 0.556242, 6.888498 0.656864, 6.898327 0.666694,
6.965501 0.733867, 7.163043 0.931409, 7.458436 1.226803, 7.602878 1.371244, 7.863786 1.632152,
8.600799 2.369166, 8.652290 2.420657, 8.641993 2.410359, 8.647825 2.416191, 8.674365 2.442732,
8.682605 2.450972, 9.323778 3.092145, 9.329321 3.097688, 9.362973 3.131339, 9.376479 3.144846,
9.415200 3.183567, 9.650781 3.419148, 9.751568 3.519934, 10.761424 4.529791, 14.091782 7.860148,
25.493722 19.262089, 58.097760 51.866126, 58.267851 52.036218, 58.581498 52.349864, 60.694593 54.462959,
63.221324 56.989691
"""


def test_every_row_of_the_scoreboard_gives_the_same_baseline() -> None:
    rows = [tuple(map(float, row.split())) for row in SCOREBOARD.strip().split(",")]
    assert len(rows) == 46
    found = [perplexity - difference for perplexity, difference in rows]
    assert min(found) == pytest.approx(6.231633, abs=HALF) and max(found) == pytest.approx(6.231636, abs=HALF)


# Same top token, percent, and its uncertainty; windows of 512 tokens of the raw WikiText-2 test set, 255 scored in each.
WINDOWS = {"L3": 564, "L2": 655}
SAME_TOP = [
    ("L2", 85.584, 0.086),
    ("L3", 71.138, 0.119),
    ("L2", 94.665, 0.055),
    ("L3", 91.901, 0.072),
    ("L2", 97.520, 0.038),
    ("L3", 96.031, 0.051),
    ("L2", 98.846, 0.026),
    ("L3", 97.674, 0.040),
    ("L3", 99.739, 0.013),
]


@pytest.mark.parametrize(("model", "percent", "uncertainty"), SAME_TOP)
def test_same_top_with_its_uncertainty(model: str, percent: float, uncertainty: float) -> None:
    n = 255 * WINDOWS[model]
    same = np.arange(n) < round(n * percent / 100)
    ones = np.ones(n)
    found = corpus_statistics(
        nll_baseline=ones, nll_variant=ones, kl=0 * ones, p_baseline=ones, p_variant=ones, same_top=same
    ).same_top
    # Half a unit of the last printed digit; the count of equal tokens is rounded, too.
    assert 100 * found.value == pytest.approx(percent, abs=50 / n)
    assert 100 * found.uncertainty == pytest.approx(uncertainty, abs=5e-4 + 50 / n)
