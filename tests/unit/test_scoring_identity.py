"""What decides a model's numbers besides its weights: found without loading anything, and changed by what matters."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

from mlflow_compress.scoring import engine_identity as module
from mlflow_compress.scoring.engine_identity import engine_identity


def with_config(folder: Path, **settings: object) -> Path:
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_the_engine_is_its_version_and_its_libraries(tmp_path: Path) -> None:
    found = engine_identity(with_config(tmp_path, model_type="llama"))
    assert set(found) == {"scoring", "attention", *module.PACKAGES}
    assert found["scoring"] == str(module.SCORING_VERSION)
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
