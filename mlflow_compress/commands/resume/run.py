"""Commands that were killed, or cut off from the tracking server, are done again."""

from __future__ import annotations

from typing import Any

from mlflow_compress.commands.command import COMMANDS, Say, silent
from mlflow_compress.commands.resume.parameters import ResumeConfig
from mlflow_compress.commands.resume.result import Resumed, ResumedCommand
from mlflow_compress.config import parameters
from mlflow_compress.config.declarations import as_typed
from mlflow_compress.errors import MlflowCompressError, StoreAwayError, TrackingError
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracker import Tracker
from mlflow_compress.tracking.unfinished_commands import (
    UnfinishedCommand,
    note_continued_run,
    unfinished_commands,
)


def run_resume(config: ResumeConfig, say: Say = silent) -> Resumed:
    """Do the commands again that did not end. What they computed is found, so that little more than storing it is left.

    A main run goes on where it was; the others begin a new run, in which finished work is found. Several notes of one
    piece of work, of a command and of those that went on with it and were killed too, are done once.
    """
    tracker = Tracker()
    done = []
    for notes in _works(tracker):
        shown = _shown(notes[0])
        if config.dry_run:
            done.append(ResumedCommand(command=shown, state="unfinished", outcome=""))
            continue
        say(f"[resume] {shown}")
        try:
            result = _again(notes, tracker, say)
        except StoreAwayError:
            raise
        except MlflowCompressError as error:
            done.append(ResumedCommand(command=shown, state="failed", outcome=str(error)))
        else:
            done.append(ResumedCommand(command=shown, state="finished", outcome=str(result.summary)))
        for note in notes:
            note.path.unlink(missing_ok=True)
    return Resumed(commands=tuple(done))


def _works(tracker: Tracker) -> list[list[UnfinishedCommand]]:
    """Return the notes by piece of work, the oldest first."""
    works: dict[str, list[UnfinishedCommand]] = {}
    for note in unfinished_commands(tracker.uri):
        works.setdefault(note.key, []).append(note)
    return list(works.values())


def _shown(note: UnfinishedCommand) -> str:
    """Return a command as a user types it, without the parameters at their defaults."""
    cls = COMMANDS.get(note.command).parameters
    defaults = {name: as_typed(field.default) for name, field in parameters(cls).items()} if cls else {}
    given = [f"--{name} {value}" for name, value in note.parameters.items() if value != defaults.get(name)]
    return " ".join([note.command, *given])


def _again(notes: list[UnfinishedCommand], tracker: Tracker, say: Say) -> Any:
    command = COMMANDS.get(notes[0].command)
    values = notes[0].parameters
    if notes[0].command == "main" and (begun := _resumable(notes, tracker)):
        notes[:] = [note_continued_run(tracker.uri, note, begun) for note in notes]
        values = {"resume": begun}
    return command.function(**({"progress": lambda done: say(str(done))} if command.tells else {}), **values)


def _resumable(notes: list[UnfinishedCommand], tracker: Tracker) -> str | None:
    """Return the newest main run that a killed process had begun, where it is far enough to go on."""
    runs = [
        run for note in reversed(notes) for run in tracker.find_unfinished("main", **{run_names.PROCESS: note.process})
    ]
    for run_id in runs:
        try:
            tracker.fetch_json(run_id, run_names.PARAMETERS)
        except StoreAwayError:
            raise
        except TrackingError:
            continue
        return run_id
    return None
