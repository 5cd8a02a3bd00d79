"""What a logged model brings along to load elsewhere: this package's code, and the pinned packages that it needs."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]

# Distributions that loading and scoring import, whatever the checkpoint's format; a test compares them with what a
# fresh process really imports.
ALWAYS = (
    "mlflow", "pandas", "torch", "transformers", "accelerate", "safetensors", "huggingface_hub", "numpy", "pyarrow",
    "numba", "llvmlite", "tqdm", "jinja2",
)  # fmt: skip
# What reads a quantization method, by the `quant_method` of its configuration.
BY_METHOD = {
    "compressed-tensors": ("compressed-tensors",),
    "bitsandbytes": ("bitsandbytes",),
    "torchao": ("torchao",),
    "gptq": ("gptqmodel", "optimum"),
    "awq": ("gptqmodel", "optimum"),
}
GGUF = ("gguf", "llama-cpp-python")


def requirements(checkpoint: Path) -> list[str]:
    """Return `name==version` of every package that loads and scores a checkpoint, as installed here.

    Versions come without their local part ("2.13.0", not "2.13.0+cpu"), which package indexes do not have. A package
    of a format that is not installed here is left out: the checkpoint has been evaluated without it.
    """
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
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
    """Copy this package's Python files into `folder` and return the copy; demo data and caches stay out."""

    def other(directory: str, entries: list[str]) -> list[str]:
        return [
            e for e in entries if not e.endswith(".py") and (e == "__pycache__" or not (Path(directory) / e).is_dir())
        ]

    return Path(shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=other))
