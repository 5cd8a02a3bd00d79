"""Our GGUF files against those that llama.cpp's own quantizer made of the same model."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from mlflow_compress.compression import compress_model, method_config
from tests.shared_data import SHARED, needs_shared

pytestmark = [needs_shared, pytest.mark.filterwarnings("ignore")]


needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="needs the extra 'llama-cpp'"
)


@pytest.mark.parametrize(
    ("method", "bits", "file"),
    [
        ("gguf", 8, "Q8_0"),
        ("gguf", 4, "Q4_0"),
        pytest.param("gguf-k", 4, "Q4_K_M", marks=needs_llama_cpp),
        pytest.param("gguf-k", 2, "Q2_K", marks=needs_llama_cpp),
    ],
)
def test_tensors_and_metadata_are_byte_for_byte_those_of_llama_cpp(
    method: str, bits: int, file: str, tmp_path: Path, no_fresh_process: None
) -> None:
    oracle = SHARED / "data" / "llama_cpp_oracle"
    config = method_config(method, bits=bits, embeddings="true")
    compress_model(str(oracle / "model"), method, config, [], tmp_path / "out")
    ours, theirs = (GGUFReader(path) for path in (tmp_path / "out" / "model.gguf", oracle / f"{file}.gguf"))
    found = {tensor.name: tensor for tensor in ours.tensors}
    assert found.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        assert found[tensor.name].tensor_type == tensor.tensor_type
        assert np.array_equal(found[tensor.name].data, tensor.data), tensor.name
    # The oracle's converter did not know this tokenizer's way to split text and wrote "default", which is another.
    assert ours.fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    for name in theirs.fields.keys() - {"general.name", "GGUF.kv_count", "tokenizer.ggml.pre"}:
        assert ours.fields[name].contents() == theirs.fields[name].contents(), name
