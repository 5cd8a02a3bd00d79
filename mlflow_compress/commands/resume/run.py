"""Commands that were killed, or cut off from the tracking server, are done again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlflow_compress.commands.diagnose.parameters import DiagnoseConfig
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.commands.promote.parameters import PromoteConfig
from mlflow_compress.commands.quantize.parameters import QuantizeConfig
from mlflow_compress.commands.resume.parameters import ResumeConfig
from mlflow_compress.commands.resume.result import Resumed, ResumedCommand
from mlflow_compress.commands.search.parameters import SearchConfig
from mlflow_compress.commands.shared.unfinished import CONFIGS
from mlflow_compress.commands.speed.parameters import SpeedConfig
from mlflow_compress.commands.sweep.parameters import SweepConfig
from mlflow_compress.config import Command, as_text, parse
from mlflow_compress.errors import MlflowCompressError, StoreAwayError, TrackingError
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracker import Tracker
from mlflow_compress.tracking.unfinished_commands import UnfinishedCommand, unfinished_commands

Say = Callable[[str], None]


def run_resume(config: ResumeConfig, say: Say = lambda line: None) -> Resumed:
    """Do the commands again that did not end. What they computed is found, so that little more than storing it is left.

    A main run goes on where it was; the others begin a new run, in which finished work is found.

    Raises
    ------
    StoreAwayError
        The tracking server is still away. The commands stay noted.
    """
    tracker = Tracker()
    done = []
    for note in unfinished_commands(tracker.uri):
        shown = _shown(note)
        if config.dry_run:
            done.append(ResumedCommand(command=shown, state="unfinished", outcome=""))
            continue
        say(f"[resume] {shown}")
        try:
            found = _again(note, tracker, say)
        except StoreAwayError:
            raise
        except MlflowCompressError as error:
            done.append(ResumedCommand(command=shown, state="failed", outcome=str(error)))
        else:
            done.append(ResumedCommand(command=shown, state="finished", outcome=str(found.summary)))
        note.path.unlink(missing_ok=True)
    return Resumed(commands=tuple(done))


def _shown(note: UnfinishedCommand) -> str:
    """Return a command as a user types it, without the parameters at their defaults."""
    defaults = as_text(CONFIGS[note.command]())
    given = [f"--{name} {value}" for name, value in note.parameters.items() if value != defaults.get(name)]
    return " ".join([note.command, *given])


def _again(note: UnfinishedCommand, tracker: Tracker, say: Say) -> Any:
    config = parse(CONFIGS[note.command], note.parameters)
    if isinstance(config, MainConfig) and (run_id := _resumable(note, tracker)):
        config = MainConfig(resume=run_id)
    return _run(config, say)


def _resumable(note: UnfinishedCommand, tracker: Tracker) -> str | None:
    """Return the main run that the killed process had begun, where it is far enough to go on."""
    for run_id in tracker.find_unfinished("main", **{run_names.PROCESS: note.process}):
        try:
            tracker.fetch_json(run_id, run_names.PARAMETERS)
        except StoreAwayError:
            raise
        except TrackingError:
            continue
        return run_id
    return None


def _run(config: Command, say: Say) -> Any:
    """Run a command by its stage; each is imported when it is needed."""
    if isinstance(config, MainConfig):
        from mlflow_compress.commands.main.run import run_main

        return run_main(config, say)
    if isinstance(config, SweepConfig):
        from mlflow_compress.commands.sweep.run import run_sweep

        return run_sweep(config, lambda progress: say(progress.line))
    if isinstance(config, SearchConfig):
        from mlflow_compress.commands.search.run import run_search

        return run_search(config, say)
    if isinstance(config, QuantizeConfig):
        from mlflow_compress.commands.quantize.run import run_quantize

        return run_quantize(config)
    if isinstance(config, EvaluateConfig):
        from mlflow_compress.commands.evaluate.run import run_evaluate

        return run_evaluate(config)
    if isinstance(config, JudgeConfig):
        from mlflow_compress.commands.judge.run import run_judge

        return run_judge(config, say=say)
    if isinstance(config, DiagnoseConfig):
        from mlflow_compress.commands.diagnose.run import run_diagnose

        return run_diagnose(config, say=say)
    if isinstance(config, SpeedConfig):
        from mlflow_compress.commands.speed.run import run_speed

        return run_speed(config)
    from mlflow_compress.commands.promote.run import run_promote

    assert isinstance(config, PromoteConfig)
    return run_promote(config)
