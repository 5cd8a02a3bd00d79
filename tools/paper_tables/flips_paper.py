""" "Accuracy is Not All You Need" (Dutta et al. 2024): accuracy, flips and MT-Bench tables.

The paper cuts digits off in many cells and rounds in others, so a cell agrees within one unit of its last digit.
"""

from itertools import pairwise

import numpy as np

from mlflow_compress.metrics.stats.correlation import spearman
from mlflow_compress.metrics.stats.significance import Flips, count_flips, mcnemar_exact
from paper_tables.source import Check, Claim, Row, agrees, broken, read, unit

MMLU_ITEMS = 14042
# Number of items where it is small enough that a printed share decides the count.
ITEMS = {"PIQA": 1838, "ARC Easy": 2376, "ARC Challenge": 1172, "Winogrande": 1267}
GENERATIVE_ITEMS = {"GSM8k": 1319, "TriviaQA": 17944}


def _name(row: Row) -> str:
    return f"{row['benchmark']}, {row['model']}, {row['method']}"


def _printed(rows: list[Row]) -> list[Row]:
    return [row for row in rows if "NA" not in row.values()]


def _answers(n: int, n_correct: int, c2w: int, w2c: int, w2w: int) -> Flips:
    """Return our count of made-up answers that have the given transitions; answer 0 is right."""
    baseline = np.where(np.arange(n) < n_correct, 0, 1)
    variant = baseline.copy()
    variant[:c2w] = 1
    variant[n_correct : n_correct + w2c] = 0
    variant[n_correct + w2c : n_correct + w2c + w2w] = 2
    return count_flips(baseline == 0, variant == 0, baseline, variant)


def whole_items(flips_pct: str, change_points: str, n: int) -> list[Flips]:
    """Return every pair of whole counts that prints as the given flips and accuracy change."""
    tolerance = (unit(flips_pct) + unit(change_points)) * n / 200
    middle = [(float(flips_pct) + sign * float(change_points)) / 200 * n for sign in (-1, 1)]
    near = [range(max(0, int(m - tolerance) - 1), int(m + tolerance) + 3) for m in middle]
    found = [Flips(n=n, n_correct=n, c2w=c, w2c=i, w2w=None) for c in near[0] for i in near[1]]
    return [
        counts
        for counts in found
        if agrees(100 * (counts.c2w + counts.w2c) / n, flips_pct)
        and agrees(100 * (counts.w2c - counts.c2w) / n, change_points)
    ]


def _whole_number(printed: str, n: int) -> bool:
    return agrees(100 * round(float(printed) * n / 100) / n, printed)


def _last(row: Row) -> str:
    """Return the printed number that decides how exactly the accuracy change is known."""
    return row.get("accuracy_pct") or row["accuracy_change_pct_points"]


def _change(row: Row) -> float:
    if "accuracy_pct" in row:
        return float(row["accuracy_pct"]) - float(row["baseline_accuracy_pct"])
    return float(row["accuracy_change_pct_points"])


def _changed_shares(row: Row, flips: Row, all_flips: Row) -> bool:
    """Return whether table 2's two shares follow from the flips and all-flips of tables 5 and 12."""
    f, change, a, every = (
        float(text) / 100 * MMLU_ITEMS
        for text in (
            flips["flips_pct"],
            flips["accuracy_change_pct_points"],
            flips["baseline_accuracy_pct"],
            all_flips["allflips_pct"],
        )
    )
    found = _answers(MMLU_ITEMS, round(a), round((f - change) / 2), round((f + change) / 2), round(every - f))
    of_correct = 100 * found.c2w / found.n_correct
    of_incorrect = 100 * (found.w2c + found.w2w) / (found.n - found.n_correct)
    return agrees(of_correct, row["changed_of_correct_pct"]) and agrees(of_incorrect, row["changed_of_incorrect_pct"])


