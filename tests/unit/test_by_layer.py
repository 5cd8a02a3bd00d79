"""Scoring layer by layer: the records are those of whole forward passes, and weights are read once a sweep."""

import importlib.util
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.architectures import ARCHITECTURES, SCALED, make, random_model
from mlflow_compress import demo
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.shared.inputs import suite_of
from mlflow_compress.compression import compress_model, method_config
from mlflow_compress.models import offloading
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.records import Request
from mlflow_compress.scoring import engine
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from mlflow_compress.scoring.forward.by_layer import BodyByLayer, body_by_layer
from tests.unit.test_offloading import LITTLE, make as make_llama

SIZES = {"batch_tokens": 256, "head_rows": 8, "progress": False}


def requests() -> list[Request]:
    return suite_of(EvaluateConfig(model="demo", limit=2)).requests[:40]


def records(loaded: LoadedModel, path: str = "auto") -> tuple[Any, Any, str]:
    """Return the records of options and of a corpus, and the path of the first."""
    scorer = Scorer(loaded, ScoringConfig(path=path, **SIZES))
    options, _ = scorer.score(requests())
    assert scorer.report is not None
    path = scorer.report.path
    text = (demo.DATA_DIR / "corpus.txt").read_text()
    corpus, _ = scorer.score_corpus("c", text, window=100, max_tokens=1000)
    return options.table, corpus.table, path


@pytest.fixture
def by_layer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Let models in memory be scored layer by layer, with a little room; count the sweeps."""
    counted: Counter[str] = Counter()
    plain, sweep = engine.split_body_and_head, BodyByLayer._sweep

    def split(model: Any) -> Any:
        body, head, whole = plain(model)
        body, reason = body_by_layer(body, 1 << 20)
        assert reason is None, reason
        return body, head, whole

    def counting(*args: Any) -> None:
        counted["sweeps"] += 1
        counted["units"] += len(args[1])
        sweep(*args)

    monkeypatch.setattr(engine, "split_body_and_head", split)
    monkeypatch.setattr(BodyByLayer, "_sweep", counting)
    yield counted


@pytest.mark.parametrize("name", [*ARCHITECTURES, *SCALED])
def test_records_are_those_of_whole_passes(name: str, request: pytest.FixtureRequest) -> None:
    """Every architecture can; the model has two layers."""
    model, tokenizer = random_model(name)
    loaded = LoadedModel(model, tokenizer, Path("nowhere"), torch.float32, torch.device("cpu"))
    wanted = records(loaded)
    counted = request.getfixturevalue("by_layer")
    found = records(loaded)
    assert counted["units"] > counted["sweeps"] > 3, "more than the probes, and several units at once"
    assert found[2] == wanted[2] and found[0].equals(wanted[0]) and found[1].equals(wanted[1])
