"""LLM-Uncertainty-Bench's README (Ye et al. 2024): accuracy, set size and UAcc of 16 base models on five tasks."""

import math

import numpy as np

from mlflow_compress.metrics.stats.conformal import ConformalResult
from mlflow_compress.metrics.stats.correlation import spearman
from paper_tables.source import Check, Claim, Row, agrees, broken, read

N_OPTIONS = 6
TASKS = ("QA", "RC", "CI", "DRS", "DS")
VALUES = ("accuracy_pct", "set_size_options", "uacc_pct")


def uacc_of_means(accuracy_pct: float, set_size: float) -> float:
    """Return our UAcc, in percent, of one printed accuracy and one printed mean set size."""
    one = ConformalResult(
        threshold=0.0,
        correct=np.array([accuracy_pct / 100]),
        size=np.array([set_size]),
        covered=np.ones(1),
        n_options=N_OPTIONS,
    )
    return 100 * one.uacc


def ratio(row: Row) -> float:
    """Return the printed UAcc over the one that the printed means give."""
    return float(row["uacc_pct"]) / uacc_of_means(float(row["accuracy_pct"]), float(row["set_size_options"]))


def follows(row: Row) -> bool:
    """Return whether the printed UAcc can come from the printed means, each rounded to two digits."""
    accuracy, size, printed = (float(row[name]) for name in VALUES)
    low = uacc_of_means(accuracy - 0.005, size + 0.005)
    high = uacc_of_means(accuracy + 0.005, size - 0.005)
    return low <= printed + 0.005 and printed - 0.005 <= high


def cells() -> list[Row]:
    """Return the 80 rows of one model and one task, without the averages."""
    return [r for r in read("lub/base_models") if r["task"] != "Avg"]


def checks() -> list[Check]:
    """Return the identities between the three tables."""
    rows, single = read("lub/base_models"), cells()
    models = {r["model"]: [s for s in single if s["model"] == r["model"]] for r in rows}
    averages = [
        (f"{r['model']}, {name}", agrees(sum(float(s[name]) for s in models[r["model"]]) / 5, r[name]))
        for r in rows
        if r["task"] == "Avg"
        for name in VALUES
    ]
    root = math.sqrt(N_OPTIONS)
    printed = {(r["model"], r["task"]): r for r in rows}
    example = read("lub/qwen_72b_example_run")
    return [
        Check("Acc, SS, UAcc", "The average is the mean of the five tasks.", "arithmetic", *broken(averages)),
        Check(
            "Acc, SS, UAcc",
            "UAcc lies between its value for sets of six options and that for sets of one.",
            "`ConformalResult.uacc`",
            *broken(
                (
                    f"{r['model']}, {r['task']}",
                    float(r["accuracy_pct"]) / root <= float(r["uacc_pct"]) <= float(r["accuracy_pct"]) * root,
                )
                for r in single
            ),
        ),
        Check(
            "Acc, SS, UAcc",
            "UAcc is accuracy over set size times the square root of six, of the printed means.",
            "`ConformalResult.uacc`",
            *broken((f"{r['model']}, {r['task']}: {ratio(r):.3f}", follows(r)) for r in single),
        ),
        Check(
            "example run",
            "The printed run of Qwen-72B equals its row of the tables, and every coverage is at least 90 %.",
            "arithmetic",
            *broken(
                (
                    r["task"],
                    all(float(r[name]) == float(printed[r["model"], r["task"]][name]) for name in VALUES)
                    and float(r["coverage_pct"]) >= 90,
                )
                for r in example
            ),
        ),
    ]


def claims() -> list[Claim]:
    """Return how accuracy, set size and UAcc go together."""
    single = cells()
    average = [r for r in read("lub/base_models") if r["task"] == "Avg"]
    accuracy, size, uacc = ([float(r[name]) for r in average] for name in VALUES)
    found = []
    for what, values in (("set size", size), ("UAcc", uacc)):
        rho = spearman(accuracy, values)
        found.append(Claim("averages", f"Spearman of accuracy and {what}", "no number", f"{rho.value:.3f}"))
    by_task = [
        [(float(r["accuracy_pct"]), float(r["set_size_options"])) for r in single if r["task"] == t] for t in TASKS
    ]
    larger = sum(a > b and s > t for rows in by_task for a, s in rows for b, t in rows)
    pairs = sum(len(rows) * (len(rows) - 1) // 2 for rows in by_task)
    return [
        *found,
        Claim(
            "five tasks", "Pairs of models in which the better one has the larger sets", "some", f"{larger} of {pairs}"
        ),
    ]
