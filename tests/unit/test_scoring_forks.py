"""Passes that forks of this process share: the same bits as in one process, and errors that are told."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from mlflow_compress.commands.evaluate.models import cores_shared_out
from mlflow_compress.commands.shared import named_models
from mlflow_compress.config import EngineConfig, SourceConfig
from mlflow_compress.errors import StoreError, WorkerError
from mlflow_compress.scoring import engine
from mlflow_compress.scoring.baseline_store import StateStore, StateWriter
from mlflow_compress.scoring.child_process import in_forks, passes_in_forks, processes_per_pass
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from mlflow_compress.scoring.generation.generate import generate_until
from tests.unit.scoring_models import TEXT, load_random, mixed_requests

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks are safe on Linux only"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.mark.parametrize("path", ["packed", "plain"])
@pytest.mark.parametrize("processes", [2, 3])
def test_forks_give_the_bits_of_one_process(
    tmp_path: Path, path: str, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_FEWEST_TOKENS", 32)
    base, variant = (
        load_random("llama", path=tmp_path / "base"),
        load_random("llama", seed=2, path=tmp_path / "variant"),
    )
    results, rows = [], []
    for n in (1, processes):
        config = ScoringConfig(progress=False, batch_tokens=64, head_rows=8, path=path, processes=n, shard_seconds=0)
        folder = tmp_path / f"in-{n}"
        with StateWriter(folder / "store", base) as capture:
            first, _ = Scorer(base, config).score(mixed_requests(), capture=capture)
            text, _ = Scorer(base, config).score_corpus("c", TEXT * 9, window=32, capture=capture)
        store = StateStore.open(folder / "store", baseline=base)
        scorer = Scorer(variant, config)
        second, moved = scorer.score(mixed_requests(), baseline=store, resume=folder / "resume")
        tokens, distances = scorer.score_corpus("c", TEXT * 9, window=32, baseline=store)
        results.append([one.table for one in (first, text, second, moved, tokens, distances)])
        rows.append(store.states(np.arange(store.n_rows)))
    assert all(one.equals(two) for one, two in zip(*results, strict=True))
    assert torch.equal(*rows)


def test_what_forks_have_finished_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_FEWEST_TOKENS", 32)
    loaded = load_random("llama", path=tmp_path / "model")
    config = ScoringConfig(progress=False, batch_tokens=64, head_rows=8, processes=2)
    first, _ = Scorer(loaded, config).score(mixed_requests(), resume=tmp_path / "resume")
    again = Scorer(loaded, config)
    monkeypatch.setattr(engine, "_computed", lambda *_: pytest.fail("the model ran"))
    second, _ = again.score(mixed_requests(), resume=tmp_path / "resume")
    assert second.table.equals(first.table)


def test_answers_of_forks_are_those_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_random("llama", path=tmp_path / "model")
    words = TEXT.split()
    prompts = [" ".join(words[i : i + 2 + 3 * (i % 4)]) for i in range(9)]
    alone = generate_until(loaded, prompts, until=("e",), max_new_tokens=20, batch_rows=2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    with passes_in_forks():
        assert processes_per_pass() == 3 and torch.get_num_threads() == 1
        resumed = generate_until(loaded, prompts, until=("e",), max_new_tokens=20, batch_rows=2, resume=tmp_path / "r")
        assert generate_until(loaded, prompts, until=("e",), max_new_tokens=20, batch_rows=2) == alone == resumed
    assert processes_per_pass() == 1


def _tasks(number: int) -> Iterator[int]:
    yield number
    if number == 3:
        raise StoreError("The third is broken", fix="Mend it")
    if number == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    yield -number


def test_forks_take_tasks_and_tell_errors_and_deaths() -> None:
    assert sorted(in_forks(_tasks, [1, 2, 5], 2)) == [-5, -2, -1, 1, 2, 5]
    with pytest.raises(StoreError, match=r"The third is broken\. Mend it") as raised:
        list(in_forks(_tasks, [1, 2, 3], 2))
    assert raised.value.fix == "Mend it" and "in _tasks" in raised.value.__notes__[0]
    with pytest.raises(WorkerError, match=r"ended by SIGKILL.* when memory runs out"):
        list(in_forks(_tasks, [1, 4, 2], 1))


def test_forks_are_for_small_models_here_and_never_where_the_user_has_set_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})

    def forks(**parameters: str) -> int:
        running = EngineConfig(engine=parameters.pop("engine", "local"))
        with cores_shared_out(running, SourceConfig(**{"model": "demo", "device": "cpu", **parameters})):
            return processes_per_pass()

    assert forks() == 2
    assert forks(engine="ray") == forks(engine="vllm") == forks(device="balanced") == forks(model="endpoint:x") == 1
    assert forks(model=str(tmp_path / "no model")) == 1
    assert forks(device="auto") == 1 + (not Path("/dev/nvidiactl").exists())
    monkeypatch.setattr(named_models, "_SMALL", 1 << 20)
    assert forks() == 1
    monkeypatch.undo()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert forks() == 1
