"""llama.cpp's perplexity README: scoreboards with propagated uncertainties.

Tokens are made that have exactly the printed moments, and reduced by our corpus statistics.
"""

import math

import numpy as np

from mlflow_compress.metrics.stats.corpus_statistics import (
    CorpusStatistics,
    WithUncertainty,
    corpus_statistics,
    mean_and_error,
)
from mlflow_compress.metrics.stats.correlation import pearson, spearman
from paper_tables.source import Check, Claim, Row, agrees, broken, read, unit

# Windows of 512 tokens of WikiText-2's raw test set in each tokenizer, 255 scored in each.
TOKENS = {"LLaMA 3 8b": 564 * 255, "LLaMA 2 7b": 655 * 255}
# The base's perplexity is PPL(Q) minus the difference in every row. Its uncertainty is printed for LLaMA 3's f16, and
# in the place of q2_K's for LLaMA 2 (see the broken cell).
BASE = {"LLaMA 3 8b": (6.231634, 0.037828), "LLaMA 2 7b": (5.794552, 0.032298)}
_MADE = 400


def with_moments(base: tuple[float, float], variant: tuple[float, float], correlation: float) -> CorpusStatistics:
    """Reduce made-up tokens whose nlls have the given perplexities, uncertainties and correlation."""
    raw = np.column_stack([np.ones(_MADE), np.random.default_rng(0).standard_normal((_MADE, 2))])
    first, second = np.linalg.qr(raw)[0].T[1:] * math.sqrt(_MADE)  # mean 0, variance 1, uncorrelated
    mixed = correlation * first + math.sqrt(1 - correlation**2) * second
    nll = [
        math.log(ppl) + u / ppl * math.sqrt(_MADE - 1) * column
        for (ppl, u), column in ((base, first), (variant, mixed))
    ]
    share = np.full(_MADE, 0.5)
    return corpus_statistics(
        nll_baseline=nll[0], nll_variant=nll[1], kl=share, p_baseline=share, p_variant=share, same_top=share > 0
    )


def _propagates(row: Row, ppl: float, u: float) -> bool:
    """Return whether ratio, difference and their uncertainties follow from both perplexities and the correlation."""
    base, printed = BASE[row["model"]], row["ppl_correlation_pct"]
    found = with_moments(base, (ppl, u), float(printed) / 100)
    if not agrees(found.ratio.value, row["ppl_ratio"]) or not agrees(found.difference.value, row["delta_ppl"], units=2):
        return False
    # The correlation is printed to a hundredth of a percent, which is much where it is close to one.
    ends = [float(printed) + side * unit(printed) / 2 for side in (1, -1)]
    low, high = (with_moments(base, (ppl, u), min(end, 100.0) / 100) for end in ends)
    return all(
        0.99 * getattr(low, name).uncertainty <= float(row[column]) <= 1.01 * getattr(high, name).uncertainty
        for name, column in (("ratio", "ppl_ratio_unc"), ("difference", "delta_ppl_unc"))
    )


def _mean_dp(row: Row, n: int) -> WithUncertainty:
    """Return mean and uncertainty of n changes of a probability with the printed mean and root mean square."""
    mean, rms = float(row["mean_dp_pct"]), float(row["rms_dp_pct"])
    spread = math.sqrt(rms**2 - mean**2)
    return mean_and_error(np.where(np.arange(n) % 2 == 0, mean - spread, mean + spread))


def _dp_cell(row: Row, n: int) -> tuple[str, bool]:
    found = _mean_dp(row, n).uncertainty
    name = row["quantization"] + (f", {row['imatrix']}" if row.get("imatrix", "none") != "none" else "")
    # The root mean square is printed with three digits after the point as well.
    return (
        f"{name}: {row['mean_dp_pct']} ± {row['mean_dp_pct_unc']}, recomputed ± {found:.3f}",
        agrees(found, row["mean_dp_pct_unc"], units=0.6),
    )


def _same_top(percent: float, n: int) -> float:
    ones = np.ones(n)
    found = corpus_statistics(
        nll_baseline=ones,
        nll_variant=ones,
        kl=0 * ones,
        p_baseline=ones,
        p_variant=ones,
        same_top=np.arange(n) < round(n * percent / 100),
    )
    return 100 * found.same_top.uncertainty


def _ratio_of(base: float, variant: float) -> float:
    one = np.ones(1)
    return corpus_statistics(
        nll_baseline=[math.log(base)],
        nll_variant=[math.log(variant)],
        kl=one,
        p_baseline=one,
        p_variant=one,
        same_top=one > 0,
    ).ratio.value


