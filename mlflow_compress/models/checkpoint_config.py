"""What a checkpoint's ``config.json`` says of how it is stored and computed, and where its weights are."""

from pathlib import Path
from typing import Any

from mlflow_compress.errors import CheckpointError
from mlflow_compress.files import read_json_object

SAFETENSORS, GGUF = "*.safetensors", "*.gguf"

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
    """Return the weight files at the top of a checkpoint, sorted: safetensors, or GGUF where there are none.

    A single GGUF file is a checkpoint too.
    """
    if folder.suffix == ".gguf" and folder.is_file():
        return [folder]
    return sorted(folder.glob(SAFETENSORS)) or sorted(folder.glob(GGUF))


def attention(folder: Path) -> str | None:
    """Return transformers' name of the attention implementation that a model needs; None: transformers chooses.

    sdpa silently ignores soft-capping (transformers 5.17), so soft-capped models run with "eager".
    """
    return "eager" if _nested(folder, "attn_logit_softcapping") else None


def has_quantized_cache(folder: Path) -> bool:
    """Return whether this package rounds the keys and values of a checkpoint; other engines would not."""
    return bool(_nested(folder, QUANTIZED_CACHE))


def _nested(folder: Path, name: str) -> Any:
    """Return an entry of a checkpoint's ``config.json``, or of the text model's part of it; None without one."""
    settings = read_settings(folder)
    return settings.get(name) or (settings.get("text_config") or {}).get(name)


def quant_method(folder: Path) -> str | None:
    """Return the ``quant_method`` in a checkpoint's ``config.json``; None for weights that are not quantized."""
    method = (read_settings(folder).get("quantization_config") or {}).get("quant_method")
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
