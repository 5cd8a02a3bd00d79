"""The tracking store of version 1.0, frozen: `python -m tests.golden.frozen_store` makes one of the present version.

It holds a sweep of two variants of the demo with a judge's grades, a decision, and a receipt. Every later version must
report, decide, compare and verify on it (`test_frozen_store.py`). It is never made again once 1.0.0 is tagged: a version
that changes a format adds a store of its own next to it.
"""

import json
import os
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import mlflow
import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[2]
FROZEN = Path(__file__).with_name("store-1.0.tar.xz")
EXPECTED = "expected.json"
RECEIPT = "receipt.zip"
# Where MLflow's tables hold whole paths
PATHS = (
    ("runs", "artifact_uri"),
    ("experiments", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
    ("logged_models", "artifact_location"),
)


def moved(database: Path, before: str, after: str) -> None:
    """Let a store that was made in one folder be found in another."""
    with closing(sqlite3.connect(database)) as connection, connection:
        for table, column in PATHS:
            connection.execute(f"UPDATE {table} SET {column} = replace({column}, ?, ?)", [before, after])


def unpacked(folder: Path) -> dict[str, Any]:
    """Unpack the frozen store into a folder, and return what its own version had found in it."""
    with tarfile.open(FROZEN) as archive:
        archive.extractall(folder, filter="data")
    expected: dict[str, Any] = json.loads((folder / EXPECTED).read_text())
    moved(folder / "mlflow.db", expected["folder"], str(folder))
    made_by, present = (Version(text).release[:2] for text in (expected["mlflow"], mlflow.__version__))
    if made_by > present:
        pytest.skip(f"made by MLflow {expected['mlflow']}, and an older one does not read its tables")
    if made_by < present:  # as a user who has updated MLflow does
        store = f"sqlite:///{folder / 'mlflow.db'}"
        subprocess.run([sys.executable, "-m", "mlflow", "db", "upgrade", store], check=True)
    return expected


def found_in(swept: str, runs: list[str]) -> dict[str, Any]:
    """Return what this version finds in the store of the working folder."""
    import mlflow_compress as mc

    decided = mc.promote(dry_run=True, max_kl=1, max_kl_outliers_pct=100, max_flips_pct=100, max_accuracy_drop_pct=100)
    return {
        "report": mc.report(swept, output="page.html").board.to_dict(),
        "champion": decided.champion,
        "history": mc.history().to_dict(),
        "compared": mc.compare(*runs).to_dict(),
        "receipt": mc.verify(RECEIPT, recompute=True).to_dict(),
        "metrics": dict(mc.load(runs[0]).metrics),
    }


def make(folder: Path) -> None:
    """Make the store in the working folder, with a judge that always gives the same grades."""
    import mlflow_compress as mc
    from mlflow_compress.demo import DATA_DIR
    from tests.judge_server import judge_server

    with judge_server(lambda number, body: "Good. Rating: [[7]]") as server:
        swept = mc.sweep(
            methods="rtn",
            bits="8,3",
            tasks=str(DATA_DIR / "choice.jsonl"),
            limit=3,
            task_args={"noise_items": 4},
            answer_args={"instruction_limit": 1, "num_samples": 2, "max_new_tokens": 8},
            judge_args={"base_url": server.base_url},
            speed=False,
            log_weights="false",
            output_dir="checkpoints",
        )
    mc.promote(max_kl=1, max_kl_outliers_pct=100, max_flips_pct=100, max_accuracy_drop_pct=100)
    runs = mlflow.search_runs(search_all_experiments=True, filter_string="tags.stage = 'main'").run_id.tolist()
    mc.export(runs[0], output=RECEIPT)
    found = found_in(swept.run.run_id, runs)
    arguments = {"folder": str(folder), "mlflow": mlflow.__version__, "swept": swept.run.run_id, "runs": runs}
    Path(EXPECTED).write_text(json.dumps({**arguments, "found": found}, indent=1, sort_keys=True))


def _kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out what no command reads of a finished run, or what only another evaluation of the model would."""
    return None if "/states" in entry.name or entry.name.endswith((".png", ".html")) else entry


def main() -> None:
    if sys.argv[1:]:
        return make(Path(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OPENAI_API_KEY": "none", "PYTHONPATH": str(ROOT)}
        environment["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
        command = [sys.executable, "-m", "tests.golden.frozen_store", folder]
        subprocess.run(command, cwd=folder, env=environment, check=True)
        with closing(sqlite3.connect(f"{folder}/mlflow.db")) as connection:
            connection.execute("VACUUM")
        with tarfile.open(FROZEN, "w:xz") as archive:
            for name in (EXPECTED, RECEIPT, "mlflow.db", "mlruns"):
                archive.add(f"{folder}/{name}", name, filter=_kept)


if __name__ == "__main__":
    main()
