"""What the baseline answers, before any variant is judged: by itself, where variants are made side by side."""

from __future__ import annotations

from mlflow_compress.config import JudgeConfig
from mlflow_compress.judges import JUDGES, chosen_judges
from mlflow_compress.stages.evaluation.open_models import OneLoaded, light
from mlflow_compress.stages.judging.answers import baseline_answers
from mlflow_compress.stages.judging.greedy_comparison import baseline_greedy
from mlflow_compress.stages.model_names import folder_or_hub, model_path
from mlflow_compress.stages.task_inputs import instructions_of
from mlflow_compress.tracking.store import Store


def answer_baseline(config: JudgeConfig, store: Store) -> None:
    """Let the baseline answer the instructions, unless the store has its answers."""
    path, instructions = model_path(config.source.model), instructions_of(config)
    with folder_or_hub("model", path):
        base = light(path, config.source, config.inference, config.running)
    load = OneLoaded()
    baseline_answers(store, base, instructions, config, load)
    if any(JUDGES.get(name).greedy for name in chosen_judges(config.answers.judges)):
        baseline_greedy(store, base, instructions, config, load)
    load.free()
