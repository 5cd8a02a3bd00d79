"""Files and folders, written completely or not at all; JSON and YAML, read strictly and with one clear error; locks."""

import glob
import json
import os
import re
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, get_type_hints

import yaml  # type: ignore[import-untyped]
from pydantic import TypeAdapter, ValidationError

from mlflow_compress.errors import ConfigError, DataError, MlflowCompressError


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """Yield a binary file that becomes `path` when the block ends without an error. Otherwise `path` is unchanged.

    The content is written to ``<name>.partial`` in the same folder, synchronised to disk (fsync), and then renamed. The
    partial file of a killed process is overwritten by the next writer. So two processes must not write the same path at
    the same time.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as sink:
            yield sink
            sink.flush()
            os.fsync(sink.fileno())
        rename(partial, path)
    except BaseException:  # an interrupt must not leave a partial file either
        partial.unlink(missing_ok=True)
        raise


def write(path: Path, data: bytes) -> None:
    """Write a complete file atomically, see `writing`."""
    with writing(path) as sink:
        sink.write(data)


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder, to a file or an empty folder, and wait until the new name is on disk."""
    source.replace(target)
    if os.name == "posix":  # other systems cannot open a folder
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


_STAGING = ".partial"


@contextmanager
def staging_folder(out: Path) -> Iterator[Path]:
    """Yield a hidden folder next to `out`. It is renamed to `out` on success, and removed on any failure."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=_STAGING, dir=out.parent))
    except OSError as error:
        raise ConfigError(f"The output folder cannot be written: {error}", got=str(out)) from error
    try:
        yield folder
        give_usual_permissions(folder)
        rename(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def give_usual_permissions(folder: Path) -> None:
    """Give a folder and its files those of ordinary new ones; temporary folders and safetensors files are private.

    A file that has them is not touched: its hash stays known.
    """
    mask = os.umask(0)
    os.umask(mask)
    for path in (folder, *folder.rglob("*")):
        usual = (0o777 if path.is_dir() else 0o666) & ~mask
        if stat.S_IMODE(path.stat().st_mode) != usual:
            path.chmod(usual)


def drop_unfinished_folders(out: Path) -> None:
    """Delete what killed processes have left of a checkpoint. Nobody else may be writing it."""
    for folder in out.parent.glob(f".{glob.escape(out.name)}.*{_STAGING}"):
        shutil.rmtree(folder, ignore_errors=True)


_MOST_DIGITS = 300  # a longer integer fits into no float
_SURROGATE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")  # of a pair, or alone


def parse_json(text: str | bytes, *, source: object, error: type[MlflowCompressError] = DataError) -> Any:
    """Return the value of a JSON text; otherwise raise `error`, which names the `source`: a path, or a path and a line.

    Besides what is no JSON, this refuses what Python's parser takes without a word, or fails on in its own way: a name
    that an object has twice, of which the last would win; brackets that are nested too deeply; integers of more than
    300 digits; bytes that are no UTF-8; and half of a surrogate pair, which no file can hold. NaN and Infinity are
    read, because programs write them; whoever uses the value refuses them.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_each_once, parse_int=_integer)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        reason = "it is nested too deeply"
    except UnicodeEncodeError:
        reason = "it holds half of a surrogate pair, which is no character"
    except UnicodeDecodeError:
        reason = "it is no UTF-8 text"
    except ValueError as wrong:
        reason = str(wrong)
    else:
        return value
    raise error(f"{source}: not JSON that can be used ({reason})") from None


def is_too_deep(text: bytes) -> bool:
    """Return whether brackets are nested more deeply than Python's parser takes, in a text that may be no JSON."""
    try:
        with suppress(ValueError):
            json.loads(text)
    except RecursionError:
        return True
    return False


def read_json(path: Path, *, error: type[MlflowCompressError] = DataError) -> Any:
    """Return the value of a JSON file; one that cannot be read is an error of the given type, see `parse_json`."""
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as wrong:
        reason = getattr(wrong, "strerror", None) or str(wrong)
        raise error(f"{path}: the file cannot be read ({reason})") from wrong
    return parse_json(data, source=path, error=error)


def read_json_object(path: Path, *, error: type[MlflowCompressError] = DataError) -> dict[str, Any]:
    """Return the object of a JSON file, by name; another value is an error of the given type too."""
    value = read_json(path, error=error)
    if not isinstance(value, dict):
        raise error(f"{path}: not a JSON object", allowed='{"name": value}', got=type(value).__name__)
    return value


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the name {twice[:60]!r} twice")
    return values


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"an integer has {len(digits):,} digits")
    return int(digits)


T = TypeVar("T")


