"""What a search logs on its run, from choices and evaluations that are made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mlflow_compress.commands.search import run as publishing
from mlflow_compress.commands.search.choice import Choice
from mlflow_compress.commands.search.parameters import SearchConfig
from mlflow_compress.commands.search.result import Search
from mlflow_compress.commands.search.run import FinishedMain, UnitKl, publish_search
from mlflow_compress.decide.cost_table import Allocation, CostTable, Limit
from mlflow_compress.errors import AlignmentError
from mlflow_compress.tracking.store import RunLink
from tests.unit import test_cost_table

SIZES = replace(test_cost_table.SIZES, rest=10)
TABLE = CostTable(sizes=SIZES, kl=np.array([[[0.3], [0.1]], [[0.2], [0.05]]]) * np.linspace(0.8, 1.2, 8))
SPREAD = np.linspace(0.5, 1.5, 20)
KL = {"x3": 0.5, "x4": 0.15, "mine": 0.2, "theirs": 0.35}


class Run:
    """Keeps what is logged."""

    run_id = "r0"

    def __init__(self) -> None:
        self.files: dict[str, Any] = {}
        self.values: dict[str, float] = {}
        self.note = ""

    def log_json(self, value: Any, name: str) -> None:
        self.files[name] = json.loads(json.dumps(value, allow_nan=False))

    def log_text(self, text: str, name: str) -> None:
        self.files[name] = text

    def log_figures(self, folder: Path, names: list[str]) -> None:
        assert all((folder / f"{name}.png").is_file() for name in names)
        self.files["figures"] = names

    def log_values(self, values: dict[str, float]) -> None:
        self.values |= values

    def set_tags(self, tags: dict[str, object]) -> None:
        assert tags["verdict"]

    def set_note(self, note: str) -> None:
        self.note = note


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    keys = tuple(("corpus", str(i)) for i in range(20))

    def unit_kl(tracker: Any, main_run: str) -> UnitKl:
        return UnitKl(unit="window", keys=keys, kl=KL[main_run] * SPREAD)

    def manifest(folder: str, *, verify: bool) -> Any:
        n_bytes = {"x3": 900, "x4": 1200, "mine": 1000, "theirs": 1100}[folder]
        return SimpleNamespace(bits_per_weight=n_bytes / 300, bits_per_weight_model=5.0, size_bytes=n_bytes + 10)

    monkeypatch.setattr(publishing, "unit_kl", unit_kl)
    monkeypatch.setattr(publishing, "read_manifest", manifest)
    return Run()


def choice(columns: tuple[int, int], n_bytes: int, predicted: float) -> Choice:
    variant: Any = SimpleNamespace(name="v")
    return Choice(
        allocation=Allocation(choice=columns, n_bytes=n_bytes, cost=predicted, gap=0.0),
        variant=variant,
        folder="",
        predicted=predicted,
        kl=np.linspace(0.2, 0.4, 8),
    )


def made(name: str) -> FinishedMain:
    return FinishedMain(run_id=name, folder=name, name=name)


def published(run: Run, tmp_path: Path, kind: str = "bits_per_weight") -> Search:
    limit = Limit(kind=kind, value=3.5)  # type: ignore[arg-type]
    tracker: Any = SimpleNamespace(
        uri=f"sqlite:///{tmp_path}/mlflow.db", link=lambda run_id: RunLink(run_id=run_id, store="s")
    )
    text = SimpleNamespace(name="/texts/search.txt", windows=SimpleNamespace(ids=range(8)))
    costs: Any = SimpleNamespace(text=text, whole=lambda folder: KL[folder] * np.ones(8))
    return publish_search(
        tracker,
        run,  # type: ignore[arg-type]
        SearchConfig(tasks="/texts/b.txt"),
        table=TABLE,
        uniform={"x:3": made("x3"), "x:4": made("x4")},
        chosen={limit: (choice((1, 0), 1000, 0.3), made("mine"))},
        costs=costs,
    )


def test_rows_costs_and_differences(run: Run, tmp_path: Path) -> None:
    """1,000 bytes are a third of the way from 900 to 1,200: the mix is 2/3 of 0.5 and 1/3 of 0.15."""
    found = published(run, tmp_path)
    assert [one.name for one in found.variants] == ["x3", "mine", "x4"]
    mine = found.variants[1]
    mix = 2 / 3 * 0.5 + 1 / 3 * 0.15
    assert mine.mix == "0.33 of x4, the rest x3" and mine.mix_kl == pytest.approx(mix)
    assert mine.difference == pytest.approx(0.2 - mix) and mine.against_mix == "closer"
    assert mine.predicted_kl == 0.3 and mine.search_kl == pytest.approx(0.3) and mine.gap == 0.0
    assert [one.name for one in found.searched] == ["mine"]
    costs = {(one.group, one.format): one for one in found.costs}
    assert costs["a", "x:3"].kl == pytest.approx(0.3) and costs["b", "x:4"].size_bytes == 800
    assert costs["a", "x:3"].kl_low is not None and costs["a", "x:3"].kl_low < 0.3
    assert found.recipes == {"mine": {"a": "x:4", "b": "x:3"}}
    assert found.held_out == "20 windows of b.txt" and found.search_text == "8 windows of 256 tokens of search.txt"

    assert run.values["search/closer_than_mix"] == 1 and run.values["search/farther_than_mix"] == 0
    assert run.values["search/largest_prediction_error_pct"] == pytest.approx(0.0, abs=1e-6)
    assert set(run.files) == {"search.json", "search.csv", "costs.csv", "search.md", "figures"}
    assert run.files["costs.csv"].splitlines()[0] == "group,format,size_bytes,kl,kl_low,kl_high"
    assert run.files["search.json"]["variants"][1]["against_mix"] == "closer"
    assert run.note.startswith("**1 variant of mixed precision; 1 of 1 closer")
    assert len(found.to_pandas()) == 3


def test_a_limit_of_kl_that_is_not_kept_is_said(run: Run, tmp_path: Path) -> None:
    found = published(run, tmp_path, kind="max_kl")
    assert found.searched[0].max_kl == 3.5 and not [note for note in found.notes if "not surely" in note]


def test_other_texts_are_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_key(tracker: Any, main_run: str) -> UnitKl:
        return UnitKl(unit="window", keys=((main_run, "0"),), kl=np.ones(1))

    monkeypatch.setattr(publishing, "unit_kl", one_key)
    with pytest.raises(AlignmentError, match="same texts"):
        published(run, tmp_path)
