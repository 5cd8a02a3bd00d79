"""Every registered method: compress, save, reload, compute; distances ordered by bits; the same bytes twice.

A new method is covered as soon as it is registered. The quick half runs each method once on a small random model, the
slow half runs the whole matrix on the demonstration model.
"""

import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from mlflow_compress import demo
from mlflow_compress.compression import METHODS, CheckpointManifest, compress_model, method_config
from mlflow_compress.compression.mixed_recipe import MixedRecipe
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.models.loading import LoadConfig, load_model
from mlflow_compress.models.source_model import resolve
from mlflow_compress.models.stored_weights import hash_weights
from tests.compress_models import TEXT, logits, make_gemma2, make_llama, make_neox, mean_kl, token_rows, write_adapter

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and the backends warn while loading

SMALL = {"group_size": 32, "calibration_samples": 4, "calibration_length": 64, "iters": 4}
"""Settings for the random models, whose rows are 64 weights long."""

CASTS = ("bf16", "fp16")
"""Methods that need a base in float32."""

DENSE = ("none", "adapter", *CASTS, "magnitude", "wanda", "sparsegpt", "gaussian-noise", "kv-cache")
"""Methods whose checkpoints are as large as a 16-bit base."""

NEED_WIDE = ("gguf-k", "gguf-imatrix", "w4a8", "w4afp8", "fp8-block")
"""Methods with blocks or groups of 128 or 256 that no setting makes smaller."""

WIDE = {"hidden_size": 256, "intermediate_size": 256}

Compress = Callable[..., tuple[CheckpointManifest, Path]]


def small_config(name: str, **settings: Any) -> Any:
    """Return a method's settings with those of `SMALL` that it has."""
    fields = METHODS.get(name).Config.model_fields
    return method_config(name, **{**{k: v for k, v in SMALL.items() if k in fields}, **settings})


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Return the random base of an architecture, in the type that a method starts from."""
    folder = tmp_path_factory.mktemp("models")
    makers = {"llama": make_llama, "neox": make_neox, "gemma2": make_gemma2}

    def base(architecture: str, method: str) -> Path:
        dtype = torch.float32 if method in CASTS else torch.bfloat16
        sizes = WIDE if method in NEED_WIDE and architecture == "llama" else {}
        path = folder / f"{architecture}-{dtype}-{'wide' if sizes else 'narrow'}"
        return path if path.exists() else makers[architecture](path, dtype=dtype, **sizes)

    return base


def need_extra(name: str) -> None:
    """Skip where a method's extra is not installed; say which."""
    method = METHODS.get(name)
    if any(importlib.util.find_spec(package) is None for package in method.requires):
        assert method.extra, f"{name} needs {method.requires}, which the plain installation must bring"
        pytest.skip(f"needs the extra {method.extra!r}")


def settings_of(name: str, architecture: str, bases: Callable[[str, str], Path], **settings: Any) -> Any:
    """Return a method's settings; `checkpoint` gets one that `rtn` has made, `adapter` a random one, `mixed` a recipe of two formats."""
    if name == "checkpoint":
        folder = bases(architecture, name).parent / f"{architecture}-made-elsewhere"
        if not folder.exists():
            compress_model(str(bases(architecture, name)), "rtn", small_config("rtn"), [], folder)
            (folder / "compression.json").unlink()
        settings["checkpoint"] = str(folder)
    if name == "adapter":
        folder = bases(architecture, name).parent / f"{architecture}-adapter"
        with torch.random.fork_rng():
            settings["adapter"] = str(write_adapter(bases(architecture, name), folder))
    if name == "mixed":
        file = bases(architecture, name).parent / f"{architecture}.json"
        formats = {f"gptq:{bits}": {"method": "gptq", "bits": bits, "group_size": 32} for bits in (4, 8)}
        linear = resolve(str(bases(architecture, name))).linear
        MixedRecipe(formats=formats, layers=dict(zip(linear, itertools.cycle(formats)))).write(file)
        settings["recipe"] = str(file)
    return small_config(name, **settings)


# `autoround` takes 10 seconds and more, whatever the model.
NAMES = [pytest.param(n, marks=[pytest.mark.ci] if n == "autoround" else ()) for n in METHODS.names()]


