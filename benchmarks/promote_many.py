"""Seconds of `promote`, `compare`, `report`, `repr` and `history` in a synthetic store that many variants share.

python benchmarks/promote_many.py [--variants 200]

Every main run has the metrics and tags that a real one has, a logged model, and an evaluate run with the results of a
real comparison and records of 400 items. Imports are not in it: processor seconds of the work alone are printed too.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import mlflow
from page_records import run_records
from synthetic_store import make_baseline, make_variant

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--variants", type=int, default=200)
parser.add_argument("--tasks", type=int, default=20, help="tasks in the results of every evaluation")
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
    shared, records = run_records(400, asked.variants)
    common = {"variants": asked.variants, "tasks": asked.tasks, "baseline": make_baseline(tracker, shared)}
    made = [make_variant(tracker, number, **common, records=own) for number, own in enumerate(records)]
    print(f"{asked.variants} variants made in {time.monotonic() - began:.1f} s")
    file = Path(folder) / "policy.yaml"
    file.write_text(POLICY)
    timed = {"policy of tasks, dry run": {"policy": str(file), "dry_run": True}, "default policy": {}}
    for what, settings in {**timed, "default policy, again": {}, "policy of tasks": {"policy": str(file)}}.items():
        began = time.monotonic()
        found = mc.promote(model="llama", **settings)
        print(json.dumps({"what": what, "seconds": round(time.monotonic() - began, 2), "outcome": found.outcome}))
        assert sum(outcome.passed for outcome in found.decision.outcomes) == asked.variants
    import mlflow_compress.commands.compare.run
    import mlflow_compress.commands.report.run

    page = Path(folder) / "report.html"
    for what, work in {
        "compare two": lambda: mc.compare(made[0], made[-1]),
        "report on two": lambda: mc.report(made[0], made[-1], output=page),
        "report on all": lambda: mc.report(*made, output=page),
        "repr of the promotion": lambda: repr(found),
        "history": lambda: repr(mc.history(model="llama")),
    }.items():
        began, used = time.monotonic(), time.process_time()
        work()
        seconds = {"seconds": time.monotonic() - began, "processor seconds": time.process_time() - used}
        print(json.dumps({"what": what, **{name: round(value, 2) for name, value in seconds.items()}}))
