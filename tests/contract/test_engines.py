"""What every registered engine promises: a stable identity, the local engine's records, resuming, named refusals."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from mlflow_compress import demo
from mlflow_compress.commands.evaluate.models import engine_started
from mlflow_compress.config import EngineConfig, InferenceConfig, SourceConfig
from mlflow_compress.config.groups import VLLM_PYTHON
from mlflow_compress.engines.interface import ENGINES, EngineModel, ModelRequest
from mlflow_compress.errors import ConfigError
from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.records import OptionBounds, OptionScores, Request
from mlflow_compress.scoring.generation.generate import generate_until
from tests.served_demo import NAME, served_demo
from tests.unit.scoring_models import rounding

NATS = {"local": 0.0, "ray": None, "vllm": 2e-3, "endpoint": None}
"""Largest difference of a log-probability from the local engine's. A new engine of this package states its own.

None: what rounding in float32 allows, as these compute with our forward pass, in other batches. vLLM's is measured: its
kernels choose their own precision.
"""
SETTINGS = {"source": SourceConfig(device="cpu"), "inference": InferenceConfig(dtype="float32")}
REQUESTS = [
    Request("t", f"q{n}", 0, option, option, f"Question {n}: which is it?\nAnswer:", f" {text}", len(text), len(text))
    for n in range(3)
    for option, text in enumerate(("a river", "the moon", "bread and salt"))
]


@pytest.fixture(scope="module")
def local() -> EngineModel:
    return ENGINES.get("local").open(ModelRequest(address=str(demo.MODEL_DIR), **SETTINGS))


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=[pytest.mark.slow] if n in ("ray", "vllm") else []) for n in NATS]
)
def opened(request: pytest.FixtureRequest, local: EngineModel) -> Iterator[tuple[str, ModelRequest]]:
    """Yield each engine that this machine has, and what opens the demo with it."""
    name = request.param
    if name == "ray" and find_spec("ray") is None:
        pytest.skip("needs Ray")
    if name == "vllm" and not os.environ.get(VLLM_PYTHON):
        pytest.skip(f"{VLLM_PYTHON} is not set")
    with ExitStack() as stack:
        asked = ModelRequest(address=str(demo.MODEL_DIR), running=EngineConfig(workers=1), **SETTINGS)
        if ENGINES.get(name).abilities.served:
            server = stack.enter_context(served_demo(local.load(), kind="vllm"))
            asked = ModelRequest(address=f"endpoint:{server.base_url}", name=NAME, reader=local, **SETTINGS)
        stack.enter_context(ENGINES.get(name).started(asked.running, on_gpu=False))
        yield name, asked


def allowed(name: str, loaded: LoadedModel) -> float:
    return 2 * rounding(loaded) if NATS[name] is None else NATS[name]  # both passes are rounded


def logliks(scores: OptionScores) -> np.ndarray:
    return np.asarray(scores.column("loglik").tolist(), dtype=float)


def test_every_engine_of_this_package_states_its_tolerance() -> None:
    assert set(ENGINES.names()) == set(NATS)


def test_identity_is_stable_and_names_model_and_version(opened: tuple[str, ModelRequest]) -> None:
    name, asked = opened
    one, two = ENGINES.get(name).open(asked), ENGINES.get(name).open(asked)
    assert one.identity == two.identity and one.rounding == two.rounding and one.abilities == two.abilities
    assert {"weights", "tokenizer", "dtype", "device", "scoring"} <= one.identity.keys()
    assert (one.at_server is not None) == one.abilities.served
    if one.at_server is not None:
        two.at_server.recognise(one.at_server.server_identity())


def test_records_and_answers_are_the_local_engines(opened: tuple[str, ModelRequest], local: EngineModel) -> None:
    name, asked = opened
    model, text = ENGINES.get(name).open(asked), "The king went home over the hill. " * 6
    loaded, here = model.load(), local.load()
    (scores, none), (wanted, _) = (m.scorer(x).score(REQUESTS) for m, x in ((model, loaded), (local, here)))
    assert none is None
    assert np.abs(logliks(scores) - logliks(wanted)).max() <= allowed(name, here) * 8  # options of up to 8 tokens
    (tokens, _), (exact, _) = (
        m.scorer(x).score_corpus("c", text, window=32) for m, x in ((model, loaded), (local, here))
    )
    assert tokens.column("target").tolist() == exact.column("target").tolist()
    assert np.abs(tokens.column("nll") - exact.column("nll")).max() <= allowed(name, here)
    if name != "vllm":  # vLLM's kernels may break ties of greedy answers otherwise
        ours, theirs = (generate_until(x, ["The king"], until=["."], max_new_tokens=6) for x in (loaded, here))
        assert ours == theirs


def test_resuming_gives_the_same_records(opened: tuple[str, ModelRequest], tmp_path: Path) -> None:
    name, asked = opened
    model = ENGINES.get(name).open(asked)
    loaded = model.load()
    first, _ = model.scorer(loaded).score(REQUESTS, resume=tmp_path)
    again, _ = model.scorer(loaded).score(REQUESTS, resume=tmp_path)
    assert first.table.equals(again.table)


def test_a_stored_pass_compares_with_a_second_one(
    opened: tuple[str, ModelRequest], local: EngineModel, tmp_path: Path
) -> None:
    name, asked = opened
    model = ENGINES.get(name).open(asked)
    loaded = model.load()
    with model.capture(tmp_path, loaded) as capture:
        model.scorer(loaded).score(REQUESTS, capture=capture)
    stored = model.stored(tmp_path)
    second = model.scorer(loaded, after=stored)
    _, distances = second.score(REQUESTS, baseline=model.comparable_with(stored))
    assert distances is not None and isinstance(distances, OptionBounds) != model.abilities.whole_distributions
    # A KL is at most half of the square of the largest change of ln p, here between two passes of one engine.
    largest = (2 * allowed(name, local.load())) ** 2 / 2
    assert np.abs(np.asarray(distances.column("kl").tolist(), dtype=float)).max() <= largest
    # Whole distributions of another engine are needed for exact distances.
    assert (local.comparable_with(stored) is not None) == model.abilities.whole_distributions


@pytest.mark.parametrize("name", [n for n, one in ENGINES.items() if one.abilities.places_itself])
def test_a_refused_option_names_the_engine(name: str) -> None:
    source = SourceConfig(device="balanced")
    reason = "Unknown engine" if ENGINES.get(name).abilities.served else f"engine={name} itself"
    with pytest.raises(ConfigError, match=reason), engine_started(EngineConfig.model_construct(engine=name), source):
        pass
