"""What parameters name, read and checked before a model is loaded: models, tasks, instructions, calibration text."""

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from mlflow_compress import demo
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.commands.quantize.parameters import QuantizeConfig
from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest
from mlflow_compress.compression.method import METHODS, MethodConfig, Setting, method_config, require_placed
from mlflow_compress.compression.servers import check_target
from mlflow_compress.config import (
    JudgeModelConfig,
    Parameters,
    SourceConfig,
    as_text,
    is_endpoint,
    read_policy,
)
from mlflow_compress.config.declarations import AUTO
from mlflow_compress.engines import vllm_environment
from mlflow_compress.errors import CheckpointError, ConfigError, MlflowCompressError
from mlflow_compress.items.prompt_style import styles_of
from mlflow_compress.items.sources.calibration_sets import SETS as CALIBRATION_SETS
from mlflow_compress.items.sources.calibration_sets import CalibrationSet, load_calibration
from mlflow_compress.items.sources.conversations import Redaction
from mlflow_compress.items.sources.data_dir import check_set_or_file
from mlflow_compress.items.sources.instructions import SETS as INSTRUCTION_SETS
from mlflow_compress.items.sources.instructions import Instruction, find_instructions, is_logged
from mlflow_compress.items.suite import Suite, load_suite
from mlflow_compress.items.task import Sampling, TaskSettings, TraceCorpus, seeded
from mlflow_compress.judges.encoders import EMBEDDED as EMBEDDED_ENCODER
from mlflow_compress.judges.encoders import usable_folder
from mlflow_compress.judges.judge_registry import chosen_judges
from mlflow_compress.judges.prompts import read_pair_prompts
from mlflow_compress.judges.session import prices_of
from mlflow_compress.kept import kept
from mlflow_compress.models import checkpoint_config, stored_weights
from mlflow_compress.models.model_files import own_sampling
from mlflow_compress.models.placement import certainly_on_cpu, certainly_without_gpu, no_gpu
from mlflow_compress.models.source_model import local_model_folder, resolve_folder
from mlflow_compress.paths import started_in
from mlflow_compress.scoring.generation.chat_format import ChatFormat, chat_format


def model_path(model: str) -> str:
    """Return the baseline's path: the folder of an embedded model, otherwise the given folder or hub id."""
    return str(demo.MODELS.get(model, model))


_SMALL = 1 << 30  # bytes of weights; up to 88 M parameters were tried, and forks were faster than threads there


def is_small(source: SourceConfig) -> bool:
    """Return whether the baseline runs on a CPU, and is so small that threads spend much time on waiting there.

    Then each core does work of its own: forks of one thread share a pass, and stages run at the same time.
    """
    if is_endpoint(source.model) or not certainly_on_cpu(source.device):
        return False
    try:
        files = checkpoint_config.weight_files(local_model_folder(model_path(source.model)))
    except MlflowCompressError:  # whatever opens it says so
        return False
    return sum(file.stat().st_size for file in files) <= _SMALL


def model_label(model: str) -> str:
    """Return the baseline's short name for run names and the registry."""
    return Path(model).name if Path(model).is_dir() else model


def baseline_label(config: EvaluateConfig | JudgeConfig) -> str:
    """Return the short name of a stage's baseline: a served one has that of its server."""
    if not is_endpoint(config.source.model):
        return model_label(config.source.model)
    return _given("baseline_served_model", config.served.baseline_served_model)


SERVED_METHOD = "endpoint"
"""In place of a method, where a server has the variant: who made it, and how, is not known."""


def compresses(method: str) -> bool:
    """Return whether a method compresses; others are controls. A served model counts as compressed."""
    return method == SERVED_METHOD or METHODS.get(method).compresses


@dataclass(frozen=True)
class ServedVariant:
    """What is known of a served variant beforehand, as the manifest says it of a checkpoint: not its size."""

    label: str
    method: str = SERVED_METHOD
    size_ratio: float | None = None
    sparsity: float | None = None
    cache_ratio: float | None = None


Made = CheckpointManifest | ServedVariant
"""What is known of a variant beforehand."""


def described(config: EvaluateConfig | JudgeConfig) -> Made:
    """Return what is known of a stage's variant: its checkpoint's manifest, or the name of a served one.

    A checkpoint that was made from other weights than the baseline's is refused, unless that was asked for.
    """
    if is_endpoint(config.checkpoint):
        return ServedVariant(f"endpoint-{_given('served_model', config.served.served_model)}")
    manifest, model = read_manifest(config.checkpoint), config.source.model
    if config.source.other_baseline or is_endpoint(model):
        return manifest
    with folder_or_hub("model", model_path(model)):
        folder = local_model_folder(model_path(model))
    if (weights := stored_weights.hash_weights(folder)[1]) != manifest.base_weights_hash:
        raise ConfigError(
            "The checkpoint was not made from this baseline: their distance would not be that of the compression",
            allowed=f"{manifest.base_model}, weights {manifest.base_weights_hash}",
            got=f"{model}, weights {weights}",
            fix="Leave out model, which is then the checkpoint's own, or set other_baseline to compare all the same",
        )
    return manifest


