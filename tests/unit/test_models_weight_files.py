"""Which files of a folder are the model: what transformers loads is hashed and counted, and the rest is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mlflow_compress as mc
from mlflow_compress.errors import CheckpointError, MissingDependencyError
from mlflow_compress.models import stored_weights
from mlflow_compress.models.checkpoint_config import unused_weights, weight_files
from mlflow_compress.models.identity import weights_hash
from mlflow_compress.models.loading import LoadConfig, load_model, open_light
from mlflow_compress.models.source_model import resolve
from tests.unit.scoring_models import CONFIGS, build_model, build_tokenizer, load_random

SHARDED = ("model-00001-of", "model-00002-of", "model-00003-of")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "sharded"
    build_model(CONFIGS["llama"]()).save_pretrained(folder, max_shard_size="120KB")
    build_tokenizer().save_pretrained(folder)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "single"
    load_random("llama", path=folder)
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in weight_files(folder) for name, t in load_file(file).items()}


def consolidated(folder: Path) -> str:
    """Mistral's second form of the same weights, under names of its own."""
    save_file({f"c.{name}": t for name, t in tensors_of(folder).items()}, folder / "consolidated.safetensors")
    return "consolidated.safetensors"


def optimizer(folder: Path) -> str:
    save_file({f"exp_avg.{name}": t for name, t in tensors_of(folder).items()}, folder / "optimizer.safetensors")
    return "optimizer.safetensors"


def adapter_without_settings(folder: Path) -> str:
    save_file({"base_model.model.lora_A.weight": torch.ones(4, 4)}, folder / "adapter_model.safetensors")
    return "adapter_model.safetensors"


def pickle(folder: Path) -> str:
    torch.save(tensors_of(folder), folder / "pytorch_model.bin")
    return "pytorch_model.bin"


def gguf(folder: Path) -> str:
    (folder / "model-q4.gguf").write_bytes(b"GGUF")
    return "model-q4.gguf"


def other_shard(folder: Path) -> str:
    """A shard that an earlier upload, in more parts, has left."""
    save_file({"model.norm.weight": torch.ones(48)}, folder / "model-00009-of-00009.safetensors")
    return "model-00009-of-00009.safetensors"


EXTRAS = [consolidated, optimizer, adapter_without_settings, pickle, gguf, other_shard]


@pytest.mark.parametrize("add", EXTRAS)
@pytest.mark.parametrize("kind", ["sharded", "single"])
def test_a_file_that_is_not_the_model_is_named_and_not_counted(
    kind: str, add: Callable[[Path], str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    clean = request.getfixturevalue(kind)
    folder = Path(shutil.copytree(clean, tmp_path / "m"))
    name = add(folder)
    assert [file.name for file in weight_files(folder)] == [file.name for file in weight_files(clean)]
    assert unused_weights(folder) == [name]
    assert unused_weights(clean) == []
    assert weights_hash(folder) == weights_hash(clean)
    assert stored_weights.hash_weights(folder) == stored_weights.hash_weights(clean)
    assert resolve(str(folder)).parameters == resolve(str(clean)).parameters
    model = load_model(LoadConfig(path=str(folder))).model
    assert sum(p.numel() for p in model.parameters()) == resolve(str(folder)).parameters


def test_one_file_goes_before_the_shards_beside_it(sharded: Path, single: Path, tmp_path: Path) -> None:
    """As transformers does: so the shards are not counted a second time."""
    folder = Path(shutil.copytree(sharded, tmp_path / "m"))
    tensors = load_file(single / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert [file.name for file in weight_files(folder)] == ["model.safetensors"]
    assert unused_weights(folder) == sorted(file.name for file in sharded.glob("model-*.safetensors"))
    loaded = load_model(LoadConfig(path=str(folder))).model
    assert torch.equal(loaded.model.norm.weight, tensors["model.norm.weight"])


def test_the_configuration_may_name_another_file(single: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(single, tmp_path / "m"))
    tensors = load_file(single / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, folder / "better.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_weights": "better.safetensors"}))
    assert [file.name for file in weight_files(folder)] == ["better.safetensors"]
    assert unused_weights(folder) == ["model.safetensors"]
    loaded = load_model(LoadConfig(path=str(folder))).model
    assert torch.equal(loaded.model.norm.weight, tensors["model.norm.weight"])


def without_index(folder: Path) -> str:
    (folder / "model.safetensors.index.json").unlink()
    return r"incomplete: model\.safetensors\.index\.json is missing"


def without_a_shard(folder: Path) -> str:
    name = sorted(folder.glob("model-*.safetensors"))[1].name
    (folder / name).unlink()
    return rf"incomplete: {name} is missing"


def without_two_shards(folder: Path) -> str:
    names = [file.name for file in sorted(folder.glob("model-*.safetensors"))[:2]]
    for name in names:
        (folder / name).unlink()
    return rf"incomplete: {names[0]}, {names[1]} are missing"


def under_another_name(folder: Path) -> str:
    for file in (*folder.glob("model-*.safetensors"), folder / "model.safetensors.index.json"):
        file.unlink()
    save_file({"model.norm.weight": torch.ones(48)}, folder / "weights.safetensors")
    return r"incomplete: model\.safetensors is missing"


def a_broken_index(folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}}))
    return "has no weight_map"


