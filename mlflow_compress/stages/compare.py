"""Compare two evaluations from what they left on disk: no model, no GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlflow_compress.config import check_text
from mlflow_compress.errors import AlignmentError, ConfigError
from mlflow_compress.metrics.core.answer_comparison import compare_answers, compare_records
from mlflow_compress.metrics.core.answer_files import Answer, answers_from_harness, answers_from_rows
from mlflow_compress.records import RunRecords
from mlflow_compress.stages.evaluation.eval_metadata import check_alike, read_about
from mlflow_compress.tasks.sources.question_files import read_jsonl

ACCEPTED = "a run id, a folder of Parquet records, samples_*.jsonl of lm-evaluation-harness, or JSONL of id, pred, gold"


def _read(source: str) -> Path | list[Answer]:
    """Read one side: the folder of records that it means, or the answers of a JSONL file."""
    check_text("run, folder or file", source)
    path = Path(source)
    if source and path.is_dir():
        return path
    if path.is_file():
        rows = read_jsonl(path)
        harness = "filtered_resps" in rows[0]
        return answers_from_harness(rows) if harness else answers_from_rows(rows)
    if len(source) == 32 and all(c in "0123456789abcdef" for c in source):
        return _folder_of_run(source)
    raise ConfigError("Nothing to compare by this name", allowed=ACCEPTED, got=source)


def _folder_of_run(run_id: str) -> Path:
    """Return the records of a run; a variant's parent run stands for its evaluate stage."""
    from mlflow_compress.tracking.tracker import Tracker

    tracker = Tracker()
    children = tracker.children(run_id)
    return tracker.fetch(children["evaluate"].info.run_id if "evaluate" in children else run_id, "records")


def compare(baseline: str, variant: str) -> dict[str, Any]:
    """Return the flips family of two evaluations with intervals, ready for JSON.

    Parameters
    ----------
    baseline, variant : str
        Each a run id, a folder of Parquet records, a harness sample log, or a JSONL file with one
        ``{"id", "pred", "gold"}`` object a line.

    Returns
    -------
    dict
        As `metrics.compare.compare_answers` describes it.

    Raises
    ------
    AlignmentError
        When items, golds, prompts, answer orders, tokenizers or shots differ, or one side is records and the other
        answers.
    ConfigError, DataError
        When a side cannot be found or read.
    """
    left, right = _read(baseline), _read(variant)
    if isinstance(left, Path) and isinstance(right, Path):
        check_alike(read_about(left), read_about(right))
        return compare_records(RunRecords.read(left), RunRecords.read(right))
    if isinstance(left, Path) or isinstance(right, Path):
        raise AlignmentError("One side holds records and the other answers", fix="Give two of the same kind")
    return compare_answers(left, right)


def as_text(found: dict[str, Any]) -> str:
    """Return the comparison for people: accuracy of both, the difference, flips, McNemar."""
    low, high = (100 * bound for bound in found["accuracy_delta_interval"])
    flips_low, flips_high = found["flips_pct_interval"]
    w2w = "" if found["w2w"] is None else f", wrong to another wrong {found['w2w']}"
    accuracies = f"{100 * found['accuracy_baseline']:.2f} % -> {100 * found['accuracy_variant']:.2f} %"
    lines = [
        f"items      {found['n']}"
        + (f" ({found['n_unscored']} more without an answer)" if found["n_unscored"] else ""),
        f"accuracy   {accuracies}, difference {100 * found['accuracy_delta']:+.2f} points [{low:+.2f}, {high:+.2f}]",
        f"flips      {found['flips_pct']:.2f} % [{flips_low:.2f}, {flips_high:.2f}]: "
        f"right to wrong {found['c2w']}, wrong to right {found['w2c']}{w2w}",
        f"McNemar    p = {found['mcnemar_p']:.4g}",
    ]
    if found["all_flips_pct"] is not None:
        lines.insert(3, f"all flips  {found['all_flips_pct']:.2f} %")
    if found.get("rule"):
        lines.append(f"scored by  {found['rule']}")
    return "\n".join(lines)


def as_json(found: dict[str, Any]) -> str:
    """Return the comparison as one JSON object."""
    return json.dumps(found, allow_nan=False)
