"""Names that other runs and people search by: run tags and the metrics that head every table."""

from __future__ import annotations

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

# The order in which a person should read them; metrics that a run does not have are left out.
HEADLINE = (
    "distance/flips_pct",
    "distance/kl_mean",
    "distance/all_flips_pct",
    "quality/accuracy",
    "quality/accuracy_delta",
    "quality/perplexity",
    "robustness/shuffle_drop_pct",
    "uncertainty/uacc",
    "uncertainty/set_size",
    "judge/similarity",
    "judge/mt_bench",
    "size/ratio",
    "size/bits_per_weight",
)

# What a task's own rows are logged for on the evaluate run; everything else by task and category is in metrics.json.
BY_TASK = (
    "quality/accuracy",
    "quality/accuracy_delta",
    "distance/flips_pct",
    "distance/all_flips_pct",
    "distance/kl_mean",
)
