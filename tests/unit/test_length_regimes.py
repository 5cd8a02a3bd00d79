"""Which sequences may be computed together where rotary frequencies depend on the longest one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig

from mlflow_compress.models.length_regimes import BASE, length_regimes, one_regime
from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.scoring.baseline_store import StateStore, StateWriter
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from mlflow_compress.scoring.plan.corpus_windows import Windows
from mlflow_compress.scoring.plan.packing import PaddedBatch, plan_batches
from tests.unit.scoring_models import CONFIGS, TEXT, build_model, build_tokenizer, request

PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "short_factor": [1.0] * 6,
    "long_factor": [4.0 + n for n in range(6)],
    "original_max_position_embeddings": 40,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LENGTHS = [3, 39, 40, 41, 42, 90]


def llama(**settings: Any) -> Any:
    config = CONFIGS["llama"]()
    for name, value in settings.items():
        setattr(config, name, value)
    return config


def of_layers(full: dict[str, Any]) -> Any:
    return Gemma3TextConfig(
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        head_dim=12,
        max_position_embeddings=40,
        rope_parameters={"sliding_attention": PLAIN, "full_attention": full},
    )


def older(**settings: Any) -> Any:
    """A configuration of code that comes with a checkpoint, as it was written before transformers 5."""
    config = SimpleNamespace(max_position_embeddings=160, original_max_position_embeddings=40, **settings)
    config.get_text_config = lambda decoder: config
    return config


@pytest.mark.parametrize("name", CONFIGS)
def test_most_models_have_one_regime(name: str) -> None:
    assert length_regimes(CONFIGS[name]()) is one_regime


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_so_have_embeddings_that_are_scaled_once(kind: str) -> None:
    assert length_regimes(llama(rope_parameters={**LONGROPE, "rope_type": kind})) is one_regime


@pytest.mark.parametrize(
    ("config", "regimes"),
    [
        (llama(rope_parameters=LONGROPE), [0, 0, 0, 40, 40, 40]),
        (of_layers(LONGROPE), [0, 0, 0, 40, 40, 40]),
        (older(rope_parameters={"type": "su"}), [0, 0, 0, 40, 40, 40]),
        (llama(rope_parameters=DYNAMIC, max_position_embeddings=40), [0, 0, 0, 41, 42, 90]),
        (of_layers(DYNAMIC), [0, 0, 0, 41, 42, 90]),
        (older(rope_parameters={"type": "dynamic"}), [0] * 6),  # up to 160
    ],
)
def test_regimes_begin_behind_the_original_length(config: Any, regimes: list[int]) -> None:
    assert [length_regimes(config)(length) for length in LENGTHS] == regimes
    assert [length_regimes(config, CONFIGS["llama"]())(length) for length in LENGTHS] == regimes


def test_of_two_models_every_difference_counts() -> None:
    both = length_regimes(
        llama(rope_parameters=LONGROPE), llama(rope_parameters={**LONGROPE, "original_max_position_embeddings": 41})
    )
    assert [both(length) for length in LENGTHS] == [0, 0, 0, 40, 41, 41]


def test_a_batch_has_one_regime_and_a_prefix_in_another_one_is_computed_again() -> None:
    """Lengths 3 and 5 are short. Of one sequence of 8 tokens and its prefixes, those of 7 and 8 are long."""
    longest = np.arange(8, dtype=np.int32)
    sequences = [longest[:n] for n in (3, 8, 7, 5)] + [np.arange(20, 25, dtype=np.int32)]

    def regime(length: int) -> int:
        return BASE if length <= 6 else 6

    plan = plan_batches(sequences, [2] * 5, batch_tokens=100, regime=regime)
    lengths = [[len(s) for s in unit.sequences] for unit in plan.units if isinstance(unit, PaddedBatch)]
    assert lengths == [[8], [5, 5]]
    # Rows of tokens 5, 6 and 7 of the long one; of 1, 2, 3, 4 of its short prefix; of 3 and 4 of the last.
    assert [rows.tolist() for rows in plan.sequence_rows] == [[3, 4], [1, 2], [0, 1], [5, 6], [7, 8]]
    assert len({key.tobytes() for key in plan.keys}) == 9
    alone = plan_batches([longest[:5]], [2], batch_tokens=100)
    assert plan.keys[5:7].tolist() == alone.keys.tolist()  # short ones are what they are without long ones
    long = plan_batches([longest], [4], batch_tokens=100)
    assert set(map(bytes, plan.keys[:3])).isdisjoint(map(bytes, long.keys))  # the same tokens with short frequencies


def test_windows_of_one_batch_have_one_regime() -> None:
    ids = [np.arange(n, dtype=np.int32) for n in (4, 4, 8, 4, 4)]
    windows = Windows(ids, [np.asarray([n - 1]) for n in (4, 4, 8, 4, 4)])

    def batches(regime: Any) -> list[list[int]]:
        units = windows.plan(100, regime)[0].units
        return [[len(s) for s in unit.sequences] for unit in units if isinstance(unit, PaddedBatch)]

    assert batches(one_regime) == [[4, 4, 8, 4, 4]]
    assert batches(lambda length: BASE if length <= 6 else 6) == [[4, 4], [8], [4, 4]]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": LONGROPE},
        {"rope_parameters": DYNAMIC, "max_position_embeddings": 40, "n_positions": 160},
    ],
    ids=["longrope", "dynamic"],
)
@pytest.mark.usefixtures("one_thread")
def test_a_stored_baseline_has_the_states_of_each_regime(rope: dict[str, Any], tmp_path: Path) -> None:
    """A short context that begins a long one has two states, and each pass finds its own, in any batches."""
    model, tokenizer, path = build_model(llama(**rope)), build_tokenizer(), tmp_path / "model"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    loaded = LoadedModel(model, tokenizer, path, torch.float32, torch.device("cpu"))
    words = TEXT.split()
    requests = [request(n, " ".join(words[:n]), f" {word}") for n in (4, 6, 40, 44) for word in words[n : n + 3]]
    with StateWriter(tmp_path / "store", loaded) as writer:
        Scorer(loaded, ScoringConfig(path="plain")).score(requests, capture=writer)
    for batch_tokens in (None, 8):
        scorer = Scorer(loaded, ScoringConfig(batch_tokens=batch_tokens))
        _, distances = scorer.score(requests, baseline=StateStore.open(tmp_path / "store"))
        assert distances is not None and scorer.report is not None
        assert scorer.report.same_plan_as_baseline is (batch_tokens is None)
        largest = max(distances.column("kl").tolist())
        assert largest == 0 if batch_tokens is None else largest < 1e-9  # other batches round otherwise