def checks() -> list[Check]:
    """Return the identities of tables 1 to 3, 5 to 13 and 15 to 19."""
    tables = {n: _printed(read(f"ainayn/{n}")) for n in ("table05_11_accuracy_flips", "table13_mmlu_pretrained_flips")}
    chat, base = tables.values()
    generative = read("ainayn/table17_18_generative")
    mmlu = {(r["model"], r["method"]): r for r in chat if r["benchmark"] == "MMLU"}
    every = {(r["model"], r["method"]): r for r in _printed(read("ainayn/table12_mmlu_allflips"))}
    second = read("ainayn/table02_changed_by_correctness")
    joined = [(r, key) for r in second if (key := (r["model"], r["method"])) in mmlu]
    larger = [(_name(r), float(r["flips_pct"]) >= abs(_change(r)) - unit(_last(r))) for r in chat + base + generative]
    whole = [r for r in chat if r["benchmark"] in ITEMS]
    margins = read("ainayn/table01_top_margin")
    scores = [r for r in read("ainayn/table03_15_16_mt_bench") if r["mean_score"] != "NA"]
    noise = read("ainayn/table19_gaussian_noise")
    rising = [float(b["kl_divergence"]) > float(a["kl_divergence"]) for a, b in pairwise(noise)]
    return [
        Check(
            "1",
            "The top margin is larger for correct answers than for wrong ones.",
            "arithmetic",
            *broken(
                (f"{r['benchmark']}, {r['model']}", float(r["top_margin_correct"]) > float(r["top_margin_wrong"]))
                for r in margins
            ),
        ),
        Check("5-11, 13, 17, 18", "Flips are at least as large as the accuracy change.", "`Flips`", *broken(larger)),
        Check(
            "5-11",
            "Flips and accuracy change come from whole numbers of items: some c2w and w2c give both "
            "(PIQA, ARC, Winogrande).",
            "`Flips`",
            *broken(
                (
                    f"{_name(r)}: flips {r['flips_pct']}",
                    bool(whole_items(r["flips_pct"], r["accuracy_change_pct_points"], ITEMS[r["benchmark"]])),
                )
                for r in whole
            ),
        ),
        Check(
            "5, 12",
            "All flips are at least as many as flips, and both tables have the same accuracies.",
            "arithmetic",
            *broken(
                (
                    _name(r),
                    float(r["allflips_pct"]) >= float(mmlu[key]["flips_pct"])
                    and r["baseline_accuracy_pct"] == mmlu[key]["baseline_accuracy_pct"]
                    and r["accuracy_change_pct_points"] == mmlu[key]["accuracy_change_pct_points"],
                )
                for key, r in every.items()
            ),
        ),
        Check(
            "2",
            "The shares of changed answers among correct and incorrect ones follow from flips, all flips and accuracy.",
            "`count_flips`",
            *broken((_name(r), _changed_shares(r, mmlu[key], every[key])) for r, key in joined),
        ),
        Check(
            "3, 15, 16",
            "The MT-Bench score is the mean of the two turns' scores.",
            "arithmetic",
            *broken(_mean_of_turns(r) for r in scores),
        ),
        Check(
            "17, 18",
            "Accuracies and flips are whole numbers of items (GSM8k 1,319, TriviaQA 17,944).",
            "arithmetic",
            *broken(
                (f"{_name(r)}: {column} {r[column]}", _whole_number(r[column], GENERATIVE_ITEMS[r["benchmark"]]))
                for r in generative
                for column in ("baseline_accuracy_pct", "accuracy_pct", "flips_pct")
            ),
        ),
        Check(
            "19",
            "The KL divergence rises with the noise and the perplexity stays.",
            "arithmetic",
            *broken(
                (f"noise {r['noise_std']}", r["perplexity"] == noise[0]["perplexity"] and rises)
                for r, rises in zip(noise[1:], rising, strict=True)
            ),
        ),
    ]


def _mean_of_turns(row: Row) -> tuple[str, bool]:
    """Return the row's name and whether its mean lies where two means with cut digits put it."""
    half = (float(row["turn1_score"]) + float(row["turn2_score"])) / 2
    mean = float(row["mean_score"])
    name = f"{row['model']}, {row['method']}: mean {row['mean_score']}, turns give {half:.3f}"
    return name, -0.001 - 1e-9 <= mean - half < 0.01


def _rho(x: list[float], y: list[float]) -> float:
    found = spearman(x, y)
    return found.value


