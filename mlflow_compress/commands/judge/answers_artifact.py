"""Both models' answers side by side, as artifact of a judge run: one page, and the same rows as JSONL."""

from collections.abc import Sequence
from pathlib import Path

from mlflow_compress.items.sources.instructions import Instruction
from mlflow_compress.metrics.conscompf import similarity
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.records import Generations
from mlflow_compress.reporting import answers_page
from mlflow_compress.tracking.run_names import ANSWERS_PAGE
from mlflow_compress.tracking.tracker import Tracker

_ROWS, PAGE = "answers.jsonl", "answers.html"


def write_answers(
    folder: Path,
    title: str,
    instructions: Sequence[Instruction],
    answers: tuple[Generations, Generations],
    inputs: MetricInputs,
) -> None:
    """Write the graded answers of both models, largest drop first, with grades and similarity where known."""
    alike: dict[str, float] = {}  # as `judge/similarity` averages it
    if (given := inputs.embeddings) is not None and given.variant is not None:
        values = similarity(given.baseline, given.variant).per_instruction()
        alike = dict(zip(given.item_ids, values.tolist(), strict=True))
    pairs = answers_page.compared_answers(
        {item.item_id: item.turns for item in instructions},
        {item.item_id: item.category for item in instructions},
        answers,
        (inputs.baseline.judgments, inputs.subject.judgments),
        alike,
    )
    folder.mkdir()
    (folder / _ROWS).write_text(answers_page.as_jsonl(pairs), encoding="utf-8")
    (folder / PAGE).write_text(answers_page.render_answers(title, pairs), encoding="utf-8")


def read_answers(store: Tracker, run_id: str) -> list[answers_page.ComparedAnswer]:
    """Return the answers that a judge run holds. A run without them is a `TrackingError`."""
    path = store.fetch(run_id, ANSWERS_PAGE) / _ROWS
    return answers_page.from_jsonl(path.read_text(encoding="utf-8"), str(path))
