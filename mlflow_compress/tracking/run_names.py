"""Names that other runs and people search by: run tags and the metrics that head every table."""

from __future__ import annotations

from mlflow_compress.metrics.core.metric_registry import all_keys, leaderboard_keys

STAGE = "stage"  # baseline | main | quantize | evaluate | judge | promote
PARENT = "mlflow.parentRunId"  # MLflow's own: shows a run below another
VARIANT = "variant"  # "awq-4bit-g128"
BASE_MODEL = "base_model"
VERDICT = "verdict"
FINGERPRINT = "fingerprint"
EVALUATION = "evaluation"  # id of what was asked and how: only runs that share it may be compared
ITEMS = "items/n"  # metric: items with a prediction, pooled in the headline
CHECKPOINT = "checkpoint"
CHECKPOINT_SHA256 = "checkpoint_sha256"  # of method, settings and weight files: tells apart variants of one name
BASE_WEIGHTS = "base_weights"  # SHA-256 of the baseline's weight files: folders of one name may hold several models
WEIGHTS = "weights"  # of a logged model: "logged" with it, or by "reference" to a folder
METHOD = "method"
BASELINE_RUN = "baseline_run_id"  # of an evaluate run: which baseline evaluation it was held against
ERROR = "error"
SKIPPED = "skipped"  # what was left out, and why
TRUNCATED = "items/truncated_prompts"  # metric of an evaluation: prompts of which the model read the end only
FAILED_STAGE = "failed_stage"  # of a main run that shows what the other stages found

# Artifact folders and files of the stages' runs.
RECORDS, NOISE = "records", "noise"
PARAMETERS = "parameters.json"  # of a main run: what `resume` goes on with

_SIZES = ("size/ratio", "size/bits_per_weight")


def leaderboard() -> tuple[str, ...]:
    """Return the metrics that a person should read first, in their order: those that declare it, then the sizes."""
    return (*(key.name for key in leaderboard_keys()), *_SIZES)


def logged_by_task() -> frozenset[str]:
    """Return the metrics that the evaluate run has for every task; those of other metrics are in metrics.json."""
    return frozenset(name for name, key in all_keys().items() if key.by_task)