def claims() -> list[Claim]:
    """Return the text's numbers beside those of the tables."""
    chat = _printed(read("ainayn/table05_11_accuracy_flips"))
    flips, change = [float(r["flips_pct"]) for r in chat], [abs(_change(r)) for r in chat]
    mmlu = {(r["model"], r["method"]): r for r in chat if r["benchmark"] == "MMLU"}
    every = {(r["model"], r["method"]): r for r in _printed(read("ainayn/table12_mmlu_allflips"))}
    pairs = [(float(every[key]["allflips_pct"]), float(r["flips_pct"])) for key, r in mmlu.items()]
    ratios = [
        float(r["changed_of_incorrect_pct"]) / float(r["changed_of_correct_pct"])
        for r in read("ainayn/table02_changed_by_correctness")
    ]
    excess = [100 * (a / f - 1) for a, f in pairs]
    generative = {
        name: [float(r["flips_pct"]) for r in read("ainayn/table17_18_generative") if r["benchmark"] == name]
        for name in GENERATIVE_ITEMS
    }
    return [
        Claim("5-11", "Largest flips of a chat model", "13.6 %", f"{max(flips):.2f} %"),
        Claim(
            "5-11",
            "Cells whose accuracy changes by at most one point",
            "the majority",
            f"{sum(c <= 1 for c in change)} of {len(change)}",
        ),
        Claim("5-11", "Spearman of flips and size of the accuracy change", "no number", f"{_rho(flips, change):.3f}"),
        Claim(
            "5", "Spearman of flips and KL divergence on MMLU", "0.981", "cannot be recomputed: KL is only in a figure"
        ),
        Claim(
            "5, 12",
            "All flips beyond flips on MMLU, mean of the cells",
            "43 %",
            f"{np.mean(excess):.1f} % (from {min(excess):.0f} to {max(excess):.0f})",
        ),
        Claim(
            "2",
            "Rows in which incorrect answers change at least twice as often as correct ones",
            "all",
            f"{sum(r >= 2 for r in ratios)} of {len(ratios)} (ratios {min(ratios):.2f} to {max(ratios):.2f})",
        ),
        _significant(chat),
        *(
            Claim(table, f"Flips on {name}", said, f"{min(generative[name]):.1f} to {max(generative[name]):.1f} %")
            for table, name, said in (("17", "GSM8k", "12 to 30 %"), ("18", "TriviaQA", "2 to 4 %"))
        ),
        *_mt_bench_claims(mmlu),
    ]


def _significant(chat: list[Row]) -> Claim:
    """Return in how many cells a test finds the accuracy change, whichever whole counts the cell stands for."""
    counts = [
        found
        for r in chat
        if r["benchmark"] in ITEMS
        and (found := whole_items(r["flips_pct"], r["accuracy_change_pct_points"], ITEMS[r["benchmark"]]))
    ]
    found = sum(all(mcnemar_exact(c.c2w, c.w2c) < 0.05 for c in cell) for cell in counts)
    return Claim(
        "5-11",
        "Cells with whole counts whose accuracy change an exact McNemar test finds (p below 0.05)",
        "not tested",
        f"{found} of {len(counts)}",
    )


def _mt_bench_claims(mmlu: dict[tuple[str, str], Row]) -> list[Claim]:
    scores = {
        (r["model"], r["method"]): float(r["mean_score"])
        for r in read("ainayn/table03_15_16_mt_bench")
        if r["mean_score"] != "NA"
    }
    found = []
    for model, loss in (("Llama2-70b chat", "5 %"), ("Yi-34b chat", "1.5 %")):
        methods = [method for m, method in scores if m == model and method != "16bit"]
        base = scores[model, "16bit"]
        change = [scores[model, method] - base for method in methods]
        moved = [float(mmlu[model, method]["flips_pct"]) for method in methods]
        found += [
            Claim(
                "3, 5",
                f"{model}: Spearman of MMLU flips and MT-Bench change",
                "well correlated",
                f"{_rho(moved, change):.3f} over {len(methods)} methods",
            ),
            Claim("3", f"{model}: mean loss on MT-Bench", loss, f"{-100 * np.mean(change) / base:.2f} %"),
        ]
    return found
