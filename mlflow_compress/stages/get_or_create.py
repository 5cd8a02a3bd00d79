"""Get-or-create for runs: returns the finished run with this fingerprint, or does the work in a new run."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from mlflow_compress.stages.resumable_workdir import unfinished
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.store import OpenRun, Store


def digest(content: Mapping[str, object]) -> str:
    """Return the SHA-256 of a fingerprint."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def get_or_create_run(
    store: Store,
    stage: str,
    label: str,
    fingerprint: Mapping[str, object],
    work: Callable[[OpenRun, Path, Path], None],
    more_tags: Mapping[str, str] = MappingProxyType({}),
) -> tuple[str, bool]:
    """Return the run that has done this work, doing it now where there is none.

    Parameters
    ----------
    store : Store
        Where runs are kept.
    stage, label : str
        The run's stage tag, and whose work it is (the baseline's name).
    fingerprint : mapping
        Everything that the result depends on; equal fingerprints share one run.
    work : callable (run, folder, resume)
        Does the work and logs it; what it leaves in the sub-folders of `folder` is stored as artifacts. What it leaves
        in `resume` is there again when it was interrupted and is done anew.
    more_tags : mapping
        Further tags of a new run.

    Returns
    -------
    run_id : str
        A FINISHED run. It becomes FINISHED only after its artifacts are stored, so an interrupted one is never found.
    fresh : bool
        Whether the work was done now.
    """
    mark = digest(fingerprint)
    tags = {run_names.FINGERPRINT: mark, run_names.BASE_MODEL: label, **more_tags}
    found = store.find(stage, **{run_names.FINGERPRINT: mark})
    if found:
        return found[0].run_id, False
    with unfinished(store.uri, mark) as resume:
        found = store.find(stage, **{run_names.FINGERPRINT: mark})
        if found:  # another process has done it while this one waited
            return found[0].run_id, False
        with store.run(f"{stage} {label}", stage, tags, own=False) as run, tempfile.TemporaryDirectory() as scratch:
            run.log_json(dict(fingerprint), "fingerprint.json")
            work(run, Path(scratch), resume)
            for folder in sorted(Path(scratch).iterdir()):
                run.log_folder(folder, folder.name)
            run.set_note(f"**{stage} {label}**: done once, found again by its fingerprint.")
    return str(run.run_id), True