def checks() -> list[Check]:
    """Return the identities of the four tables."""
    board, both = read("llama_cpp/llama3_8b_scoreboard"), read("llama_cpp/llama2_7b_vs_llama3_8b")
    old = read("llama_cpp/llama2_70b_old_scoreboard")
    bf16 = {r["row"]: r for r in read("llama_cpp/llama3_8b_bf16_vs_fp16")}
    value = {number: float(r["value"]) for number, r in bf16.items()}
    bf16_found = with_moments(
        (value["2"], float(bf16["2"]["uncertainty"])), (value["1"], float(bf16["1"]["uncertainty"])), value["3"] / 100
    )
    n3 = TOKENS["LLaMA 3 8b"]
    return [
        Check(
            "LLaMA 3 8b scoreboard",
            "Perplexity minus its difference is the base's perplexity, the same in every row.",
            "arithmetic",
            *broken(
                (r["quantization"], abs(float(r["ppl"]) - float(r["delta_ppl"]) - BASE["LLaMA 3 8b"][0]) <= 2.1e-6)
                for r in board
            ),
        ),
        Check(
            "LLaMA 3 8b scoreboard",
            "The uncertainty of the mean Δp follows from mean and root mean square.",
            "`mean_and_error`",
            *broken(_dp_cell(r, n3) for r in board),
        ),
        Check(
            "LLaMA 2 and 3",
            "Ratio and difference of perplexities, with uncertainties, follow from the two perplexities and their "
            "correlation.",
            "`corpus_statistics`",
            *broken(
                (
                    f"{r['model']} {r['quantization']}: perplexity {r['ppl']} ± {r['ppl_unc']}",
                    _propagates(r, float(r["ppl"]), float(r["ppl_unc"])),
                )
                for r in both
            ),
        ),
        Check(
            "LLaMA 2 and 3",
            "The uncertainty of the share of equal top tokens follows from the share.",
            "`corpus_statistics`",
            *broken(
                (
                    f"{r['model']} {r['quantization']}",
                    agrees(_same_top(float(r["same_top_pct"]), TOKENS[r["model"]]), r["same_top_pct_unc"], units=0.51),
                )
                for r in both
            ),
        ),
        Check(
            "LLaMA 2 and 3",
            "The uncertainty of the mean Δp follows from mean and root mean square.",
            "`mean_and_error`",
            *broken(_dp_cell(r, TOKENS[r["model"]]) for r in both),
        ),
        Check(
            "BF16 and FP16",
            "Logarithm of the ratio, ratio and difference follow from the two perplexities.",
            "`corpus_statistics`",
            *broken(
                (bf16[number]["metric"], agrees(getattr(bf16_found, name).value, bf16[number]["value"]))
                for number, name in (("4", "log_ratio"), ("5", "ratio"), ("6", "difference"))
            ),
        ),
        Check(
            "BF16 and FP16",
            "A KL divergence is not negative, nor is any of its percentiles.",
            "arithmetic",
            *broken((f"{r['metric']}: {r['value']}", value[k] >= 0) for k, r in bf16.items() if "KLD" in r["metric"]),
        ),
        Check(
            "Llama 2 70B, old",
            "The change against FP16 is 100 (perplexity / 3.4313 - 1).",
            "`corpus_statistics`",
            *broken(
                (
                    r["quantization"],
                    agrees(100 * (_ratio_of(3.4313, float(r["ppl"])) - 1), r["delta_to_fp16_pct"], units=0.51),
                )
                for r in old
                if r["delta_to_fp16_pct"] != "NA"
            ),
        ),
    ]


def repaired_q2_k() -> bool:
    """Return whether LLaMA 2's q2_K row holds with the perplexity that its difference gives, 6.420104 ± 0.0361."""
    row = next(
        r for r in read("llama_cpp/llama2_7b_vs_llama3_8b") if (r["model"], r["quantization"]) == ("LLaMA 2 7b", "q2_K")
    )
    return _propagates(row, BASE["LLaMA 2 7b"][0] + float(row["delta_ppl"]), 0.0361)


def claims() -> list[Claim]:
    """Return how KL goes with the scoreboard's other columns."""
    board = read("llama_cpp/llama3_8b_scoreboard")
    kl = [float(r["kld_nats"]) for r in board]
    base = BASE["LLaMA 3 8b"][0]
    found = []
    for what, column in (("perplexity difference", "delta_ppl"), ("RMS Δp", "rms_dp_pct"), ("size", "size_gib")):
        rho = spearman(kl, [float(r[column]) for r in board])
        found.append(Claim("LLaMA 3 8b scoreboard", f"Spearman of KL and {what}", "no number", f"{rho.value:.4f}"))
    r = pearson(kl, [math.log(float(row["ppl"]) / base) for row in board], interval=False)
    found.append(
        Claim(
            "LLaMA 3 8b scoreboard",
            "Pearson of KL and logarithm of the perplexity ratio",
            "no number",
            f"{r.value:.5f}",
        )
    )
    return found
