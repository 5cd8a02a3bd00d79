"""Commands that were killed, or cut off from the tracking server, are done again."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mlflow_compress.commands.command import COMMANDS, Say, silent
from mlflow_compress.commands.resume.parameters import ResumeConfig
from mlflow_compress.commands.shared.tabular import Tabular
from mlflow_compress.config import given_parameters
from mlflow_compress.config.declarations import as_typed
from mlflow_compress.errors import MlflowCompressError, StoreAwayError, TrackingError, breaks_off
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracker import Tracker
from mlflow_compress.tracking.unfinished_commands import (
    UnfinishedCommand,
    note_continued,
    unfinished_commands,
)


@dataclass(frozen=True, kw_only=True)
class ResumedCommand:
    """A command that was killed, or cut off from the tracking server."""

    command: str  # Its verb, and the parameters that are not at their defaults
    state: Literal["unfinished", "finished", "failed"]  # "unfinished": only listed, or broke off again
    outcome: str  # What it found, or why it failed


@dataclass(frozen=True, kw_only=True)
class Resumed(Tabular):
    """The commands that had not ended, the oldest first."""

    commands: tuple[ResumedCommand, ...]  # One per command

    @property
    def exit_code(self) -> int:
        return int(any(one.state == "failed" or (one.state == "unfinished" and one.outcome) for one in self.commands))

    @property
    def summary(self) -> str:
        if not self.commands:
            return "Nothing to resume: every command of this machine has ended"
        states = [one.state for one in self.commands]
        counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        return f"{len(states)} {'command' if len(states) == 1 else 'commands'}: {counted}"

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        return [asdict(one) for one in self.commands]

    def as_text(self) -> str:
        lines = [f"{one.state}: {one.command}" + (f"\n  {one.outcome}" if one.outcome else "") for one in self.commands]
        return "\n".join([*lines, f"{self.summary}."])


logger = logging.getLogger(__name__)


def run_resume(config: ResumeConfig, say: Say = silent) -> Resumed:
    """Do the commands again that did not end. What they computed is found, so that little more than storing it is left.

    A main run goes on where it was; the others begin a new run, in which finished work is found. Several notes of one
    piece of work, of a command and of those that went on with it and were killed too, are done once.
    """
    tracker = Tracker()
    done = []
    works: dict[str, list[UnfinishedCommand]] = {}  # the oldest first
    for note in unfinished_commands(tracker.uri):
        works.setdefault(note.key, []).append(note)
    for notes in works.values():
        shown = _shown(notes[0])
        run_ids = dict.fromkeys(note.run for note in reversed(notes) if note.run is not None)  # the newest first
        runs = [_Begun(run_id, *state) for run_id in run_ids if (state := tracker.interrupted(run_id)) is not None]
        if any(run.status == "RUNNING" for run in runs):  # somebody goes on with it now
            continue
        finished = [run for run in runs if run.status == "FINISHED"]
        if finished:
            outcome = f"Run {finished[0].run_id} had finished, but was killed before it could report it"
            done.append(ResumedCommand(command=shown, state="finished", outcome=outcome))
        elif config.dry_run:
            done.append(ResumedCommand(command=shown, state="unfinished", outcome=""))
        else:
            say(f"[resume] {shown}")
            done.append(_do_again(shown, notes, runs, tracker, say))
        if not config.dry_run and done[-1].state != "unfinished":
            for note in notes:
                note.path.unlink(missing_ok=True)
        if finished and not config.dry_run:
            tracker.drop_killed(run.run_id for run in runs)
    return Resumed(commands=tuple(done))


def _shown(note: UnfinishedCommand) -> str:
    """Return a command as a user types it, without the parameters at their defaults."""
    cls = COMMANDS.get(note.command).parameters
    defaults = {name: as_typed(field.default) for name, field in given_parameters(cls).items()} if cls else {}
    given = [f"--{name} {value}" for name, value in note.parameters.items() if value != defaults.get(name)]
    return " ".join([note.command, *given])


@dataclass(frozen=True)
class _Begun:
    """A run that an interrupted command has begun."""

    run_id: str
    status: str
    experiment: str  # Its name


def _do_again(
    shown: str, notes: list[UnfinishedCommand], runs: list[_Begun], tracker: Tracker, say: Say
) -> ResumedCommand:
    """Do a piece of work again, in the experiment where it began."""
    command = COMMANDS.get(notes[0].command)
    begun = _resumable(runs, tracker) if notes[0].command == "main" else None
    values = {"resume": begun} if begun else dict(notes[0].parameters)
    if runs:
        values["experiment"] = runs[0].experiment
    notes[:] = [note_continued(tracker.uri, note, values) for note in notes]
    try:
        result = command.function(**({"progress": lambda done: say(str(done))} if command.tells else {}), **values)
    except StoreAwayError:
        raise
    except Exception as error:
        if not isinstance(error, MlflowCompressError):
            logger.exception("%s failed", shown)
        outcome = str(error) or type(error).__name__
        if breaks_off(error):
            outcome = f"{outcome.rstrip('.')}. It stays on the list; to abandon it, delete {notes[0].pattern}"
        return ResumedCommand(command=shown, state="unfinished" if breaks_off(error) else "failed", outcome=outcome)
    return ResumedCommand(command=shown, state="finished", outcome=str(result.summary))


def _resumable(runs: list[_Begun], tracker: Tracker) -> str | None:
    """Return the newest main run that is far enough to go on."""
    for run in runs:
        try:
            tracker.fetch_json(run.run_id, run_names.PARAMETERS)
        except StoreAwayError:
            raise
        except TrackingError:
            continue
        return run.run_id
    return None
