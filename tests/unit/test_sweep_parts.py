"""The parts of a sweep: stages in this process, runs that a killed process left, values that are kept, the live table."""

import io
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live
from tqdm import tqdm

from mlflow_compress import cli
from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.commands.main.run import stage_keys
from mlflow_compress.commands.shared.scores import processor_seconds, score_runs, stage_seconds, wall_seconds
from mlflow_compress.commands.sweep import on_workers
from mlflow_compress.commands.sweep.make_variant import close_killed, one_process, parent_run
from mlflow_compress.commands.sweep.on_workers import SweepPlace, VariantWorker, _check
from mlflow_compress.commands.sweep.parameters import SweepConfig
from mlflow_compress.commands.sweep.plan import Combination, PreparedVariant, combinations, prepare_sweep
from mlflow_compress.commands.sweep.result import SweepProgress, VariantProgress
from mlflow_compress.compression import compress_model
from mlflow_compress.compression.pipeline import reload_helper, reload_in_fresh_process
from mlflow_compress.config.declarations import parse
from mlflow_compress.errors import CheckpointError, ConfigError, StageError, TrackingError, WorkerError
from mlflow_compress.kept import keeping, keeps, kept
from mlflow_compress.scoring.engine_identity import package_hash
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.projects import run_stage_here
from mlflow_compress.tracking.tracker import Snapshot, Tracker
from tests.compress_models import make_llama
from tests.conftest import Fork


def status(tracker: Tracker, run_id: str) -> str:
    return str(tracker.client.get_run(run_id).info.status)


def test_what_is_kept_is_made_once_and_freed_at_the_end() -> None:
    made: list[int] = []

    def make() -> list[int]:
        made.append(1)
        return [len(made)]

    assert kept("a", make) != kept("a", make) and not keeps()  # nothing is kept outside of a sweep
    with keeping():
        assert keeps() and kept("a", make) is kept("a", make) and kept("b", make) != kept("a", make)
        assert len(made) == 4
    assert not keeps() and kept("a", make) == [5]


def test_a_stage_in_this_process_is_a_child_like_one_in_a_process_of_its_own(tracker: Tracker) -> None:
    def work() -> None:
        with tracker.run("a name", "evaluate", {run_names.VARIANT: "x"}) as run:
            with tracker.run("baseline", "baseline", {}, own=False) as other:
                pass
            run.set_tags({"other": other.run_id})

    with tracker.run("main", "main", {}) as parent:
        child = run_stage_here(tracker, "evaluate", work, parent=parent)
    assert tracker.child_ids(parent.run_id) == {"evaluate": child}
    run = tracker.client.get_run(child)
    assert run.info.status == "FINISHED" and run.info.run_name == "a name" and run.data.tags[run_names.VARIANT] == "x"
    assert run_names.PARENT not in tracker.client.get_run(run.data.tags["other"]).data.tags


@pytest.mark.parametrize("opened", [True, False])
def test_a_stage_in_this_process_that_fails_says_so(
    opened: bool, tracker: Tracker, caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> None:
        if opened:
            with tracker.run("a name", "evaluate", {}):
                raise ConfigError("It is wrong")
        raise RuntimeError("out of memory")

    with tracker.run("main", "main", {}) as parent, pytest.raises(StageError) as failed:
        run_stage_here(tracker, "evaluate", work, parent=parent)
    reason = "It is wrong." if opened else "out of memory"
    assert failed.value.what == f"Stage evaluate failed: {reason}" and failed.value.stage == "evaluate"
    [child] = tracker.children(parent.run_id).values()
    assert child.info.status == "FAILED" and reason in child.data.tags[run_names.RUN_ERROR]
    assert ("RuntimeError" in caplog.text) == (not opened)  # the traceback of what nobody expected


def test_an_interrupted_stage_is_killed(tracker: Tracker) -> None:
    def work() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), tracker.run("main", "main", {}) as parent:
        run_stage_here(tracker, "judge", work, parent=parent)
    [child] = tracker.children(parent.run_id).values()
    assert (status(tracker, parent.run_id), child.info.status) == ("KILLED", "KILLED")


