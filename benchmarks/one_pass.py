"""What answer shuffles and divergences cost on top of accuracy.

MMLU five-shot alone, against the same with two shuffles of every question and all divergences from a stored baseline in
the same pass.

Example
-------
python benchmarks/one_pass.py --data HUB_FOLDER --work /tmp/benchmark
"""

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from against_harness import SUBJECTS
from setting import machine, make_model, make_variant, parser

from mlflow_compress.items.task import FAMILIES, Task, TaskSettings
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.scoring.baseline_store import StateStore, StateWriter
from mlflow_compress.scoring.engine import Scorer, ScoringConfig

QUIET = ScoringConfig(progress=False)


def mmlu(data: Path, *, shuffles: int, items: int = 50) -> Task:
    """Return the lettered task of four subjects, so many items each, five shots."""
    rows: list[dict[str, Any]] = []
    for subject in SUBJECTS:
        for split, limit in (("dev", 5), ("test", items)):
            lines = (data / "cais/mmlu" / subject / f"{split}.jsonl").read_text(encoding="utf-8").split("\n")
            for number, line in enumerate(lines[:limit]):
                fields = {"id": f"{subject}-{split}-{number}", "category": subject, "split": split}
                rows.append({**json.loads(line), **fields})
    return FAMILIES.get("lettered").build("mmlu", rows, TaskSettings(num_fewshot=5, num_shuffles=shuffles))[0]


def seconds(loaded: LoadedModel, task: Task, baseline: StateStore | None) -> float:
    """Return the seconds of one pass."""
    scorer = Scorer(loaded, QUIET)
    began = time.perf_counter()
    scorer.score(task.requests, baseline=baseline)
    return time.perf_counter() - began


def main() -> None:
    """Time both in turn, and print one JSON line."""
    given = parser(str(__doc__)).parse_args()
    baseline = make_model(given.work / "llama", given.data)
    variant = load_model(LoadConfig(path=str(make_variant(given.work / "variant", baseline)), device="cpu"))
    plain, shuffled = mmlu(given.data, shuffles=0), mmlu(given.data, shuffles=2)
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_model(LoadConfig(path=str(baseline), device="cpu"))
        with StateWriter(Path(folder) / "store", loaded) as writer:
            Scorer(loaded, QUIET).score(shuffled.requests, capture=writer)
        del loaded
        store = StateStore.open(Path(folder) / "store")
        seconds(variant, plain, None)
        pairs = [(seconds(variant, shuffled, store), seconds(variant, plain, None)) for _ in range(given.runs)]
    result = {
        "benchmark": "one_pass",
        "machine": machine(),
        "accuracy_alone_seconds": round(statistics.median(b for _, b in pairs), 2),
        "with_shuffles_and_kl_seconds": round(statistics.median(a for a, _ in pairs), 2),
        "ratio": round(statistics.median(a / b for a, b in pairs), 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
