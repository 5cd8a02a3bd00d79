"""A judge that fails loses nothing: the evaluation is published, and the rest is done by resuming the run."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import mlflow
import pytest
from mlflow.entities import Run

from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracker import Tracker
from tests.judge_server import judge_server
from tests.task_files import sums, write_rows

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
KEY, PASSWORD = "sk-none-needed-123", "pass-w0rd-1234"
REFUSAL = 401, {"error": {"message": "no such key"}}
# Runs the command and tells which libraries the main process itself has imported by then.
COMMAND = """
import json, sys
from mlflow_compress.cli import main
code = main(sys.argv[1:])
print(json.dumps([name for name in ("torch", "transformers", "sentence_transformers", "lm_eval") if name in sys.modules]))
raise SystemExit(code)
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the main job in `folder` with a key for the judge."""
    store = f"sqlite:///{folder / 'mlflow.db'}"
    environment = {**os.environ, "MLFLOW_TRACKING_URI": store, "OPENAI_API_KEY": KEY, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", COMMAND, "main", *options]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def parent(tracker: Tracker) -> Run:
    """Return the one main run of the store."""
    [found] = [
        run
        for run in tracker.client.search_runs([tracker.experiment_id])
        if run.data.tags.get(run_names.STAGE) == "main"
    ]
    return found


@dataclass(frozen=True)
class Failed:
    """A main job whose judge stage failed, with its runs as they were before one of the tests resumes it."""

    folder: Path
    done: subprocess.CompletedProcess[str]
    tracker: Tracker
    main: Run
    children: dict[str, Run]


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Failed:
    """Run a small variant whose judge refuses every request; model paths and tasks are relative."""
    folder = tmp_path_factory.mktemp("judge")
    write_rows(folder / "choice.jsonl", sums(6))
    says = [{"question_id": i, "category": "c", "turns": [f"Say {i}"]} for i in range(2)]
    write_rows(folder / "say.jsonl", says)
    few = ["--answer_args", "num_samples=2,max_new_tokens=4,judge_max_tokens=4", "--judge_model", "j"]
    with judge_server(lambda number, body: REFUSAL) as server:
        asked = ["--method", "rtn", "--tasks", "choice.jsonl", "--instructions", "say.jsonl", *few]
        done = run(folder, *asked, "--judge_args", f"base_url={server.base_url.replace('//', f'//user:{PASSWORD}@')}")
        assert server.keys and all(key.startswith("Basic ") for key in server.keys)  # the stage got the password
    assert done.returncode == 1, done.stderr[-3000:]
    mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
    tracker = Tracker()
    main = parent(tracker)
    return Failed(folder, done, tracker, main, tracker.children(main.info.run_id))


def test_what_was_evaluated_is_published_and_the_run_says_what_failed(failed: Failed) -> None:
    done, main = failed.done, failed.main
    assert "Answers flipped" in done.stdout and f"--resume {main.info.run_id}" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [], "the main process imports what only stages need"
    sections = re.findall(r"(?m)^\[(check|\d/4|publish)\]", done.stderr)
    assert sections == ["check", "1/4", "2/4", "3/4", "4/4", "publish"]
    assert "Next:" not in done.stdout  # the error says what to do next
    assert "judge/" not in done.stdout and "items or tokens" not in done.stdout  # stages say one line each
    assert main.info.status == "FAILED" and main.data.tags[run_names.FAILED_STAGE] == "judge"
    assert "refused the key" in main.data.tags[run_names.RUN_ERROR]
    assert main.data.tags["mlflow.note.content"].startswith("**judge failed:**")
    assert "distance/kl_mean" in main.data.metrics and "judge/similarity" not in main.data.metrics
    assert run_names.EVALUATION in main.data.tags and run_names.BASELINE_RUN in main.data.tags
    assert main.data.metrics[run_names.N_ITEMS] == 6
    assert "auto" not in {value for name, value in main.data.params.items() if name != "judge_base_url"}
    assert main.data.params["device"] in ("cpu", "cuda")


def test_neither_key_nor_password_is_written(failed: Failed) -> None:
    folder, done = failed.folder, failed.done
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert (folder / "mlflow.db") in written
    for secret in (KEY, PASSWORD):
        assert secret not in done.stdout + done.stderr
        assert [path for path in written if secret.encode() in path.read_bytes()] == []
    assert failed.main.data.params["judge_base_url"].startswith("http://127.0.0.1:")


def test_resuming_runs_the_judge_alone_and_publishes_again(failed: Failed) -> None:
    tracker, main, children = failed.tracker, failed.main, failed.children
    with judge_server(lambda number, body: "Good. Rating: [[7]]", model="j") as server:
        done = run(failed.folder, "--resume", main.info.run_id, "--judge_args", f"base_url={server.base_url}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "[1/4] quantize: finished before" in done.stderr and "[2/4] evaluate: finished before" in done.stderr
    again = parent(tracker)
    assert "\nNext:          mlflow-compress promote --model demo\n" in done.stdout
    assert again.info.status == "FINISHED" and not {run_names.RUN_ERROR, run_names.FAILED_STAGE} & set(again.data.tags)
    assert again.data.metrics["judge/mt_bench"] == 7
    # What the judgments will take is said before the first call; what they took stands in the report, with the answers.
    assert "[judge] j: " in done.stderr and " calls: about " in done.stderr
    page = (tracker.fetch(again.info.run_id, "report") / "report.html").read_text(encoding="utf-8")
    assert "Judgments and their cost" in page and "all with a rating" in page
    assert page.count('<article class="pair">') == 2 and "grade 7 of 10" in page
    assert again.data.metrics["distance/kl_mean"] == main.data.metrics["distance/kl_mean"]
    now = tracker.children(main.info.run_id)
    assert {stage: now[stage].info.run_id for stage in ("quantize", "evaluate")} == {
        stage: children[stage].info.run_id for stage in ("quantize", "evaluate")
    }
    assert now["judge"].info.status == "FINISHED"
    running = [r for r in tracker.client.search_runs([tracker.experiment_id]) if r.info.status == "RUNNING"]
    assert running == []
