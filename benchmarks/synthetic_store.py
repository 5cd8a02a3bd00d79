"""A synthetic store of finished main runs, for benchmarks of what reads many variants."""

import hashlib
import tempfile
import time
from pathlib import Path

from mlflow.entities import LoggedModelOutput, Metric, RunTag

from mlflow_compress.commands.shared.stored import METRICS_FILE, METRICS_FORMAT
from mlflow_compress.records import RunRecords
from mlflow_compress.tracking.run_names import RECORDS
from mlflow_compress.tracking.tracker import Tracker


def results(tasks: int) -> list[dict[str, object]]:
    """Return the results of one evaluation: 60 metrics, pooled and by task."""
    names = [
        "distance/flips_pct",
        "distance/all_flips_pct",
        "quality/accuracy_delta",
        *(f"quality/metric{i}" for i in range(57)),
    ]
    places = [None, *(f"task{i}" for i in range(tasks))]
    common = {"value": 1.0, "low": 0.5, "high": 2.0, "level": 0.95, "n": 1000, "n_unscored": 0, "category": None}
    common["p"] = None
    return [{"name": name, "task": task, **common} for name in names for task in places]


def log_records(tracker: Tracker, run_id: str, records: RunRecords) -> None:
    """Log records as the stages do."""
    with tempfile.TemporaryDirectory() as folder:
        records.write(Path(folder))
        tracker.client.log_artifacts(run_id, folder, RECORDS)


def make_baseline(tracker: Tracker, records: RunRecords | None, model: str = "llama") -> str:
    """Make the run of the baseline that all variants of a model share, and return its id."""
    run = tracker.client.create_run(tracker.experiment_id, tags={"base_model": model, "stage": "baseline"})
    if records is not None:
        log_records(tracker, run.info.run_id, records)
    tracker.client.set_terminated(run.info.run_id)
    return str(run.info.run_id)


def make_variant(
    tracker: Tracker,
    number: int,
    *,
    variants: int,
    tasks: int,
    model: str = "llama",
    baseline: str | None = None,
    records: RunRecords | None = None,
) -> str:
    """Make the finished main run of one variant, with its evaluate run, and return its id.

    With `records` and the run of the `baseline`, `compare` and `report` can read it too.
    """
    client, experiment, now = tracker.client, tracker.experiment_id, int(time.time() * 1000)
    weights = hashlib.sha256(model.encode()).hexdigest()
    tags = {
        "base_model": model,
        "variant": f"rtn-{number:03d}",
        "method": "rtn",
        "evaluation": weights[:16],
        "base_weights": weights,
        "checkpoint_sha256": f"{number:064x}",
        "verdict": f"rtn-{number:03d} is not worse",
        **({"baseline_run_id": baseline} if baseline else {}),
    }
    kl, size = 0.001 + number * 1e-5, 1e6 + 1000 * ((number * 37) % variants)
    values = {
        "size/bytes": size, "size/ratio": 1e7 / size, "distance/kl_mean": kl, "distance/flips_pct": 1.0,
        "gate/kl_items": 1000, "gate/kl_clipped_upper": kl * 1.1, "gate/kl_above_clip_pct_upper": 0.4,
        "distance/kl_clipped_mean": kl, "distance/kl_above_clip_pct": 0.0, "gate/flips_pct_upper": 2.0,
        "gate/accuracy_drop_pct_upper": 1.0, "quality/accuracy_delta": 0.0, "items/n": 1000, "items/unscored_pct": 0.0,
        "items/cut_pct": 0.0,
        **{f"quality/metric{i}": float(i) for i in range(20)},
    }  # fmt: skip
    run = client.create_run(experiment, run_name=tags["variant"])
    client.log_batch(
        run.info.run_id,
        metrics=[Metric(name, value, now, 0) for name, value in values.items()],
        tags=[RunTag(name, value) for name, value in {**tags, "stage": "main"}.items()],
    )
    logged = client.create_logged_model(experiment, name=tags["variant"], source_run_id=run.info.run_id, tags=tags)
    client.log_outputs(run.info.run_id, [LoggedModelOutput(logged.model_id, step=0)])
    client.set_terminated(run.info.run_id)
    below = {**tags, "stage": "evaluate", "mlflow.parentRunId": run.info.run_id}
    child = client.create_run(experiment, tags=below)
    client.log_dict(child.info.run_id, {"format": METRICS_FORMAT, "results": results(tasks)}, METRICS_FILE)
    if records is not None:
        log_records(tracker, child.info.run_id, records)
    client.set_terminated(child.info.run_id)
    return str(run.info.run_id)
