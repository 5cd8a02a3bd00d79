"""What is checked of a variant's parameters before a run is made, and what the run logs of them."""

from __future__ import annotations

from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.commands.quantize.run import method_settings, resolved, variant_name
from mlflow_compress.commands.shared.model_names import SERVED_METHOD, described, not_served
from mlflow_compress.commands.shared.task_inputs import calibration_set, instructions_of, suite_of
from mlflow_compress.compression.method import AUTO, METHODS, NONE
from mlflow_compress.config import EMBEDDED, CompressionConfig, as_text, is_endpoint
from mlflow_compress.errors import ConfigError
from mlflow_compress.items.contamination import check_contamination
from mlflow_compress.items.prompt_style import styles_of
from mlflow_compress.items.sources.calibration_sets import CalibrationSet
from mlflow_compress.judges.judge_registry import chosen_judges
from mlflow_compress.judges.session import prices_of

_OF_SERVED = ("checkpoint", "output_dir")  # parameters of the compression that a served variant may have


def check(config: MainConfig) -> dict[str, object]:
    """Check the parameters without a model. Return all that are known by now, with "auto" resolved.

    The checks read tasks, instructions and calibration text, and refuse calibration text that holds evaluation items.
    So a misspelt task is refused before an hour of compression. For the demo and for files, the checks import neither
    torch nor transformers. For tasks of lm-evaluation-harness they do, because that package imports both.
    """
    calibration, suite = _compression(config), suite_of(config.evaluate_config())
    if calibration is not None:
        check_contamination(calibration.plain(), suite.tasks, suite.corpora)
    if config.judge:
        instructions_of(config.judge_config())
        prices_of(config.judging)
        if config.answers.judges != "all":
            chosen_judges(config.answers.judges)
    return resolved_parameters(config, calibration)


def _compression(config: MainConfig) -> CalibrationSet | None:
    """Check method and settings, and return the calibration text; None where there is none."""
    if config.is_served:
        check_served(config)
        return None
    if is_endpoint(config.source.model):
        raise not_served("model", config.source.model)
    compression = config.quantize_config
    METHODS.get(config.compression.method).require_backend(method_settings(compression))
    return calibration_set(compression)


def check_served(config: MainConfig) -> None:
    """Refuse a served variant without a name, and one with settings of a compression, which would have no effect."""
    described(config.evaluate_config(config.compression.checkpoint))
    default = CompressionConfig()
    for name, value in config.compression.model_dump().items():
        unused = value != getattr(default, name) and (name, value) != ("method", "checkpoint")
        if unused and name not in _OF_SERVED:
            raise ConfigError(
                f"Parameter {name!r} is given beside a served model, which is not compressed here",
                got=as_text(config)[name],
                fix="Leave it out",
            )


def name_of(config: MainConfig) -> str:
    """Return the variant's short name, such as "awq-4bit-g128" or "endpoint-my-llama"."""
    if config.is_served:
        return described(config.evaluate_config(config.compression.checkpoint)).label
    return variant_name(config.quantize_config)


def resolved_parameters(config: MainConfig, calibration: CalibrationSet | None) -> dict[str, object]:
    """Return the parameters that are known before a model is loaded, with "auto" resolved."""
    known = {
        **as_text(config),
        **_resolved_compression(config, calibration),
        "tasks": EMBEDDED if config.evaluation.tasks == AUTO else config.evaluation.tasks,
        "instructions": EMBEDDED if config.answers.instructions == AUTO else config.answers.instructions,
        "prompt_style": ",".join(styles_of(config.evaluation.prompt_style)),
    }
    return {name: value for name, value in known.items() if value != AUTO and name != "resume"}


def _resolved_compression(config: MainConfig, calibration: CalibrationSet | None) -> dict[str, object]:
    """Return the parameters of the compression; a served variant has none."""
    if not config.is_served:
        compression = config.quantize_config
        return resolved(compression, method_settings(compression), calibration)
    unused = {name: NONE for name in CompressionConfig.model_fields if name != "checkpoint"}
    return {**unused, "method": SERVED_METHOD}
