"""Models larger than the memory that they may take: weights come from the disk, and the records stay the same."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from mlflow_compress import demo
from mlflow_compress.commands.evaluate.items import suite_of
from mlflow_compress.commands.evaluate.models import light
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.compression import compress_model, method_config
from mlflow_compress.config import parse
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.models.placement import Offload, placement
from mlflow_compress.records import OptionDistances, OptionScores
from mlflow_compress.scoring.baseline_store import StateStore, StateWriter
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from mlflow_compress.scoring.generation.generate import generate
from mlflow_compress.scoring.generation.generation_rows import GenerationConfig

LITTLE = {"cpu": "100KB"}


def make(folder: Path, *, dtype: torch.dtype = torch.bfloat16, tied: bool = False, **sizes: int) -> Path:
    """Write a random Llama with the demo's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL_DIR)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, **sizes}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=tied,
        **shape,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def on_disk(path: Path, offload_dir: Path, **given: Any) -> LoadedModel:
    loaded = load_model(
        LoadConfig(path=str(path), device="balanced", max_memory=LITTLE, offload_dir=str(offload_dir), **given)
    )
    assert any(parameter.device.type == "meta" for parameter in loaded.model.parameters())
    return loaded


def scored(loaded: LoadedModel, folder: Path, baseline: Path | None = None) -> tuple[OptionScores, Any]:
    """Score 20 options of the demo, and store or read the states."""
    scorer = Scorer(loaded, ScoringConfig(progress=False, batch_tokens=256))  # activations are small
    requests = suite_of(EvaluateConfig(model="demo", limit=1)).requests[:20]
    if baseline is not None:
        return scorer.score(requests, baseline=StateStore.open(baseline))
    with StateWriter(folder, loaded) as writer:
        return scorer.score(requests, capture=writer)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_scores_are_those_of_the_whole_model(
    base: Path, tmp_path: Path, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "off").mkdir()
    whole = load_model(LoadConfig(path=str(base), device="cpu", dtype=dtype))
    parted = on_disk(base, tmp_path / "off", dtype=dtype)
    assert parted.device == whole.device and parted.dtype == whole.dtype
    layers = sum(parameter.nbytes for parameter in whole.model.model.layers.parameters())
    [said] = [record for record in caplog.records if "fetched again in every pass" in record.getMessage()]
    gigabytes, seconds, rate = cast(tuple[float, float, float], said.args)
    assert gigabytes == pytest.approx(layers / 1e9, rel=0.01) and seconds == pytest.approx(gigabytes / rate)
    wanted, _ = scored(whole, tmp_path / "whole")
    found, _ = scored(parted, tmp_path / "parted")
    assert found.table.equals(wanted.table)
    # The stored head and states are the same too: a variant finds the same distances, and from itself none.
    for store in ("whole", "parted"):
        _, distances = scored(parted, tmp_path, baseline=tmp_path / store)
        assert isinstance(distances, OptionDistances) and not distances.column("kl").any()


def test_float32_weights_are_aligned(tmp_path: Path) -> None:
    """Weights that are stored as they are used come from the middle of a mapped file."""
    folder = make(tmp_path / "m", dtype=torch.float32, tied=True)
    parted = on_disk(folder, tmp_path)
    weights = parted.model.model.layers[1].mlp.up_proj._hf_hook.weights_map["weight"]
    assert weights.data_ptr() % 64 == 0
    assert parted.model.lm_head.weight is parted.model.model.embed_tokens.weight
    wanted, _ = scored(load_model(LoadConfig(path=str(folder), device="cpu")), tmp_path / "whole")
    assert scored(parted, tmp_path / "parted")[0].table.equals(wanted.table)


def test_answers_are_those_of_the_whole_model(base: Path, tmp_path: Path) -> None:
    whole = load_model(LoadConfig(path=str(base), device="cpu"))
    asked = GenerationConfig(max_new_tokens=8, samples=2)
    prompts = ["Where is the lamp?", "Who"]
    assert generate(on_disk(base, tmp_path), prompts, asked) == generate(whole, prompts, asked)


@pytest.mark.ci
@pytest.mark.parametrize("method, given", [("rtn", {"group_size": 64}), ("w8a8", {})])
def test_a_compressed_checkpoint_is_decompressed_layer_by_layer(
    base: Path, tmp_path: Path, method: str, given: dict[str, Any]
) -> None:
    """`w8a8` stores integers as weights, and rounds activations."""
    out, off = tmp_path / method, tmp_path / "off"
    off.mkdir()
    compress_model(str(base), method, method_config(method, **given), [], out, device="cpu")
    wanted, _ = scored(load_model(LoadConfig(path=str(out), device="cpu")), tmp_path / "whole")
    parted = on_disk(out, off)
    assert scored(parted, tmp_path / "parted")[0].table.equals(wanted.table)
    assert list(off.iterdir()), "the decompressed layers lie there"
    del parted
    gc.collect()
    assert not list(off.iterdir()), "and go with the model"