def read_typed(
    path: Path,
    kind: type[T],
    *,
    error: type[MlflowCompressError],
    fix: str | None = None,
    optional: Collection[str] = (),
) -> T:
    """Return the object of a JSON file as a dataclass: see `dataclass_of`."""
    return dataclass_of(read_json_object(path, error=error), path, kind, error=error, fix=fix, optional=optional)


def dataclass_of(
    content: Mapping[str, Any],
    path: Path,
    kind: type[T],
    *,
    error: type[MlflowCompressError],
    fix: str | None = None,
    ignore: Collection[str] = (),
    optional: Collection[str] = (),
) -> T:
    """Return what a JSON file holds as a dataclass, whose fields all have their declared types.

    `ignore` has names that the file has and the dataclass has not, `optional` fields that the file may lack. Any other
    difference is an `error`.
    """
    stored = {name: value for name, value in content.items() if name not in ignore}
    hints = get_type_hints(kind)
    wrong = sorted(stored.keys() - hints) or sorted(hints.keys() - stored.keys() - set(optional))
    if wrong:
        raise error(f"{path.name} is broken: it lacks a field, or has an unknown one", got=wrong[0], fix=fix)
    for name, hint in ((name, hint) for name, hint in hints.items() if name in stored):
        try:
            TypeAdapter(hint).validate_python(stored[name], strict=True)
        except ValidationError as invalid:
            reason = invalid.errors(include_url=False)[0]["msg"]
            raise error(f"{path.name} is broken: {name}: {reason}", got=str(path), fix=fix) from None
    return kind(**stored)


_MOST_YAML_BYTES = 2**20
_MOST_YAML_VALUES = 10_000
_TOO_MANY = f"with its aliases it stands for more than {_MOST_YAML_VALUES:,} values"
_DEEPEST_YAML = 100  # brackets within brackets


class _OnceLoader(yaml.SafeLoader):  # type: ignore[misc]
    """The safe loader, which also refuses a name that is there twice; the last would win without a word.

    Aliases of aliases make a small file stand for any number of values: those are counted before one is made.
    """

    _n_nodes = 0

    def fetch_flow_collection_start(self, token: Any) -> None:
        """Read a bracket; the time that many of them take grows with the square of their number."""
        if self.flow_level == _DEEPEST_YAML:
            raise yaml.YAMLError("it is nested too deeply")
        super().fetch_flow_collection_start(token)

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node; more of them than a file may have are not read."""
        self._n_nodes += 1
        if self._n_nodes > _MOST_YAML_VALUES:
            raise yaml.YAMLError(_TOO_MANY)
        return super().compose_node(parent, index)

    def get_single_node(self) -> Any:
        """Return the node of the document; one that stands for too many values is refused."""
        node = super().get_single_node()
        if node is not None and self._values(node, {}) > _MOST_YAML_VALUES:
            raise yaml.YAMLError(_TOO_MANY)
        return node

    def _values(self, node: Any, counted: dict[int, int]) -> int:
        if id(node) not in counted:
            inner = node.value if isinstance(node, yaml.CollectionNode) else ()
            parts = [part for pair in inner for part in (pair if isinstance(pair, tuple) else (pair,))]
            counted[id(node)] = 1 + sum(self._values(part, counted) for part in parts)
        return counted[id(node)]

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        if len(set(names)) < len(names):
            twice = next(name for name, number in Counter(names).items() if number > 1)
            raise yaml.MarkedYAMLError(problem=f"the name {twice[:60]!r} is there twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, *, parameter: str) -> Any:
    """Return the value of a YAML file, None if it is empty; `parameter` is the one that names the file."""
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(_MOST_YAML_BYTES + 1)
        if len(data) > _MOST_YAML_BYTES:
            raise ValueError(f"it has more than {_MOST_YAML_BYTES:,} bytes")
        return yaml.load(data.decode("utf-8"), Loader=_OnceLoader)
    except RecursionError:
        reason = "it is nested too deeply"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        reason = f"{error.problem}{f', line {mark.line + 1}' if mark is not None else ''}"
    except (OSError, ValueError, RuntimeError, OverflowError, TypeError, yaml.YAMLError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
    raise ConfigError(f"Parameter '{parameter}' names no YAML file that can be read: {reason}", got=str(path))


@contextmanager
def alone_with(lock: Path, *, wait: bool = True) -> Iterator[bool]:
    """Yield whether this process alone has a lock file; without `wait`, False where another process has it.

    The operating system releases the lock of a killed process. The file is deleted while it is locked: whoever waited
    for it sees that it has no name any more (filelock looks at `st_nlink`), and locks a new file.
    """
    from filelock import FileLock, Timeout

    taken = FileLock(lock)
    try:
        taken.acquire(timeout=-1 if wait else 0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.unlink(missing_ok=True)
        taken.release()
