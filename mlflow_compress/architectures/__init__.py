"""Model classes of checkpoints that no class of transformers fits; they ship with this package."""

from __future__ import annotations

import json
from pathlib import Path


def register_for(folder: Path) -> None:
    """Make transformers' Auto classes know the architecture of a checkpoint, where it is one of ours.

    A folder without a readable ``config.json`` is left for the loader to complain about.
    """
    try:
        model_type = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return
    if model_type == "sliced_llama":
        from mlflow_compress.architectures.sliced_llama import register

        register()
