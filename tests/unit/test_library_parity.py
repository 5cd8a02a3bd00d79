"""Our own code and the library function that can take its place give equal results."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import scipy.special
import torch
from huggingface_hub import parse_local_safetensors_file_metadata
from hypothesis import given
from hypothesis import strategies as st
from rapidfuzz.distance import LCSseq
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from scipy.stats import binomtest
from statsmodels.stats.multitest import multipletests
from transformers import AutoModelForCausalLM

from mlflow_compress.compress import storage
from mlflow_compress.compress.gguf_file import from_gguf_name, to_gguf_name
from mlflow_compress.metrics.arrays import softmax
from mlflow_compress.metrics.intervals import wilson
from mlflow_compress.metrics.significance import holm, mcnemar_exact
from mlflow_compress.metrics.text import lcs_length
from tests.compress_models import make_llama, make_qwen2, make_qwen3
from tests.metric_records import QUICK

COUNTS = st.integers(1, 20_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@QUICK
@given(COUNTS, st.sampled_from([0.8, 0.9, 0.95, 0.99]))
def test_wilson_is_scipys(counts, level):
    k, n = counts
    theirs = binomtest(k, n).proportion_ci(confidence_level=level, method="wilson")
    assert wilson(k, n, level=level) == pytest.approx((theirs.low, theirs.high), rel=1e-13, abs=1e-15)


@QUICK
@given(st.integers(0, 3000), st.integers(0, 3000))
def test_exact_mcnemar_is_scipys_binomial_test(c2w, w2c):
    if c2w + w2c:
        assert mcnemar_exact(c2w, w2c) == pytest.approx(binomtest(c2w, c2w + w2c, 0.5).pvalue, rel=1e-11)


@QUICK
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_holm_is_statsmodels_to_the_last_bit(values):
    assert holm(values).tolist() == multipletests(values, method="holm")[1].tolist()


@QUICK
@given(st.lists(st.lists(st.floats(-800, 800), min_size=4, max_size=4), min_size=1, max_size=9))
def test_softmax_is_scipys_to_the_last_bit(rows):
    x = np.array([*rows, [-np.inf, 0.0, -np.inf, 1.0]])
    assert np.array_equal(softmax(x), scipy.special.softmax(x, axis=-1))


WORDS = st.lists(st.sampled_from(["a", "b", "ab", "über", "", "97"]), max_size=200)


@QUICK
@given(WORDS, WORDS)
def test_longest_common_subsequence_of_words_is_rapidfuzzs(a, b):
    assert lcs_length(a, b) == LCSseq.similarity(a, b)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [make_llama, make_qwen2, make_qwen3])
def test_names_in_gguf_files_are_ggufs(make, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(make(tmp_path), dtype=torch.float32)
    kind, layers = model.config.model_type, model.config.num_hidden_layers
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[kind]
    names = gguf.get_tensor_name_map(architecture, layers)
    for name, _ in model.named_parameters():
        assert names.get_name(name, (".weight", ".bias")) == to_gguf_name(name)
        assert from_gguf_name(to_gguf_name(name)) == name


KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.uint8, torch.bool)


def test_safetensors_headers_are_the_libraries(tmp_path: Path):
    tensors = {f"x.{i}": torch.zeros(i + 1, 3).to(kind) for i, kind in enumerate(KINDS)} | {"none": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    theirs = parse_local_safetensors_file_metadata(tmp_path / "model.safetensors").tensors
    found = storage.read_headers(tmp_path)
    assert found.keys() == theirs.keys()
    for name, tensor in theirs.items():
        start, end = tensor.data_offsets
        assert found[name] == storage.StoredTensor(tensor.dtype, tuple(tensor.shape), end - start)
        assert end - start == tensors[name].nbytes


def _header(**fields: object) -> bytes:
    text = json.dumps({"w": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3], **fields}}).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 64,
        struct.pack("<Q", 3) + b"no!",
        struct.pack("<Q", 2**40) + b"{}",
        _header() + b"xy",
        _header() + b"xyzz",
        _header()[:20],
    ],
)
def test_what_we_refuse_safetensors_refuses(tmp_path: Path, content: bytes):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(storage.CheckpointError):
        storage.read_headers(tmp_path)
    with pytest.raises(SafetensorError), safe_open(path, framework="np"):
        pass
