"""The sample that the noise run scores, and the metrics that read it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlflow_compress.commands.evaluate.baseline import noise_sample
from mlflow_compress.items.suite import Suite
from mlflow_compress.items.task import Corpus, Task, item_row
from mlflow_compress.metrics import compute_all
from mlflow_compress.records import Items, Request
from mlflow_compress.reporting.details import details
from tests import metric_records


def task(name: str, n: int) -> Task:
    rows = [
        item_row(name, "cloze", "loglik", {"id": str(i), "category": None}, question="q", prompt="p") for i in range(n)
    ]
    shared = {"permutation": 0, "content": 0, "context": "p", "continuation": " x", "n_chars": 1, "n_bytes": 1}
    requests = tuple(Request(task=name, item_id=str(i), option=o, **shared) for i in range(n) for o in range(2))
    return Task(name=name, family="cloze", items=Items.from_rows(rows), requests=requests)


def drawn(suite: Suite) -> list[list[str]]:
    return [part.items.column("item_id").tolist() for part in suite.tasks]


def test_a_seeded_draw_of_each_task_with_all_its_requests() -> None:
    suite = Suite(tasks=(task("a", 50), task("b", 50), task("c", 3)), corpora=())
    sample = noise_sample(suite, 10, seed=1)
    a, b, c = drawn(sample)
    assert len(set(a)) == len(set(b)) == 10 and a != b and c == ["0", "1", "2"]
    assert a == sorted(a, key=int)  # in the order of the task
    assert [r.item_id for r in sample.tasks[0].requests] == [i for i in a for _ in range(2)]
    assert drawn(noise_sample(suite, 10, seed=1)) == [a, b, c]
    assert drawn(noise_sample(suite, 10, seed=2))[0] != a
    alone = Suite(tasks=(task("b", 50),), corpora=())
    assert drawn(noise_sample(alone, 10, seed=1)) == [b]  # whatever else is evaluated
    assert noise_sample(suite, 0, seed=1) is suite


@pytest.mark.parametrize(("asked", "n", "tokens"), [(None, 3, 1536), (1000, 3, 1000), (None, 1, 1024)])
def test_the_first_windows_of_a_corpus_and_the_first_documents(asked: int | None, n: int, tokens: int) -> None:
    rolling = replace(task("r", 0), requests=(), documents=("one", "two", "three", "four"))
    suite = Suite(tasks=(rolling,), corpora=(Corpus(name="c", text="t", max_tokens=asked),))
    sample = noise_sample(suite, n, seed=0)
    assert sample.corpora[0].max_tokens == tokens and sample.tasks[0].documents == rolling.documents[:n]


def test_metrics_compare_and_count_what_the_noise_run_covers() -> None:
    full = metric_records.inputs(40)
    assert full.noise is not None and full.noise.items is not None and full.noise.token_scores is not None
    whole = {r.name: r for r in compute_all(full) if r.name.startswith("noise/")}
    kept = {row["item_id"] for row in full.noise.items.table.to_pylist()[::4]}
    windows = set(sorted(set(full.noise.token_scores.column("item_id")))[:2])
    noise = replace(
        full.noise,
        items=full.noise.items.where(item_id=kept),
        option_scores=full.noise.option_scores and full.noise.option_scores.where(item_id=kept),
        option_distances=full.noise.option_distances and full.noise.option_distances.where(item_id=kept),
        token_scores=full.noise.token_scores.where(item_id=windows),
        token_distances=full.noise.token_distances and full.noise.token_distances.where(item_id=windows),
        generations=None,
    )
    partial = replace(full, noise=noise)
    results = compute_all(partial)
    found = {r.name: r for r in results if r.name.startswith("noise/")}
    assert found.keys() == whole.keys()
    assert all(found[name].n < whole[name].n for name in whole)
    assert found["noise/flips_pct"].n_unscored == whole["noise/flips_pct"].n_unscored == 0
    # Everything that is no floor is as it was.
    rest = [r for r in compute_all(full) if not r.name.startswith("noise/")]
    assert [r for r in results if not r.name.startswith("noise/")] == rest
    floors = {row["name"]: row["floor"] for row in details(partial, results)["noise_floor"]}
    assert floors["distance/kl_mean"] == found["noise/kl_mean"].value
