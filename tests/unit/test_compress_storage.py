"""Sizes, bits per weight and manifests, against numbers worked out by hand.

Comparison of logits: exact for equal ones, and a wrong number cannot pass.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mlflow_compress.compression import probe
from mlflow_compress.compression.checkpoint_manifest import MANIFEST_FILE, CheckpointManifest, hash_others
from mlflow_compress.errors import CheckpointError, ReloadMismatchError
from mlflow_compress.models import stored_weights
from tests.unit.scoring_models import U


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tensors = {
        "embed.weight": torch.ones(10, 4, dtype=torch.bfloat16),  # 80 bytes
        "layers.0.up.weight_packed": torch.zeros(4, 1, dtype=torch.int32),  # 16 bytes
        "layers.0.up.weight_scale": torch.ones(4, 1, dtype=torch.bfloat16),  # 8 bytes
        "layers.0.up.bias": torch.ones(4, dtype=torch.bfloat16),  # 8 bytes, not part of the weight
        "layers.0.upper.weight": torch.ones(2, 2, dtype=torch.bfloat16),  # 8 bytes of another layer
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_bytes_and_plain_layers_are_those_of_the_stored_tensors(checkpoint: Path) -> None:
    tensors = stored_weights.read_headers(checkpoint)
    assert stored_weights.total_bytes(tensors) == 80 + 16 + 8 + 8 + 8
    assert stored_weights.bytes_of_layers(tensors, ["layers.0.up"]) == 16 + 8
    assert stored_weights.main_dtype(tensors) == "bfloat16"
    assert stored_weights.plain_layers(tensors, ["layers.0.up", "layers.0.upper", "layers.0.none"]) == [
        "layers.0.upper"
    ]


def test_states_below_the_weight_belong_to_the_layer_and_sparsity_counts_dense_zeros_only(tmp_path: Path) -> None:
    save_file(
        {"a.weight": torch.zeros(3, dtype=torch.uint8), "a.weight.absmax": torch.zeros(2)},
        tmp_path / "model.safetensors",
    )
    assert stored_weights.bytes_of_layers(stored_weights.read_headers(tmp_path), ["a"]) == 3 + 8
    save_file(
        {"a.weight": torch.tensor([[0.0, 1.0], [0.0, 0.0]]), "b.weight": torch.zeros(4)}, tmp_path / "model.safetensors"
    )
    assert stored_weights.sparsity_of_layers(tmp_path, ["a"]) == 0.75
    assert stored_weights.sparsity_of_layers(tmp_path, ["c"]) is None


def test_metadata_is_put_in_order_and_nothing_else_changes(tmp_path: Path) -> None:
    contents = []
    for order in ("abc", "cab"):
        header = {
            "__metadata__": dict.fromkeys(order, "größe"),
            "w": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode() + b"  "
        path = tmp_path / f"{order}.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + b"xyz")
        stored_weights.sort_metadata(path)
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == dict.fromkeys("abc", "größe") and bytes(file.get_tensor("w").tolist()) == b"xyz"
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]


def test_a_truncated_file_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        stored_weights.read_headers(checkpoint)


def _header(length: int | None = None) -> bytes:
    text = json.dumps({"w": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.bool])
def test_bytes_are_right_for_every_element_type(tmp_path: Path, kind: torch.dtype) -> None:
    tensors = {"a": torch.zeros(5, 3, dtype=kind), "empty": torch.zeros(0, 4, dtype=kind)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = stored_weights.read_headers(tmp_path)
    assert {name: (t.shape, t.n_bytes) for name, t in found.items()} == {
        name: (tuple(t.shape), t.nbytes) for name, t in tensors.items()
    }


NOT_SAFETENSORS = {
    "empty": b"",
    "a huge length": b"\xff" * 64,
    "no JSON": (3).to_bytes(8, "little") + b"no!",
    "a length beyond the file": _header(2**20),
    "a header cut short": _header()[:20],
    "a byte too few": _header() + b"xy",
    "a byte too many": _header() + b"xyzz",
}


@pytest.mark.parametrize("content", NOT_SAFETENSORS.values(), ids=NOT_SAFETENSORS)
def test_a_file_that_is_not_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    message = "truncated, or it is not a safetensors file: .*model.safetensors'. Copy or download it again"
    with pytest.raises(CheckpointError, match=message):
        stored_weights.read_headers(tmp_path)


def test_a_file_is_read_from_its_header_and_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no safetensors weights"):
        stored_weights.weight_files(tmp_path)
    with pytest.raises(CheckpointError, match="not a finished compressed checkpoint"):
        CheckpointManifest.read(tmp_path)
    with pytest.raises(CheckpointError, match="probe"):
        probe.read_probe(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(_header() + b"xyz")
    assert stored_weights.read_headers(tmp_path) == {"w": stored_weights.StoredTensor("U8", (3,), 3)}


@pytest.fixture
def manifest(checkpoint: Path) -> CheckpointManifest:
    manifest = CheckpointManifest(
        method="rtn",
        label="rtn-4bit-g128",
        settings={"bits": 4},
        format="compressed-tensors",
        base_model="base",
        base_weights_hash="0" * 64,
        base_size_bytes=240,
        base_parameters=60,
        base_dtype="bfloat16",
        calibration=None,
        size_bytes=120,
        size_ratio=2.0,
        cache_bytes_per_token=2048.0,
        base_cache_bytes_per_token=2048.0,
        bits_per_weight=4.125,
        bits_per_weight_model=16.0,
        sparsity=None,
        base_sparsity=None,
        seconds=1.5,
        processor_seconds=1.4,
        peak_memory_bytes=10,
        peak_memory_kind="rss",
        device="cpu",
        library_versions={"torch": "2"},
        weight_files=stored_weights.hash_weights(checkpoint)[0],
        other_files=hash_others(checkpoint),
        probe_sha256="1" * 64,
        reload={"kl_max": 0.0},
    )
    manifest.write(checkpoint)
    return manifest


def test_a_manifest_comes_back_as_it_was_written_and_one_changed_byte_is_found(
    checkpoint: Path, manifest: CheckpointManifest
) -> None:
    assert CheckpointManifest.read(checkpoint) == manifest
    assert asdict(CheckpointManifest.read(checkpoint, verify=False)) == asdict(manifest)
    assert not list(checkpoint.glob("*.partial"))
    path = checkpoint / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="has changed"):
        CheckpointManifest.read(checkpoint)
    assert CheckpointManifest.read(checkpoint, verify=False) == manifest


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"version": 1}', "version"])
def test_a_broken_manifest_is_refused(checkpoint: Path, manifest: CheckpointManifest, damage: str) -> None:
    path = checkpoint / MANIFEST_FILE
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({**stored, "version": 99}) if damage == "version" else damage)
    with pytest.raises(CheckpointError, match="manifest"):
        CheckpointManifest.read(checkpoint)


def test_a_missing_or_additional_weight_file_is_found(checkpoint: Path, manifest: CheckpointManifest) -> None:
    save_file({"x": torch.zeros(1)}, checkpoint / "extra.safetensors")
    with pytest.raises(CheckpointError, match=r"not in its manifest.*could change the model.*extra\.safetensors"):
        CheckpointManifest.read(checkpoint)
    (checkpoint / "extra.safetensors").rename(checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match="weight file has changed"):
        CheckpointManifest.read(checkpoint)
    (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": {"x": "model-00001-of-00001.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"not those of its manifest.*model-00001-of-00001\.safetensors"):
        CheckpointManifest.read(checkpoint)


def test_every_file_is_covered_not_the_weights_alone(checkpoint: Path, manifest: CheckpointManifest) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        (checkpoint / name).write_text("{}")
    with pytest.raises(CheckpointError, match=r"not in its manifest.*config\.json"):
        CheckpointManifest.read(checkpoint)
    whole = replace(manifest, other_files=hash_others(checkpoint))
    whole.write(checkpoint)
    assert CheckpointManifest.read(checkpoint) == whole and "config.json" in whole.other_files
    for harmless in ("README.md", ".cache", "a.lock"):
        (checkpoint / harmless).write_text("x")
    assert CheckpointManifest.read(checkpoint) == whole
    (checkpoint / "config.json").write_text('{"hidden_size": 1}')
    with pytest.raises(CheckpointError, match=r"has changed.*config\.json"):
        CheckpointManifest.read(checkpoint)
    (checkpoint / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"is missing.*config\.json"):
        CheckpointManifest.read(checkpoint)


@pytest.mark.parametrize(
    "wrong", [{"size_bytes": "120"}, {"settings": []}, {"other_files": {"a": 1}}, {"size_ratio": None}, {"label": 3}]
)
def test_a_manifest_with_a_field_of_another_type_is_refused(
    checkpoint: Path, manifest: CheckpointManifest, wrong: dict[str, object]
) -> None:
    path = checkpoint / MANIFEST_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **wrong}))
    with pytest.raises(CheckpointError, match=f"{MANIFEST_FILE} is broken: {next(iter(wrong))}"):
        CheckpointManifest.read(checkpoint, verify=False)


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(6, 50, generator=torch.Generator().manual_seed(0))


def test_logits_have_the_distances_by_hand_and_another_vocabulary_is_a_mismatch(logits: torch.Tensor) -> None:
    report = probe.compare_logits(logits, logits.clone())
    assert (report.max_abs_diff, report.kl_mean, report.kl_max, report.positions) == (0.0, 0.0, 0.0, 6)
    assert report.agrees
    with pytest.raises(ReloadMismatchError, match="other logits"):
        probe.compare_logits(logits, logits[:, :-1])
    # Two tokens: p = (1/2, 1/2), q = (2/3, 1/3): KL = 1/2 ln(3/4) + 1/2 ln(3/2) = 1/2 ln(9/8) = 0.0588915.
    # ln 2 is rounded to float32, by U of it, and printed with seven digits.
    report = probe.compare_logits(torch.zeros(1, 2), torch.tensor([[np.log(2.0), 0.0]], dtype=torch.float32))
    assert report.kl_max == pytest.approx(0.0588915, abs=0.5e-7 + U)
    assert report.max_abs_diff == pytest.approx(np.log(2.0), rel=U)


def test_rounding_noise_passes_and_one_wrong_logit_or_nan_does_not(logits: torch.Tensor) -> None:
    assert probe.compare_logits(logits, logits + 1e-5 * torch.randn_like(logits)).agrees
    wrong = logits.clone()
    wrong[3, 7] += 0.01
    assert not probe.compare_logits(logits, wrong).agrees
    wrong[0, 0] = torch.nan
    assert not probe.compare_logits(logits, wrong).agrees


def test_models_that_round_activations_may_differ_by_a_step_and_no_further(logits: torch.Tensor) -> None:
    near, far = logits + 0.1 * torch.randn_like(logits), logits + torch.randn_like(logits)
    report = probe.compare_logits(logits, near, rounded=True)
    assert 1e-4 < report.kl_mean < 0.01 and report.agrees and not probe.compare_logits(logits, near).agrees
    with pytest.raises(ReloadMismatchError, match=r"a mean KL up to 0\.01 nats"):
        probe.compare_logits(logits, far, rounded=True).require_agreement()
    assert not probe.compare_logits(logits, torch.full_like(logits, torch.nan), rounded=True).agrees


def test_what_is_written_comes_back(tmp_path: Path, logits: torch.Tensor) -> None:
    ids = np.arange(12, dtype=np.int64).reshape(3, 4)
    for rounded in (False, True):
        probe.write_probe(tmp_path, probe.Probe(ids), logits, rounded=rounded)
        stored, same, told = probe.read_probe(tmp_path)
        assert np.array_equal(stored.ids, ids) and torch.equal(same, logits) and told is rounded
    assert not list(tmp_path.glob("*.safetensors"))  # not among the weights
