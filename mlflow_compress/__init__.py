"""Compress a causal language model many ways and measure how far each variant has moved from its baseline.

`import mlflow_compress as mc` has a function per command: the front door of Python. Each takes the parameters of its
command (`mlflow-compress evaluate --help`) as keyword arguments, and returns a typed result with `to_pandas()`,
`to_arrow()`, `to_dict()` and a table in notebooks. `store` says where runs are kept. Without it that is MLflow's
tracking store (`MLFLOW_TRACKING_URI`); with a folder's path it is a store of MLflow's in that folder. Either way a
baseline is evaluated once and found again.

Names are imported when they are first used, so that `import mlflow_compress` costs nothing. What type checkers and
editors read is `__init__.pyi`, which tools/write_stub.py writes from the registry of commands.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from mlflow_compress.version import __version__ as __version__

BESIDES = {
    "AliasHistory": "commands.promote.result",
    "AnswerEvaluation": "commands.evaluate.result",
    "Approval": "commands.promote.result",
    "Catalog": "commands.shared.tabular",
    "Comparison": "commands.compare.run",
    "Forecast": "commands.compare.run",
    "CompressedModel": "commands.quantize.run",
    "CostPlan": "commands.plan.run",
    "Diagnosis": "commands.diagnose.result",
    "Evaluation": "commands.evaluate.result",
    "GateVerdict": "commands.gate.run",
    "MetricResult": "records",
    "MlflowCompressError": "errors",
    "Policy": "config.policy",
    "Promotion": "commands.promote.result",
    "Receipt": "commands.receipt.result",
    "ReceiptComparison": "commands.receipt.result",
    "Retention": "commands.gc.result",
    "Repair": "commands.search.result",
    "Resumed": "commands.resume.run",
    "Rollback": "commands.promote.result",
    "Search": "commands.search.result",
    "SpeedMeasurement": "commands.speed.run",
    "Sweep": "commands.sweep.result",
    "SweepPlan": "commands.sweep.result",
    "VariantRun": "commands.main.stages",
    "VariantsReport": "commands.report.run",
    "load": "commands.compare.command",
}
"""Public names that are no commands, and the module of each."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name in BESIDES:
        return getattr(import_module(f"{__name__}.{BESIDES[name]}"), name)
    # A module of this package is imported by its name; asking the registry for it would import the registry too early.
    if name == "__all__" or (not name.startswith("_") and find_spec(f"{__name__}.{name}") is None):
        from mlflow_compress.commands.command import all_commands

        functions = {command.function.__name__: command.function for command in all_commands().values()}
        if name == "__all__":
            return sorted([*BESIDES, *functions, "__version__"])
        if name in functions:
            return functions[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names."""
    return list(__getattr__("__all__"))
