"""Errors before any work, nothing half-made left behind, and a reload check that sees a wrong weight."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mlflow_compress.compression import (
    METHODS,
    CheckpointManifest,
    CompressionJob,
    Method,
    MethodConfig,
    compress_model,
    method_config,
)
from mlflow_compress.compression.reload_check import main as reload_check
from mlflow_compress.errors import CheckpointError, ConfigError, ReloadMismatchError, UnsupportedError
from mlflow_compress.models.source_model import resolve
from tests.compress_models import TEXT, make_falcon, make_llama, make_mixture, make_neox

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and bitsandbytes warn while loading


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixture(tmp_path_factory.mktemp("mixture") / "experts")


@pytest.fixture(scope="module")
def falcon(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_falcon(tmp_path_factory.mktemp("falcon") / "own-class")


def small_settings(method: str) -> dict[str, int]:
    known = METHODS.get(method).Config.model_fields
    small = {"group_size": 32, "calibration_samples": 2, "calibration_length": 32}
    return {name: value for name, value in small.items() if name in known}


class Saver(Method):
    """Saves the model, then spoils something."""

    name = "spoiled"
    description = reference = format = "test"
    Config = MethodConfig

    def compress(self, job: CompressionJob) -> torch.Tensor:
        model = job.source.load(job.device)
        model.save_pretrained(job.folder)
        job.source.tokenizer().save_pretrained(job.folder)
        self.spoil(job.folder)
        return job.probe.logits(model)

    def spoil(self, folder: Path) -> None:
        raise KeyboardInterrupt


class WrongWeight(Saver):
    """One weight of the file differs from the one in memory."""

    def spoil(self, folder: Path) -> None:
        change_one_weight(folder)


def change_one_weight(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] += 0.05
    save_file(tensors, path, metadata={"format": "pt"})


def use(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    METHODS.names()  # the registry is full before a test adds to it
    monkeypatch.setitem(METHODS._objects, method.name, method)
    monkeypatch.setitem(METHODS._modules, method.name, __name__)


def test_an_interrupted_run_leaves_nothing(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(Saver(), monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        compress_model(str(base), "spoiled", None, [], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("forked_checks")
def test_a_checkpoint_with_a_wrong_weight_is_not_published(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(WrongWeight(), monkeypatch)
    with pytest.raises(ReloadMismatchError, match="does not reproduce the compressed model in memory"):
        compress_model(str(base), "spoiled", None, [], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("forked_checks")
def test_a_published_checkpoint_can_be_checked_again_and_tampering_shows(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    manifest = compress_model(str(base), "none", None, [], out)
    assert manifest == CheckpointManifest.read(out)
    assert manifest.reload["max_abs_diff"] == 0.0 and manifest.reload["kl_max"] == 0.0
    assert manifest.size_ratio == 1.0 and manifest.bits_per_weight == manifest.bits_per_weight_model == 16.0
    assert manifest.seconds > 0 and manifest.peak_memory_bytes > 2**20
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert reload_check([str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["agrees"] is True
    change_one_weight(out)
    assert reload_check([str(out)]) == 1
    with pytest.raises(CheckpointError, match="has changed"):
        CheckpointManifest.read(out)
    (out / "model.safetensors").write_bytes(b"")
    assert reload_check([str(out)]) == 2


def test_a_model_that_is_not_there_and_an_output_folder_in_use_are_clear_errors(base: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such model folder"):
        compress_model(str(tmp_path / "nothing"), "none", None, [], tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        compress_model(str(tmp_path), "none", None, [], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        compress_model(str(base), "none", None, [], tmp_path)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("rtn", {}, r"Group size 128 does not divide the 64 input features of model\.layers\.0\.self_attn\.q_proj"),
        ("gptq", {"group_size": 96}, "Group size 96 does not divide"),
        ("awq", {"group_size": 128}, "Group size 128 does not divide"),
        ("gptq", {"group_size": 32, "calibration_length": 512}, "longer than the model's context.*at most 128"),
        ("awq", {"group_size": 32, "calibration_samples": 100000}, "calibration text is too short"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_any_work(
    base: Path, tmp_path: Path, method: str, settings: dict[str, int], message: str
) -> None:
    settings = {"calibration_length": 64, **settings} if METHODS.get(method).needs_calibration else settings
    with pytest.raises(ConfigError, match=message):
        compress_model(str(base), method, method_config(method, **settings), TEXT, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_calibration_without_text_and_settings_of_another_method_are_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'gptq' needs calibration text"):
        compress_model(str(base), "gptq", None, ["  \n"], tmp_path / "out")
    with pytest.raises(ConfigError, match="not those of method 'rtn'"):
        compress_model(str(base), "rtn", method_config("gptq"), [], tmp_path / "out")


def test_a_quantized_model_is_not_quantized_again(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "llama")
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UnsupportedError, match="already quantized"):
        resolve(str(model))


def test_a_model_is_described_without_its_head_and_awq_refuses_one_that_it_does_not_know(
    base: Path, tmp_path: Path
) -> None:
    source = resolve(str(base))
    assert source.head == "lm_head" and source.dtype == "bfloat16" and source.layers == 2
    assert len(source.linear) == 14 and source.linear["model.layers.1.mlp.down_proj"] == (64, 128)
    neox = resolve(str(make_neox(tmp_path / "neox")))
    assert neox.head == "lm_head" and "lm_head" not in neox.linear and len(neox.linear) == 8
    model = make_neox(tmp_path / "neox")
    config = method_config("awq", group_size=32, calibration_samples=2, calibration_length=32)
    with pytest.raises(UnsupportedError, match=r"does not know which layers.*GPTNeoXForCausalLM.*gptq or rtn"):
        compress_model(str(model), "awq", config, TEXT, tmp_path / "out")


NOT_EXPERTS = [
    name
    for name, method in METHODS.items()
    if method.linear_only and not method.extra and not method.takes_experts(method.Config())
]


@pytest.mark.parametrize("method", NOT_EXPERTS)
def test_experts_that_a_method_would_pass_over_are_refused(method: str, mixture: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError, match=r"linear layers only, and 8\d% .*experts.gate_up_proj.*experts too: autoround, awq"
    ):
        compress_model(str(mixture), method, None, TEXT, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.by_class and not method.extra])
def test_layers_that_a_library_would_pass_over_are_refused(method: str, falcon: Path, tmp_path: Path) -> None:
    settings = small_settings(method)
    with pytest.raises(UnsupportedError, match=r"skips linear layers of a subclass, such as .*FalconForC.*Use hqq"):
        compress_model(str(falcon), method, method_config(method, **settings), TEXT, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["rtn", "fp8", "bnb-nf4", "bnb-int8"])
def test_layers_that_a_library_has_passed_over_are_an_error(
    method: str, falcon: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(METHODS.get(method)), "by_class", False)  # as if that were not known of it
    with pytest.raises(UnsupportedError, match=f"'{method}' left 8 of 8 linear layers unchanged.*FalconForCausalLM"):
        compress_model(str(falcon), method, method_config(method, **small_settings(method)), [], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_rounded_weights_may_be_stored_as_floats(falcon: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(METHODS.get("magnitude")), "supported_bits", (4,))  # as if it rounded
    manifest = compress_model(str(falcon), "magnitude", method_config("magnitude"), [], tmp_path / "out")
    assert manifest.bits_per_weight == 16, "stored as the model is"
