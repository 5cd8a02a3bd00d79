"""The one exception tree: whatever is the user's to read is a `MlflowCompressError`."""

import difflib
import errno
import importlib.util
import os
import re
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

_MOST_SHOWN = 200  # characters of a wrong value
_MOST_CHARACTERS = 3_000  # of a message
_LONG_WORD = re.compile(rf"\S{{{2 * _MOST_SHOWN},}}")
_MOST_ERRORS = 12  # of several that are told together
_MOST_LISTED = 40  # names; of more, those that are nearest to what was given


def _listed(names: list[str], got: object) -> str:
    """Return the allowed names; of a long list the five that are most like the wrong one."""
    if len(names) <= _MOST_LISTED:
        return ", ".join(names)
    near = difflib.get_close_matches(str(got), names, n=5, cutoff=0.0)
    return f"{', '.join(near)}, or one of {len(names) - len(near)} others"


def nearest(name: str, known: Iterable[str], *, n: int = 1) -> list[str]:
    """Return the known names that are most like a wrong one, whatever its capitals; none where none is alike."""
    by_folded = {one.casefold(): one for one in known}
    return [by_folded[one] for one in difflib.get_close_matches(name.casefold(), by_folded, n=n)]


class MlflowCompressError(Exception):
    """Base of every error that is the user's to read.

    - `what`: What is wrong, as one sentence without a final full stop.
    - `allowed`: What would have been accepted.
    - `got`: What was given instead.
    - `fix`: What to change.
    """

    def __init__(
        self,
        what: str,
        *,
        allowed: str | Iterable[str] | None = None,
        got: object = None,
        fix: str | None = None,
    ) -> None:
        if fix is None and isinstance(got, str) and allowed is not None and not isinstance(allowed, str):
            allowed = list(map(str, allowed))
            near = nearest(got, allowed)
            fix = f"Did you mean {' or '.join(map(repr, near))}?" if near else None
        self.fix = fix or ""
        parts = [what if what.endswith("?") else what.rstrip(".") + "."]
        if allowed is not None:
            parts.append(f"Allowed: {allowed if isinstance(allowed, str) else _listed(list(map(str, allowed)), got)}.")
        if got is not None:
            text = repr(got) if isinstance(got, str) else str(got)
            cut = f"{text[:_MOST_SHOWN]}... ({len(text):,} characters)"
            parts.append(f"Got: {text if len(text) <= _MOST_SHOWN else cut}.")
        if fix is not None:
            parts.append(fix if fix.endswith("?") else fix.rstrip(".") + ".")
        text = _LONG_WORD.sub(lambda word: f"{word[0][:_MOST_SHOWN]}... ({len(word[0]):,} characters)", " ".join(parts))
        cut = f"{text[: _MOST_CHARACTERS - 100]}... ({len(text):,} characters)"
        super().__init__(text if len(text) <= _MOST_CHARACTERS else cut)


def raise_together(errors: Sequence[MlflowCompressError]) -> None:
    """Raise what was found wrong, if anything, as one error of the first one's kind: a line for each."""
    if len(errors) < 2:
        if errors:
            raise errors[0]
        return
    lines = [str(error) for error in errors[:_MOST_ERRORS]]
    while len(lines) > 1 and sum(map(len, lines)) > _MOST_CHARACTERS - 100:
        lines.pop()
    more = [f"... and {len(errors) - len(lines):,} more"] if len(errors) > len(lines) else []
    raise type(errors[0])(f"{len(errors):,} things are wrong:\n" + "\n".join([*lines, *more]))


class ConfigError(MlflowCompressError):
    """A parameter, name or file that the user gave is wrong."""


class UnsupportedError(ConfigError):
    """The request is well-formed, but this method, model or device cannot do it."""


class MissingDependencyError(MlflowCompressError):
    """An optional package is not installed."""


