"""Every registered method: compress, save, reload, compute; distances ordered by bits; the same bytes twice.

A new method is covered as soon as it is registered. The quick half runs each method once on a small random model, the
slow half runs the whole matrix on the demonstration model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from mlflow_compress import demo
from mlflow_compress.compress import METHODS, Manifest, compress_model, method_config
from mlflow_compress.compress.reload_check import main as reload_check
from mlflow_compress.compress.storage import hash_weights
from mlflow_compress.errors import ConfigError, UnsupportedError
from tests.compress_models import TEXT, logits, make_llama, make_neox, mean_kl, token_rows

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and the backends warn while loading

SMALL = {"group_size": 32, "calibration_samples": 4, "calibration_length": 64}
"""Settings for the random models, whose rows are 64 weights long."""

Compress = Callable[..., tuple[Manifest, Path]]


def small_config(name: str, **settings: Any) -> Any:
    """Return a method's settings with those of `SMALL` that it has."""
    fields = METHODS.get(name).Config.__dataclass_fields__
    return method_config(name, **{**{k: v for k, v in SMALL.items() if k in fields}, **settings})


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_neox(tmp_path_factory.mktemp("models") / "neox")


@pytest.mark.parametrize("name", METHODS.names())
def test_a_method_makes_a_checkpoint_that_anyone_can_load(
    name: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    method, out = METHODS.get(name), tmp_path / "out"
    random_state = torch.get_rng_state()
    manifest = compress_model(str(llama), name, small_config(name), TEXT, out)

    assert capsys.readouterr() == ("", "")  # libraries are kept quiet
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # and leave nothing in the working directory
    assert torch.equal(torch.get_rng_state(), random_state)  # nor touch the caller's random numbers
    assert Manifest.read(out) == manifest
    assert (manifest.calibration is not None) == method.needs_calibration
    assert AutoTokenizer.from_pretrained(out)("a goose") == AutoTokenizer.from_pretrained(llama)("a goose")

    ids = token_rows(llama, TEXT[0], rows=4, length=64)
    kl = mean_kl(logits(llama, ids), logits(out, ids))
    assert kl == 0.0 if name == "none" else 0.0 < kl < 0.5
    weight_bits = method.default_bits
    if weight_bits is not None:
        # At least the bits themselves, at most two more for scales, zero points and the tables of tiny layers.
        assert weight_bits < manifest.bits_per_weight < weight_bits + 2
        assert manifest.size_ratio > 1
    assert manifest.size_bytes < sum(path.stat().st_size for path in out.glob("*.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS.names())
def test_another_architecture_works_or_is_refused_with_a_reason(name: str, neox: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    try:
        compress_model(str(neox), name, small_config(name), TEXT, out)
    except UnsupportedError as error:
        assert "GPTNeoXForCausalLM" in str(error)
        assert not out.exists()
        return
    assert reload_check([str(out)]) == 0


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.supported_bits])
def test_bits_that_a_method_lacks_are_refused(name: str) -> None:
    allowed = ", ".join(map(str, METHODS.get(name).supported_bits))
    with pytest.raises(UnsupportedError, match=rf"Allowed: {allowed}\. Got: 7"):
        method_config(name, bits=7)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.needs_calibration])
def test_a_method_that_needs_text_refuses_to_run_without(name: str, llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs calibration text"):
        compress_model(str(llama), name, small_config(name), [], tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS.names())
def test_the_same_settings_give_the_same_bytes(name: str, llama: Path, tmp_path: Path) -> None:
    hashes = []
    for run in ("first", "second"):
        compress_model(str(llama), name, small_config(name, **_seed(name, 3)), TEXT, tmp_path / run)
        hashes.append(hash_weights(tmp_path / run))
    assert hashes[0] == hashes[1]


def _seed(name: str, seed: int) -> dict[str, int]:
    return {"seed": seed} if METHODS.get(name).needs_calibration else {}


@pytest.fixture(scope="module")
def on_demo(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[float, Manifest]]:
    """Compress the demonstration model and return the KL to it on held-out text, with the manifest."""
    folder = tmp_path_factory.mktemp("demo")
    calibration = [(demo.DATA_DIR / "calibration.txt").read_text()]
    ids = token_rows(demo.MODEL_DIR, (demo.DATA_DIR / "corpus.txt").read_text(), rows=16, length=256)
    baseline = logits(demo.MODEL_DIR, ids)
    done: dict[tuple[Any, ...], tuple[float, Manifest]] = {}

    def compress(name: str, **settings: Any) -> tuple[float, Manifest]:
        key = (name, *sorted(settings.items()))
        if key not in done:
            out = folder / str(len(done))
            manifest = compress_model(str(demo.MODEL_DIR), name, method_config(name, **settings), calibration, out)
            done[key] = mean_kl(baseline, logits(out, ids)), manifest
        return done[key]

    return compress


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if len(method.supported_bits) > 1])
def test_fewer_bits_lie_farther_from_the_baseline(name: str, on_demo: Callable[..., tuple[float, Manifest]]) -> None:
    results = [on_demo(name, bits=bits) for bits in METHODS.get(name).supported_bits]
    distances = [kl for kl, _ in results]
    sizes = [manifest.size_bytes for _, manifest in results]
    assert distances == sorted(distances) and len(set(distances)) == len(distances), distances
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes), sizes


@pytest.mark.slow
def test_methods_rank_as_the_papers_say(on_demo: Callable[..., tuple[float, Manifest]]) -> None:
    assert on_demo("none")[0] == 0.0
    assert on_demo("gptq", bits=4)[0] < on_demo("rtn", bits=4)[0]
    assert on_demo("awq", bits=3)[0] < on_demo("rtn", bits=3, symmetric="false")[0]
    assert on_demo("bnb-int8")[0] < on_demo("bnb-nf4")[0]