def an_index_cut_short(folder: Path) -> str:
    text = (folder / "model.safetensors.index.json").read_text()
    (folder / "model.safetensors.index.json").write_text(text[: len(text) // 2])
    return "model.safetensors.index.json"


def a_name_of_nothing(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_weights": "lost.safetensors"}))
    return r"incomplete: lost\.safetensors is missing"


BREAKS = [
    without_index,
    without_a_shard,
    without_two_shards,
    under_another_name,
    a_broken_index,
    an_index_cut_short,
    a_name_of_nothing,
]


@pytest.mark.parametrize("damage", BREAKS)
def test_an_incomplete_folder_is_one_error_that_names_the_file(
    damage: Callable[[Path], str], sharded: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "m"))
    message = damage(folder)
    calls: list[Callable[[], Any]] = [
        lambda: load_model(LoadConfig(path=str(folder))),
        lambda: open_light(LoadConfig(path=str(folder))),
        lambda: resolve(str(folder)),
        lambda: mc.compress(str(folder), "fp16", store=str(tmp_path / "store")),
    ]
    for call in calls:
        with pytest.raises(CheckpointError, match=message):
            call()


def test_an_adapter_beside_a_model_is_refused_and_one_alone_needs_peft(
    single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(single, tmp_path / "m"))
    adapter_without_settings(folder)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "x"}))
    calls: list[Callable[[], Any]] = [lambda: load_model(LoadConfig(path=str(folder))), lambda: resolve(str(folder))]
    for call in calls:
        with pytest.raises(CheckpointError, match="has a model and an adapter"):
            call()
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for call in calls:
        with pytest.raises(MissingDependencyError, match=r"peft.*mlflow-compress\[adapters\]"):
            call()


def test_results_name_what_is_not_counted(sharded: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "m"))
    consolidated(folder)
    store = str(tmp_path / "store")
    made = mc.compress(str(folder), "rtn", bits=8, group_size=16, store=store)
    clean = resolve(str(sharded))
    assert made.manifest.base_parameters == clean.parameters
    assert made.manifest.base_size_bytes == 4 * clean.parameters
    assert made.manifest.size_ratio == pytest.approx(4 * clean.parameters / made.manifest.size_bytes)
    assert "not counted: consolidated.safetensors" in made.summary
    said: list[str] = []
    item = {"category": "c", "choices": ["flour", "salt", "iron", "wool"], "answer": 0}
    items = [{**item, "id": str(n), "question": f"What is sold on day {n}?"} for n in range(6)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    found = mc.evaluate(made, tasks=str(tmp_path / "q.jsonl"), num_fewshot=0, store=store, progress=said.append)
    assert "ot loaded from the baseline's folder: consolidated.safetensors" in found.account.sentence
    assert any("consolidated.safetensors" in line for line in said)


def test_a_checkpoint_from_elsewhere_is_copied_without_what_is_not_the_model(single: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(single, tmp_path / "other"))
    consolidated(other)
    made = mc.compress(str(single), "checkpoint", method_args={"checkpoint": str(other)}, store=str(tmp_path / "s"))
    assert sorted(made.manifest.weight_files) == ["model.safetensors"]
    assert not (made.folder / "consolidated.safetensors").exists()


@pytest.mark.parametrize("names", [["a.gguf", "b.gguf"], ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "b.gguf"]])
def test_of_gguf_files_the_first_counts_with_its_parts(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"GGUF")
    *used, last = names
    assert [file.name for file in weight_files(tmp_path)] == used
    assert unused_weights(tmp_path) == [last]
