"""Every number that the metrics return for small synthetic records, and the tables made of them, as they were stored.

The stored values are what the metrics returned before they were written as formulas over subsets. A value may differ
by 1e-12 of itself (other versions of numpy sum in another order). `python -m tests.golden.test_metric_results` writes
them again; that is right only where a number is meant to change.
"""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from mlflow_compress.decide.gates import gate_values
from mlflow_compress.metrics import MetricInputs, MetricSettings, compute_all, headline
from mlflow_compress.records import MetricResult, OptionDistances, OptionScores, RunRecords
from mlflow_compress.reporting.headline import headline_rows, headline_table
from tests.metric_records import identical, inputs

STORED = Path(__file__).with_name("metric_results.json")
SETTINGS = MetricSettings(resamples=200)


def _without_some(run: RunRecords) -> RunRecords:
    """Return the run with items that were not scored: two of the lettered ones and one cloze item."""

    def nulls(records: Any, columns: tuple[str, ...]) -> Any:
        rows = records.table.to_pylist()
        for row in rows:
            if (row["task"], row["item_id"]) in {("mmlu", "00003"), ("mmlu", "00007"), ("piqa", "00004")}:
                row.update(dict.fromkeys(columns))
        return type(records).from_rows(rows)

    distances = OptionDistances.SCHEMA.names[len(OptionDistances.KEY) :]
    return replace(
        run,
        option_scores=nulls(run.option_scores, ("loglik",)) if isinstance(run.option_scores, OptionScores) else None,
        option_distances=nulls(run.option_distances, tuple(distances)) if run.option_distances is not None else None,
    )


def _generated(full: MetricInputs) -> MetricInputs:
    """Return the inputs with generated and last-word answers alone: no multiple choice, so all answers are pooled."""

    def kept(run: RunRecords) -> RunRecords:
        return RunRecords(
            items=run.items.where(family=["last_word", "exact"]),
            option_scores=run.option_scores.where(task="lambada"),
            option_distances=run.option_distances.where(task="lambada"),
            generations=run.generations,
        )

    baseline = replace(full.baseline, option_distances=full.variant.option_distances)
    return MetricInputs(replace(kept(baseline), option_distances=None), kept(full.variant))


def cases() -> dict[str, MetricInputs]:
    """Return the inputs by what they are."""
    full = inputs(24, windows=24, per_window=5)
    found = {
        "full": full,
        "identical": identical(full),
        "baseline alone": MetricInputs(full.baseline, embeddings=full.embeddings),
        "some unscored": MetricInputs(full.baseline, _without_some(full.variant), full.noise),
        "generated": _generated(full),
    }
    return {name: replace(inputs, settings=SETTINGS) for name, inputs in found.items()} | {
        "pooled only": replace(full, settings=replace(SETTINGS, pooled_only=True))
    }


def _row(result: MetricResult) -> list[Any]:
    return list(asdict(result).values())


def _shown(results: list[MetricResult]) -> list[Any]:
    """Return the text of the headline table with its notes, and the page's rows with floor and verdict."""
    pooled = headline(results)
    gates = gate_values(pooled)
    rows = [
        [None if cell is None else str(cell) for cell in vars(replace(row, meaning="")).values()]
        for row in headline_rows(pooled)
    ]
    return [headline_table(pooled).splitlines(), rows, sorted(gates.items())]


@pytest.mark.parametrize("name", ["full", "identical", "baseline alone", "some unscored", "generated", "pooled only"])
def test_the_numbers_are_as_they_were_stored(name):
    stored = json.loads(STORED.read_text())[name]
    results = compute_all(cases()[name])
    assert [r.name for r in results] == [row[0] for row in stored["results"]]
    for result, expected in zip(results, stored["results"], strict=True):
        for got, wanted in zip(_row(result), expected, strict=True):
            same = math.isclose(got, wanted, rel_tol=1e-12) if isinstance(wanted, float) else got == wanted
            assert same, f"{result} was {expected}"
    *texts, gates = json.loads(json.dumps(_shown(results)))
    *stored_texts, stored_gates = stored["shown"]
    assert texts == stored_texts
    assert dict(gates) == pytest.approx(dict(stored_gates), rel=1e-12)


if __name__ == "__main__":
    found = {name: compute_all(inputs) for name, inputs in cases().items()}
    lines = {name: {"results": [_row(r) for r in results], "shown": _shown(results)} for name, results in found.items()}
    cut = [f'"{name}": ' + json.dumps(case).replace('], ["', '],\n["') for name, case in lines.items()]
    STORED.write_text("{\n" + ",\n".join(cut) + "\n}\n")
