"""The code and the pinned packages with which a logged model loads on another machine."""

from __future__ import annotations

import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mlflow_compress.errors import CheckpointError
from mlflow_compress.files.json_text import read_json_object

PACKAGE = Path(__file__).resolve().parents[2]

# Distributions that loading and scoring import for every checkpoint format. A test compares them with the imports of a
# fresh process.
ALWAYS = (
    "mlflow", "pandas", "torch", "transformers", "accelerate", "safetensors", "huggingface_hub", "numpy", "pyarrow",
    "numba", "llvmlite", "tqdm", "jinja2",
)  # fmt: skip
# Distributions that load a quantized checkpoint, by the `quant_method` of its configuration.
BY_METHOD = {
    "compressed-tensors": ("compressed-tensors",),
    "bitsandbytes": ("bitsandbytes",),
    "torchao": ("torchao",),
    "gptq": ("gptqmodel", "optimum"),
    "awq": ("gptqmodel", "optimum"),
}
GGUF = ("gguf", "llama-cpp-python")


def requirements(checkpoint: Path | None) -> list[str]:
    """Return `name==version` of every package that loads and scores a checkpoint, in the installed versions.

    A served model (None) has no checkpoint, and so no packages of a format.

    Versions have no local part ("2.13.0", not "2.13.0+cpu"), because package indexes do not have it. A package of the
    checkpoint's format that is not installed is left out, because the checkpoint was evaluated without it.
    """
    optional: list[str] = []
    if checkpoint is not None:
        config = read_json_object(checkpoint / "config.json", error=CheckpointError)
        method = str((config.get("quantization_config") or {}).get("quant_method"))
        optional = [*BY_METHOD.get(method, ()), *(GGUF if any(checkpoint.glob("*.gguf")) else ())]
    pinned = [f"{name}=={version(name).partition('+')[0]}" for name in ALWAYS]
    for name in optional:
        try:
            pinned.append(f"{name}=={version(name).partition('+')[0]}")
        except PackageNotFoundError:
            continue
    return pinned


def copy_code(folder: Path) -> Path:
    """Copy this package's Python files into `folder` and return the copy. Demo data and caches are not copied."""

    def other(directory: str, entries: list[str]) -> list[str]:
        return [
            e for e in entries if not e.endswith(".py") and (e == "__pycache__" or not (Path(directory) / e).is_dir())
        ]

    return Path(shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=other))