def test_the_cost_of_a_variant_is_its_processor_time_without_the_baseline(
    tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that waits costs nothing. Where a part was not noted, nothing is said."""
    processor = [100.0]  # a clock that this test moves
    monkeypatch.setattr("mlflow_compress.tracking.tracker.processor_time", lambda: processor[0])
    with tracker.run("evaluate", "evaluate", {}) as run:
        processor[0] += 1
        with tracker.run("baseline", "baseline", {}, own=False) as baseline:
            processor[0] += 30
        processor[0] += 2
        run.set_tags({run_names.BASELINE_RUN: baseline.run_id})
    for one, seconds in ((run, 300), (baseline, 40)):
        start = tracker.client.get_run(one.run_id).info.start_time
        tracker.client.set_terminated(one.run_id, end_time=start + 1000 * seconds)
    children = {"evaluate": tracker.client.get_run(run.run_id)}
    assert tracker.client.get_run(baseline.run_id).data.metrics[run_names.PROCESSOR] == 30
    assert stage_seconds(tracker, children, processor_seconds)["evaluate"] == 3
    assert stage_seconds(tracker, children, wall_seconds)["evaluate"] == 260
    with tracker.run("main", "main", {}) as main:  # it notes none
        pass
    children["quantize"] = tracker.client.get_run(main.run_id)
    children["quantize"].data.metrics["speed/compress_seconds"] = 1.0
    assert stage_seconds(tracker, children, processor_seconds) == {}


def left_running(tracker: Tracker, stage: str, **tags: str) -> str:
    """Return a run that a killed process has left behind."""
    return str(tracker.client.create_run(tracker.experiment_id, tags={"stage": stage, **tags}).info.run_id)


def test_the_same_sweep_opens_its_unfinished_run_again_and_ends_what_was_left(tracker: Tracker) -> None:
    parent = left_running(tracker, "sweep", **{run_names.SWEEP_KEY: "k"})
    main = left_running(tracker, "main", **{run_names.SWEEP_RUN: parent})
    stage = left_running(tracker, "evaluate", **{run_names.PARENT: main})
    done = left_running(tracker, "main", **{run_names.SWEEP_RUN: parent})
    tracker.client.set_terminated(done, "FINISHED")
    other = left_running(tracker, "sweep", **{run_names.SWEEP_KEY: "other"})
    assert tracker.find_unfinished("sweep", sweep_key="k") == [parent]

    with parent_run(tracker, "again", "k", {}) as run:
        assert run.run_id == parent
        assert [status(tracker, r) for r in (main, stage, done, other)] == ["KILLED", "KILLED", "FINISHED", "RUNNING"]
        with parent_run(tracker, "at the same time", "k", {}) as second:
            assert second.run_id != parent  # another process runs the same sweep
    assert status(tracker, parent) == "FINISHED"
    with parent_run(tracker, "later", "k", {}) as run:
        assert run.run_id not in (parent, second.run_id)  # a finished sweep is not opened again


def test_one_process_at_a_time_has_a_key(tracker: Tracker) -> None:
    with one_process(tracker, "a" * 20, wait=False) as first, one_process(tracker, "a" * 20, wait=False) as second:
        assert first and not second
    with one_process(tracker, "a" * 20, wait=False) as again, one_process(tracker, "b" * 20, wait=False) as other:
        assert again and other


def made(tracker: Tracker, variant: str, evaluation: str | None = None, *, stage: str = "main") -> str:
    """Return a run that failed, as far as the scoreboard reads it; with an evaluation it looks like one with results."""
    tags = {run_names.BASE_MODEL: "demo", run_names.VARIANT: variant, run_names.METHOD: "rtn"}
    if evaluation is not None:
        tags |= {run_names.EVALUATION: evaluation, run_names.CHECKPOINT_SHA256: variant}
    with pytest.raises(ConfigError), tracker.run(variant, stage, tags, own=False) as run:
        run.log_params({"bits": "auto", "resolved/bits": "3"})
        raise ConfigError("It is wrong")
    return str(run.run_id)


def test_a_run_without_results_is_a_row_with_its_error(tracker: Tracker) -> None:
    """Two failed tries of one variant get names that differ."""
    one, two = made(tracker, "rtn-3bit"), made(tracker, "rtn-3bit")
    board = score_runs(tracker, [one, two, one], names={two: "the second"})
    assert [(row.name, row.status, row.reason, row.bits) for row in board.rows] == [
        ("rtn-3bit", "failed", "It is wrong.", 3.0),
        ("the second", "failed", "It is wrong.", 3.0),
    ]
    assert board.baseline == "demo" and board.evaluation is None and board.columns == ()
    named = [row.name for row in score_runs(tracker, [one, two]).rows]
    assert named == ["rtn-3bit", f"rtn-3bit ({two[:8]})"]


def test_a_report_reads_every_run_once(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [made(tracker, "rtn-3bit"), made(tracker, "rtn-4bit")]
    store = Snapshot(tracker, runs)

    def away(*args: object) -> None:
        raise AssertionError("the store was read again")

    monkeypatch.setattr(tracker.client, "get_run", away, raising=False)
    assert [row.run_id for row in score_runs(store, [*runs, *runs]).rows] == runs


def test_runs_that_cannot_be_compared_are_refused(tracker: Tracker) -> None:
    with pytest.raises(ConfigError, match=r"several evaluations.*aaaa, bbbb"):
        score_runs(tracker, [made(tracker, "rtn-4bit", "bbbb"), made(tracker, "rtn-3bit", "aaaa")])
    with pytest.raises(ConfigError, match=r"Only main runs are compared.*stage promote"):
        score_runs(tracker, [made(tracker, "rtn-4bit", stage="promote")])
    with pytest.raises(ConfigError, match="no run to compare"):
        score_runs(tracker, [])
    with pytest.raises(TrackingError, match="no such run"):
        score_runs(tracker, ["0" * 32])


def test_a_table_is_replaced(tracker: Tracker) -> None:
    with tracker.run("x", "sweep", {}) as run:
        for values in ([1, 2], [3]):
            run.log_table({"variant": values}, "table.json")
        assert tracker.fetch_json(run.run_id, "table.json") == {"columns": ["variant"], "data": [[3]]}


def test_without_a_terminal_there_are_quiet_lines() -> None:
    heard: list[str] = []
    assert not sys.stderr.isatty()
    with cli.shown_progress(heard.append) as progress:
        progress(SweepProgress(line="[1/2] rtn: starts", variants=(VariantProgress(name="rtn"),)))
    assert heard == ["[1/2] rtn: starts"]


def test_on_a_terminal_a_section_stands_out(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with cli.shown_progress(heard.append) as progress:
        progress("[1/4] quantize: compresses")
        progress("a line")
    assert heard == ["\n\x1b[1m[1/4] quantize: compresses\x1b[0m", "a line"]
    monkeypatch.setenv("NO_COLOR", "1")
    with cli.shown_progress(heard.append) as progress:
        progress("[1/4] quantize: compresses")
    assert heard[2:] == ["\n[1/4] quantize: compresses"]


def test_no_bar_stands_between_the_rows_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO()))
    terminal = Live(console=Console(file=io.StringIO(), force_terminal=True), auto_refresh=False)
    monkeypatch.setattr(cli, "_live", lambda: terminal)
    sys.stderr.isatty = lambda: True  # type: ignore[method-assign]
    row = SweepProgress(line="[1/1] rtn: starts", variants=(VariantProgress(name="rtn"),))
    with cli.shown_progress(lambda line: None) as progress:
        progress(row)
        assert tqdm(total=3, disable=None).disable
        progress(row)  # the table is shown again, and no line is told


@pytest.mark.parametrize(("terminal", "left"), [(True, "False False"), (False, "True True")])
def test_bars_of_libraries_vanish_and_files_get_none(
    terminal: bool, left: str, light_python: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import io, sys; from mlflow_compress import cli\n"
        f"sys.stderr.isatty = lambda: {terminal}\n"
        "cli.main(['promote', 'policy']); from tqdm.auto import tqdm; bar = tqdm(total=3, file=io.StringIO())\n"
        "print(bar.leave if not bar.disable else True, bar.disable)"
    )
    for name in [name for name in os.environ if name.startswith("TQDM_")]:
        monkeypatch.delenv(name)
    done = light_python("-c", code)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, left), done.stderr


def test_the_table_shows_every_variant_and_takes_no_markup_from_names() -> None:
    console = Console(file=io.StringIO(), width=60)
    variants = (
        VariantProgress(name="rtn [bold]x[/bold]", state="finished", doing="KL 0.02"),
        VariantProgress(name="awq", state="runs", doing="[2/3] evaluate: scores both models on the same items " * 3),
        VariantProgress(name="gptq"),
    )
    console.print(cli.progress_table(variants))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 4 and all(len(line) <= 60 for line in lines)
    assert "rtn [bold]x[/bold]" in lines[1] and "KL 0.02" in lines[1]
    assert "[2/3] evaluate" in lines[2] and "waits" in lines[3]


@pytest.mark.ci
def test_the_helper_process_gives_the_answers_of_a_new_process(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base")
    good, bad = tmp_path / "good", tmp_path / "bad"
    compress_model(str(base), "none", None, [], good)
    shutil.copytree(good, bad)
    (bad / "model.safetensors").write_bytes(b"broken")
    alone = reload_in_fresh_process(good)
    with reload_helper():
        assert reload_in_fresh_process(good) == alone
        with pytest.raises(CheckpointError, match="does not load in a new process"):
            reload_in_fresh_process(bad)
        assert reload_in_fresh_process(good) == alone  # a check that failed does not end the helper


def test_a_helper_process_that_has_ended_is_a_clear_error_and_no_broken_pipe(tmp_path: Path) -> None:
    with reload_helper() as python:
        python.server.kill()
        python.server.wait()
        with pytest.raises(CheckpointError, match="exit code -9"):
            reload_in_fresh_process(tmp_path)


@pytest.mark.parametrize(
    ("more", "why"),
    [({"replicates": 2}, "Replicates of a variant are compared on all items"), ({}, "Served models are scored on all")],
)
def test_a_sweep_that_cannot_draw_its_items_is_refused_at_once(
    more: dict[str, int], why: str, tracker: Tracker
) -> None:
    config = parse(SweepConfig, {"methods": "gptq", "items": "100", **more})
    chosen, _ = combinations(config)
    if not more:
        chosen = [replace(chosen[0], settings=None)]
    with pytest.raises(ConfigError, match=why):
        prepare_sweep(config, chosen, tracker)


LEAVE_OPEN = """
import os, signal, sys
from mlflow_compress.tracking.tracker import Tracker
tracker = Tracker()
tags = {"sweep_run_id": sys.argv[1], "variant_key": "k", "base_model": "demo", "variant": "rtn"}
with tracker.run("main", "main", tags), tracker.run("answers", "answers", {}, own=False):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def variant(**parameters: object) -> PreparedVariant:
    asked = Combination(name="rtn-4bit", config=MainConfig(**parameters), settings=None)  # type: ignore[arg-type]
    return PreparedVariant(asked=asked, known={"engine": "ray"}, key="k", parts={run_names.EVALUATED_KEY: "e"})


def test_a_variant_is_found_in_a_run_that_has_more_stages_than_are_wanted(tracker: Tracker) -> None:
    """The keys of a main run with judge and speed hold those of one without, and another judge is another key."""
    full, bare, other = (
        stage_keys(MainConfig(**asked), "folder", "evaluation")  # type: ignore[arg-type]
        for asked in (
            {"judge": True, "speed": True},
            {"judge": False, "speed": False},
            {"judge": True, "speed": True, "num_samples": 3},
        )
    )
    assert bare.items() < full.items() and set(full) - set(bare) == {run_names.JUDGED_KEY, run_names.TIMED_KEY}
    assert {tag for tag in full if full[tag] != other[tag]} == {run_names.JUDGED_KEY}
    wanted = replace(variant(), parts=bare)
    assert wanted.finished_run(tracker) is None
    with tracker.run("rtn demo", "main", full) as run:
        pass
    assert wanted.finished_run(tracker) == replace(wanted, parts=full).finished_run(tracker) == run.run_id
    assert replace(wanted, parts=other).finished_run(tracker) is None
    with tracker.run("rtn demo", "main", {run_names.VARIANT_KEY: "k"}) as exact:
        pass
    assert wanted.finished_run(tracker) == exact.run_id


def test_a_worker_has_its_share_of_what_all_may_ask_of_judges() -> None:
    limits = {"judge_max_cost": 9.0, "judge_concurrency": 16, "judge_requests_per_minute": 7}
    made = on_workers._on_worker(variant(engine="ray", device="auto", **limits), "cuda", 3)
    config = made.asked.config
    assert (config.running.engine, config.source.device) == ("local", "cuda")
    assert made.known == {"engine": "ray", "device": "cuda"}
    asked = config.judging
    assert (asked.judge_max_cost, asked.judge_concurrency) == (3.0, 5)
    assert (asked.judge_requests_per_minute, asked.judge_tokens_per_minute) == (2, 0)  # 0 stays "no limit"
    fewer = on_workers._on_worker(variant(judge_concurrency=2), "cpu", 5).asked.config
    assert fewer.judging.judge_concurrency == 1


def test_a_worker_that_does_not_see_the_same_is_refused(
    tracker: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://me:secret@judge:1/v1")
    place = SweepPlace.of(tracker, "parent", judge=True)
    assert "secret" not in str(place) and "a-key" not in str(place)
    _check(place)
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ConfigError, match=r"OPENAI_API_KEY is not the same .*Allowed: set\. Got: 'not set'"):
        _check(place)
    _check(replace(place, judge=None))
    with pytest.raises(ConfigError, match=r"locks is not the same on the machine of a worker.*MLFLOW_COMPRESS_HOME"):
        _check(replace(place, judge=None, process="of-another-home"))


def test_workers_have_all_our_code() -> None:
    worker = VariantWorker("cpu", 1)
    assert VariantWorker.code()["package"] == package_hash()
    assert worker.describe().items() >= VariantWorker.code().items()


def killed_below(parent: str, python: Fork) -> None:
    done = python("-c", LEAVE_OPEN, parent)
    assert done.returncode == -9, done.stderr


def status_of(tracker: Tracker, run_id: str) -> str:
    return str(tracker.client.get_run(run_id).info.status)


def test_runs_that_a_killed_worker_left_open_are_closed(tracker: Tracker, python: Fork) -> None:
    with tracker.run("sweep", "sweep", {}) as parent:
        killed_below(parent.run_id, python)
        [main], [answers] = tracker.find_unfinished("main"), tracker.find_unfinished("answers")
        assert status_of(tracker, main) == status_of(tracker, answers) == "RUNNING"
        close_killed(tracker, parent.run_id)
        assert status_of(tracker, main) == status_of(tracker, answers) == "KILLED"
        assert status_of(tracker, parent.run_id) == "RUNNING"


@pytest.mark.ci
def test_a_variant_that_takes_its_workers_with_it_is_failed(tracker: Tracker, python: Fork) -> None:
    error = WorkerError("4 workers were lost")
    with tracker.run("sweep", "sweep", {}) as parent:
        with pytest.raises(WorkerError, match="4 workers were lost"):
            on_workers._lost(tracker, parent.run_id, variant(), error)  # none has opened a run
        killed_below(parent.run_id, python)
        found = on_workers._lost(tracker, parent.run_id, variant(), error)
    run = tracker.look_up(found.run_id)
    assert (found.state, found.said) == ("failed", "4 workers were lost.")
    assert status_of(tracker, found.run_id) == "FAILED" and run.tags[run_names.RUN_ERROR] == "4 workers were lost."
