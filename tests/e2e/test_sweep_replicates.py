"""Replicates of a sweep on the embedded demo: made again, found again, shown as luck, and counted by a policy."""

from pathlib import Path

import pytest

from mlflow_compress import cli
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracker import Tracker
from tests.e2e.test_sweep import FEW, sweeps

QUICK = [*FEW, "--limit=2", "--speed=false", "--calibration_args", "samples=4,length=32", "--bits=4"]


@pytest.mark.slow
def test_replicates_are_runs_of_their_own_that_only_say_how_much_is_luck(
    tracker: Tracker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = ["sweep", *QUICK, "--methods=gptq,rtn"]
    assert cli.main(sweep) == 0
    before = {run.info.run_id for run in tracker.find_finished("main")}
    assert cli.main([*sweep, "--replicates=3"]) == 0
    shown = capsys.readouterr()
    assert "4 variants of demo, 2 of them finished" in shown.err
    assert "One replicate, because no calibration text is read: rtn-4bit-g128." in shown.err
    assert "[3/4] gptq-4bit-g128 (replicate 2): starts" in shown.err

    # The first makes are found. The others have the same evaluation and another calibration, and tell whose they are.
    mains = tracker.find_finished("main")
    [first] = [
        run for run in mains if run.info.run_id in before and run.data.tags[run_names.VARIANT].startswith("gptq")
    ]
    again = [run for run in mains if run.info.run_id not in before]
    folder = Path(first.data.tags[run_names.CHECKPOINT]).name
    assert [run.data.tags[run_names.REPLICATE_OF] for run in again] == [folder, folder]
    assert {run.data.params["method_args"] for run in again} == {"seed=43", "seed=44"}
    assert {run.data.params["seed"] for run in mains} == {"42"}
    for tag, n in ((run_names.EVALUATION, 1), (run_names.VARIANT, 1), (run_names.CHECKPOINT_SHA256, 3)):
        assert len({run.data.tags[tag] for run in (first, *again)}) == n, tag

    # One row for all makes, and what they differ by; rtn is made once.
    parent = max(sweeps(tracker), key=lambda run: run.info.start_time)
    assert {parent.data.metrics[f"sweep/{name}"] for name in ("variants", "finished")} == {4.0}
    board = tracker.fetch_json(parent.info.run_id, "scoreboard.json")
    rows = {row["name"]: row for row in board["rows"]}
    assert set(rows) == {"gptq-4bit-g128", "rtn-4bit-g128"} and rows["rtn-4bit-g128"]["made_once"]
    luck = rows["gptq-4bit-g128"]["luck"]
    assert set(luck["runs"]) == {run.info.run_id for run in again}
    kl = [run.data.metrics["distance/kl_mean"] for run in (first, *again)]
    assert luck["kl"]["mean"] == pytest.approx(sum(kl) / 3, rel=1e-6) and luck["kl"]["n_makes"] == 3
    [pair] = board["closer"]
    assert 0 < pair["kl"] < 1 and {pair["first"], pair["second"]} == set(rows)
    assert "3 replicates of gptq-4bit-g128: KL " in shown.out and "text is read: rtn-4bit-g128" in shown.out

    # The page of the sweep, and a report on its runs, say the same.
    assert cli.main(["report", parent.info.run_id, "--output", str(tmp_path / "page.html")]) == 0
    assert "3 replicates of gptq-4bit-g128" in (tmp_path / "page.html").read_text()
    runs = [run.info.run_id for run in mains]
    assert cli.main(["report", *runs, "--output", str(tmp_path / "table.json")]) == 0
    assert '"n_makes": 3' in (tmp_path / "table.json").read_text()

    # A promotion takes no replicate, and a policy counts them.
    capsys.readouterr()
    for n, said in ((3, ""), (4, "required: 3 replicates < 4")):
        (tmp_path / "policy.yaml").write_text(f"kl: none\ngates: []\nmargins: []\nrequire: {{replicates: {n}}}\n")
        assert cli.main(["promote", "--policy", str(tmp_path / "policy.yaml"), "--dry_run", "true"]) == 0
        told = capsys.readouterr().out
        assert "(2 variants, 32 items)" in told and said in told
        assert ("with other calibration samples" in told) == bool(said)
