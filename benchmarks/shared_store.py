"""Seconds of what people ask of a shared store of many models, on SQLite and PostgreSQL.

python benchmarks/shared_store.py [--models 50] [--variants 2000] [--store sqlite|postgresql]

The store holds finished main runs with their evaluate runs, of which those of the first model
have records. Imports are not in it. Every line has the seconds, the processor seconds of this process, and the requests
to the store (statements of its database).
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import mlflow
from local_servers import postgres
from page_records import run_records
from sqlalchemy import event
from sqlalchemy.engine import Engine
from synthetic_store import make_baseline, make_variant

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--models", type=int, default=50)
parser.add_argument("--variants", type=int, default=2000)
parser.add_argument("--tasks", type=int, default=20, help="tasks in the results of every evaluation")
parser.add_argument("--store", choices=["sqlite", "postgresql"], default="sqlite")
asked = parser.parse_args()

statements: list[str] = []
event.listen(Engine, "before_cursor_execute", lambda _c, _cursor, statement, *_: statements.append(statement))


@contextmanager
def database(folder: str) -> Iterator[str]:
    """Yield the address of an empty database."""
    with postgres() if asked.store == "postgresql" else nullcontext(f"sqlite:///{folder}/mlflow.db") as uri:
        yield uri


with tempfile.TemporaryDirectory() as folder, database(folder) as uri:
    mlflow.set_tracking_uri(uri)
    mlflow.create_experiment("mlflow-compress", artifact_location=Path(folder, "artifacts").as_uri())
    import mlflow_compress as mc
    import mlflow_compress.commands.compare.run
    import mlflow_compress.commands.gc.result
    import mlflow_compress.commands.promote.run
    import mlflow_compress.commands.report.run
    import mlflow_compress.tracking.retention
    from mlflow_compress.tracking.tracker import Tracker
    from mlflow_compress.tracking.views import save_leaderboard

    tracker = Tracker()
    began = time.monotonic()
    each = asked.variants // asked.models
    shared, records = run_records(400, each)
    made: list[str] = []
    for number in range(asked.models):
        first, model = number == 0, f"llama-{number}"
        common = {"variants": each, "tasks": asked.tasks, "model": model}
        common["baseline"] = make_baseline(tracker, shared if first else None, model)
        for variant, own in enumerate(records):
            run = make_variant(tracker, variant, **common, records=own if first else None)
            made += [run] if first else []
    print(f"{asked.variants} variants of {asked.models} models made in {time.monotonic() - began:.0f} s", flush=True)
    page = Path(folder) / "report.html"
    for what, work in {
        "leaderboard": lambda: save_leaderboard(tracker, made[-1]),
        "promote, dry run": lambda: mc.promote(model="llama-0", dry_run=True),
        "promote": lambda: mc.promote(model="llama-0"),
        "promote, again": lambda: mc.promote(model="llama-0"),
        "history": lambda: mc.history(model="llama-0"),
        "compare two": lambda: mc.compare(made[0], made[-1]),
        "report on two": lambda: mc.report(made[0], made[-1], output=page),
        "gc, dry run": lambda: mc.gc(older_than=0, base_model="llama-1"),
        "report on a model": lambda: mc.report(*made, output=page),
    }.items():
        statements.clear()
        began, used = time.monotonic(), time.process_time()
        work()
        seconds = {"seconds": time.monotonic() - began, "processor seconds": time.process_time() - used}
        figures = {name: round(value, 2) for name, value in seconds.items()}
        print(json.dumps({"what": what, **figures, "statements": len(statements)}), flush=True)