@pytest.mark.parametrize("name", NAMES)
def test_a_method_makes_a_checkpoint_that_anyone_can_load(
    name: str,
    bases: Callable[[str, str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_fresh_process: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    need_extra(name)
    monkeypatch.chdir(tmp_path)
    method, out, base = METHODS.get(name), tmp_path / "out", bases("llama", name)
    settings = settings_of(name, "llama", bases)
    random_state = torch.get_rng_state()
    capsys.readouterr()
    manifest = compress_model(str(base), name, settings, TEXT, out)

    assert capsys.readouterr() == ("", "")  # libraries are kept quiet
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # and leave nothing in the working directory
    assert torch.equal(torch.get_rng_state(), random_state)  # nor touch the caller's random numbers
    assert CheckpointManifest.read(out) == manifest
    assert (manifest.calibration is not None) == method.needs_calibration
    assert AutoTokenizer.from_pretrained(out)("a goose") == AutoTokenizer.from_pretrained(base)("a goose")
    assert method.label(settings) == manifest.label and "/" not in manifest.label

    ids = token_rows(base, TEXT[0], rows=4, length=64)
    kl = mean_kl(logits(base, ids), logits(out, ids))
    assert kl == 0.0 if name == "none" else 0.0 < kl < 1.0
    scored = load_model(LoadConfig(path=str(out), device="cpu")).model  # the scoring engine sees the same model
    with torch.inference_mode():
        assert torch.equal(scored(input_ids=ids).logits, logits(out, ids))
    weight_bits = getattr(method.Config(), "bits", None)
    if weight_bits is not None:
        # At least the bits themselves, at most two more for scales, zero points and the tables of tiny layers.
        assert weight_bits < manifest.bits_per_weight < weight_bits + 2
        assert manifest.size_ratio > 1
    if name in DENSE:
        assert manifest.bits_per_weight == manifest.bits_per_weight_model == 16.0
        assert manifest.size_ratio == (2.0 if name in CASTS else 1.0)
    if "sparsity" in method.Config.model_fields:
        # SparseGPT removes its threshold too: a weight more in a block of at least 64 x 64.
        assert 0.5 <= manifest.sparsity <= 0.5 + 64.0**-2
    assert manifest.size_bytes < sum((out / file).stat().st_size for file in manifest.weight_files)


@pytest.mark.parametrize(
    ("architecture", "model"), [("neox", "GPTNeoXForCausalLM"), ("gemma2", "Gemma2ForCausalLM")], ids=["neox", "gemma2"]
)
@pytest.mark.parametrize("name", NAMES)
def test_another_architecture_works_or_is_refused_with_a_reason(
    name: str, architecture: str, model: str, bases: Callable[[str, str], Path], tmp_path: Path, no_fresh_process: None
) -> None:
    need_extra(name)
    out, base = tmp_path / "out", bases(architecture, name)
    try:
        compress_model(str(base), name, settings_of(name, architecture, bases), TEXT, out)
    except UnsupportedError as error:
        assert model in str(error)
        assert not out.exists()
        return
    assert CheckpointManifest.read(out).method == name  # published, so its reload check agreed
    ids = token_rows(base, TEXT[0], rows=4, length=64)
    before, after = (load_model(LoadConfig(path=str(f), device="cpu", dtype="float32")).model for f in (base, out))
    with torch.inference_mode():
        assert mean_kl(before(input_ids=ids).logits, after(input_ids=ids).logits) < 1.0


@pytest.fixture(scope="module")
def made(bases: Callable[[str, str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a method's checkpoint of the random Llama, which is made once."""
    folder = tmp_path_factory.mktemp("made")

    def make(name: str) -> Path:
        if not (folder / name).exists():
            compress_model(str(bases("llama", name)), name, seeded(name, bases), TEXT, folder / name)
        return folder / name

    return make


def seeded(name: str, bases: Callable[[str, str], Path]) -> Any:
    return settings_of(name, "llama", bases, **({"seed": 3} if METHODS.get(name).needs_calibration else {}))


def installed() -> list[str]:
    """Return the methods whose packages are there."""
    return [n for n, m in METHODS.items() if all(importlib.util.find_spec(p) is not None for p in m.requires)]


@pytest.mark.ci
def test_checkpoints_of_every_method_load_in_a_fresh_process(
    made: Callable[[str], Path], no_fresh_process: None
) -> None:
    names = installed()
    folders = [str(made(name)) for name in names]
    command = [sys.executable, "-m", "mlflow_compress.compression.reload_check", *folders]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(names), done.stderr
    wrong = {name: answer for name, answer in zip(names, answers, strict=True) if answer.get("agrees") is not True}
    assert not wrong


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.supported_bits])
def test_bits_that_a_method_lacks_are_refused(name: str) -> None:
    allowed = ", ".join(map(str, METHODS.get(name).supported_bits))
    with pytest.raises(UnsupportedError, match=rf"Allowed: {allowed}\. Got: 7"):
        method_config(name, bits=7)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.needs_calibration])
def test_a_method_that_needs_text_refuses_to_run_without(
    name: str, bases: Callable[[str, str], Path], tmp_path: Path
) -> None:
    need_extra(name)
    with pytest.raises(ConfigError, match="needs calibration text"):
        compress_model(str(bases("llama", name)), name, small_config(name), [], tmp_path / "out")


@pytest.mark.ci
@pytest.mark.parametrize("name", METHODS.names())
def test_the_same_settings_give_the_same_bytes(
    name: str,
    bases: Callable[[str, str], Path],
    made: Callable[[str], Path],
    tmp_path: Path,
    no_fresh_process: None,
) -> None:
    need_extra(name)
    compress_model(str(bases("llama", name)), name, seeded(name, bases), TEXT, tmp_path / "again")
    assert hash_weights(tmp_path / "again") == hash_weights(made(name))


@pytest.fixture(scope="module")
def on_demo(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[float, CheckpointManifest]]:
    """Compress the demonstration model and return the KL to it on held-out text, with the manifest."""
    folder = tmp_path_factory.mktemp("demo")
    calibration = [(demo.DATA_DIR / "calibration.txt").read_text()]
    ids = token_rows(demo.MODEL_DIR, (demo.DATA_DIR / "corpus.txt").read_text(), rows=16, length=256)
    baseline = logits(demo.MODEL_DIR, ids)
    done: dict[tuple[Any, ...], tuple[float, CheckpointManifest]] = {}

    def compress(name: str, **settings: Any) -> tuple[float, CheckpointManifest]:
        key = (name, *sorted(settings.items()))
        if key not in done:
            out = folder / str(len(done))
            manifest = compress_model(str(demo.MODEL_DIR), name, method_config(name, **settings), calibration, out)
            done[key] = mean_kl(baseline, logits(out, ids)), manifest
        return done[key]

    return compress


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if len(method.supported_bits) > 1])
def test_fewer_bits_lie_farther_from_the_baseline(
    name: str, on_demo: Callable[..., tuple[float, CheckpointManifest]]
) -> None:
    need_extra(name)
    few_steps = {"iters": 10} if name == "autoround" else {}  # its 200 take minutes
    results = [on_demo(name, bits=bits, **few_steps) for bits in METHODS.get(name).supported_bits]
    distances = [kl for kl, _ in results]
    sizes = [manifest.size_bytes for _, manifest in results]
    assert distances == sorted(distances) and len(set(distances)) == len(distances), distances
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes), sizes


