"""What plain transformers must be told to load a checkpoint: model classes of our own, and GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SAFETENSORS, GGUF = "*.safetensors", "*.gguf"


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files at the top of a checkpoint, sorted: safetensors, or GGUF where there are none."""
    return sorted(folder.glob(SAFETENSORS)) or sorted(folder.glob(GGUF))


def loading_options(folder: Path) -> dict[str, Any]:
    """Return the arguments of `AutoModelForCausalLM.from_pretrained` that a checkpoint's files ask for.

    Our own model classes become known to transformers on the way. A GGUF file takes its configuration from the
    ``config.json`` beside it, which says more than the file; its weights are expanded to plain floats.
    """
    folder = Path(folder)
    if _model_type(folder) == "sliced_llama":
        from mlflow_compress.architectures.sliced_llama import register

        register()
    files = weight_files(folder)
    if not files or files[0].suffix != ".gguf":
        return {"use_safetensors": True}
    from transformers import AutoConfig

    return {"gguf_file": files[0].name, "config": AutoConfig.from_pretrained(folder, local_files_only=True)}


def _model_type(folder: Path) -> str | None:
    """Return the model type; a folder without a readable configuration is left for the loader to complain about."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config.get("model_type") if isinstance(config, dict) else None
