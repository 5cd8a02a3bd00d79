"""The key of a finished variant: equal keys mean that nothing has to be computed again."""

from __future__ import annotations

from dataclasses import asdict

from mlflow_compress.config import MainConfig, as_text
from mlflow_compress.scoring.vllm.vllm_environment import named_python
from mlflow_compress.stages.get_or_create import digest
from mlflow_compress.stages.task_inputs import instructions_of

# Where work is done, how calls are made, and what they may cost decide no result.
_NOT_DECIDING = (
    "checkpoint",
    "device",
    "engine",
    "workers",
    "cpus_per_worker",
    "ray_address",
    "experiment",
    "judge_base_url",
    "judge_concurrency",
    "judge_timeout",
    "judge_max_retries",
    "judge_requests_per_minute",
    "judge_tokens_per_minute",
    "judge_prices",
    "judge_max_cost",
    "judge_traces",
    "endpoint_concurrency",
    "endpoint_timeout",
    "endpoint_max_retries",
)


def variant_key(config: MainConfig, checkpoint: str, evaluation: str) -> str:
    """Return a hash of everything that decides the results of a main run.

    Parameters
    ----------
    config : MainConfig
        The run's parameters.
    checkpoint : str
        The name of the checkpoint's folder, which ends in a digest of the method, its settings, the calibration text
        and the baseline's weights. Of a served variant, the digest of what is known of it.
    evaluation : str
        The evaluation id: a hash of the baseline, the tasks' content and the settings.
    """
    deciding: dict[str, object] = {
        "checkpoint": checkpoint,
        "evaluation": evaluation,
        "noise_items": config.evaluation.noise_items,
        "log_weights": config.log_weights,
    }
    if config.judge:
        judge = config.judge_config()
        deciding["judge"] = {name: value for name, value in as_text(judge).items() if name not in _NOT_DECIDING}
        deciding["instructions"] = [asdict(instruction) for instruction in instructions_of(judge)]
    if config.speed:
        # With vLLM at hand, a variant may have a speed that it could not have before.
        deciding["speed"] = {**config.timing.model_dump(), "vllm": named_python(config.running.vllm_python) is not None}
    return digest(deciding)