def read_manifest(checkpoint: str | None, *, verify: bool = True) -> CheckpointManifest:
    """Return the manifest of a complete compressed checkpoint; `verify` reads every file of it."""
    if is_endpoint(checkpoint):
        raise not_served("checkpoint", str(checkpoint))
    if not checkpoint:
        raise ConfigError("Parameter 'checkpoint' must be given", allowed="the folder that quantize wrote")
    if not Path(checkpoint).is_dir():
        raise _no_folder("checkpoint", checkpoint, allowed="the folder that quantize wrote")
    return CheckpointManifest.read(Path(checkpoint), verify=verify)


@contextmanager
def folder_or_hub(parameter: str, value: str) -> Iterator[None]:
    """Add the parameter's name, and the folder that was searched, to a `CheckpointError` about a missing model.

    Stages of an MLflow project run in other working folders, so a relative path may mean an unexpected folder.
    """
    if is_endpoint(value):
        raise not_served(parameter, value)
    exists = value in ("", EMBEDDED_ENCODER) or Path(value).is_dir()
    if not exists and (Path(value).is_absolute() or value.startswith((".", "~")) or value.count("/") > 1):
        raise _no_folder(parameter, value, allowed="a folder, or a name on the hub such as org/name")
    try:
        yield
    except CheckpointError as error:
        if exists:
            raise
        raise ConfigError(
            f"Parameter '{parameter}': {str(error).rstrip('.')}",
            fix=f"A relative folder was looked for in {started_in()}",
        ) from error


def _given(parameter: str, name: str | None) -> str:
    if not name:
        raise ConfigError(f"Parameter {parameter!r} must be given", allowed="the model's name at that server")
    return name


def not_served(parameter: str, value: str) -> ConfigError:
    """Return the error of a command that cannot work with a served model in this place."""
    return ConfigError(
        f"Parameter {parameter!r} names a served model, and what is asked here needs one in a folder",
        got=value,
        fix="Served models are evaluated, judged and timed; compressing one, and looking into its layers, needs its "
        "weights",
    )


def _no_folder(parameter: str, value: str, *, allowed: str) -> ConfigError:
    looked = "" if Path(value).is_absolute() else f" (looked for in {started_in()})"
    return ConfigError(
        f"Parameter '{parameter}' names no folder{looked}", allowed=allowed, got=value, fix="Give its absolute path"
    )


_SETS: dict[str, Collection[str]] = {
    "calibration": CALIBRATION_SETS,
    "instructions": INSTRUCTION_SETS,
    "trace_instructions": INSTRUCTION_SETS,
}
OWN_ENGINES = ("local", "ray", "vllm")  # known without importing them


def check_named(config: Parameters) -> None:
    """Refuse settings, and names of sets, files, styles, judges and engines, without importing what works with them."""
    values = config.values()
    quantize = config if isinstance(config, QuantizeConfig) else getattr(config, "quantize_config", None)
    if quantize is not None and not is_endpoint(quantize.compression.checkpoint):
        method_settings(quantize)
    for method in str(values.get("methods") or "").split(",") if values.get("grid") is None else ():
        if method.strip():
            METHODS.get(method.strip())
    for parameter, sets in _SETS.items():
        if values.get(parameter, AUTO) != AUTO and not is_logged(str(values[parameter])):
            check_set_or_file(parameter, str(values[parameter]), sets)
    if values.get("redact") is not None:
        Redaction.of(str(values["redact"]))
    if "prompt_style" in values:
        styles_of(str(values["prompt_style"]))
    if values.get("policy") is not None:
        read_policy(str(values["policy"]))
    engine = values.get("engine", OWN_ENGINES[0])
    if engine not in (*OWN_ENGINES, "endpoint") and not entry_points(group="mlflow_compress.engines"):
        raise ConfigError("Unknown engine", allowed=OWN_ENGINES, got=engine)

    if engine == "vllm":
        vllm_environment.installed(vllm_environment.find_python(values["vllm_python"]))
    elsewhere = "devices" in values or values.get("ray_address") or values.get("dry_run")  # nothing is run here
    if values.get("device") == "cuda" and not elsewhere and engine in OWN_ENGINES and certainly_without_gpu():
        raise no_gpu("cuda")
    if isinstance(judging := getattr(config, "judging", None), JudgeModelConfig) and values.get("judge", True):
        judges = chosen_judges(str(values["judges"]))
        if "similarity" in judges and values["encoder_base_url"] is None and values["encoder"] != EMBEDDED_ENCODER:
            with folder_or_hub("encoder", values["encoder"]):
                usable_folder(values["encoder"])
        if values["bertscore_model"] not in (None, EMBEDDED_ENCODER):
            with folder_or_hub("bertscore_model", values["bertscore_model"]):
                resolve_folder(values["bertscore_model"])
        prices_of(judging)
        if judging.judge_prompts is not None:
            read_pair_prompts(Path(judging.judge_prompts))
    if "checkpoint" in values and quantize is None:
        checkpoint = values["checkpoint"]
        if is_endpoint(checkpoint):
            _given("served_model", values["served_model"])
        elif not is_endpoint(values["model"]):
            read_manifest(checkpoint, verify=False)


