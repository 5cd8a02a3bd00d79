"""Both models' answers side by side, as artifact of a judge run: one page, and the same rows as JSONL."""

from collections.abc import Sequence

from mlflow_compress.items.sources.instructions import Instruction
from mlflow_compress.metrics.conscompf import similarity
from mlflow_compress.metrics.core.metric_inputs import AnswerEmbeddings, MetricInputs
from mlflow_compress.records import Generations
from mlflow_compress.reporting import answers_page
from mlflow_compress.tracking.live_processes import scratch_folder
from mlflow_compress.tracking.run_names import ANSWERS
from mlflow_compress.tracking.store import OpenRun, Store

ROWS, PAGE = "answers.jsonl", "answers.html"


def log_answers(
    run: OpenRun,
    uri: str,
    title: str,
    instructions: Sequence[Instruction],
    answers: tuple[Generations, Generations],
    inputs: MetricInputs,
) -> None:
    """Log the graded answers of both models, largest drop first, with grades and similarity where known.

    `uri` is the store of the run.
    """
    pairs = answers_page.compared_answers(
        {item.item_id: item.turns for item in instructions},
        {item.item_id: item.category for item in instructions},
        answers,
        (inputs.baseline.judgments, inputs.subject.judgments),
        _similarity(inputs.embeddings),
    )
    with scratch_folder(uri) as folder:
        (folder / ROWS).write_text(answers_page.as_jsonl(pairs), encoding="utf-8")
        (folder / PAGE).write_text(answers_page.render_answers(title, pairs), encoding="utf-8")
        run.log_folder(folder, ANSWERS)


def _similarity(given: AnswerEmbeddings | None) -> dict[str, float]:
    """Return the similarity of the sampled answers by instruction, as `judge/similarity` averages it."""
    if given is None or given.variant is None:
        return {}
    values = similarity(given.baseline, given.variant).per_instruction()
    return dict(zip(given.item_ids, values.tolist(), strict=True))


def read_answers(store: Store, run_id: str) -> list[answers_page.ComparedAnswer]:
    """Return the answers that `log_answers` has logged. A run without them is a `TrackingError`."""
    path = store.fetch(run_id, ANSWERS) / ROWS
    return answers_page.from_jsonl(path.read_text(encoding="utf-8"), str(path))