def test_a_format_that_cannot_be_offloaded_is_refused(base: Path, tmp_path: Path, no_fresh_process: None) -> None:
    kv, out = tmp_path / "kv", tmp_path / "noisy"
    compress_model(str(base), "kv-cache", None, [], kv, device="cpu")  # its weights are plain: it can
    wanted, _ = scored(load_model(LoadConfig(path=str(kv), device="cpu")), tmp_path / "whole")
    assert scored(on_disk(kv, tmp_path), tmp_path / "parted")[0].table.equals(wanted.table)
    compress_model(str(base), "gaussian-noise", None, [], out, device="cpu")
    with pytest.raises(UnsupportedError, match="must fit into memory"):
        on_disk(out, tmp_path)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"device": "cpu", "max_memory": LITTLE}, "is for device=balanced"),
        ({"device": "balanced", "max_memory": {"gpu": "1GB"}}, "Unknown device in 'max_memory'"),
        ({"device": "balanced", "max_memory": {"cpu": "much"}}, "cannot be read"),
    ],
)
def test_wrong_placement_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        placement(**given)


def test_sizes_are_read_as_accelerate_does_and_reach_the_model(base: Path) -> None:
    # GiB are powers of two, GB of ten.
    found = placement("balanced", {"cpu": "2GiB", "1": "70GB"})
    assert found == {"device_map": "auto", "max_memory": {"cpu": 2 * 2**30, 1: 70 * 10**9}}
    given = {"model": str(base), "device": "balanced", "max_memory": "cpu=1MB,0=2GiB"}
    config = parse(EvaluateConfig, given)
    placed = light(str(base), config.source, config.inference)
    assert placed.config.max_memory == {"cpu": "1MB", "0": "2GiB"} and placed.device.type == "cpu"


def test_a_folder_that_is_not_there_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="offload_dir"):
        on_disk(base, tmp_path / "none")


SCORE = """
import json, sys
from pathlib import Path
from benchmarks.anonymous_memory import anonymous_peak
from mlflow_compress.models.loading import LoadConfig, load_model
from tests.unit.test_offloading import LITTLE, scored
folder, out, other = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
scored(load_model(LoadConfig(path=other, device="cpu")), out / "first")  # imports, kernels: any model needs them
with anonymous_peak() as peak:
    given = {"device": "balanced", "max_memory": LITTLE, "offload_dir": str(out)}
    scored(load_model(LoadConfig(path=str(folder), **given)), out / "states")
print(json.dumps(peak.added))
"""
COMPRESS = """
import json, sys
from pathlib import Path
from benchmarks.compress_memory import measure
print(json.dumps(measure(Path(sys.argv[1]), "rtn", from_disk=True)["added_bytes"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("work", [SCORE, COMPRESS], ids=["score", "rtn"])
def test_memory_is_that_of_a_layer(tmp_path: Path, work: str) -> None:
    """Six layers more add less than a seventh of what they have in float32; what they do add is their own.

    Scoring keeps keys and values of each layer, and `rtn` the smallest and largest weight of each group: 2 of 128.
    """
    sizes = {"hidden_size": 1024, "intermediate_size": 2816}
    layer = 4 * (3 * 1024 * 1024 + 3 * 1024 * 2816)  # bytes: queries and output, half as many keys and values; three
    peaks = []
    for layers in (3, 9):
        folder, out = make(tmp_path / f"m{layers}", num_hidden_layers=layers, **sizes), tmp_path / f"out{layers}"
        out.mkdir()
        command = [sys.executable, "-c", work, str(folder), str(out), str(demo.MODEL_DIR)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2], env={**os.environ}
        )
        assert done.returncode == 0, done.stderr
        peaks.append(json.loads(done.stdout.splitlines()[-1]))
    assert peaks[1] < 4 * layer, (peaks, layer)
    assert (peaks[1] - peaks[0]) / 6 < layer / 7, (peaks, layer)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_compressing_from_the_disk_writes_the_same_weights(base: Path, tmp_path: Path, method: str) -> None:
    text = [(demo.DATA_DIR / "calibration.txt").read_text()]
    few = {"calibration_samples": 4, "calibration_length": 64} if method == "gptq" else {}
    config = method_config(method, group_size=64, **few)
    (tmp_path / "off").mkdir()
    offload = Offload(max_memory=LITTLE, folder=str(tmp_path / "off"))
    whole = compress_model(str(base), method, config, text, tmp_path / "whole", device="cpu")
    parted = compress_model(str(base), method, config, text, tmp_path / "parted", device="balanced", offload=offload)
    assert not list((tmp_path / "off").iterdir())
    assert parted.reload["kl_max"] == 0 and parted.size_bytes == whole.size_bytes
    wanted, found = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parted"))
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and found[name].equal(tensor), name


def test_a_method_that_needs_the_whole_model_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"Allowed: .*gptq, .*rtn, "):
        compress_model(str(base), "hqq", None, [], tmp_path / "out", device="balanced")
