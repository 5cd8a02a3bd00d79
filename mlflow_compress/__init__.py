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
    from mlflow_compress.commands.compare.result import Comparison
    from mlflow_compress.commands.diagnose.result import Diagnosis
    from mlflow_compress.commands.evaluate.result import AnswerEvaluation, Evaluation
    from mlflow_compress.commands.gate.result import GateVerdict
    from mlflow_compress.commands.main.result import VariantRun
    from mlflow_compress.commands.plan.result import CostPlan
    from mlflow_compress.commands.promote.result import AliasHistory, Promotion, Rollback
    from mlflow_compress.commands.quantize.result import CompressedModel
    from mlflow_compress.commands.rate.result import BlindSheet, HumanRatings
    from mlflow_compress.commands.report.result import VariantsReport
    from mlflow_compress.commands.resume.result import Resumed
    from mlflow_compress.commands.search.result import Search
    from mlflow_compress.commands.shared.listing import Listing
    from mlflow_compress.commands.speed.result import SpeedMeasurement
    from mlflow_compress.commands.sweep.result import Sweep, SweepPlan
    from mlflow_compress.errors import MlflowCompressError

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
