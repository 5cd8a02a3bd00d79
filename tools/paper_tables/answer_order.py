""" "Changing Answer Order Can Decrease MMLU Accuracy" (Gupta et al. 2024): accuracy, metric and relative drop."""

from mlflow_compress.metrics.order import drop_pct
from mlflow_compress.metrics.stats.correlation import spearman
from paper_tables.source import Check, Claim, Row, agrees, broken, read

TABLES = {"1": "order/table1_mmlu", "2": "order/table2_problem_solving"}


def _pair(row: Row) -> tuple[float, float]:
    return float(row["mmlu_accuracy_pct"]), float(row["metric_pct"])


def checks() -> list[Check]:
    """Return the identities of tables 1 and 2, rounded as printed."""
    rows = [(f"table {number}, {r['model']}", r) for number, name in TABLES.items() for r in read(name)]
    return [
        Check(
            "1, 2",
            "The drop is 100 (accuracy - metric)/accuracy.",
            "`drop_pct`",
            *broken((name, agrees(float(drop_pct(*_pair(r))), r["drop_pct"], units=0.5)) for name, r in rows),
        ),
        Check(
            "1, 2",
            "The metric lies between accuracy squared (independent answers) and accuracy.",
            "arithmetic",
            *broken((name, a * a / 100 < m <= a) for name, r in rows for a, m in [_pair(r)]),
        ),
    ]


def claims() -> list[Claim]:
    """Return how closely accuracy and robustness go together."""
    found = []
    for number, name in TABLES.items():
        accuracy, metric = zip(*map(_pair, read(name)), strict=True)
        drops = [float(drop_pct(a, m)) for a, m in zip(accuracy, metric, strict=True)]
        for what, values in (("metric", metric), ("drop", drops)):
            rho = spearman(accuracy, values)
            found.append(Claim(number, f"Spearman of accuracy and {what}", "no number", f"{rho.value:.3f}"))
        found.append(Claim(number, "Mean drop of the ten models", "no number", f"{sum(drops) / len(drops):.1f} %"))
    return found
