"""llama.cpp itself: its quantizer with importances, and our files opened in it. Needs the extra `llama-cpp`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mlflow_compress import demo
from mlflow_compress.compression import calibration_tokens, compress_model, method_config
from mlflow_compress.compression.methods.gguf_k import mean_squares
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.models import architectures
from mlflow_compress.models.source_model import resolve
from tests.compress_models import logits, mean_kl, token_rows
from tests.shared_data import SHARED, needs_shared

pytest.importorskip("llama_cpp", reason="needs the extra 'llama-cpp'")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_fresh_process")]
CALIBRATION = [(demo.DATA_DIR / "calibration.txt").read_text()]


NATIVE = """
import sys, numpy, llama_cpp
file, ids, out = sys.argv[1:]
ids = numpy.load(ids)
model = llama_cpp.Llama(file, n_ctx=512, logits_all=True, verbose=False)
rows = []
for row in ids.tolist():
    model.reset()
    model.eval(row)
    rows.append(model.scores[: len(row)].copy())
numpy.save(out, numpy.stack(rows))
"""


def native_logits(folder: Path, ids: torch.Tensor, scratch: Path) -> torch.Tensor:
    """Return llama.cpp's own logits of a checkpoint's file, shape as `ids` with the vocabulary behind.

    In a process without torch: its kernels and torch's do not run in one.
    """
    files = [folder / "model.gguf", scratch / "ids.npy", scratch / "logits.npy"]
    np.save(files[1], ids.numpy())
    subprocess.run([sys.executable, "-c", NATIVE, *map(str, files)], check=True, capture_output=True)
    return torch.from_numpy(np.load(files[2]))


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return token_rows(demo.MODEL_DIR, (demo.DATA_DIR / "corpus.txt").read_text(), rows=4, length=128)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "bits"), [("gguf", 8), ("gguf", 5), ("gguf", 4), ("gguf-k", 6), ("gguf-k", 4)])
def test_llama_cpp_opens_our_files_and_computes_what_we_measure(
    method: str, bits: int, tmp_path: Path, text: torch.Tensor
) -> None:
    compress_model(str(demo.MODEL_DIR), method, method_config(method, bits=bits), [], tmp_path / "out")
    ours, theirs = logits(tmp_path / "out", text), native_logits(tmp_path / "out", text, tmp_path)
    # llama.cpp rounds activations to 8 bits (distance of Q8_0 to a model with exact weights), and nothing else.
    assert mean_kl(ours, theirs) < 1e-3
    assert float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()) > 0.97


TOKENIZE = """
import sys, llama_cpp
model = llama_cpp.Llama(sys.argv[1], vocab_only=True, verbose=False)
print(model.tokenize(sys.stdin.buffer.read(), add_bos=False))
"""


@needs_shared
@pytest.mark.slow
def test_llama_cpp_cuts_text_into_the_same_tokens(tmp_path: Path) -> None:
    base = SHARED / "data" / "llama_cpp_oracle" / "model"
    compress_model(str(base), "gguf", method_config("gguf", bits=8), [], tmp_path / "out")
    text = (demo.DATA_DIR / "corpus.txt").read_text()[:20_000] + "In 1907 it ground 12 sacks; didn't it?  Nobody knows."
    command = [sys.executable, "-c", TOKENIZE, str(tmp_path / "out" / "model.gguf")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, input=text)
    assert json.loads(done.stdout) == AutoTokenizer.from_pretrained(base)(text, add_special_tokens=False)["input_ids"]


@pytest.mark.slow
def test_importances_lower_the_error_that_they_weigh(tmp_path: Path) -> None:
    source = resolve(str(demo.MODEL_DIR))
    base = source.load("cpu")
    tokens = calibration_tokens.prepare_calibration(source.tokenizer(), CALIBRATION, samples=32, length=256, seed=0)
    squares, errors = mean_squares(base, list(source.linear), tokens)[0], {}
    for method, settings in (("gguf-k", {}), ("gguf-imatrix", {"calibration_samples": 32})):
        compress_model(
            str(demo.MODEL_DIR), method, method_config(method, bits=3, **settings), CALIBRATION, tmp_path / method
        )
        options = architectures.loading_options(tmp_path / method)
        variant = AutoModelForCausalLM.from_pretrained(tmp_path / method, dtype=torch.float32, **options)
        errors[method] = {
            name: float(
                ((variant.get_submodule(name).weight - base.get_submodule(name).weight) ** 2 @ weight.float()).sum()
            )
            for name, weight in squares.items()
        }
    assert sum(errors["gguf-imatrix"].values()) < 0.95 * sum(errors["gguf-k"].values())
    better = [errors["gguf-imatrix"][name] < error for name, error in errors["gguf-k"].items()]
    assert sum(better) > 0.9 * len(better)


def test_importances_are_the_mean_squares_of_a_layers_inputs() -> None:
    class Model(torch.nn.Module):
        device = torch.device("cpu")

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
            return self.layer(torch.stack([input_ids.float(), torch.ones_like(input_ids).float()], -1))

    found, _ = mean_squares(Model(), ["layer"], calibration_tokens.Calibration(np.arange(6).reshape(2, 3)))
    assert found["layer"].tolist() == pytest.approx([(1 + 4 + 9 + 16 + 25) / 6, 1.0])


def test_rows_that_are_no_whole_blocks_and_unknown_mixes_are_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"multiples of 256\. Got: 64"):
        compress_model(str(base), "gguf-k", method_config("gguf-k"), [], tmp_path / "out")
    with pytest.raises(ConfigError, match=r"no 6-bit K-quant of this mix.*Allowed: M"):
        method_config("gguf-k", bits=6, mix="S")
