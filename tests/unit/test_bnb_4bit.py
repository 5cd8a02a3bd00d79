"""bitsandbytes on a CPU: 4-bit layers are computed from the values they stand for, whatever the processor."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mlflow_compress.compression import compress_model, method_config, pipeline
from mlflow_compress.models.architectures import packed_layers
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.scoring.baseline_store import StateStore, StateWriter
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from tests.compress_models import check_here, make_llama
from tests.unit.scoring_models import build_tokenizer, mixed_requests, naive_logliks, rounding

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_fresh_process")]

FOUR_BIT = ("bnb-nf4", "bnb-fp4")
WIDTH = 172  # outputs that the kernel for AVX512-BF16 refuses, stories260K's


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_llama(tmp_path_factory.mktemp("models") / "base", intermediate_size=WIDTH, vocab_size=300)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoints(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The base by every method of bitsandbytes."""
    out = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "reload_in_fresh_process", check_here)
        for method in (*FOUR_BIT, "bnb-int8"):
            out[method] = tmp_path_factory.mktemp(method) / "out"
            manifest = compress_model(str(base), method, method_config(method), [], out[method])
            assert manifest.reload["max_abs_diff"] == 0.0
    return out


def by_hand(weight: Any, state: Any, scales: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return code[level] * scale, one number after the other."""
    code, packed = state.code.numpy(), weight.data.view(torch.uint8).reshape(-1).tolist()
    n = int(np.prod(state.shape))
    levels = [(packed[i // 2] >> (0 if i % 2 else 4)) & 15 for i in range(n)]
    found = [np.float32(code[level]) * np.float32(scales[i // state.blocksize]) for i, level in enumerate(levels)]
    return np.asarray(found, dtype=np.float32).reshape(tuple(state.shape))


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("codes", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(6, 128), (8, 48), (7, 33), (5, 172)])
def test_the_values_of_a_weight(shape: tuple[int, int], codes: str, double: bool) -> None:
    packed_layers.import_offline()
    from bitsandbytes.functional import dequantize_4bit, dequantize_blockwise
    from bitsandbytes.nn import Params4bit

    torch.manual_seed(3)
    original = torch.randn(shape)
    weight = Params4bit(original, quant_type=codes, compress_statistics=double, requires_grad=False)._quantize("cpu")
    state = weight.quant_state
    scales = dequantize_blockwise(state.absmax, state.state2) + state.offset if double else state.absmax
    found = packed_layers.bnb_4bit_weight(weight)
    assert found.numpy().tobytes() == by_hand(weight, state, scales.numpy()).tobytes()
    assert float((found - original).abs().max()) < 0.25 * float(original.abs().max())  # half of the widest gap
    if shape[1] % 64 == 0:  # there bitsandbytes' own function is right on every processor
        assert torch.equal(found, dequantize_4bit(weight.data, state))


@pytest.mark.parametrize("method", FOUR_BIT)
def test_a_checkpoint_is_scored_as_its_values_mean(method: str, base: Path, checkpoints: dict[str, Path]) -> None:
    loaded = load_model(LoadConfig(path=str(checkpoints[method]), device="cpu"))
    packed = {name.removesuffix(".weight") for name in load_file(checkpoints[method] / "model.safetensors")}
    meant = copy.deepcopy(load_model(LoadConfig(path=str(base), device="cpu")).model)
    n_layers = 0
    for name, layer in loaded.model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            assert type(layer) is torch.nn.Linear and layer.weight.dtype == torch.float32, name
            assert name in packed
            n_layers += 1
            with torch.no_grad():
                meant.get_submodule(name).weight.copy_(layer.weight)
    assert n_layers == 15  # seven in each block, and the head
    scores, _ = Scorer(loaded, ScoringConfig(progress=False)).score(mixed_requests())
    as_meant = LoadedModel(meant, loaded.tokenizer, base, torch.float32, loaded.device)
    difference = scores.column("loglik") - naive_logliks(as_meant, mixed_requests())
    assert np.abs(difference / scores.column("n_tokens")).max() < rounding(as_meant)


@pytest.mark.parametrize("method", [*FOUR_BIT, "bnb-int8"])
def test_a_checkpoint_is_at_no_distance_from_itself(method: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = LoadConfig(path=str(checkpoints[method]), device="cpu")
    loaded, config = load_model(path), ScoringConfig(progress=False, batch_tokens=128)
    with StateWriter(tmp_path / "store", loaded) as writer:
        Scorer(loaded, config).score(mixed_requests(), capture=writer)
    again = load_model(path)
    store = StateStore.open(tmp_path / "store", baseline=again)
    _, distances = Scorer(again, config).score(mixed_requests(), baseline=store)
    assert distances is not None and (distances.column("kl") == 0.0).all()


@pytest.mark.ci
def test_no_kernel_is_looked_for_on_a_hub(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    (tmp_path / "kernels.py").write_text(
        f"def get_kernel(*_, **__):\n    open({str(asked)!r}, 'w').close()\n    raise OSError('no network here')\n"
    )
    code = (
        "import socket, sys\n"
        "def refuse(*_): raise AssertionError('a connection was attempted')\n"
        "socket.socket.connect = refuse\n"
        "from mlflow_compress.models.loading import LoadConfig, load_model\n"
        "load_model(LoadConfig(path=sys.argv[1], device='cpu'))\n"
        "import bitsandbytes, kernels\n"  # both can be imported afterwards
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", code, str(checkpoints["bnb-nf4"])],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not asked.exists()
    assert "kernels-community" not in done.stderr
