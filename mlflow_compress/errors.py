"""The one exception tree.

::

    MlflowCompressError
    ├── ConfigError            a parameter, name or file that the user gave is wrong
    │   └── UnsupportedError   the request is well-formed, but this method, model or device cannot do it
    ├── MissingDependencyError an optional package is not installed
    ├── DataError              an item, task or corpus file is broken
    ├── CheckpointError        a model folder is missing, broken, or not what its manifest says
    │   └── ReloadMismatchError  a saved checkpoint does not compute what the in-memory model computed
    ├── AlignmentError         two sets of records do not describe the same items, prompts or tokens
    ├── StoreError             a baseline state store is broken or belongs to another model
    ├── WorkerError            another process of this job failed
    ├── JudgeError             the judge endpoint failed
    ├── StageError             a stage of the main job failed
    ├── SweepError             variants of a sweep failed
    └── TrackingError          the tracking store cannot be used
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class MlflowCompressError(Exception):
    """Base of every error that is the user's to read.

    Parameters
    ----------
    what : str
        What is wrong, as one sentence without a final full stop.
    allowed : str or iterable of str, optional
        What would have been accepted.
    got : object, optional
        What was given instead.
    fix : str, optional
        What to change.
    """

    def __init__(
        self,
        what: str,
        *,
        allowed: str | Iterable[str] | None = None,
        got: object = None,
        fix: str | None = None,
    ) -> None:
        parts = [what.rstrip(".") + "."]
        if allowed is not None:
            listed = allowed if isinstance(allowed, str) else ", ".join(str(a) for a in allowed)
            parts.append(f"Allowed: {listed}.")
        if got is not None:
            parts.append(f"Got: {got!r}." if isinstance(got, str) else f"Got: {got}.")
        if fix is not None:
            parts.append(fix if fix.endswith("?") else fix.rstrip(".") + ".")
        super().__init__(" ".join(parts))


class ConfigError(MlflowCompressError):
    """A parameter, name or file that the user gave is wrong."""


class UnsupportedError(ConfigError):
    """The request is well-formed, but this method, model or device cannot do it."""


class MissingDependencyError(MlflowCompressError):
    """An optional package is not installed."""


class DataError(MlflowCompressError):
    """An item, task or corpus file is broken."""


class CheckpointError(MlflowCompressError):
    """A model folder is missing, broken, or not what its manifest says."""


class ReloadMismatchError(CheckpointError):
    """A saved checkpoint does not compute what the in-memory model computed."""


class AlignmentError(MlflowCompressError):
    """Two sets of records do not describe the same items, prompts or tokens."""


class StoreError(MlflowCompressError):
    """A baseline state store is broken or belongs to another model."""


class WorkerError(MlflowCompressError):
    """Another process of this job failed."""


class JudgeError(MlflowCompressError):
    """The judge endpoint failed."""


class StageError(MlflowCompressError):
    """A stage of the main job failed.

    Parameters
    ----------
    what : str
        The stage's own error message, or the signal that killed it.
    stage : str
        Name of the stage.
    fix : str, optional
        What to change.
    published : VariantRun, optional
        What the finished stages have found.
    """

    def __init__(self, what: str, *, stage: str, fix: str | None = None, published: Any = None) -> None:
        super().__init__(what, fix=fix)
        self.what = what
        self.stage = stage
        self.published = published


class SweepError(MlflowCompressError):
    """Variants of a sweep failed; the others are published.

    Parameters
    ----------
    what : str
        How many failed, and why.
    published : Sweep
        What the others have found.
    fix : str
        What to change.
    """

    def __init__(self, what: str, *, published: Any, fix: str) -> None:
        super().__init__(what, fix=fix)
        self.what = what
        self.published = published


class TrackingError(MlflowCompressError):
    """The tracking store cannot be used."""
