"""Get-or-create for runs: return the finished run with a given fingerprint, or do the work in a new run."""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType

from mlflow_compress.commands.command import all_commands
from mlflow_compress.config import Parameters, as_given
from mlflow_compress.files import alone_with
from mlflow_compress.home import home
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.live_processes import scratch_folder
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker, opened, tracking_uri
from mlflow_compress.tracking.unfinished_commands import noted
from mlflow_compress.transport.endpoint import VARIABLES, shown_url


@contextmanager
def store_of_command(config: Parameters, given: Tracker | str | None) -> Iterator[Tracker]:
    """Give a command its store: the given one; or MLflow's, with a note on disk until the command ends by itself.

    A stage asks for it after it has checked its parameters, so that a refused command leaves nothing.
    """
    if given is not None:
        yield opened(given)
        return
    with unfinished_until_ended(config):
        yield Tracker(config.experiment)


@contextmanager
def unfinished_until_ended(config: Parameters) -> Iterator[None]:
    """Keep a note of a command on disk, until it ends by itself, so that `resume` can do it again."""
    [command] = [known for known in all_commands().values() if known.parameters is type(config)]
    if not command.resumable:
        yield
        return
    values = config.values()
    addresses = {name: shown_url(values[name]) for name in VARIABLES if values.get(name)}  # may hold a password
    with noted(tracking_uri(), command.name, as_given(config.with_values(**addresses))) as killed:
        yield
    if killed:
        Tracker(config.experiment).drop_killed(killed)


logger = logging.getLogger(__name__)

FINGERPRINT_FILE = "fingerprint.json"  # artifact of a run that is found again: all that decides its results


def workdirs_folder(tracking_uri: str) -> Path:
    """Return the folder of all work folders of a tracking store; it is not created here."""
    return home(tracking_uri) / "unfinished"


def _places(tracking_uri: str, fingerprint: str) -> tuple[Path, Path, Path]:
    """Return the folder of all work folders, that of one fingerprint, and its lock file."""
    workdirs = workdirs_folder(tracking_uri)
    return workdirs, workdirs / fingerprint[:16], workdirs / f"{fingerprint[:16]}.lock"


@contextmanager
def resumable_workdir(tracking_uri: str, fingerprint: str) -> Iterator[Path]:
    """Yield the work folder of this fingerprint. It is deleted when the work ends, and kept when it is interrupted.

    Two processes with the same fingerprint take turns: the second one waits, then finds the results of the first.
    """
    workdirs, folder, lock = _places(tracking_uri, fingerprint)
    workdirs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        if not held.enter_context(alone_with(lock, wait=False)):
            logger.warning("Another process does the same work in %s; waiting for it", workdirs)
            held.enter_context(alone_with(lock))
        if folder.is_dir():
            logger.info("Resuming interrupted work in %s", folder)
        folder.mkdir(exist_ok=True)
        yield folder
        shutil.rmtree(folder)


def digest(content: Mapping[str, object]) -> str:
    """Return the SHA-256 of a fingerprint."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def get_or_create_run(
    store: Tracker,
    stage: str,
    label: str,
    fingerprint: Mapping[str, object],
    work: Callable[[TrackedRun, Path, Path], None],
    more_tags: Mapping[str, str] = MappingProxyType({}),
    before: Callable[[], None] = lambda: None,
) -> tuple[str, bool]:
    """Return the finished run with this fingerprint, and whether the work was done now, in a new run.

    - `work` (run, folder, resume): Does the work and logs it. Each sub-folder of `folder` is stored as an artifact
      folder. Files in `resume` are still there when an interrupted work is started again.
    - `before`: Called before the work, where it must be done. An error leaves no run.
    """
    key = digest(fingerprint)
    tags = {run_names.FINGERPRINT: key, run_names.BASE_MODEL: label, **more_tags}
    runs = store.find(stage, **{run_names.FINGERPRINT: key})
    if runs:
        _, folder, lock = _places(store.uri, key)
        if folder.is_dir() or lock.exists():  # of a process that was killed just when the work was stored
            with alone_with(lock, wait=False) as alone:
                if alone:  # otherwise another process deletes it now
                    shutil.rmtree(folder, ignore_errors=True)
        return runs[0].run_id, False
    before()
    with resumable_workdir(store.uri, key) as resume, store.alone(key) as confirm:
        runs = store.find(stage, **{run_names.FINGERPRINT: key})
        if runs:  # another process has done it while this one waited
            return runs[0].run_id, False
        with store.run(f"{stage} {label}", stage, tags, own=False) as run, scratch_folder(store.uri) as scratch:
            run.log_json(dict(fingerprint), FINGERPRINT_FILE)
            work(run, scratch, resume)
            for folder in sorted(scratch.iterdir()):
                run.log_folder(folder, folder.name)
            confirm()
            run.set_note(f"**{stage} {label}**: computed once, then reused by its fingerprint.")
    return str(run.run_id), True
