"""Options longer than the model's context are not scored: null in every record, counted, and no answer of their items."""

import json
from collections import Counter
from pathlib import Path

import pytest

from mlflow_compress.commands.evaluate.outputs import run_model
from mlflow_compress.items.suite import Suite, load_suite
from mlflow_compress.items.task import TaskSettings
from mlflow_compress.metrics import MetricInputs, compute_all
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.records import RunRecords
from mlflow_compress.scoring.baseline_store import StateStore, StateWriter
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from tests.shared_data import SHARED, needs_shared
from tests.unit.scoring_models import load_random

LONG = {3, 7}  # items one of whose options does not fit into 160 tokens
QUIET = ScoringConfig(progress=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    folder = tmp_path_factory.mktemp("models")
    return {name: load_random("llama", seed=seed, path=folder / name) for seed, name in enumerate(("base", "variant"))}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    file = tmp_path_factory.mktemp("tasks") / "goals.jsonl"
    rows = [
        {
            "id": f"goal-{i}",
            "category": "farm",
            "context": f"The miller has {i} geese and he",
            "choices": ["counts them", "sells them " + "again " * (200 if i in LONG else 2)],
            "answer": i % 2,
        }
        for i in range(10)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_suite(str(file), model="none", settings=TaskSettings())


def check(base: RunRecords, variant: RunRecords, noise: RunRecords, left_out: dict[str, int]) -> None:
    """Nulls where an option does not fit (`left_out`: how many of an item), and every number is about other items."""
    for run in (base, variant, noise):
        rows = [row for row in run.option_scores.table.to_pylist() if row["loglik"] is None]
        assert Counter(row["item_id"] for row in rows) == left_out
        assert all(row["greedy"] is None and row["n_tokens"] > 0 for row in rows)
    for run in (variant, noise):
        rows = [row for row in run.option_distances.table.to_pylist() if row["kl"] is None]
        assert Counter(row["item_id"] for row in rows) == left_out
        assert all(row["same_top"] is None and row["rbo10"] is None for row in rows)
    results = compute_all(MetricInputs(baseline=base, variant=variant, noise=noise))
    counts = {r.name: (r.n, r.n_unscored) for r in results if r.task is None and r.category is None}
    wanted = (len(base.items) - len(left_out), len(left_out))
    names = ("distance/flips_pct", "distance/kl_mean", "quality/accuracy", "noise/flips_pct", "noise/kl_mean")
    assert {name: counts[name] for name in names} == dict.fromkeys(names, wanted)


@pytest.mark.parametrize("path", ["packed", "plain"])
def test_they_are_left_out_and_counted_everywhere(
    path: str, models: dict[str, LoadedModel], suite: Suite, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = ScoringConfig(progress=False, path=path)
    first = Scorer(models["base"], config)
    with StateWriter(tmp_path / "store", models["base"]) as writer:
        base = run_model(first, suite, capture=writer, resume=tmp_path / "work").records
    assert first.report is not None and first.report.n_unscored == len(LONG)
    assert "2 options are longer than the model's context and are not scored" in caplog.text
    store = StateStore.open(tmp_path / "store", baseline=models["base"])
    variant = run_model(Scorer(models["variant"], config), suite, baseline=store).records
    noise = run_model(
        Scorer(models["base"], ScoringConfig(progress=False, path=path, batch_tokens=64)), suite, baseline=store
    )
    ids = base.items.column("item_id") if base.items is not None else []
    check(base, variant, noise.records, {ids[i]: 1 for i in LONG})
    again = run_model(Scorer(models["base"], config), suite, baseline=store).records
    assert set(again.option_distances.table.column("kl").to_pylist()) == {0.0, None}
    assert again.option_scores.table.equals(base.option_scores.table)
    beside = run_model(Scorer(models["variant"], config), suite).records  # no baseline: no distances, the same nulls
    assert beside.option_scores.table.equals(variant.option_scores.table)


def test_items_that_all_have_one_leave_no_number(models: dict[str, LoadedModel], suite: Suite) -> None:
    wanted = {suite.items.column("item_id")[i] for i in LONG}
    requests = [r for r in suite.requests if r.item_id in wanted and r.option == 1]
    scorer = Scorer(models["base"], QUIET)
    scores, distances = scorer.score(requests, baseline=models["variant"])
    assert scores.table.column("loglik").to_pylist() == [None, None]
    assert distances.table.column("kl").to_pylist() == [None, None]
    assert (scorer.report.n_unscored, scorer.report.n_tokens) == (2, 0)


@pytest.mark.ci
@needs_shared
def test_piqas_two_long_documents_with_a_context_of_512(tmp_path: Path) -> None:
    loaded = load_model(LoadConfig(path=str(SHARED / "data" / "models" / "stories260K"), device="cpu"))
    settings = TaskSettings(data_dir=str(SHARED / "hub"))
    [task] = load_suite("piqa", model="none", settings=settings).tasks
    ids = task.items.column("item_id").tolist()
    picked = {ids[i] for i in (0, 1, 2, 3, 312, 313, 314, 315, 1552, 1553, 1554, 1555)}
    requests = [r for r in task.requests if r.item_id in picked]
    items = task.items.where(item_id=picked)
    with StateWriter(tmp_path / "store", loaded) as writer:
        base, _ = Scorer(loaded, QUIET).score(requests, capture=writer)
    store = StateStore.open(tmp_path / "store", baseline=loaded)
    scores, distances = Scorer(loaded, QUIET).score(requests, baseline=store)
    run = RunRecords(items=items, option_scores=scores, option_distances=distances)
    check(RunRecords(items=items, option_scores=base), run, run, {"314": 2, "1554": 2})
    assert distances is not None and set(distances.table.column("kl").to_pylist()) == {0.0, None}
