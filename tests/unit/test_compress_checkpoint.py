"""Checkpoints made elsewhere: copied whole, hashed, compared with the right base, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlflow_compress.compress import Manifest, compress_model, method_config, run
from mlflow_compress.compress.source import resolve
from mlflow_compress.config import QuantizeConfig
from mlflow_compress.errors import CheckpointError, ConfigError, MissingDependencyError, UnsupportedError
from mlflow_compress.stages.quantize import checkpoint_folder, method_settings
from tests.compress_models import check_here, make_llama

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def no_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "reload_in_fresh_process", check_here)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("base") / "llama")


def take(base: Path, checkpoint: Path, out: Path) -> Manifest:
    return compress_model(str(base), "checkpoint", method_config("checkpoint", checkpoint=str(checkpoint)), [], out)


@pytest.mark.parametrize("method", ["gguf", "bnb-nf4", "w8a8"])
def test_any_format_is_taken_with_its_own_sizes(base: Path, tmp_path: Path, method: str) -> None:
    original = compress_model(str(base), method, None, [], tmp_path / "theirs")
    manifest = take(base, tmp_path / "theirs", tmp_path / "ours")
    assert manifest.label == "checkpoint-theirs"
    assert manifest.weight_files == original.weight_files  # the same bytes
    assert manifest.bits_per_weight == original.bits_per_weight and manifest.size_bytes == original.size_bytes


def test_the_folder_in_which_it_is_kept_changes_with_its_weights(base: Path, tmp_path: Path) -> None:
    theirs = make_llama(tmp_path / "theirs", seed=1)
    config = QuantizeConfig(model=str(base), method="checkpoint", checkpoint=str(theirs), out=str(tmp_path))
    source = resolve(str(base))

    def folder() -> Path:
        return checkpoint_folder(config, method_settings(config), source, [])

    first = folder()
    assert folder() == first
    make_llama(theirs, seed=2)
    assert folder() != first


def test_what_cannot_be_compared_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs a checkpoint.*-P checkpoint="):
        compress_model(str(base), "checkpoint", None, [], tmp_path / "out")
    with pytest.raises(ConfigError, match="Method 'rtn' has no parameter 'checkpoint'"):
        method_settings(QuantizeConfig(method="rtn", checkpoint="somewhere"))
    with pytest.raises(CheckpointError, match="folder does not exist"):
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
