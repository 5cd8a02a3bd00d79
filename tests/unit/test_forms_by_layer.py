"""Variants of a model whose weights wait on a disk are scored beside it, while each of its layers is read once."""

from functools import partial
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
from mlflow_compress.scoring.forward.by_layer import Form
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
    made: list[int] = []

    def counting(form: Form, number: int) -> torch.nn.Module:
        made.append(number)
        return form(number)

    noted = [partial(counting, form) for form in forms]
    # Killed in the last sweep, at its last layer of two: what was written behind each layer loses that one, and what
    # is written behind each sweep alone both.
    for seconds, lost in ((0.0, 1), (1e9, 2)):
        config, parts = ScoringConfig(path=path, shard_seconds=seconds, **SIZES), tmp_path / f"parts-{seconds}"
        killed, *_ = scorers_of_forms(loaded, forms, config)
        counted.stop_at = 2 * n_sweeps
        with pytest.raises(KeyboardInterrupt):
            killed.score(requests(), baseline=states, resume=parts)
        counted.stop_at = None
        made.clear()
        scorers = scorers_of_forms(loaded, noted, config)
        again = [one.score(requests(), baseline=states, resume=parts) for one in scorers]
        assert counted.n_layers == lost and made == [n for n in (0, 1)[-lost:] for _ in forms]
        for (scores, distances), (own, far) in zip(again, found, strict=True):
            assert distances is not None and far is not None
            assert scores.table.equals(own.table) and distances.table.equals(far.table)
        made.clear()
        scorers_of_forms(loaded, noted, config)[0].score(requests(), baseline=states, resume=parts)
        assert counted.n_layers == 0 and not made, "a finished pass is not computed again"
