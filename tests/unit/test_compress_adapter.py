"""Adapters are merged as peft merges them, bit for bit, into the base that they name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mlflow_compress.compression import compress_model, method_config
from mlflow_compress.errors import CheckpointError, ConfigError, UnsupportedError
from tests.compress_models import make_llama, write_adapter

peft = pytest.importorskip("peft", reason="needs the extra 'adapters'")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and peft warn while loading


def merged_by_peft(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    tuned = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    return dict(tuned.merge_and_unload().state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("steps", "settings"), [(0, {}), (3, {}), (0, {"use_dora": True})], ids=["random", "3", "dora"]
)
def test_the_checkpoint_has_peft_s_weights(
    tmp_path: Path, dtype: torch.dtype, steps: int, settings: dict[str, Any]
) -> None:
    base = make_llama(tmp_path / "base", dtype=dtype)
    adapter = write_adapter(base, tmp_path / "tuned", steps=steps, **settings)
    manifest = compress_model(
        str(base), "adapter", method_config("adapter", adapter=str(adapter)), [], tmp_path / "out"
    )
    assert manifest.label == "adapter-tuned" and manifest.size_ratio == pytest.approx(1.0, abs=0.01)
    [file] = (tmp_path / "out").glob("*.safetensors")
    found, expected = load_file(file), merged_by_peft(base, adapter)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    [before] = base.glob("*.safetensors")
    changed = [name for name, tensor in load_file(before).items() if not torch.equal(tensor, found[name])]
    assert changed and all("proj" in name for name in changed)
    # What is merged is a model like any other: it is compressed as one.
    again = compress_model(
        str(tmp_path / "out"), "rtn", method_config("rtn", bits=4, group_size=32), [], tmp_path / "q"
    )
    assert again.size_ratio > 1.0


def test_an_adapter_of_another_base_is_refused_by_name(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base")
    adapter, other = write_adapter(base, tmp_path / "tuned"), make_llama(tmp_path / "other", seed=1)
    with pytest.raises(UnsupportedError, match="another base") as error:
        compress_model(str(other), "adapter", method_config("adapter", adapter=str(adapter)), [], tmp_path / "out")
    assert str(base) in str(error.value) and "other_base=true" in str(error.value)

    # The same weights under another name are the same base; a name that says nothing needs the user's word.
    copy = make_llama(tmp_path / "copy")
    compress_model(str(copy), "adapter", method_config("adapter", adapter=str(adapter)), [], tmp_path / "same")
    named = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": "some/tiny-llama"}
    (adapter / "adapter_config.json").write_text(json.dumps(named))
    with pytest.raises(UnsupportedError, match="model=some/tiny-llama"):
        compress_model(str(base), "adapter", method_config("adapter", adapter=str(adapter)), [], tmp_path / "out")
    config = method_config("adapter", adapter=str(adapter), other_base=True)
    assert compress_model(str(base), "adapter", config, [], tmp_path / "said").label == "adapter-tuned"


def test_what_is_no_adapter_is_refused(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base")
    with pytest.raises(ConfigError, match="needs an adapter"):
        compress_model(str(base), "adapter", None, [], tmp_path / "out")
    with pytest.raises(CheckpointError, match="no pickles"):
        compress_model(str(base), "adapter", method_config("adapter", adapter=str(base)), [], tmp_path / "out")
