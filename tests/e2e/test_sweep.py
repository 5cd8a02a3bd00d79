"""Sweeps on the embedded demo, in real stores: failures, continuation, kills, and two at once."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import pytest

import mlflow_compress as mc
from mlflow_compress import cli
from mlflow_compress.records import RunRecords
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracker import Tracker

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
FEW = ["--limit=1", "--judge=false", "--task_args", "noise_items=5"]


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "mlflow_compress", "sweep", *FEW, *options]


def environment(folder: Path) -> dict[str, str]:
    values = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}", "PYTHONPATH": str(ROOT)}
    return {**os.environ, **values, "OMP_NUM_THREADS": "1"}


def tracker_of(folder: Path) -> Tracker:
    mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
    return Tracker()


def measured(board: dict[str, Any]) -> dict[str, Any]:
    """Return what a scoreboard says of the variants: everything but run ids, durations and speed."""
    rows = [
        {
            **{name: value for name, value in row.items() if name not in ("run_id", "cells")},
            "cells": {name: cell for name, cell in row["cells"].items() if not name.startswith(("seconds/", "speed/"))},
        }
        for row in board["rows"]
    ]
    return {**board, "rows": rows}


def board_of(tracker: Tracker, run_id: str) -> dict[str, Any]:
    return measured(tracker.fetch_json(run_id, "scoreboard.json"))


def sweeps(tracker: Tracker) -> list[Any]:
    runs = tracker.client.search_runs([tracker.experiment_id], filter_string="tags.stage = 'sweep'")
    return list(runs)


@pytest.mark.ci
def test_a_variant_that_fails_is_marked_and_the_same_command_goes_on(
    tracker: Tracker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Groups of 100 weights do not divide the demo's layers, which compression finds out."""
    (tmp_path / "grid.yaml").write_text("- {method: hqq, bits: [4, 5], group_size: [64, 100]}\n")
    arguments = ["sweep", *FEW, "--grid", str(tmp_path / "grid.yaml")]
    assert cli.main(arguments) == 1
    shown = capsys.readouterr()
    assert "1 of 2 variants failed: hqq-4bit-g100: Stage quantize failed: Group size 100 does not divide" in shown.err
    assert "[2/2] hqq-4bit-g100: " in shown.err and "Not made:\n- hqq bits=5 group_size=64" in shown.err
    assert "1 of 2 variants against demo" in shown.out
    assert max(len(line) for line in shown.out.splitlines() if "://" not in line and "/" not in line) <= 120
    *_, page = shown.out.rstrip().splitlines()
    assert shown.out.startswith("Ship none of them yet") and Path(page.removeprefix("Page:").strip()).is_file()

    [parent] = sweeps(tracker)
    assert parent.info.status == "FAILED"
    assert parent.data.tags[run_names.VERDICT] == parent.data.tags["mlflow.note.content"].splitlines()[0].rstrip(".")
    counts = {name.removeprefix("sweep/"): value for name, value in parent.data.metrics.items()}
    assert counts == {"variants": 2, "finished": 1, "found": 0, "failed": 1, "unsupported": 2, "warnings": 3}
    files = {file.path for file in tracker.client.list_artifacts(parent.info.run_id)}
    assert files >= {f"scoreboard.{kind}" for kind in ("json", "md", "csv")} | {
        "scoreboard_table.json",
        "figures",
        "report.html",
    }
    mains = tracker.find_finished("main")
    assert {run.data.tags[run_names.VARIANT] for run in mains} == {"hqq-4bit-g64"}
    assert {run.data.tags[run_names.SWEEP_RUN] for run in mains} == {parent.info.run_id}
    assert run_names.PARENT not in mains[0].data.tags  # MLflow's list shows variants, and no collapsed sweep
    assert set(tracker.children(mains[0].info.run_id)) == {"quantize", "evaluate", "speed"}
    first = board_of(tracker, parent.info.run_id)
    every = tracker.client.search_runs([tracker.experiment_id])
    assert {run.info.status for run in every} == {"FINISHED", "FAILED"}

    # The same command: the same run is opened again, and only what failed is tried again. Another policy chooses anew.
    (tmp_path / "policy.yaml").write_text("{kl: none, gates: [], margins: []}\n")
    assert cli.main([*arguments, "--policy", str(tmp_path / "policy.yaml")]) == 1
    shown = capsys.readouterr()
    assert "Ship hqq-4bit-g64: " in shown.out and "passes the policy policy.yaml." in shown.out
    assert "2 variants of demo, 1 of them finished" in shown.err and "finished, run" in shown.err
    [again] = sweeps(tracker)
    assert again.info.run_id == parent.info.run_id
    assert [run.info.run_id for run in tracker.find_finished("main")] == [run.info.run_id for run in mains]
    assert board_of(tracker, parent.info.run_id) == first
    assert len(tracker.fetch_json(parent.info.run_id, "scoreboard_table.json")["data"]) == 4


