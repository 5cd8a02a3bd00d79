"""Get-or-create for runs: return the finished run with a given fingerprint, or do the work in a new run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from mlflow_compress.stages.resumable_workdir import drop_finished_workdir, resumable_workdir
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.shared_store.live_processes import scratch_folder
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
    """Return the finished run with this fingerprint. Where there is none, the work is done now in a new run.

    Parameters
    ----------
    store : Store
        Where runs are kept.
    stage, label : str
        The run's stage tag, and the baseline's name.
    fingerprint : mapping
        Everything that the result depends on; equal fingerprints share one run.
    work : callable (run, folder, resume)
        Does the work and logs it. Each sub-folder of `folder` is stored as an artifact folder. Files in `resume` are
        still there when an interrupted work is started again.
    more_tags : mapping
        Further tags of a new run.

    Returns
    -------
    run_id : str
        A FINISHED run. A run becomes FINISHED after its artifacts are stored, so an interrupted one is never returned.
    fresh : bool
        Whether the work was done now.
    """
    key = digest(fingerprint)
    tags = {run_names.FINGERPRINT: key, run_names.BASE_MODEL: label, **more_tags}
    found = store.find(stage, **{run_names.FINGERPRINT: key})
    if found:
        drop_finished_workdir(store.uri, key)
        return found[0].run_id, False
    with resumable_workdir(store.uri, key) as resume, store.alone(key) as confirm:
        found = store.find(stage, **{run_names.FINGERPRINT: key})
        if found:  # another process has done it while this one waited
            return found[0].run_id, False
        with store.run(f"{stage} {label}", stage, tags, own=False) as run, scratch_folder(store.uri) as scratch:
            run.log_json(dict(fingerprint), "fingerprint.json")
            work(run, scratch, resume)
            for folder in sorted(scratch.iterdir()):
                run.log_folder(folder, folder.name)
            confirm()
            run.set_note(f"**{stage} {label}**: done once, found again by its fingerprint.")
    return str(run.run_id), True
