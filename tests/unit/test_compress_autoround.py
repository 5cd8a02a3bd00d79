"""AutoRound: float32 throughout, better than plain rounding, and nothing of the process is changed."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mlflow_compress import demo
from mlflow_compress.compression import compress_model, method_config
from mlflow_compress.errors import ConfigError, UnsupportedError
from tests.compress_models import TEXT, logits, make_llama, mean_kl, token_rows

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and the backends warn while loading

SMALL = {"calibration_samples": 4, "calibration_length": 64, "iters": 3}


@pytest.mark.ci
@pytest.mark.usefixtures("no_fresh_process")
def test_a_float32_model_is_never_rounded_to_bfloat16(tmp_path: Path) -> None:
    base, out = make_llama(tmp_path / "base", dtype=torch.float32), tmp_path / "out"
    before = load_file(base / "model.safetensors")
    norm = "model.layers.0.input_layernorm.weight"
    before[norm] = torch.linspace(0.5, 1.5, len(before[norm]))  # bfloat16 has few of these values
    save_file(before, base / "model.safetensors", metadata={"format": "pt"})
    random.seed(5)
    np.random.seed(5)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.are_deterministic_algorithms_enabled()
    manifest = compress_model(
        str(base), "autoround", method_config("autoround", group_size="channel", **SMALL), TEXT, out
    )
    assert states == (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.are_deterministic_algorithms_enabled(),
    )
    assert torch.equal(load_file(out / "model.safetensors")[norm], before[norm])
    assert manifest.label == "autoround-4bit-channel" and 4 < manifest.bits_per_weight < 6


@pytest.mark.parametrize("setting", ["iters", "batch_size"])
def test_steps_and_batches_are_at_least_one(setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{setting}' is too small.*1 or more"):
        method_config("autoround", **{setting: 0})


def test_a_group_that_does_not_fit_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="Group size 48 does not divide"):
        compress_model(
            str(base), "autoround", method_config("autoround", group_size=48, **SMALL), TEXT, tmp_path / "out"
        )


@pytest.mark.slow
@pytest.mark.usefixtures("no_fresh_process")
def test_learned_rounding_is_closer_than_plain_rounding(tmp_path: Path) -> None:
    text = [(demo.DATA_DIR / "calibration.txt").read_text()]
    ids = token_rows(demo.MODEL_DIR, (demo.DATA_DIR / "corpus.txt").read_text(), rows=8, length=256)
    baseline = logits(demo.MODEL_DIR, ids)

    def distance(method: str, **settings: Any) -> float:
        out = tmp_path / f"{method}{len(list(tmp_path.iterdir()))}"
        compress_model(str(demo.MODEL_DIR), method, method_config(method, bits=2, **settings), text, out)
        return mean_kl(baseline, logits(out, ids))

    learned = distance("autoround", iters=10, calibration_samples=32)
    assert learned < 0.5 * distance("gptq", calibration_samples=32) and learned < 0.5 * distance("rtn")
