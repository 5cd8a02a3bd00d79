"""What decides a model's numbers besides its weights: found without loading anything, and changed by what matters."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import mlflow_compress
from mlflow_compress.scoring import engine_identity as module
from mlflow_compress.scoring.engine_identity import engine_identity, source_hash

PACKAGE = Path(mlflow_compress.__file__).parent


def with_config(folder: Path, **settings: object) -> Path:
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_the_engine_is_its_code_and_its_libraries(tmp_path: Path) -> None:
    found = engine_identity(with_config(tmp_path, model_type="llama"))
    assert set(found) == {"source", "attention", *module.PACKAGES}
    assert {name: found[name] for name in module.PACKAGES} == {name: version(name) for name in module.PACKAGES}
    assert found["attention"] == "auto"
    assert engine_identity(with_config(tmp_path, attn_logit_softcapping=50.0))["attention"] == "eager"
    assert engine_identity(with_config(tmp_path, text_config={"attn_logit_softcapping": 9.0}))["attention"] == "eager"
    compressed = engine_identity(with_config(tmp_path, quantization_config={"quant_method": "compressed-tensors"}))
    assert compressed["compressed-tensors"] == version("compressed-tensors")
    assert "llama-cpp-python" in engine_identity(with_config(tmp_path, native_gguf=True))


def test_code_that_comes_with_a_checkpoint_decides_too(tmp_path: Path) -> None:
    with_config(tmp_path, model_type="own")
    (tmp_path / "modeling_own.py").write_text("A = 1")
    before = engine_identity(tmp_path)["model code"]
    (tmp_path / "modeling_own.py").write_text("A = 2")
    assert engine_identity(tmp_path)["model code"] != before


def hash_of(package: Path) -> str:
    """Return the hash that a copy of the package computes for itself, from another working folder."""
    code = "from mlflow_compress.scoring.engine_identity import source_hash; import sys; print(source_hash(), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=package.parent,
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    found, loaded_torch = done.stdout.split()
    assert loaded_torch == "False"  # an orchestrating process asks, too
    return found


def test_a_copy_elsewhere_has_the_same_hash_and_an_edit_changes_it(tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "mlflow_compress"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("demo", "__pycache__"))
    assert hash_of(copy) == source_hash()
    (copy / "reporting" / "text.py").write_text("")  # how results are shown decides no number
    assert hash_of(copy) == source_hash()
    edited = copy / "scoring" / "plan" / "units.py"
    edited.write_text(edited.read_text() + "# edited")
    assert hash_of(copy) != source_hash()


@pytest.mark.parametrize("name", module.SOURCES)
def test_every_named_part_of_the_package_is_there(name: str) -> None:
    assert list((PACKAGE / name).glob("*.py"))