def require_extra(extra: str, *packages: str, by: str) -> None:
    """Raise `MissingDependencyError` with the command that installs an extra, where a package of it is missing.

    - `packages`: By the names they are imported by. None is imported here.
    - `by`: What needs them, as the beginning of the sentence.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise MissingDependencyError(
            f"{by} needs packages that are not installed: {', '.join(missing)}",
            fix=f"Run: pip install 'mlflow-compress[{extra}]'",
        )


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


class EndpointError(MlflowCompressError):
    """The server of a served model failed, or cannot give what scoring needs."""


class StageError(MlflowCompressError):
    """A stage of the main job failed: `what` is its own message, or the signal that killed it; see `breaks_off`."""

    def __init__(
        self, what: str, *, stage: str, fix: str | None = None, published: Any = None, broke_off: bool = False
    ) -> None:
        super().__init__(what, fix=fix)
        self.what = what
        self.stage = stage
        self.published = published
        self.broke_off = broke_off


class SweepError(MlflowCompressError):
    """Variants of a sweep failed; `published` is what the others have found."""

    def __init__(self, what: str, *, published: Any, fix: str) -> None:
        super().__init__(what, fix=fix)
        self.what = what
        self.published = published


class TrackingError(MlflowCompressError):
    """The tracking store cannot be used."""


class StoreAwayError(TrackingError):
    """The tracking server did not answer for a long time."""


class MachineError(MlflowCompressError):
    """This machine has no disk space, memory or permission left."""


def breaks_off(error: BaseException) -> bool:
    """Return whether work that ends with an error is unfinished: the same command may go well at another time.

    So it is after a kill, where the server or the machine refuses, and after what nobody has foreseen. Other errors of
    ours would come again, until what they name is changed.
    """
    if isinstance(error, StageError):
        return error.broke_off
    return not isinstance(error, MlflowCompressError) or isinstance(error, StoreAwayError | MachineError)


_FIXES = {
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT), "Free disk space, and start the same command again: it continues where it stopped"
    ),
    errno.EFBIG: "Raise the limit on the size of files (`ulimit -f`), and start the same command again",
    **dict.fromkeys(
        (errno.EROFS, errno.EACCES, errno.EPERM), "Give this user the right to write there, or name another folder"
    ),
    errno.EMFILE: "Raise the limit on open files (`ulimit -n`), and start the same command again",
    errno.EIO: "The disk or its driver reports a fault: look into the system's log",
    errno.ENOMEM: "Take dtype=bfloat16, fewer items (limit), or device=balanced, which keeps weights on the disk; or a "
    "machine with more memory",
    errno.EAGAIN: "Raise the limit on processes and threads (`ulimit -u`)",
}
_OF_A_LIBRARY = re.compile(r"os error (\d+)|\[?[Ee]rrno (\d+)")  # Rust's words (safetensors, tokenizers), and pyarrow's
_NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "Cannot allocate memory",  # the system's word, which the loader of libraries gives in an ImportError
    "malloc of size",
    "MemoryError",
)
_NO_THREAD = ("can't start new thread", "The global thread pool has not been initialized")  # Python, and Rust (rayon)
_ASKED = re.compile(
    r"(?:allocate |malloc of size )(\d+(?:\.\d+)? [KMGTPE]iB|\d+)"
)  # torch on CPU and GPU, numpy, pyarrow


def machine_fault(error: BaseException) -> MachineError | None:
    """Return the clear error of a machine that lacks disk space, memory or rights; None for other and for clear ones.

    - `error`: What a stage has raised. Libraries written in other languages say the system's error number in their
      text. An error of ours that was raised because memory ran out is that fault too: the model or file is not broken.
    """
    if isinstance(error, MachineError):
        return None
    reason = error.__cause__ if isinstance(error, MlflowCompressError) else error
    if reason is not None and is_no_memory(reason):
        _let_go(error)
        asked = _ASKED.search(str(reason))
        size = f" for another {asked[1]}{' bytes' if asked[1].isdecimal() else ''}" if asked else ""
        return MachineError(f"There is not enough memory{size}", got=_line(error), fix=_FIXES[errno.ENOMEM])
    number = _number_of(error)
    if number not in _FIXES:
        return None
    place = error.filename if isinstance(error, OSError) and error.filename is not None else None
    got = os.fsdecode(place) if isinstance(place, str | bytes) else _line(error)
    return MachineError(f"The system refuses to continue: {os.strerror(number)}", got=got, fix=_FIXES[number])


def _is_no_thread(error: BaseException) -> bool:
    return str(error).startswith(_NO_THREAD) and type(error).__name__ in ("RuntimeError", "PanicException")


def _let_go(error: BaseException) -> None:
    """Free what the frames behind an error hold, weights above all, so that there is memory to say what happened."""
    behind: BaseException | None = error
    while behind is not None:
        traceback.clear_frames(behind.__traceback__)
        behind = behind.__context__


def is_no_memory(error: BaseException) -> bool:
    """Return whether an error says, in whichever library's words, that memory ran out."""
    if _is_no_thread(error):  # a thread needs 8 MB for its stack; Python says the same of `ulimit -u`
        import resource  # not on Windows

        return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    if isinstance(error, RuntimeError | ImportError):
        return any(words in str(error) for words in _NO_MEMORY)
    return isinstance(error, MemoryError) or _number_of(error) == errno.ENOMEM


def _number_of(error: BaseException) -> int | None:
    """Return the system's error number: an error's own, or the one in the text of a library's error."""
    if isinstance(error, OSError):
        return error.errno
    if _is_no_thread(error):
        return errno.EAGAIN
    if type(error).__module__.partition(".")[0] not in ("safetensors_rust", "safetensors", "tokenizers", "pyarrow"):
        return None
    match = _OF_A_LIBRARY.search(str(error))
    return int(match[1] or match[2]) if match else None


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
