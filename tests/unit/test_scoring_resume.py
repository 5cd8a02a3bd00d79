"""Runs that are killed, and runs that run out of memory."""

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from mlflow_compress.errors import StoreError, UnsupportedError
from mlflow_compress.records import OptionDistances, OptionScores, TokenDistances, TokenScores
from mlflow_compress.scoring.baseline_store import StateStore
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from tests.unit.scoring_models import load_random, mixed_requests, rounding

CONFIG = ScoringConfig(progress=False, batch_tokens=64, head_rows=8, shard_seconds=0.0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills child processes")
@pytest.mark.ci
def test_a_run_killed_many_times_ends_with_the_same_bytes(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.scoring_killed", str(tmp_path), "7"],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) >= 20
    for kind in (OptionScores, OptionDistances, TokenScores, TokenDistances):
        whole, killed = (tmp_path / run / f"{kind.NAME}.parquet" for run in ("whole", "killed"))
        assert whole.read_bytes() == killed.read_bytes()
    stores = [StateStore.open(tmp_path / run / "store") for run in ("whole", "killed")]
    n = stores[0].n_rows
    assert stores[1].n_rows == n
    whole_rows, killed_rows = (s.states(np.arange(n)) for s in stores)
    assert torch.equal(whole_rows, killed_rows)


def test_a_finished_journal_is_read_instead_of_run_again_and_that_of_another_pass_is_refused(tmp_path: Path) -> None:
    loaded = load_random("llama", path=tmp_path / "model")
    first, _ = Scorer(loaded, CONFIG).score(mixed_requests(), resume=tmp_path / "resume")

    def refuse(*_: object) -> None:
        raise AssertionError("the model ran")

    again = Scorer(loaded, CONFIG)
    again.config = ScoringConfig(progress=False, batch_tokens=64, head_rows=8, path="plain")  # no probe of packs
    plain, _ = again.score(mixed_requests(), resume=tmp_path / "plain")
    handle = loaded.model.model.register_forward_pre_hook(refuse)
    second, _ = again.score(mixed_requests(), resume=tmp_path / "plain")
    handle.remove()
    assert second.table.equals(plain.table)
    both = np.abs(first.column("loglik") - plain.column("loglik")) / first.column("n_tokens")
    assert both.max() < 2 * rounding(loaded)  # each is rounded
    Scorer(loaded, CONFIG).score(mixed_requests(), resume=tmp_path / "resume")
    with pytest.raises(StoreError, match=r"with other .*targets"):
        Scorer(loaded, CONFIG).score(mixed_requests()[3:], resume=tmp_path / "resume")
    other = load_random("llama", seed=2, path=tmp_path / "other")
    with pytest.raises(StoreError, match="with other weights"):
        Scorer(other, CONFIG).score(mixed_requests(), resume=tmp_path / "resume")


def test_a_clock_that_is_set_back_loses_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_random("llama", path=tmp_path / "model")
    whole, _ = Scorer(loaded, CONFIG).score(mixed_requests(), resume=tmp_path / "whole")
    now = itertools.count(2_000_000_000, -3600)  # an hour back at every look
    monkeypatch.setattr(time, "time", lambda: next(now))
    found, _ = Scorer(loaded, CONFIG).score(mixed_requests(), resume=tmp_path / "back")
    again, _ = Scorer(loaded, CONFIG).score(mixed_requests(), resume=tmp_path / "back")
    assert found.table.equals(whole.table) and again.table.equals(whole.table)
    parts = [sorted(path.name for path in (tmp_path / name / "options").iterdir()) for name in ("whole", "back")]
    assert parts[0] == parts[1] and len(parts[0]) > 3


@pytest.mark.parametrize("damage", ["truncate", "tamper", "label"])
def test_a_damaged_part_is_refused(tmp_path: Path, damage: str) -> None:
    loaded = load_random("llama", path=tmp_path / "model")
    Scorer(loaded, CONFIG).score(mixed_requests(), resume=tmp_path / "resume")
    part = tmp_path / "resume" / "options" / "part-00001.safetensors"
    data = part.read_bytes()
    if damage == "truncate":
        part.write_bytes(data[:-3])
    elif damage == "tamper":
        part.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    else:
        part.with_suffix(".json").write_text("{")
    with pytest.raises(StoreError, match=r"part-00001\.(safetensors was changed|json: not JSON)"):
        Scorer(loaded, CONFIG).score(mixed_requests(), resume=tmp_path / "resume")


@pytest.mark.parametrize("path", ["packed", "plain"])
@pytest.mark.parametrize("limit", [150, 40, 7])
def test_running_out_of_memory_halves_the_batches_and_changes_nothing(path: str, limit: int) -> None:
    loaded, requests = load_random("llama"), [r for r in mixed_requests() if r.item_id != "overflow"]
    config = ScoringConfig(progress=False, batch_tokens=600, path=path)
    wanted = Scorer(loaded, config).score(requests)[0]
    scorer = Scorer(loaded, config)
    longest = max(len(e.inputs) for e in scorer.encoder.encode(requests))

    def scarce(_: object, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        if kwargs["input_ids"].numel() > (limit if path == "packed" else max(limit, longest)):
            raise torch.OutOfMemoryError("CUDA out of memory")

    handle = loaded.model.model.register_forward_pre_hook(scarce, with_kwargs=True)
    if path == "packed" and limit < 12:  # the probe itself needs 12 tokens
        handle.remove()
        scorer._path = lambda *_: ("packed", None)  # type: ignore[method-assign]
        handle = loaded.model.model.register_forward_pre_hook(scarce, with_kwargs=True)
    scores = scorer.score(requests)[0]
    handle.remove()
    assert scorer.report.n_splits > 0
    moved = np.abs(scores.column("loglik") - wanted.column("loglik")) / wanted.column("n_tokens")
    assert moved.max() < 2 * rounding(loaded)  # both are rounded


def test_memory_too_small_for_one_sequence_is_one_clear_error() -> None:
    loaded = load_random("llama")
    scorer = Scorer(loaded, ScoringConfig(progress=False, path="plain"))

    def scarce(_: object, args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    handle = loaded.model.model.register_forward_pre_hook(scarce)
    with pytest.raises(UnsupportedError, match="Memory ran out on"):
        scorer.score(mixed_requests())
    handle.remove()