def test_a_variant_of_a_sweep_has_the_numbers_of_a_main_run(tracker: Tracker) -> None:
    """The stages in one process leave what they leave in processes of their own, bit for bit."""
    single = mc.run(method="gptq", bits=4, limit=1, task_args={"noise_items": 5}, judge=False)
    checkpoint = Path(single.checkpoint)
    weights = (checkpoint / "model.safetensors").read_bytes()
    for run in tracker.client.search_runs([tracker.experiment_id]):
        tracker.client.delete_run(run.info.run_id)
    checkpoint.rename(checkpoint.with_name("elsewhere"))

    assert cli.main(["sweep", *FEW, "--methods=rtn,gptq", "--bits=4"]) == 0
    [run] = tracker.find_finished("main", variant="gptq-4bit-g128")
    assert (checkpoint / "model.safetensors").read_bytes() == weights
    ours = tracker.client.get_run(single.run.run_id).data
    left = {name: value for name, value in ours.metrics.items() if not name.startswith("speed/")}
    right = {name: value for name, value in run.data.metrics.items() if not name.startswith("speed/")}
    assert left == right and ours.params == run.data.params
    without = {run_names.SWEEP_RUN, "mlflow.source.name", "mlflow.log-model.history", "mlflow.loggedArtifacts"}
    assert ours.tags.keys() - without == run.data.tags.keys() - without


# The command, which kills itself and its children so many calls and returns of functions after one of its messages.
KILLED = """
import os, signal, sys
from mlflow_compress import cli

class Messages:
    n = 0
    def write(self, text):
        self.n += text.count("\\n")
        if self.n >= int(sys.argv[1]):
            sys.setprofile(step)
        return stderr.write(text)
    def __getattr__(self, name):
        return getattr(stderr, name)

def step(*_, left=iter(range(int(sys.argv[2])))):
    if next(left, None) is None:
        os.killpg(0, signal.SIGKILL)

stderr, sys.stderr = sys.stderr, Messages()
sys.exit(cli.main(sys.argv[3:]))
"""