@pytest.mark.slow
def test_methods_rank_as_the_papers_say(on_demo: Callable[..., tuple[float, CheckpointManifest]]) -> None:
    assert on_demo("none")[0] == 0.0
    assert on_demo("gptq", bits=4)[0] < on_demo("rtn", bits=4)[0]
    assert on_demo("awq", bits=3)[0] < on_demo("rtn", bits=3, symmetric="false")[0]
    assert on_demo("bnb-int8")[0] < on_demo("bnb-nf4")[0] < on_demo("bnb-fp4")[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bnb-nf4", "bnb-fp4"])
def test_double_quantization_saves_bits_and_costs_little(
    name: str, on_demo: Callable[..., tuple[float, CheckpointManifest]]
) -> None:
    (plain, large), (double, small) = on_demo(name), on_demo(name, double_quant="true")
    # 0.37 bits a weight by the paper, less each layer's table of 1 KiB, which counts in layers as small as these.
    assert 0.25 < large.bits_per_weight - small.bits_per_weight < 0.373
    assert double < 1.5 * plain and small.label == f"{name}-dq"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if "sparsity" in method.Config.model_fields])
def test_more_zeros_lie_farther_from_the_baseline(
    name: str, on_demo: Callable[..., tuple[float, CheckpointManifest]]
) -> None:
    ratios = [0.25, 0.5, 0.75]
    results = [on_demo(name, sparsity=ratio) for ratio in ratios]
    distances = [kl for kl, _ in results]
    assert distances == sorted(distances) and distances[0] > 0, distances
    before = on_demo("none")[1].sparsity  # a few rows of the demo are zero from the start
    for ratio, (_, manifest) in zip(ratios, results, strict=True):
        assert ratio - 5e-4 < manifest.sparsity < ratio + before + 5e-4
    structured, manifest = on_demo(name, pattern="2:4")
    assert 0.5 <= manifest.sparsity < 0.5 + before and structured > distances[1]


@pytest.mark.slow
def test_repairing_the_errors_of_pruning_pays(on_demo: Callable[..., tuple[float, CheckpointManifest]]) -> None:
    # Magnitude and Wanda change places on the demo: it has none of the loud channels that Wanda is made for.
    for settings in ({"sparsity": 0.5}, {"sparsity": 0.75}, {"pattern": "2:4"}):
        sparsegpt = on_demo("sparsegpt", **settings)[0]
        assert sparsegpt < on_demo("wanda", **settings)[0] and sparsegpt < on_demo("magnitude", **settings)[0]
