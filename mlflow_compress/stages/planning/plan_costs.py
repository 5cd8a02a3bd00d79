"""The plan of a whole job: what each stage would compute, read and write, and how long that takes on a machine."""

from __future__ import annotations

from typing import Any

import torch

from mlflow_compress import demo
from mlflow_compress.config import EMBEDDED, EvaluateConfig, JudgeConfig, PlanConfig
from mlflow_compress.errors import CheckpointError
from mlflow_compress.models.identity import max_length
from mlflow_compress.results import CostPlan
from mlflow_compress.scoring.costs.model_shape import model_shape
from mlflow_compress.scoring.generation.chat_format import chat_format
from mlflow_compress.scoring.plan.encoding import Encoder
from mlflow_compress.scoring.scoring_config import default_limits
from mlflow_compress.stages.evaluation.noise_sample import noise_sample
from mlflow_compress.stages.model_names import model_label
from mlflow_compress.stages.planning.stage_costs import StageCosts
from mlflow_compress.stages.planning.workloads import instruction_answers, scored_work, task_answers
from mlflow_compress.stages.task_inputs import instructions_of, suite_of

_NOTES = (
    "Operations of matrices, attention and head; attention as if every layer saw the whole text",
    "Answers are counted at their greatest length",
    "One copy compresses, and the others wait; they share all other work",
    "A variant is evaluated with its weights expanded to the dtype",
    "Starting Python, compiling kernels, the judge's own calls and uploads to MLflow are not counted",
)


def run_plan(config: PlanConfig) -> CostPlan:
    """Return the costs of baseline, compression, variants and answers; no weights are read and nothing runs.

    Raises
    ------
    ConfigError, CheckpointError, DataError
        The model's configuration, its tokenizer or a task cannot be read.
    """
    model_config, tokenizer = _opened(config)
    length = max_length(model_config, tokenizer)
    shape = model_shape(model_config, max_length=length, trust_remote_code=config.source.trust_remote_code)
    suite = suite_of(EvaluateConfig(source=config.source, evaluation=config.evaluation, inference=config.inference))
    if any(task.chat for task in suite.tasks):
        chat, system = chat_format(tokenizer), config.inference.system_prompt or ""
        suite = suite.rendered(lambda message: chat.prompt([message], system=system))
    encoder = Encoder(tokenizer, length)
    # Batches have the size that they have on a GPU, unless a CPU is asked for.
    limits = default_limits(shape.vocabulary, on_gpu=config.source.device != "cpu")
    scored = scored_work(suite, encoder, **limits)
    again = noise_sample(suite, config.evaluation.noise_items, seed=config.source.seed)
    written = task_answers(suite, encoder)
    costs = StageCosts(
        config,
        shape,
        scored,
        stored_bytes=_dtype("auto", model_config).itemsize,
        number_bytes=_dtype(config.inference.dtype, model_config).itemsize,
    )
    stages = costs.baseline(scored_work(again, encoder, **limits), written)
    stages += [costs.compression(), costs.variant(written)]
    if config.judge:
        judged = JudgeConfig(source=config.source, answers=config.answers, inference=config.inference)
        stages += costs.answers(*instruction_answers(instructions_of(judged), tokenizer, config, length))
    spread = f"The layers of one copy lie on {costs.per_copy} devices, which work one after another"
    return CostPlan(
        model=model_label(config.source.model),
        parameters=shape.parameters,
        active_parameters=shape.active,
        devices=config.machine.devices,
        devices_per_copy=costs.per_copy,
        copies=costs.copies,
        stages=tuple(stages),
        states_bytes=costs.states,
        checkpoint_bytes=costs.checkpoint,
        notes=(*_NOTES, *([spread] if costs.per_copy > 1 else [])),
    )


def _dtype(name: str, model_config: Any) -> torch.dtype:
    """Return a dtype by its name; 'auto' is the configuration's, and float32 where it has none."""
    named = getattr(model_config, "dtype", None) if name == "auto" else name
    if isinstance(named, torch.dtype):
        return named
    found = getattr(torch, str(named or "float32"))
    assert isinstance(found, torch.dtype)
    return found


def _opened(config: PlanConfig) -> tuple[Any, Any]:
    """Return configuration and tokenizer; a hub id costs the download of both, and never of weights."""
    from transformers import AutoConfig, AutoTokenizer

    model = str(demo.MODEL_DIR) if config.source.model == EMBEDDED else config.source.model
    trusted = config.source.trust_remote_code
    try:
        return (
            AutoConfig.from_pretrained(model, trust_remote_code=trusted),
            AutoTokenizer.from_pretrained(config.tokenizer or model, trust_remote_code=trusted),
        )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"The model's configuration or tokenizer cannot be read: {error}",
            got=model,
            fix="Give a folder with config.json and the tokenizer, or another folder for the tokenizer",
        ) from error