def killed(folder: Path, options: list[str], message: int, steps: int) -> bool:
    """Run a sweep that is killed so many steps after a message; return whether it was, or had ended before."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(message), str(steps), *command(*options)[3:]],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        start_new_session=True,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
    return done.returncode != 0


def test_killed_at_five_random_points_the_scoreboard_is_the_same(tmp_path: Path) -> None:
    options = ["--methods=rtn", "--bits=8,4,3"]
    boards = {}
    rng = random.Random(16)
    for name, kills in (("whole", 0), ("killed", 5)):
        folder = tmp_path / name
        folder.mkdir()
        # The plan has nine lines; then the baseline is evaluated, and every variant has five lines.
        hits = [killed(folder, options, 9 + rng.randrange(9), rng.randrange(1_000_000)) for _ in range(kills)]
        assert sum(hits) >= 3 or not kills
        done = subprocess.run(
            command(*options), cwd=folder, env=environment(folder), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        tracker = tracker_of(folder)
        boards[name] = board_of(tracker, tracker.find_finished("sweep")[0].info.run_id)
        below = [
            r
            for r in tracker.client.search_runs([tracker.experiment_id])
            if {run_names.PARENT, run_names.SWEEP_RUN} & set(r.data.tags)
        ]
        assert {r.info.status for r in below} <= {"FINISHED", "KILLED"}
        assert len(tracker.find_finished("main")) == 3
    assert boards["killed"] == boards["whole"]


def test_two_sweeps_at_once_lose_nothing(tmp_path: Path) -> None:
    """They share a variant: one of them makes it, and the other one finds it."""
    started = [
        subprocess.Popen(
            command("--methods=rtn", f"--bits={bits}"),
            cwd=tmp_path,
            env=environment(tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for bits in ("4,8", "4,3")
    ]
    for process in started:
        _, complaint = process.communicate()
        assert process.returncode == 0, complaint[-3000:]
    tracker = tracker_of(tmp_path)
    mains = tracker.find_finished("main")
    assert sorted(run.data.tags[run_names.VARIANT] for run in mains) == [
        "rtn-3bit-g128",
        "rtn-4bit-g128",
        "rtn-8bit-g128",
    ]
    assert len(tracker.find_finished("baseline")) == 1
    found = [board_of(tracker, run.info.run_id) for run in tracker.find_finished("sweep")]
    rows = {row["name"]: row["cells"] for board in found for row in board["rows"]}
    assert len(found) == 2 and all(len(board["rows"]) == 2 for board in found) and len(rows) == 3
    shared = [row for board in found for row in board["rows"] if row["name"] == "rtn-4bit-g128"]
    assert shared[0]["cells"] == shared[1]["cells"]
    assert {run.info.status for run in tracker.client.search_runs([tracker.experiment_id])} == {"FINISHED"}


def test_variants_of_a_sweep_are_compared_on_the_drawn_items_that_they_share(tracker: Tracker) -> None:
    def sweep() -> Any:
        return mc.sweep(
            methods="rtn", bits="8,3", items=120, num_shuffles=0, task_args={"noise_items": 5}, judge=False, speed=False
        )

    found = sweep()
    board = found.scoreboard
    assert board.drawn_from == 1620 and board.n_items == 120 and "120 items, drawn from 1,620" in found.finding
    [pair] = board.separations
    assert pair.kl is not None and 50 < pair.kl.n <= 120
    values = [row.cells["distance/kl_mean"].value for row in board.finished]
    assert pair.kl.value == pytest.approx(values[1] - values[0], rel=0.75)
    again = sweep()
    assert again.plan.to_do == () and [row.run_id for row in again.scoreboard.rows] == [r.run_id for r in board.rows]


def test_items_are_added_to_finished_variants_and_the_rest_stays(
    tracker: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What asks for more items is set by hand: 150 for one of two variants, which the pilot of 100 has decided."""
    asked = [{"rtn-8bit-g128": (150, "rtn-3bit-g128")}]
    monkeypatch.setattr(
        "mlflow_compress.commands.sweep.run.more_items", lambda board, policy: asked.pop() if asked else {}
    )
    wide = tmp_path / "wide.yaml"
    wide.write_text("kl: none\nmargins: []\ngates: [{metric: distance/flips_pct, at_most: 90}]\n")

    def sweep() -> Any:
        return mc.sweep(
            methods="rtn",
            bits="8,3",
            items="auto",
            policy=wide,
            num_shuffles=0,
            task_args={"noise_items": 5},
            judge=False,
            speed=False,
        )

    board = sweep().scoreboard
    rows = {row.name: row for row in board.finished}
    assert {name: row.cells["distance/flips_pct"].n for name, row in rows.items()} == {
        "rtn-8bit-g128": 150, "rtn-3bit-g128": 100
    }  # fmt: skip
    more = tracker.children(str(rows["rtn-8bit-g128"].run_id))
    assert more["evaluate"].data.params["items"].endswith("+150")
    first = tracker.run_of(more["evaluate"].data.tags[run_names.SCORED_BEFORE])
    keys = [
        set(RunRecords.read(tracker.fetch(run.info.run_id, "records")).items.key_rows())  # type: ignore[union-attr]
        for run in (first, more["evaluate"])
    ]
    assert keys[0] < keys[1]
    spent = rows["rtn-8bit-g128"].cells["seconds/evaluate"].value
    assert spent > more["evaluate"].data.metrics[run_names.PROCESSOR]  # both rounds count
    again = sweep()
    assert again.plan.to_do == () and [row.run_id for row in again.scoreboard.rows] == [r.run_id for r in board.rows]
