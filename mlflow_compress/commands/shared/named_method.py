"""The compression method that parameters name: its settings, and the text that it is calibrated on."""

from mlflow_compress.compression.method import METHODS, MethodConfig, Setting, method_config, require_placed
from mlflow_compress.compression.servers import check_target
from mlflow_compress.config import CompressionConfig, SourceConfig
from mlflow_compress.config.declarations import as_typed
from mlflow_compress.errors import ConfigError
from mlflow_compress.items.sources.calibration_sets import CalibrationSet, load_calibration
from mlflow_compress.kept import kept


def method_settings(asked: CompressionConfig, source: SourceConfig) -> MethodConfig:
    """Return the method's frozen settings. Wrong settings are refused before any work is done."""
    given: dict[str, Setting] = {"bits": asked.bits, "group_size": asked.group_size}
    if METHODS.get(asked.method).needs_calibration:
        given["calibration_samples"], given["calibration_length"] = asked.calibration_samples, asked.calibration_length
        given["seed"] = asked.method_args.get("seed", source.seed)
    if asked.checkpoint is not None:
        given["checkpoint"] = asked.checkpoint
    if twice := sorted(given.keys() & asked.method_args.keys() - {"seed"}):
        got = as_typed(asked.method_args)
        raise ConfigError(f"'method_args' holds the parameter {twice[0]}", got=got, fix=f"Give {twice[0]}=VALUE")
    settings = method_config(asked.method, **{**given, **asked.method_args})
    check_target(asked.target, METHODS.get(asked.method), settings)
    require_placed(METHODS.get(asked.method), settings, source.device)
    return settings


def calibration_set(asked: CompressionConfig, source: SourceConfig) -> CalibrationSet | None:
    """Return the calibration set of a method; None where the method needs no calibration."""
    if not METHODS.get(asked.method).needs_calibration:
        return None
    name, model, data_dir = asked.calibration, source.model, source.data_dir or ""
    return kept(("calibration", name, model, data_dir), lambda: load_calibration(name, model=model, data_dir=data_dir))
