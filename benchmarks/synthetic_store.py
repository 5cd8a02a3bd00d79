"""A synthetic store of finished main runs, for benchmarks of what reads many variants."""

import time

from mlflow.entities import LoggedModelOutput, Metric, RunTag

from mlflow_compress.tracking.tracker import Tracker


def results(tasks: int) -> list[dict[str, object]]:
    """Return the results of one evaluation: 60 metrics, pooled and by task."""
    names = ["distance/flips_pct", "distance/all_flips_pct", *(f"quality/metric{i}" for i in range(58))]
    places = [None, *(f"task{i}" for i in range(tasks))]
    common = {"value": 1.0, "low": 0.5, "high": 2.0, "level": 0.95, "n": 1000, "n_unscored": 0, "category": None}
    return [{"name": name, "task": task, **common} for name in names for task in places]


def make_variant(tracker: Tracker, number: int, *, variants: int, tasks: int) -> str:
    """Make the finished main run of one variant, with its evaluate run, and return its id."""
    client, experiment, now = tracker.client, tracker.experiment_id, int(time.time() * 1000)
    tags = {
        "base_model": "llama",
        "variant": f"rtn-{number:03d}",
        "method": "rtn",
        "evaluation": "a" * 16,
        "base_weights": "1" * 64,
        "checkpoint_sha256": f"{number:064x}",
    }
    kl, size = 0.001 + number * 1e-5, 1e6 + 1000 * ((number * 37) % variants)
    values = {
        "size/bytes": size, "size/ratio": 1e7 / size, "distance/kl_mean": kl, "distance/flips_pct": 1.0,
        "gate/kl_items": 1000, "gate/kl_upper": kl * 1.1, "gate/flips_pct_upper": 2.0,
        "gate/accuracy_drop_pct_upper": 1.0, "items/n": 1000, "items/unscored_pct": 0.0, "items/cut_pct": 0.0,
        **{f"quality/metric{i}": float(i) for i in range(20)},
    }  # fmt: skip
    run = client.create_run(experiment, run_name=tags["variant"])
    client.log_batch(
        run.info.run_id,
        metrics=[Metric(name, value, now, 0) for name, value in values.items()],
        tags=[RunTag(name, value) for name, value in {**tags, "stage": "main"}.items()],
    )
    model = client.create_logged_model(experiment, name=tags["variant"], source_run_id=run.info.run_id, tags=tags)
    client.log_outputs(run.info.run_id, [LoggedModelOutput(model.model_id, step=0)])
    client.set_terminated(run.info.run_id)
    below = {**tags, "stage": "evaluate", "mlflow.parentRunId": run.info.run_id}
    child = client.create_run(experiment, tags=below)
    client.log_dict(child.info.run_id, results(tasks), "metrics.json")
    client.set_terminated(child.info.run_id)
    return str(run.info.run_id)
