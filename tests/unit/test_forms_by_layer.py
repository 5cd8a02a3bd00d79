"""Variants of a model whose weights wait on a disk are scored beside it, while each of its layers is read once."""

from pathlib import Path

import pytest
import torch

from benchmarks.architectures import make
from mlflow_compress.compression import compress_model, method_config
from mlflow_compress.compression.one_layer import LayerMaker
from mlflow_compress.models.loading import LoadConfig, load_model
from mlflow_compress.models.source_model import resolve
from mlflow_compress.scoring.baseline_store import StateStore, StateWriter
from mlflow_compress.scoring.engine import Scorer, ScoringConfig, scorers_of_forms
from tests.unit.test_by_layer import SIZES, Sweeps, on_disk, requests

VARIANTS = [
    ("rtn", {"bits": 8}), ("rtn", {"bits": 4, "group_size": 64}), ("fp8", {}), ("hqq", {}), ("w8a8", {}),
    ("magnitude", {}), ("mxfp4", {}), ("rtn", {"bits": 4, "symmetric": False}),
]  # fmt: skip


@pytest.mark.parametrize(
    "name, path, n_sweeps",
    [
        ("Llama", "packed", 1),
        pytest.param("Qwen3", "plain", 2, marks=pytest.mark.ci),
        pytest.param("Gemma3Text", "packed", 1, marks=pytest.mark.ci),
    ],
)
def test_records_are_those_of_checkpoints_and_the_baseline_is_read_once(
    name: str, path: str, n_sweeps: int, tmp_path: Path, no_fresh_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(name, tmp_path / "base", torch.bfloat16)
    config = ScoringConfig(path=path, shard_seconds=0.0, **SIZES)
    base, wanted = load_model(LoadConfig(path=str(folder), device="cpu")), []
    with StateWriter(tmp_path / "states", base) as writer:
        Scorer(base, config).score(requests(), capture=writer)
    states = StateStore.open(tmp_path / "states", baseline=base)
    for number, (method, given) in enumerate(VARIANTS):
        out = tmp_path / str(number)
        compress_model(str(folder), method, method_config(method, **given), [], out, device="cpu")
        whole = load_model(LoadConfig(path=str(out), device="cpu"))
        wanted.append(Scorer(whole, config).score(requests(), baseline=states))
    counted = Sweeps(n_sweeps, monkeypatch)
    loaded = on_disk(folder, tmp_path)
    maker = LayerMaker(loaded, resolve(str(folder)), tmp_path)
    forms = [maker.forms(method, method_config(method, **given)) for method, given in VARIANTS]
    found = [one.score(requests(), baseline=states) for one in scorers_of_forms(loaded, forms, config)]
    assert counted.fetched == n_sweeps * counted.waiting
    for (method, given), (scores, distances), (own, far) in zip(VARIANTS, found, wanted, strict=True):
        assert scores.table.equals(own.table), (method, given)
        assert distances is not None and far is not None and distances.table.equals(far.table), (method, given)
    if n_sweeps == 1:
        counted.stop_at = 2  # of two layers
        with pytest.raises(KeyboardInterrupt):
            scorers_of_forms(loaded, forms, config)[0].score(requests(), baseline=states, resume=tmp_path / "parts")
        counted.stop_at = None
        one, *_ = scorers_of_forms(loaded, forms, config)
        again, _ = one.score(requests(), baseline=states, resume=tmp_path / "parts")
        assert counted.n_layers == 1 and again.table.equals(found[0][0].table), "it goes on behind the first"
