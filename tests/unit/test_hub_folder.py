"""The folder that can be uploaded: it loads, its card is what the Hub reads, and it tells nothing of this machine."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

import mlflow_compress as mc
from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest
from mlflow_compress.errors import ConfigError
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.folder_store import FolderStore
from tests.compress_models import make_llama
from tests.e2e.test_receipt import evaluated

CARD = "---\nlicense: apache-2.0\ntags: [a-tag]\n---\n# A base\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Path]:
    """Return a store, a run of it that says how far a checkpoint has moved, and the checkpoint."""
    folder = tmp_path_factory.mktemp("hub")
    base = make_llama(folder / "base")
    (base / "README.md").write_text(CARD)
    (base / "LICENSE.txt").write_text("Do what you like.")
    store, run = evaluated(folder / "results", "rtn-4bit-g32")
    compressed = mc.compress(str(base), "rtn", bits=4, group_size="32", output_dir=str(folder / "made"), store=store)
    FolderStore(store).add_to(run).set_tags({run_names.CHECKPOINT: str(compressed.folder)})
    return store, run, Path(compressed.folder)


def upload(made: tuple[Path, str, Path], output: Path, **more: Any) -> Any:
    store, run, _ = made
    return mc.hub_folder(run, output=output, store=store, **more)


def test_the_card_is_what_the_hub_reads(made: tuple[Path, str, Path], tmp_path: Path) -> None:
    receipt = upload(made, tmp_path / "hub", base_model="org/base")
    card = ModelCard.load(tmp_path / "hub" / "README.md")
    data = card.data.to_dict()
    assert (data["base_model"], data["base_model_relation"]) == ("org/base", "quantized")
    assert data["license"] == "apache-2.0" and data["library_name"] == "transformers"
    assert data["tags"] == ["quantized", "rtn", "4-bit", "compressed-tensors", "mlflow-compress"]
    accuracy = {row["name"]: row["value"] for row in receipt.to_rows() if row["task"] is None}["quality/accuracy"]
    entries = {one.metric_type: one for one in card.data.eval_results if one.dataset_type == "mlflow-compress"}
    assert entries["accuracy"].metric_value == accuracy and entries["accuracy"].metric_args["n"] > 0
    assert f"Evaluation `{receipt.stated['evaluation_id']}`" in card.text and receipt.sha256 in card.text
    assert "| bits | 4 |" in card.text and "`vllm serve FOLDER`" in card.text
    assert receipt.remarks == ()


def test_the_folder_loads_and_tells_nothing_of_this_machine(made: tuple[Path, str, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hub, checkpoint = tmp_path / "hub", made[2]
    before = {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}
    upload(made, hub, base_model="org/base")
    assert {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()} == before
    manifest = CheckpointManifest.read(hub)  # every file is as it was, and none is strange
    assert manifest.base_model == "org/base" and "LICENSE.txt" in manifest.other_files
    assert json.loads((hub / "config.json").read_text())["quantization_config"]["quant_method"] == "compressed-tensors"
    assert {"generation_config.json", "tokenizer.json", "LICENSE.txt"} <= {path.name for path in hub.iterdir()}
    model, tokenizer = AutoModelForCausalLM.from_pretrained(hub), AutoTokenizer.from_pretrained(hub)
    assert model.config.quantization_config is not None and tokenizer("a").input_ids
    told = [
        path for path in hub.rglob("*") if path.is_file() and str(checkpoint.parents[1]).encode() in path.read_bytes()
    ]
    assert told == []


def test_what_is_not_known_is_not_in_the_card_but_told(made: tuple[Path, str, Path], tmp_path: Path) -> None:
    base = made[2].parents[1] / "base"
    (base / "README.md").write_text("---\nlicense: [\n---\n")  # broken: the file of the licence is there still
    with_file = upload(made, tmp_path / "with-file")
    data = ModelCard.load(tmp_path / "with-file" / "README.md").data.to_dict()
    assert data["license"] == "other" and data["license_link"] == "LICENSE.txt"
    assert "base_model" not in data and "base_model_relation" not in data
    assert [remark.partition(",")[0] for remark in with_file.remarks] == ["The card names no base model"]
    (base / "LICENSE.txt").rename(base / "away")
    try:
        without = upload(made, tmp_path / "without", base_model="org/base")
    finally:
        (base / "away").rename(base / "LICENSE.txt")
        (base / "README.md").write_text(CARD)
    assert "license" not in ModelCard.load(tmp_path / "without" / "README.md").data.to_dict()
    assert without.remarks == ("The base's folder says no licence: add 'license' to the card",)
    assert "add 'license' to the card." in without.as_text()


def test_what_cannot_be_uploaded_is_refused_and_leaves_nothing(made: tuple[Path, str, Path], tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        upload(made, tmp_path / "full")
    store, run = evaluated(tmp_path / "results")
    for checkpoint, message in ((None, "has no checkpoint"), ("endpoint:http://127.0.0.1:1/v1", "served")):
        if checkpoint is not None:
            FolderStore(store).add_to(run).set_tags({run_names.CHECKPOINT: checkpoint})
        with pytest.raises(ConfigError, match=message):
            mc.hub_folder(run, output=tmp_path / "hub", store=store)
    assert not (tmp_path / "hub").exists()
