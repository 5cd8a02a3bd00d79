"""Bytes, dtypes and hashes of a checkpoint's weights, read from its files."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from mlflow_compress.errors import CheckpointError
from mlflow_compress.hashes import sha256_files
from mlflow_compress.models import checkpoint_config, gguf_file
from mlflow_compress.models.gguf_file import StoredTensor

if TYPE_CHECKING:
    import torch

STORED_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Floating types of safetensors as torch names them."""


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a checkpoint (safetensors or GGUF), sorted; `CheckpointError` if there are none."""
    files = checkpoint_config.weight_files(folder)
    if not files:
        raise CheckpointError(
            "The checkpoint has no safetensors weights", got=str(folder), fix="Convert the weights to safetensors first"
        )
    return files


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Return every stored tensor by name, read from the headers; a broken file is a `CheckpointError`."""
    from huggingface_hub import parse_local_safetensors_file_metadata
    from huggingface_hub.errors import SafetensorsParsingError

    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        if path.suffix == ".gguf":
            tensors |= gguf_file.read_gguf_headers(path)
            continue
        try:
            with safe_open(path, framework="np"):  # raises an error unless the tensors fill the file to the last byte
                entries = parse_local_safetensors_file_metadata(path).tensors
        except (OSError, SafetensorError, SafetensorsParsingError) as error:
            raise CheckpointError(
                f"The weight file is truncated, or it is not a safetensors file: {error}",
                got=str(path),
                fix="Copy or download it again",
            ) from error
        for name, entry in entries.items():
            start, end = entry.data_offsets
            tensors[name] = StoredTensor(entry.dtype, tuple(entry.shape), end - start)
    return tensors


def sort_metadata(path: Path) -> None:
    """Sort the metadata in a safetensors file's header, so that equal contents give equal bytes.

    The library writes metadata in the random order of a hash table, and has no option to change that.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= length, "the header grew"
        file.seek(8)
        file.write(text.ljust(length))


def main_dtype(tensors: Mapping[str, StoredTensor]) -> str:
    """Return the floating type that most stored elements have, as torch names it."""
    counts: Counter[str] = Counter()
    for tensor in tensors.values():
        if tensor.dtype in STORED_DTYPES:
            counts[STORED_DTYPES[tensor.dtype]] += tensor.elements
    if not counts:
        raise CheckpointError("The checkpoint holds no floating-point weights", got=f"{len(tensors)} tensors")
    return counts.most_common(1)[0][0]


def total_bytes(tensors: Mapping[str, StoredTensor]) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.n_bytes for tensor in tensors.values())


def bytes_of_layers(tensors: Mapping[str, StoredTensor], layers: Iterable[str]) -> int:
    """Return the bytes of all tensors that represent these layers' weights: values, scales, zero points, states.

    Biases are not counted: no method changes them.
    """
    wanted = set(layers)
    total = 0
    for name, tensor in tensors.items():
        # "model.layers.0.mlp.down_proj.weight.absmax" belongs to the layer "model.layers.0.mlp.down_proj".
        parts = name.split(".")
        owners = {".".join(parts[:cut]) for cut in range(1, len(parts))}
        if owners & wanted and parts[-1] != "bias":
            total += tensor.n_bytes
    return total


def plain_layers(tensors: Mapping[str, StoredTensor], layers: Iterable[str]) -> list[str]:
    """Return the layers whose weights are stored as plain floats of at least 16 bits."""
    weights = {layer: tensors.get(f"{layer}.weight") for layer in layers}
    return [layer for layer, weight in weights.items() if weight is not None and weight.dtype in STORED_DTYPES]


def read_tensors(folder: Path, wanted: Callable[[str], bool]) -> dict[str, "torch.Tensor"]:
    """Return the stored tensors of the modules that are wanted by their names, as they are stored."""
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as stored:
            names = [name for name in set(stored.keys()) if wanted(name.rpartition(".")[0])]
            tensors |= {name: stored.get_tensor(name) for name in names}
    return tensors


def zeros_of_layers(folder: Path, layers: Iterable[str]) -> dict[str, tuple[int, int] | None]:
    """Return the numbers of exact zeros and of all entries of each layer's weight; None where these are not floats.

    Layers that are stored under other names, as packed ones are, are left out.
    """
    import torch

    wanted = {f"{layer}.weight": layer for layer in layers}
    counts: dict[str, tuple[int, int] | None] = {}
    for path in weight_files(folder):
        if path.suffix == ".gguf":
            continue
        with safe_open(path, framework="pt") as source:
            for name in wanted.keys() & set(source.keys()):
                counts[wanted[name]] = None
                if source.get_slice(name).get_dtype() in STORED_DTYPES:
                    tensor = source.get_tensor(name)
                    counts[wanted[name]] = int(torch.count_nonzero(tensor == 0)), tensor.numel()
    return counts


def sparsity_of_layers(folder: Path, layers: Iterable[str]) -> float | None:
    """Return the share of exact zeros in these layers' weights, or None where they are not stored as plain floats."""
    by_layer = zeros_of_layers(folder, layers).values()
    counts = [count for count in by_layer if count is not None]
    if not counts or len(counts) < len(by_layer):
        return None
    return sum(zeros for zeros, _ in counts) / sum(entries for _, entries in counts)


def hash_weights(folder: Path) -> tuple[dict[str, str], str]:
    """Return the SHA-256 of each weight file by name, and one SHA-256 over all names and hashes."""
    files = {path.name: digest for path, digest in sha256_files(weight_files(folder)).items()}
    joined = "".join(f"{name}\0{digest}\n" for name, digest in sorted(files.items()))
    return files, hashlib.sha256(joined.encode()).hexdigest()
