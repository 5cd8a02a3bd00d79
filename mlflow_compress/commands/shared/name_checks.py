"""Refuses what parameters name and is not there, before a model is loaded and without importing what works with it."""

from collections.abc import Collection
from importlib.metadata import entry_points
from pathlib import Path
from typing import TypeVar

from mlflow_compress.commands.shared.named_method import method_settings
from mlflow_compress.commands.shared.named_models import folder_or_hub, read_manifest, served_name
from mlflow_compress.config import (
    AnswerConfig,
    CompressionConfig,
    EngineConfig,
    EvaluationConfig,
    InferenceConfig,
    JudgeModelConfig,
    Parameters,
    ServedConfig,
    SourceConfig,
    TracesConfig,
    is_endpoint,
    read_policy,
)
from mlflow_compress.config.declarations import AUTO, Group, groups
from mlflow_compress.engines import vllm_environment
from mlflow_compress.errors import ConfigError
from mlflow_compress.items.prompt_style import styles_of
from mlflow_compress.items.sources.calibration_sets import CALIBRATION_SETS
from mlflow_compress.items.sources.conversations import Redaction
from mlflow_compress.items.sources.data_dir import check_set_or_file
from mlflow_compress.items.sources.instructions import INSTRUCTION_SETS, is_logged
from mlflow_compress.judges.encoders import EMBEDDED_ENCODER, usable_folder
from mlflow_compress.judges.judge_registry import chosen_judges
from mlflow_compress.judges.prompts import read_pair_prompts
from mlflow_compress.judges.session import prices_of
from mlflow_compress.models.placement import certainly_without_gpu, no_gpu
from mlflow_compress.models.source_model import resolve_folder

OWN_ENGINES = ("local", "ray", "vllm")  # known without importing them

G = TypeVar("G", bound=Group)


def _group(config: Parameters, kind: type[G]) -> G | None:
    """Return a command's group of parameters; None where it takes none of them."""
    named = (getattr(config, name) for name in groups(type(config)))
    return next((group for group in named if isinstance(group, kind)), None)


def check_named(config: Parameters) -> None:
    """Refuse settings, and names of sets, files, styles, judges and engines, without importing what works with them."""
    compression = _group(getattr(config, "quantize_config", config), CompressionConfig)
    source = _group(config, SourceConfig)
    if compression is not None and source is not None and not is_endpoint(compression.checkpoint):
        method_settings(compression, source)
    config.require_known()
    answers, traces = _group(config, AnswerConfig), _group(config, TracesConfig)
    _check_set("calibration", config.values().get("calibration"), CALIBRATION_SETS)
    _check_set("instructions", None if answers is None else answers.instructions, INSTRUCTION_SETS)
    _check_set("trace_instructions", None if traces is None else traces.trace_instructions, INSTRUCTION_SETS)
    if (inference := _group(config, InferenceConfig)) is not None and inference.redact is not None:
        Redaction.of(inference.redact)
    if (evaluation := _group(config, EvaluationConfig)) is not None:
        styles_of(evaluation.prompt_style)
    if (policy := config.values().get("policy")) is not None:
        read_policy(str(policy))
    _check_engine(_group(config, EngineConfig), source, config.computes_here)
    judging = _group(config, JudgeModelConfig)
    if judging is not None and answers is not None and getattr(config, "judge", True):
        _check_judges(answers, judging)
    served = _group(config, ServedConfig)
    if compression is None and source is not None and served is not None and hasattr(config, "checkpoint"):
        if is_endpoint(config.checkpoint):
            served_name("served_model", served.served_model)
        elif not is_endpoint(source.model):
            read_manifest(config.checkpoint, verify=False)


def _check_set(parameter: str, value: str | None, sets: Collection[str]) -> None:
    if value not in (None, AUTO) and not is_logged(str(value)):
        check_set_or_file(parameter, str(value), sets)


def _check_engine(running: EngineConfig | None, source: SourceConfig | None, computes_here: bool) -> None:
    """Refuse an engine that nobody has registered, one that is not installed, and a device that is not there."""
    engine = OWN_ENGINES[0] if running is None else running.engine
    if engine not in (*OWN_ENGINES, "endpoint") and not entry_points(group="mlflow_compress.engines"):
        raise ConfigError("Unknown engine", allowed=OWN_ENGINES, got=engine)
    if running is not None and engine == "vllm":
        vllm_environment.installed(vllm_environment.find_python(running.vllm_python))
    here = computes_here and not (running is not None and running.ray_address)
    if source is not None and source.device == "cuda" and here and engine in OWN_ENGINES and certainly_without_gpu():
        raise no_gpu("cuda")


def _check_judges(answers: AnswerConfig, judging: JudgeModelConfig) -> None:
    """Refuse unknown judges, models of theirs that are not there, and prices and prompts that cannot be read."""
    judges = chosen_judges(answers.judges)
    if "similarity" in judges and answers.encoder_base_url is None and answers.encoder != EMBEDDED_ENCODER:
        with folder_or_hub("encoder", answers.encoder):
            usable_folder(answers.encoder)
    if answers.bertscore_model not in (None, EMBEDDED_ENCODER):
        with folder_or_hub("bertscore_model", answers.bertscore_model):
            resolve_folder(answers.bertscore_model)
    prices_of(judging)
    if judging.judge_prompts is not None:
        read_pair_prompts(Path(judging.judge_prompts))
