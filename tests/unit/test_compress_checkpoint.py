"""Checkpoints made elsewhere: copied whole, hashed, compared with the right base, or refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mlflow_compress.commands.quantize.parameters import QuantizeConfig
from mlflow_compress.commands.quantize.run import new_checkpoint_folder
from mlflow_compress.commands.shared.named_method import method_settings
from mlflow_compress.compression import CheckpointManifest, compress_model, method_config
from mlflow_compress.config import SourceConfig
from mlflow_compress.errors import CheckpointError, ConfigError, MissingDependencyError, UnsupportedError
from mlflow_compress.models.source_model import resolve
from mlflow_compress.models.stored_weights import hash_weights
from tests.compress_models import TEXT, logits, make_falcon, make_llama, make_mistral, make_qwen2, token_rows

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_fresh_process")]


def config(checkpoint: Path) -> Any:
    return method_config("checkpoint", checkpoint=str(checkpoint))


def take(base: Path, checkpoint: Path, out: Path) -> CheckpointManifest:
    return compress_model(str(base), "checkpoint", config(checkpoint), [], out)


@pytest.mark.parametrize("method", ["gguf", "bnb-nf4", "w8a8"])
def test_any_format_is_taken_with_its_own_sizes(base: Path, tmp_path: Path, method: str) -> None:
    original = compress_model(str(base), method, None, [], tmp_path / "theirs")
    manifest = take(base, tmp_path / "theirs", tmp_path / "ours")
    assert manifest.label == "checkpoint-theirs"
    assert manifest.weight_files == original.weight_files  # the same bytes
    assert manifest.bits_per_weight == original.bits_per_weight and manifest.size_bytes == original.size_bytes


def test_a_checkpoint_that_was_pruned_and_tuned_stands_beside_its_base(base: Path, tmp_path: Path) -> None:
    tuned = make_llama(tmp_path / "tuned", seed=1, num_hidden_layers=1)
    manifest = take(base, tuned, tmp_path / "ours")
    assert manifest.base_weights_hash == hash_weights(base)[1]
    assert manifest.size_ratio == resolve(str(base)).parameters / resolve(str(tuned)).parameters > 1
    ids = token_rows(base, TEXT[0], rows=1, length=32)
    assert torch.equal(logits(tmp_path / "ours", ids), logits(tuned, ids))


def test_the_folder_in_which_it_is_kept_changes_with_its_weights(base: Path, tmp_path: Path) -> None:
    theirs = make_llama(tmp_path / "theirs", seed=1)
    config = QuantizeConfig(model=str(base), method="checkpoint", checkpoint=str(theirs), output_dir=str(tmp_path))
    source = resolve(str(base))

    def folder() -> Path:
        return new_checkpoint_folder(config, method_settings(config.compression, config.source), source.folder, [])

    first = folder()
    assert folder() == first
    make_llama(theirs, seed=2)
    assert folder() != first


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "generation_config.json", "chat_template.jinja"])
def test_the_folder_in_which_it_is_kept_changes_with_what_is_copied_into_it(
    base: Path, tmp_path: Path, name: str
) -> None:
    model = Path(shutil.copytree(base, tmp_path / "base"))
    config = QuantizeConfig(model=str(model), method="none", output_dir=str(tmp_path))

    def folder() -> Path:
        return new_checkpoint_folder(config, method_settings(config.compression, config.source), model, [])

    first = folder()
    (model / "README.md").write_text("No loader reads this.")
    assert folder() == first
    (model / name).write_text((model / name).read_text() + " " if (model / name).is_file() else "{}")
    assert folder() != first


@pytest.mark.parametrize("make", [make_llama, make_mistral, make_qwen2])
def test_a_gguf_file_by_itself_takes_configuration_and_tokenizer_from_the_base(make: Any, tmp_path: Path) -> None:
    base = make(tmp_path / "base")
    original = compress_model(str(base), "gguf", method_config("gguf", bits=4), [], tmp_path / "theirs")
    file = (tmp_path / "theirs" / "model.gguf").rename(tmp_path / "tiny.Q4_0.gguf")
    manifest = take(base, file, tmp_path / "ours")
    assert manifest.label == "checkpoint-tiny.Q4-0"
    assert manifest.size_bytes == original.size_bytes and manifest.bits_per_weight == 4.5
    file.rename(tmp_path / "theirs" / "model.gguf")
    ids = token_rows(base, TEXT[0], rows=2, length=64)
    assert torch.equal(logits(tmp_path / "ours", ids), logits(tmp_path / "theirs", ids))


def test_a_gguf_file_of_another_model_is_refused(base: Path, tmp_path: Path) -> None:
    def written(make: Any, **changes: Any) -> Path:
        other = make(tmp_path / make.__name__, **changes)
        compress_model(str(other), "gguf", None, [], tmp_path / f"{make.__name__}-gguf")
        return tmp_path / f"{make.__name__}-gguf" / "model.gguf"

    with pytest.raises(UnsupportedError, match=r"another architecture than the base\. Allowed: llama\. Got: 'qwen2'"):
        take(base, written(make_qwen2), tmp_path / "out")
    deeper = written(make_llama, num_hidden_layers=3)
    with pytest.raises(
        UnsupportedError, match=r"differ in 9 tensors, the first of them model\.layers\.2.*Allowed: none"
    ):
        take(base, deeper, tmp_path / "out")
    with pytest.raises(CheckpointError, match="GGUF file does not exist"):
        take(base, tmp_path / "none.gguf", tmp_path / "out")
    (tmp_path / "broken.gguf").write_bytes(deeper.read_bytes()[:300])
    with pytest.raises(CheckpointError, match="cannot be read"):
        take(base, tmp_path / "broken.gguf", tmp_path / "out")
    with pytest.raises(UnsupportedError, match="GGUF"):
        compress_model(str(make_falcon(tmp_path / "falcon")), "checkpoint", config(deeper), [], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_compared_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs a checkpoint.*Give checkpoint="):
        compress_model(str(base), "checkpoint", None, [], tmp_path / "out")
    with pytest.raises(ConfigError, match="Method 'rtn' has no parameter 'checkpoint'"):
        method_settings(QuantizeConfig(method="rtn", checkpoint="somewhere").compression, SourceConfig())
    with pytest.raises(CheckpointError, match="No such model folder"):
        take(base, tmp_path / "nothing", tmp_path / "out")
    with pytest.raises(UnsupportedError, match=r"another vocabulary.*Allowed: 64\. Got: 96"):
        take(base, make_llama(tmp_path / "larger", vocab_size=96), tmp_path / "out")
    needs = make_llama(tmp_path / "needs")
    config = json.loads((needs / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "aqlm"}
    (needs / "config.json").write_text(json.dumps(config))
    with pytest.raises(MissingDependencyError, match="format needs a package"):
        take(base, needs, tmp_path / "out")
    assert not (tmp_path / "out").exists()
