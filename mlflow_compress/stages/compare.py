"""Compare two finished evaluations from their files: without a model or a GPU."""

from __future__ import annotations

from pathlib import Path

from mlflow_compress.config import check_text
from mlflow_compress.errors import AlignmentError, ConfigError
from mlflow_compress.items.sources.question_files import read_jsonl
from mlflow_compress.metrics.core.answer_comparison import compare_answers, compare_records
from mlflow_compress.metrics.core.answer_files import Answer, answers_from_harness, answers_from_rows
from mlflow_compress.records import RunRecords
from mlflow_compress.results import Comparison
from mlflow_compress.stages.evaluation.eval_metadata import check_comparable, read_metadata
from mlflow_compress.tracking.run_names import RECORDS
from mlflow_compress.tracking.store import Store

ACCEPTED = "a run id, a folder of Parquet records, samples_*.jsonl of lm-evaluation-harness, or JSONL of id, pred, gold"


def _read(source: str, store: Store | None) -> Path | list[Answer]:
    """Return one side of the comparison: the folder of its records, or the answers of a JSONL file."""
    check_text("run, folder or file", source)
    path = Path(source)
    if source and path.is_dir():
        return path
    if path.is_file():
        rows = read_jsonl(path)
        harness = "filtered_resps" in rows[0]
        return answers_from_harness(rows) if harness else answers_from_rows(rows)
    if len(source) == 32 and all(c in "0123456789abcdef" for c in source):
        return _folder_of_run(source, store)
    raise ConfigError("Nothing to compare by this name", allowed=ACCEPTED, got=source)


def _folder_of_run(run_id: str, store: Store | None) -> Path:
    """Return the folder of a run's records; for the main run of a variant, those of its evaluate stage."""
    if store is None:
        from mlflow_compress.tracking.tracker import Tracker

        store = Tracker()
    return store.fetch(store.child_ids(run_id).get("evaluate", run_id), RECORDS)


def compare(baseline: str, variant: str, store: Store | None = None) -> Comparison:
    """Return accuracy, flips and the other answer comparisons of two evaluations, with intervals.

    Parameters
    ----------
    baseline, variant : str
        Each a run id, a folder of Parquet records, a harness sample log, or a JSONL file with one
        ``{"id", "pred", "gold"}`` object per line.
    store : Store, optional
        Where run ids are looked up; the MLflow store if not given.

    Raises
    ------
    AlignmentError
        Items, golds, prompts, answer orders, tokenizers or few-shot settings differ, or one side has records and the
        other one answers.
    ConfigError, DataError
        A side cannot be found or read.
    """
    left, right = _read(baseline, store), _read(variant, store)
    if isinstance(left, Path) and isinstance(right, Path):
        check_comparable(read_metadata(left), read_metadata(right))
        return Comparison(compare_records(RunRecords.read(left), RunRecords.read(right)))
    if isinstance(left, Path) or isinstance(right, Path):
        raise AlignmentError("One side holds records and the other answers", fix="Give two of the same kind")
    return Comparison(compare_answers(left, right))