def task_settings(config: EvaluateConfig) -> TaskSettings:
    """Return how items are drawn and shown: the parameters of the same names, with "" for a text that is not given."""
    values: dict[str, Any] = {name: "" if value is None else value for name, value in config.values().items()}
    return TaskSettings(**{field.name: values[field.name] for field in fields(TaskSettings)})


def suite_of(config: EvaluateConfig) -> Suite:
    """Return the suite that a configuration names: tasks and corpora."""
    deciding = tuple((name, value) for name, value in as_text(config).items() if name != "checkpoint")
    suite = kept(
        ("suite", deciding),
        lambda: load_suite(config.evaluation.tasks, model=config.source.model, settings=task_settings(config)),
    )
    if any(isinstance(corpus, TraceCorpus) for corpus in suite.corpora):
        trace_prompts(config)  # a wrong set is refused now, not when a model has been loaded
    return suite


def with_chat_template(tokenizer: Any, suite: Suite, system: str = "", folder: Path | None = None) -> Suite:
    """Return the suite with its messages rendered in the baseline's chat template, after the system prompt.

    The baseline's template renders the prompts of both models, so that both read the same text. Both draw the answers
    to problems as the generation settings in the baseline's `folder` say; without one, from the whole distribution.
    """
    if not any(task.chat or task.conversations or task.calls for task in suite.tasks):
        return suite
    chat, tasks = chat_format(tokenizer), []
    for task in suite.tasks:
        answering = task.answering
        if answering is not None and answering.thinking is not None:
            if not answering.thinking:
                _require_thinking_can_be_off(chat)
            sampling = Sampling() if folder is None else Sampling(**own_sampling(folder))
            ends: dict[str, Any] = {"until": chat.until, "end_tokens": chat.end_tokens}
            task = replace(task, answering=replace(answering, sampling=sampling, **ends))
        tasks.append(task)
    return replace(suite, tasks=tuple(tasks)).rendered(
        lambda message, **told: chat.prompt([message], system=system, **told),
        lambda messages: chat.conversation(json.loads(messages), system=system),
        lambda asked: chat.conversation(asked["messages"], system=system, tools=asked["tools"]),
        chat.call_form,
    )


def _require_thinking_can_be_off(chat: ChatFormat) -> None:
    if chat.prompt(["question"], enable_thinking=False) == chat.prompt(["question"], enable_thinking=True):
        raise CheckpointError(
            "The baseline cannot be asked not to think: its chat template does not read enable_thinking",
            fix="Leave out enable_thinking=false, or take another model",
        )


def trace_prompts(config: EvaluateConfig) -> list[Instruction]:
    """Return the instructions that the baseline answers for the task `traces`: a seeded draw, in the set's order."""
    asked, settings = config.traces, task_settings(config)
    instructions = find_instructions(
        asked.trace_instructions, model=config.source.model, settings=settings, parameter="trace_instructions"
    )
    if not 0 < asked.trace_prompts < len(instructions):
        return instructions
    chosen = seeded(settings, "traces").sample(range(len(instructions)), asked.trace_prompts)
    return [instructions[number] for number in sorted(chosen)]


def instructions_of(config: JudgeConfig) -> list[Instruction]:
    """Return the instructions that a configuration names."""
    settings = TaskSettings(
        seed=config.source.seed,
        limit=config.answers.instruction_limit,
        data_dir=config.source.data_dir or "",
        redact=config.inference.redact or "",
        system_prompt=config.inference.system_prompt or "",
    )
    return find_instructions(config.answers.instructions, model=config.source.model, settings=settings)


def method_settings(config: QuantizeConfig) -> MethodConfig:
    """Return the method's frozen settings. Wrong settings are refused before any work is done."""
    asked = config.compression
    given: dict[str, Setting] = {"bits": asked.bits, "group_size": asked.group_size}
    if METHODS.get(asked.method).needs_calibration:
        given["calibration_samples"], given["calibration_length"] = asked.calibration_samples, asked.calibration_length
        given["seed"] = asked.method_args.get("seed", config.source.seed)
    if asked.checkpoint is not None:
        given["checkpoint"] = asked.checkpoint
    if twice := sorted(given.keys() & asked.method_args.keys() - {"seed"}):
        got = as_text(config)["method_args"]
        raise ConfigError(f"'method_args' holds the parameter {twice[0]}", got=got, fix=f"Give {twice[0]}=VALUE")
    settings = method_config(asked.method, **{**given, **asked.method_args})
    check_target(asked.target, METHODS.get(asked.method), settings)
    require_placed(METHODS.get(asked.method), settings, config.source.device)
    return settings


def calibration_set(config: QuantizeConfig) -> CalibrationSet | None:
    """Return the calibration set of a method; None where the method needs no calibration."""
    if not METHODS.get(config.compression.method).needs_calibration:
        return None
    name, model, data_dir = config.compression.calibration, config.source.model, config.source.data_dir or ""
    return kept(("calibration", name, model, data_dir), lambda: load_calibration(name, model=model, data_dir=data_dir))
