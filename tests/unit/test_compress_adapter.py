"""Adapters are merged as peft merges them, bit for bit, into the base that they name: as a variant, and as a model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import mlflow_compress as mc
from mlflow_compress import demo
from mlflow_compress.compression import compress_model, method_config
from mlflow_compress.errors import CheckpointError, ConfigError, UnsupportedError
from mlflow_compress.models import peft_adapter
from mlflow_compress.models.loading import LoadConfig, open_light
from mlflow_compress.models.source_model import SourceModel, local_model_folder
from tests.compress_models import make_llama, make_qwen2, write_adapter
from tests.task_files import sums, write_rows

peft = pytest.importorskip("peft", reason="needs the extra 'adapters'")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and peft warn while loading


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLFLOW_COMPRESS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


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
    # The adapter as a model has the same weights, and is compressed as any other model.
    [file] = local_model_folder(str(adapter)).glob("*.safetensors")
    model = load_file(file)
    assert model.keys() == found.keys() and all(torch.equal(tensor, found[name]) for name, tensor in model.items())
    again = compress_model(str(adapter), "rtn", method_config("rtn", bits=4, group_size=32), [], tmp_path / "q")
    assert again.size_ratio > 1.0 and again.base_model == str(adapter)


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


def rewritten(adapter: Path, **changes: Any) -> None:
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | changes))


def test_the_demo_with_an_adapter_is_a_baseline_under_the_adapter_s_name(
    no_fresh_process: None, tmp_path: Path
) -> None:
    adapter, store = write_adapter(demo.MODEL_DIR, tmp_path / "my-lora"), str(tmp_path / "store")
    tasks = str(write_rows(tmp_path / "cloze.jsonl", sums(2, choices=["two", "four or more"], answer=0)))
    made = mc.compress(str(adapter), "rtn", bits=4, store=store)
    found = mc.evaluate(made, tasks=tasks, num_fewshot=0, num_shuffles=0, store=store)
    assert made.manifest.base_model == str(adapter) and made.folder.name.startswith("my-lora-rtn-4bit")
    assert found.baseline == "my-lora" and found["distance/kl_mean"].value > 0
    # What an engine loads is the merged folder: vLLM is given this path.
    assert open_light(LoadConfig(path=str(adapter))).path == local_model_folder(str(adapter))
    # The plan reads the base's shape alone.
    assert mc.plan(model=str(adapter), judge=False, tasks=tasks).model == "my-lora"


def test_a_merged_model_is_made_once_and_again_where_a_file_changes(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_llama(tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "tuned")
    save = SourceModel.save_others

    def interrupted(source: SourceModel, folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SourceModel, "save_others", interrupted)
    with pytest.raises(KeyboardInterrupt):
        local_model_folder(str(adapter))
    assert list((home / "merged").iterdir()) == []
    monkeypatch.setattr(SourceModel, "save_others", save)
    first = local_model_folder(str(adapter))
    moved = Path(shutil.copytree(adapter, tmp_path / "elsewhere"))
    with monkeypatch.context() as patch:
        patch.delattr(peft_adapter, "merge")
        assert local_model_folder(str(adapter)) == local_model_folder(str(moved)) == first
    (base / "chat_template.jinja").write_text("{{ messages }}")
    second = local_model_folder(str(adapter))
    assert (second / "chat_template.jinja").is_file() and not (first / "chat_template.jinja").exists()
    assert sorted((home / "merged").iterdir()) == sorted([first, second])


def without_base(adapter: Path) -> str:
    rewritten(adapter, base_model_name_or_path=None)
    return r"names no base.*Got: 'None in .*adapter_config\.json"


def base_elsewhere(adapter: Path) -> str:
    rewritten(adapter, base_model_name_or_path="/nowhere/llama")
    return (
        r"base of the adapter cannot be opened: No such model folder.*'/nowhere/llama'.*Correct base_model_name_or_path"
    )


def base_is_an_adapter(adapter: Path) -> str:
    rewritten(adapter, base_model_name_or_path=str(adapter))
    return "base of the adapter is an adapter"


def narrower_base(adapter: Path) -> str:
    base = make_llama(adapter.parent / "narrow", hidden_size=32)
    rewritten(adapter, base_model_name_or_path=str(base))
    return "peft cannot merge the adapter: RuntimeError"


def shorter_base(adapter: Path) -> str:
    base = make_llama(adapter.parent / "short", num_hidden_layers=1)
    rewritten(adapter, base_model_name_or_path=str(base))
    return r"the base has no place for .*layers\.1\."


def longer_base(adapter: Path) -> str:
    base = make_llama(adapter.parent / "long", num_hidden_layers=3)
    rewritten(adapter, base_model_name_or_path=str(base), target_modules=["q_proj"])
    return r"missing adapter keys .*layers\.2\."


def base_with_code(adapter: Path) -> str:
    base = make_llama(adapter.parent / "coded")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "own.Config"}}))
    rewritten(adapter, base_model_name_or_path=str(base))
    return "brings code along.*trust_remote_code=true"


def pickled(adapter: Path) -> str:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    return "no pickles.*without adapter_model.safetensors"


def no_weights_at_all(adapter: Path) -> str:
    rewritten(adapter, peft_type="PROMPT_TUNING")
    return "peft cannot merge the adapter"


WRONG = [
    without_base,
    base_elsewhere,
    base_is_an_adapter,
    narrower_base,
    shorter_base,
    longer_base,
    base_with_code,
    pickled,
    no_weights_at_all,
]


@pytest.mark.parametrize("damage", WRONG)
def test_an_adapter_that_gives_no_model_is_one_error(damage: Callable[[Path], str], tmp_path: Path, home: Path) -> None:
    adapter = write_adapter(make_llama(tmp_path / "base"), tmp_path / "tuned")
    message = damage(adapter)
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        local_model_folder(str(adapter))
    assert not list(home.glob("merged/*"))


def test_an_adapter_of_a_head_that_is_the_embedding_too_is_refused(tmp_path: Path) -> None:
    adapter = write_adapter(make_qwen2(tmp_path / "base"), tmp_path / "tuned", target_modules=["lm_head"])
    # peft would add to the embedding, too, what was trained for the head.
    with pytest.raises(UnsupportedError, match="tie_word_embeddings=True"):
        local_model_folder(str(adapter))
