"""lm-evaluation-harness run as it is: its stock backend on the same documents as ours, for the parity tests."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.shared_data import SHARED

HUB = SHARED / "hub"
MODEL = SHARED / "data" / "models" / "stories260K"


@dataclass(frozen=True)
class Case:
    """A task on the shared data: its folder in the harness, its data set, and what the copy here lacks."""

    task: str
    folder: str
    dataset: str
    shots: int | None = None
    without: tuple[str, ...] = ()


CASES = {
    "piqa": Case("piqa", "piqa", "baber/piqa", without=("training_split",)),
    "arc_easy": Case("arc_easy", "arc", "allenai/ai2_arc", without=("validation_split",)),
    "arc_challenge": Case("arc_challenge", "arc", "allenai/ai2_arc", without=("validation_split",)),
    "arc_easy 3-shot": Case("arc_easy", "arc", "allenai/ai2_arc", shots=3, without=("validation_split",)),
    "winogrande": Case("winogrande", "winogrande", "allenai/winogrande", without=("training_split",)),
    "lambada_openai": Case("lambada_openai", "lambada", "EleutherAI/lambada_openai"),
    "gsm8k 8-shot": Case("gsm8k", "gsm8k", "openai/gsm8k", shots=8),
    "triviaqa": Case("triviaqa", "triviaqa", "mandarjoshi/trivia_qa", without=("training_split",)),
    "mmlu 0-shot": Case("mmlu", "mmlu/default", "cais/mmlu"),
    "mmlu 5-shot": Case("mmlu", "mmlu/default", "cais/mmlu", shots=5),
    "mmlu_anatomy 5-shot": Case("mmlu_anatomy", "mmlu/default", "cais/mmlu", shots=5),
}


def stock_model(*, batch_size: int = 1, path: Path = MODEL, dtype: str = "float32") -> Any:
    """The harness's Hugging Face backend."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(path), dtype=dtype, device="cpu", batch_size=batch_size)


def stock_results(model: Any, case: Case, documents: Mapping[str, list[int]]) -> dict[str, Any]:
    """Evaluate `documents` (by leaf task, in order) with the harness alone; its results with samples."""
    import lm_eval.tasks
    from lm_eval.evaluator import evaluate

    root = Path(lm_eval.tasks.__file__).parent
    kind = "group" if case.task == "mmlu" else "task"
    changed = {kind: case.task, "dataset_path": str(HUB / case.dataset), **dict.fromkeys(case.without)}
    with tempfile.TemporaryDirectory() as own:  # the harness lets a file override a group's data, but no dictionary
        (Path(own) / "here.yaml").write_text(yaml.safe_dump({"group": "here", "task": [changed]}))
        index = lm_eval.tasks.TaskManager(include_path=[root / case.folder, own], include_defaults=False)
        found = index.load(["here"])
    for task in found["tasks"].values():
        shots = task.get_config("num_fewshot") if case.shots is None else case.shots
        task.set_config(key="num_fewshot", value=shots or 0)
        task.set_fewshot_seed(seed=1234)
    return dict(evaluate(model, found, samples=dict(documents), bootstrap_iters=0))
