"""Compress a causal language model many ways and measure how far each variant has moved from its baseline.

The names below are imported when they are first used, so that `import mlflow_compress` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlflow_compress.version import __version__

if TYPE_CHECKING:
    from mlflow_compress.api import (
        blind,
        compare,
        compress,
        diagnose,
        evaluate,
        gate,
        history,
        judge,
        load,
        methods,
        plan,
        promote,
        ratings,
        report,
        resume,
        rollback,
        run,
        search,
        speed,
        sweep,
        tasks,
    )
    from mlflow_compress.errors import MlflowCompressError
    from mlflow_compress.results import (
        AliasHistory,
        AnswerEvaluation,
        BlindSheet,
        Comparison,
        CompressedModel,
        CostPlan,
        Diagnosis,
        Evaluation,
        GateVerdict,
        HumanRatings,
        Listing,
        Promotion,
        Resumed,
        Rollback,
        Search,
        SpeedMeasurement,
        Sweep,
        SweepPlan,
        VariantRun,
        VariantsReport,
    )

__all__ = [
    "AliasHistory",
    "AnswerEvaluation",
    "BlindSheet",
    "Comparison",
    "CompressedModel",
    "CostPlan",
    "Diagnosis",
    "Evaluation",
    "GateVerdict",
    "HumanRatings",
    "Listing",
    "MlflowCompressError",
    "Promotion",
    "Resumed",
    "Rollback",
    "Search",
    "SpeedMeasurement",
    "Sweep",
    "SweepPlan",
    "VariantRun",
    "VariantsReport",
    "__version__",
    "blind",
    "compare",
    "compress",
    "diagnose",
    "evaluate",
    "gate",
    "history",
    "judge",
    "load",
    "methods",
    "plan",
    "promote",
    "ratings",
    "report",
    "resume",
    "rollback",
    "run",
    "search",
    "speed",
    "sweep",
    "tasks",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Functions have lower-case names; of the classes, one is an error and the others are results.
    module = "api" if name.islower() else "errors" if name == "MlflowCompressError" else "results"
    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
