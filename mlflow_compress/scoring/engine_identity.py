"""Identity of the scoring engine: our code and the library versions, which decide a model's numbers."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mlflow_compress.models import architectures

SOURCES = ("items", "models", "records", "scoring")
"""Sub-packages whose code decides which tokens a model reads, what is computed, and what is written down."""

PACKAGES = ("torch", "transformers", "tokenizers", "lm_eval", "numba")
"""Distributions that compute, or define tasks, for every model."""

FORMAT_PACKAGES = {
    "awq": "gptqmodel",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "gptq": "gptqmodel",
    "hqq_packed": "compressed-tensors",
    "torchao": "torchao",
}
"""The distribution that reads each format of quantized weights, by ``quant_method``."""


def engine_identity(folder: Path) -> dict[str, str]:
    """Return what decides the numbers of the model in a folder, apart from its weights and the tasks.

    Two evaluations with equal identities, on machines of the same kind, may share their results.

    Parameters
    ----------
    folder : Path
        A local model folder (see `loading.resolve_folder`).

    Returns
    -------
    dict of str to str
        ``source``: SHA-256 of our code (see `source_hash`). One entry per library: its version, or "not installed".
        ``attention``: the requested implementation, or "auto" where transformers chooses. ``model code``: SHA-256 of
        the Python files in the folder, if there are any.
    """
    folder = Path(folder)
    packages: set[str] = set()
    method = architectures.quant_method(folder)
    if method in FORMAT_PACKAGES:
        packages.add(FORMAT_PACKAGES[method])
    if architectures.is_native_gguf(folder):
        packages.add("llama-cpp-python")
    identity = {**code_identity(), "attention": architectures.attention(folder) or "auto"}
    identity.update({package: _version(package) for package in sorted(packages)})
    code = sorted(folder.glob("*.py"))
    return {**identity, "model code": _hash(code, folder)} if code else identity


def code_identity() -> dict[str, str]:
    """Return the hash of our code (`source_hash`), and the versions of the libraries that compute for every model."""
    return {"source": source_hash(), **{package: _version(package) for package in PACKAGES}}


@cache
def source_hash() -> str:
    """Return the SHA-256 of the Python files in `SOURCES` (64 hexadecimal digits).

    The paths inside the package and the contents are hashed, so a wheel and a checkout of the same code agree.
    """
    root = Path(__file__).resolve().parents[1]
    return _hash([file for name in SOURCES for file in (root / name).rglob("*.py")], root)


@cache
def package_hash() -> str:
    """Return the SHA-256 of all Python files of this package (64 hexadecimal digits)."""
    root = Path(__file__).resolve().parents[1]
    return _hash(list(root.rglob("*.py")), root)


def _hash(files: list[Path], root: Path) -> str:
    total = hashlib.sha256()
    for name, file in sorted((file.relative_to(root).as_posix(), file) for file in files):
        total.update(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
