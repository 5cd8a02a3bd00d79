"""Identity of the scoring engine: the version of our scoring and of the libraries, which decide a model's numbers."""

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mlflow_compress.models import checkpoint_config

SCORING_VERSION = 3
"""Version of everything that decides a record: which tokens a model reads, what is computed, what is written down.

Raise it by one in the commit that changes a number, a row or a column of the records beyond rounding; nothing else
(a comment, a new module, a faster loop) changes it. It is part of the evaluation id and of a baseline's fingerprint:
evaluations of one version stay comparable across releases, and those of another version are computed again.
`tests/golden/test_demo_records.py` fails when the demo's records move and this version does not.
"""

PACKAGES = ("torch", "transformers", "tokenizers", "numba")  # compute for every model
_FORMAT_PACKAGES = {  # what reads each format of quantized weights, by ``quant_method``
    "awq": "gptqmodel",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "gptq": "gptqmodel",
    "hqq_packed": "compressed-tensors",
    "torchao": "torchao",
}


def engine_identity(folder: Path) -> dict[str, str]:
    """Return what decides the numbers of the model in a local folder, apart from its weights and the tasks.

    Two evaluations with equal identities, on machines of the same kind, may share their results. ``scoring`` is
    `SCORING_VERSION`, a library's entry its version. ``attention`` is the requested implementation, or "auto" where
    transformers chooses, and ``model code`` the SHA-256 of the Python files in the folder, if there are any.
    """
    folder = Path(folder)
    identity = {**code_identity(), "attention": checkpoint_config.attention(folder) or "auto"}
    packages = {_FORMAT_PACKAGES.get(checkpoint_config.quant_method(folder) or "")}
    if checkpoint_config.is_native_gguf(folder):
        packages.add("llama-cpp-python")
    identity |= {package: _version(package) for package in sorted(filter(None, packages))}
    code = sorted(folder.glob("*.py"))
    return {**identity, "model code": _hash(code, folder)} if code else identity


def code_identity() -> dict[str, str]:
    """Return the version of our scoring, and those of the libraries that compute for every model."""
    return {"scoring": str(SCORING_VERSION), **{package: _version(package) for package in PACKAGES}}


@cache
def package_hash() -> str:
    """Return the SHA-256 of all Python files of this package, which all processes of one pass must share."""
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
