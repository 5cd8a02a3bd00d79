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
from synthetic_store import make_variant

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


with tempfile.TemporaryDirectory() as folder:
    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    import mlflow_compress as mc
    from mlflow_compress.tracking.tracker import Tracker

    tracker = Tracker()
    began = time.monotonic()
    for number in range(asked.variants):
        make_variant(tracker, number, variants=asked.variants, tasks=asked.tasks)
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
        from mlflow_compress.tracking.model_registry import create_model, register_version

        [group], _ = evaluations(tracker, "llama")
        began = time.monotonic()
        create_model(tracker, "old", "1" * 64)
        for variant in group.variants:
            tracker.client.search_model_versions(f"run_id = '{variant.run.info.run_id}'")
            register_version(tracker, "old", variant.run)
        print(json.dumps({"what": "registering every variant", "seconds": round(time.monotonic() - began, 2)}))
