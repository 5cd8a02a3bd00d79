"""What a checkpoint's ``config.json`` says of how it is stored and computed, and where its weights are."""

import json
import os
import re
from pathlib import Path
from typing import Any

from mlflow_compress.errors import CheckpointError
from mlflow_compress.files import read_json_object

GGUF = "*.gguf"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FIRST_PART = re.compile(r"(.+-)00001(-of-\d{5}\.gguf)")
_WEIGHTS = {".safetensors", ".gguf", ".bin", ".pt", ".pth"}  # suffixes of files that hold tensors

GGUF_NATIVE = "native_gguf"
"""Flag in the ``config.json`` of a GGUF checkpoint; true where llama.cpp computes the logits."""

GGUF_NATIVE_CACHE = "native_gguf_cache"
"""Types of the keys and of the values in llama.cpp's cache, in the same file; 16-bit floats where it is missing."""

OWN_FORMATS = HQQ_PACKED, NOISY_LOGITS = "hqq_packed", "noisy_logits"
"""Values of ``quant_method`` in our own checkpoints (module `own_formats`)."""

QUANTIZED_CACHE = "quantized_cache"
"""Entry of ``config.json``: by the number of a layer, how its keys and values are rounded (module `quantized_cache`).

It is beside the weights' ``quantization_config``, whatever that is. Only this package reads it.
"""

CACHE_IGNORED = "Other loaders, transformers among them, ignore rounded caches without a warning"
"""What is said of a checkpoint with that entry where it is made."""

COMPRESSED_TENSORS = "compressed-tensors"
"""``quant_method`` of the checkpoints that llm-compressor writes."""


def weight_files(folder: Path) -> list[Path]:
    """Return the files from which transformers loads a checkpoint's weights, sorted; none where there are none.

    These are ``model.safetensors``, or the files that ``model.safetensors.index.json`` names, or else the first GGUF
    file, with its parts. `transformers_weights` in ``config.json`` may name another file or index. A single GGUF file
    is a checkpoint too. What else lies in the folder is no part of the model (`unused_weights`).

    Raises `CheckpointError` where one of these files is missing.
    """
    if folder.suffix == ".gguf" and folder.is_file():
        return [folder]
    named = read_settings(folder).get("transformers_weights")
    for name in [str(named)] if named else [_SINGLE, _INDEX]:
        if (folder / name).is_file():
            return _indexed(folder / name) if name.endswith(".json") else [folder / name]
    if named:
        raise _missing(folder, [str(named)])
    if ggufs := sorted(folder.glob(GGUF)):
        parts = _FIRST_PART.fullmatch(ggufs[0].name)
        return sorted(folder.glob(f"{parts[1]}*{parts[2]}")) if parts else ggufs[:1]
    if others := sorted(folder.glob("*.safetensors")):
        raise _missing(folder, [_INDEX if "-of-" in others[0].name else _SINGLE])
    return []


def _indexed(index: Path) -> list[Path]:
    """Return the files that an index of shards names."""
    shards = read_json_object(index, error=CheckpointError).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError("The index of the weight files is broken: it has no weight_map", got=str(index))
    if wrong := [name for name in shards.values() if not isinstance(name, str)]:
        raise CheckpointError(
            "The index of the weight files is broken: its weight_map names no file for a tensor",
            allowed="names of files",
            got=f"{str(wrong[0])[:100]} in {index}",
        )
    names = sorted(set(shards.values()))
    # Of a name that no file can have, `Path.is_file` is an error.
    if missing := [name[:100] for name in names if not os.path.isfile(index.parent / name)]:  # noqa: PTH113
        raise _missing(index.parent, missing)
    return [index.parent / name for name in names]


def _missing(folder: Path, names: list[str]) -> CheckpointError:
    return CheckpointError(
        f"The model is incomplete: {', '.join(names)} {'is' if len(names) == 1 else 'are'} missing",
        allowed=f"{_SINGLE}, or {_INDEX} with the files that it names",
        got=str(folder),
        fix="Copy or download the folder again",
    )


def unused_weights(folder: Path) -> list[str]:
    """Return the names of files that hold tensors, and that are no part of the model: transformers does not load them.

    Examples are a second form of the same weights (``consolidated.safetensors``), an optimizer's state, an adapter.
    """
    used = weight_files(folder)
    return sorted(file.name for file in folder.glob("*") if file.suffix in _WEIGHTS and file not in used)


def attention(folder: Path) -> str | None:
    """Return transformers' name of the attention implementation that a model needs; None: transformers chooses.

    sdpa silently ignores soft-capping (transformers 5.17), so soft-capped models run with "eager".
    """
    return "eager" if _nested(folder, "attn_logit_softcapping") else None


def has_quantized_cache(folder: Path) -> bool:
    """Return whether this package rounds the keys and values of a checkpoint; other engines would not."""
    return bool(cache_settings(folder))


def cache_settings(folder: Path) -> Any:
    """Return the entry `QUANTIZED_CACHE` as it is written; None without one."""
    return _nested(folder, QUANTIZED_CACHE)


def _nested(folder: Path, name: str) -> Any:
    """Return an entry of a checkpoint's ``config.json``, or of the text model's part of it; None without one."""
    settings = read_settings(folder)
    return settings.get(name) or _part(settings, "text_config", folder).get(name)


def _part(settings: dict[str, Any], name: str, folder: Path) -> dict[str, Any]:
    """Return an entry that is an object, and an empty one where it is missing or null."""
    part = settings.get(name)
    if part is not None and not isinstance(part, dict):
        raise CheckpointError(
            f"config.json cannot be read, because of its field {name!r}",
            allowed="a JSON object",
            got=f"{json.dumps(part)[:200]} in {folder / 'config.json'}",
            fix="Correct this field",
        )
    return part or {}


def quant_method(folder: Path) -> str | None:
    """Return the ``quant_method`` in a checkpoint's ``config.json``; None for weights that are not quantized."""
    method = _part(read_settings(folder), "quantization_config", folder).get("quant_method")
    return str(method) if method else None


def is_native_gguf(folder: Path) -> bool:
    """Return whether llama.cpp computes this checkpoint's logits."""
    return bool(read_settings(folder).get(GGUF_NATIVE))


def read_settings(folder: Path) -> dict[str, Any]:
    """Return ``config.json`` as a dictionary; empty where it cannot be read, which the loader reports later."""
    try:
        return read_json_object(Path(folder) / "config.json", error=CheckpointError)
    except CheckpointError:
        return {}
