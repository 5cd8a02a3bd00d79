"""Seconds to score every item of the demo: once while states are captured, once against the stored baseline.

    python benchmarks/demo_scoring.py

To compare two commits, run it in two checkouts in turn, with `PYTHONPATH` set to each, and take the medians.
"""

import json
import tempfile
import time
from pathlib import Path

from mlflow_compress import demo
from mlflow_compress.items.suite import load_suite
from mlflow_compress.items.task import TaskSettings
from mlflow_compress.models.loading import LoadConfig, load_model
from mlflow_compress.scoring.baseline_store import StateStore, StateWriter
from mlflow_compress.scoring.engine import Scorer, ScoringConfig

ROUNDS = 2

if __name__ == "__main__":
    requests = load_suite("demo", model="demo", settings=TaskSettings()).requests
    model = load_model(LoadConfig(path=str(demo.MODEL_DIR), device="cpu", dtype="float32"))
    seconds: dict[str, list[float]] = {"capture": [], "compare": []}
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as scratch:
            states = Path(scratch) / "states"
            begun = time.perf_counter()
            with StateWriter(states, model) as writer:
                Scorer(model, ScoringConfig()).score(requests, capture=writer)
            captured = time.perf_counter()
            Scorer(model, ScoringConfig()).score(requests, baseline=StateStore.open(states, baseline=model))
            seconds["capture"].append(round(captured - begun, 2))
            seconds["compare"].append(round(time.perf_counter() - captured, 2))
    print(json.dumps(seconds))
