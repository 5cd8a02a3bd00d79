"""Compress a causal language model many ways and measure how far each variant has moved from its baseline.

The names below are imported when they are first used, so that `import mlflow_compress` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlflow_compress.version import __version__

if TYPE_CHECKING:
    from mlflow_compress.api import compare, compress, evaluate, judge, load, methods, promote, run, tasks
    from mlflow_compress.errors import MlflowCompressError
    from mlflow_compress.results import (
        AnswerEvaluation,
        Comparison,
        CompressedModel,
        Evaluation,
        Listing,
        Promotion,
        VariantRun,
    )

_WHERE = {
    "mlflow_compress.api": (
        "compare",
        "compress",
        "evaluate",
        "judge",
        "load",
        "methods",
        "promote",
        "run",
        "tasks",
    ),
    "mlflow_compress.errors": ("MlflowCompressError",),
    "mlflow_compress.results": (
        "AnswerEvaluation",
        "Comparison",
        "CompressedModel",
        "Evaluation",
        "Listing",
        "Promotion",
        "VariantRun",
    ),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}

__all__ = [
    "AnswerEvaluation",
    "Comparison",
    "CompressedModel",
    "Evaluation",
    "Listing",
    "MlflowCompressError",
    "Promotion",
    "VariantRun",
    "__version__",
    "compare",
    "compress",
    "evaluate",
    "judge",
    "load",
    "methods",
    "promote",
    "run",
    "tasks",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
