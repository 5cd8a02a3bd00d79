"""Our own code and the library function that can take its place give equal results."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from huggingface_hub import parse_local_safetensors_file_metadata
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mlflow_compress.compress import storage

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
