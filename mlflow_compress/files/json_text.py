"""The project's one reader of JSON that others wrote: strict, and with one clear error."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mlflow_compress.errors import DataError, MlflowCompressError

_MOST_DIGITS = 300  # a longer integer fits into no float
_SURROGATE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")  # of a pair, or alone


def parse_json(text: str | bytes, *, source: object, error: type[MlflowCompressError] = DataError) -> Any:
    """Return the value of a JSON text.

    Besides what is no JSON, this refuses what Python's parser takes without a word, or fails on in its own way: a name
    that an object has twice, of which the last would win; brackets that are nested too deeply; integers of more than
    300 digits; bytes that are no UTF-8; and half of a surrogate pair, which no file can hold. NaN and Infinity are
    read, because programs write them; whoever uses the value refuses them.

    Parameters
    ----------
    text : str or bytes
        The text.
    source : object
        Where it is from, for the error: a path, or a path and a line.
    error : type
        The error that is raised.

    Raises
    ------
    MlflowCompressError
        Of the type `error`, naming the source and what is wrong.
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
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the name {twice[:60]!r} twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"an integer has {len(digits):,} digits")
    return int(digits)
