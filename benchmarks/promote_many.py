"""Seconds of `promote` over many variants, in a synthetic store of finished main runs.

python benchmarks/promote_many.py [--variants 200] [--old]

Every main run has the metrics and tags that a real one has, a logged model, and an evaluate run with the results of a
real comparison. `--old` also times registering every variant, as promotion did before.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import mlflow
from mlflow.entities import LoggedModelOutput, Metric, RunTag

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--variants", type=int, default=200)
parser.add_argument("--tasks", type=int, default=20, help="tasks in the results of every evaluation")
parser.add_argument("--old", action="store_true", help="register every variant too, as before")
asked = parser.parse_args()

POLICY = """
gates:
  - {metric: distance/flips_pct, at_most: 9, task: task3}
  - {metric: distance/all_flips_pct, at_most: 9}
margins:
  - {metric: quality/accuracy_delta, margin: 0.2}
require: {stages: [evaluate]}
"""


def results() -> list[dict[str, object]]:
    """Return the results of one evaluation: 60 metrics, pooled and by task."""
    names = ["distance/flips_pct", "distance/all_flips_pct", *(f"quality/metric{i}" for i in range(58))]
    places = [None, *(f"task{i}" for i in range(asked.tasks))]
    common = {"value": 1.0, "low": 0.5, "high": 2.0, "level": 0.95, "n": 1000, "n_unscored": 0, "category": None}
    return [{"name": name, "task": task, **common} for name in names for task in places]


def make(tracker: object, number: int) -> None:
    """Make the finished main run of one variant, with its evaluate run."""
    client, experiment, now = tracker.client, tracker.experiment_id, int(time.time() * 1000)  # type: ignore[attr-defined]
    tags = {
        "base_model": "llama",
        "variant": f"rtn-{number:03d}",
        "method": "rtn",
        "evaluation": "a" * 16,
        "base_weights": "1" * 64,
        "checkpoint_sha256": f"{number:064x}",
    }
    kl, size = 0.001 + number * 1e-5, 1e6 + 1000 * ((number * 37) % asked.variants)
    values = {
        "size/bytes": size, "size/ratio": 1e7 / size, "distance/kl_mean": kl, "distance/flips_pct": 1.0,
        "gate/kl_items": 1000, "gate/kl_upper": kl * 1.1, "gate/flips_pct_upper": 2.0,
        "gate/accuracy_drop_pct_upper": 1.0, "items/n": 1000,
        **{f"quality/metric{i}": float(i) for i in range(80)},
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
    client.log_dict(child.info.run_id, results(), "metrics.json")
    client.set_terminated(child.info.run_id)


with tempfile.TemporaryDirectory() as folder:
    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    import mlflow_compress as mc
    from mlflow_compress.tracking.tracker import Tracker

    tracker = Tracker()
    began = time.monotonic()
    for number in range(asked.variants):
        make(tracker, number)
    print(f"{asked.variants} variants made in {time.monotonic() - began:.1f} s")
    file = Path(folder) / "policy.yaml"
    file.write_text(POLICY)
    timed = {"policy of tasks, dry run": {"policy": str(file), "dry_run": True}, "default policy": {}}
    for what, settings in {**timed, "default policy, again": {}, "policy of tasks": {"policy": str(file)}}.items():
        began = time.monotonic()
        found = mc.promote(model="llama", **settings)
        print(json.dumps({"what": what, "seconds": round(time.monotonic() - began, 2), "outcome": found.outcome}))
        assert sum(outcome.passed for outcome in found.decision.outcomes) == asked.variants
    if asked.old:
        from mlflow_compress.tracking.evaluations import evaluations
        from mlflow_compress.tracking.logged_models.model_registry import create_model, register

        [group], _ = evaluations(tracker, "llama")
        began = time.monotonic()
        create_model(tracker, "old", "1" * 64)
        for variant in group.variants:
            tracker.client.search_model_versions(f"run_id = '{variant.run.info.run_id}'")
            register(tracker, "old", variant.run)
        print(json.dumps({"what": "registering every variant", "seconds": round(time.monotonic() - began, 2)}))
