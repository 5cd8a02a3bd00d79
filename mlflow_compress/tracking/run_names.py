"""Names of run tags, artifacts and leading metrics, by which runs are searched."""

from collections.abc import Mapping

from mlflow_compress.metrics.core.metric_registry import all_keys, headline_keys, leaderboard_keys

STAGE = "stage"  # baseline | main | quantize | evaluate | judge | diagnose | promote | rollback | gate | sweep ...
PARENT = "mlflow.parentRunId"  # MLflow's own tag: shows a run below its parent
VARIANT = "variant"  # "awq-4bit-g128"
BASE_MODEL = "base_model"
VERDICT = "verdict"
FINGERPRINT = "fingerprint"
EVALUATION = "evaluation"  # evaluation id: only runs with the same id may be compared
ORDERED_BY = "distance/kl_mean"  # metric by which runs are ordered
N_ITEMS = "items/n"  # metric: items with a prediction, pooled in the headline

CHECKPOINT = "checkpoint"
CHECKPOINT_SHA256 = "checkpoint_sha256"  # of method, settings and weight files; distinguishes variants of the same name
BASE_WEIGHTS = "base_weights"  # SHA-256 of the baseline's weight files; several models may have the same name
WEIGHTS_KEPT = "weights"  # of a logged model: "logged" (stored with it), "reference" (to a folder) or "served" (none)
EVALUATE_RUN = "evaluate_run_id"  # of a served variant's model: the run that has measured it
SERVED_TAGS = ("served_model", "endpoint", "server", EVALUATE_RUN)  # of a served variant's main run, model and version

METHOD = "method"
SERVED_BY = "served_by"  # of a main run: targets that take its checkpoint, or "none"; not there where nobody knows
BASELINE_RUN = "baseline_run_id"  # of an evaluate run: the run of its baseline
BASELINE_GREEDY_RUN = "baseline_greedy_run_id"  # of a judge run: the run with the baseline's greedy answers
RUN_ERROR = "error"
POINTS_AT = "points_at"  # of a run that `mlflow run` made in another experiment: the run with the results
PROCESS = "process"  # of a run that is open: who writes to it, see `live_processes`
SCORED_BEFORE = "scored_before"  # of an evaluation on more items: the run that has scored the first of them
SKIPPED = "skipped"  # what was left out, and why
PROCESSOR = "speed/processor_seconds"  # metric of a stage's run
TRUNCATED = "items/truncated_prompts"  # metric of an evaluation: prompts that were too long and lost their beginning

DECISION = "decision"  # of a registered version: the run that gave it an alias
POLICY = "policy"  # of a decision: SHA-256 of the policy
ALIAS, REGISTERED_MODEL = "alias", "registered_model"  # of a decision: what it is about
APPROVAL = "approval"  # of a registered version: "waiting: ALIAS", or who has approved it
APPROVED_BY = "approved_by"  # of a decision and its approval
RECEIPT = "receipt"  # of an evaluate run, a decision and a version: SHA-256 of the receipt that was exported last
WAIVER = "waiver"  # of a decision that needed it: the waiver in one sentence
DELIVERY = "delivery"  # of a decision that a webhook has asked for: MLflow's id of the delivery
MOVED_FROM, MOVED_TO = "moved_from", "moved_to"  # of a decision that moved the alias: versions

VARIANT_KEY = "variant_key"  # of a main run: hash of checkpoint, evaluation and judge, by which a sweep finds it
EVALUATED_KEY, JUDGED_KEY, TIMED_KEY = "evaluated_key", "judged_key", "timed_key"  # the same in parts, by stage
ON_LEADERBOARD = "leaderboard"  # of a main run: "shown", or which run has its results and more
SWEEP_RUN = "sweep_run_id"  # of a main run: the sweep or search that made it. Not nested: MLflow's list shows variants.
ASKED = "asked"  # of a main run: hash of all that decides it but judge and speed, by which the same command finds it
REPLICATE_OF = "replicate_of"  # of a main run: name of the checkpoint's folder that it made with other samples
SWEEP_KEY = "sweep_key"  # of a sweep: hash of its variants' keys, by which the same command goes on
FAILED_STAGE = "failed_stage"  # of a main run that shows the results of the other stages

# Parameters of a main run: whether it is worse than its baseline (or how many items would tell), and changed answers.
# MLflow's page of several runs opens on the first three parameters that differ, by name, and on the first metric.
DEFAULT_POLICY = "default_policy"

# Artifact folders and files of the stages' runs.
RECORDS, NOISE_RECORDS = "records", "noise"
ENGINE_RECORDS = "engine"  # of a baseline that another engine ran: records of its checkpoint under transformers
EMBEDDING_FILES = "embeddings"  # of a judge run: vectors of the answers of "baseline", "again" and "variant"
BASELINE_GRADES = "baseline_grades"  # of a judge run: what its judges say of the baseline's answers
HIDDEN = "answers_hidden"  # tag of a judge run on logged conversations whose texts no report shows
ANSWERS_PAGE = "answers"  # of a judge run: both models' answers side by side, as page and as JSONL
FACTS = "endpoint.json"  # of a run that has asked a served model: what its server can, and who it is
ACCOUNT = "account.json"  # of an evaluate run: what was asked, what became of it, and under what conditions
PARAMETERS = "parameters.json"  # of a main run: the parameters that `resume` reads

_SIZES = ("size/ratio", "size/bits_per_weight")
_CACHE = ("size/cache_bytes_per_token", "size/cache_ratio")
_MORE = ("size/bytes", "size/sparsity")
_GATE = "gate/"


def leaderboard() -> tuple[str, ...]:
    """Return the leaderboard's metrics in order: those that declare a place in it, then the sizes."""
    return (*(key.name for key in leaderboard_keys()), *_SIZES)


def on_main_run(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values that a variant's main run shows. All others are on the runs of its stages.

    MLflow's page of two runs opens on the metric that was logged first, so KL and size go before the leaderboard's
    others. The rest is the headline table, what gates read, and what the sizes mean; of a cache, where it differs.
    """
    headline = [key.name for key in headline_keys() if key.on_main_run]
    # What gates read, and the values that those ends of intervals are of.
    gates = [name for name in values if name.startswith(_GATE)]
    gates += [
        name
        for name, declared in all_keys().items()
        if declared.gate is not None and declared.gate.name in values and declared.unit != "items"
    ]
    cache = _CACHE if values.get("size/cache_ratio", 1.0) != 1.0 else ()
    ordered = dict.fromkeys([ORDERED_BY, *_SIZES, *leaderboard(), *headline, *_MORE, *cache, *gates])
    return {name: values[name] for name in ordered if name in values}


def logged_by_task() -> frozenset[str]:
    """Return the metrics that are logged per task. For other metrics, values per task are in metrics.json only."""
    return frozenset(name for name, key in all_keys().items() if key.by_task)
