"""Methods that need nothing but a layer write the same weights where the model waits on a disk."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.architectures import make
from mlflow_compress.compression import compress_model, method_config
from mlflow_compress.models.loading import LoadConfig, load_model
from mlflow_compress.models.placement import Offload


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize(
    "name, method, given",
    [
        ("Llama", "fp8", {}),
        ("Llama", "w8a8", {}),
        ("Llama", "magnitude", {}),
        ("Gemma3Text", "magnitude", {"pattern": "2:4"}),
        ("Llama", "fp16", {}),
    ],
)
def test_a_checkpoint_is_the_same_from_the_disk(
    name: str, method: str, given: dict[str, Any], tmp_path: Path, no_fresh_process: None
) -> None:
    base, settings = make(name, tmp_path / "base", torch.bfloat16), method_config(method, **given)
    whole = compress_model(str(base), method, settings, [], tmp_path / "whole", device="cpu")
    little = Offload(max_memory={"cpu": "100KB"}, folder=str(tmp_path))
    disk = compress_model(str(base), method, settings, [], tmp_path / "disk", device="balanced", offload=little)
    wanted, found = stored(tmp_path / "whole"), stored(tmp_path / "disk")
    assert wanted.keys() == found.keys() and (disk.sparsity, disk.size_ratio) == (whole.sparsity, whole.size_ratio)
    for own, tensor in wanted.items():
        assert tensor.dtype == found[own].dtype and tensor.view(torch.uint8).equal(found[own].view(torch.uint8)), own


def test_gemma_3_computes_the_same_with_embeddings_on_the_disk(tmp_path: Path, no_fresh_process: None) -> None:
    # Their scale is a buffer that is in no file.
    base = make("Gemma3Text", tmp_path / "base", torch.bfloat16)
    compress_model(str(base), "rtn", method_config("rtn"), [], tmp_path / "made", device="cpu")
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    balanced: dict[str, Any] = {"device": "balanced", "max_memory": {"cpu": "100KB"}, "offload_dir": str(tmp_path)}
    logits = []
    for placed in ({"device": "cpu"}, balanced):
        loaded = load_model(LoadConfig(path=str(tmp_path / "made"), dtype="float32", **placed))
        with torch.no_grad():
            logits.append(loaded.model(input_ids=ids).logits)
    assert logits[0].equal(logits[1])
