"""`report` on real runs of the demo: a sweep's run, main runs, every format, and what is refused."""

import json
from pathlib import Path

import pytest

import mlflow_compress as mc
from mlflow_compress.cli import main
from mlflow_compress.tracking.tracker import Tracker
from tests.browser import browser, chromium

TINY = {"limit": 2, "num_shuffles": 0, "task_args": {"noise_items": 2}, "judge": False}


@pytest.mark.slow
def test_a_sweep_and_its_runs_make_the_same_page(
    tracker: Tracker, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = mc.sweep(methods="rtn", bits="8,3,5", **TINY).run.run_id
    rows = tracker.fetch_json(sweep, "scoreboard.json")["rows"]
    first, second = [row["run_id"] for row in rows if row["run_id"]]

    # The sweep's run holds its page; the command makes it again, with the combination that has no run.
    held = (tracker.fetch(sweep, "report.html")).read_text(encoding="utf-8")
    found = mc.report(sweep, output="sweep.html")
    assert found.path == workdir / "sweep.html" and found.path.read_text(encoding="utf-8") == held
    assert [row.status for row in found.board.rows] == ["finished", "finished", "unsupported"]
    assert "rtn bits=5" in held and "does not support these bits" in held

    # Main runs, on the command line, in every format.
    assert main(["report", first, second, "-o", "two.html"]) == 0
    assert "Report: " in capsys.readouterr().out.splitlines()[-1]
    assert main(["report", first, second, "-o", "two.md"]) == 0
    lines = Path("two.md").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("**Ship ") and sum(line.startswith("| rtn-") for line in lines) >= 2
    assert main(["report", first, second, "-o", "two.csv"]) == 0
    assert Path("two.csv").read_text(encoding="utf-8").startswith("variant,method,")
    assert main(["report", f"--runs={first},{second}", "--output", "two.txt", "--format", "json"]) == 0
    values = json.loads(Path("two.txt").read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in values["scoreboard"]["rows"]}
    kl = {name: row["cells"]["distance/kl_mean"]["value"] for name, row in rows.items()}
    assert kl == {row.name: row.cells["distance/kl_mean"].value for row in found.board.finished}
    assert values["setup"]["limit"] == "2" and values["setup"]["torch"]

    # Nothing but the files was written: no run was made.
    assert tracker.find("report") == []

    # What the page counts as changed answers is what each run's own table holds.
    changed = {
        row["name"]: len(tracker.fetch_json(tracker.child_ids(row["run_id"])["evaluate"], "flips.json"))
        for row in rows.values()
    }
    together = values["shared_changes"]["together"]
    own = {name: together[i][i] for i, name in enumerate(values["shared_changes"]["variants"])}
    assert own == changed and sum(changed.values()) > 0

    # A run that was evaluated on other items is refused, and the reason is the setting that differs.
    other = mc.sweep(methods="rtn", bits="8", **{**TINY, "limit": 1})
    assert main(["report", first, other.run.run_id, "-o", "unlike.html"]) == 2
    assert "limit is 2 and 1" in capsys.readouterr().err and not Path("unlike.html").exists()

    # A run that is no variant is refused too.
    assert main(["report", tracker.child_ids(first)["evaluate"], "-o", "stage.html"]) == 2
    assert "neither a main run nor a sweep" in capsys.readouterr().err

    if chromium() is not None:
        with browser() as tab:
            tab.show(f"{(workdir / 'sweep.html').as_uri()}#flips")  # of every variant
            tab.ready()
            assert tab.run("document.querySelectorAll('#flip-list article').length") > 0
            assert tab.errors == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "No run to report on"),
        (["0" * 32], "no such run"),
        (["RUN", "-o", "report.pdf"], "does not show its format"),
        (["RUN", "-o", "nowhere/report.html"], "folder of the report does not exist"),
        (["0" * 32, "--format", "pdf"], "Parameter 'format'"),
    ],
)
def test_what_cannot_be_reported_on(
    workdir: Path, tracker: Tracker, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with tracker.run("any", "main", {}) as run:
        pass
    assert main(["report", *(run.run_id if one == "RUN" else one for one in arguments)]) in (1, 2)
    assert message in capsys.readouterr().err
    assert not list(workdir.glob("*.html"))
