"""JSON files that this package writes itself: read back with the type of every field."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from mlflow_compress.errors import MlflowCompressError
from mlflow_compress.files.json_text import read_json_object

T = TypeVar("T")


def read_typed(
    path: Path,
    kind: type[T],
    *,
    error: type[MlflowCompressError],
    fix: str | None = None,
    ignore: Collection[str] = (),
) -> T:
    """Return the object of a JSON file as a dataclass, whose fields all have their declared types.

    `ignore` has names that the file has and the dataclass has not.

    Raises
    ------
    MlflowCompressError
        Of the type `error`: the file cannot be read, has a field too many or too few, or one of another type.
    """
    stored = {name: value for name, value in read_json_object(path, error=error).items() if name not in ignore}
    hints = get_type_hints(kind)
    wrong = sorted(stored.keys() - hints) or sorted(hints.keys() - stored)
    if wrong:
        raise error(f"{path.name} is broken: it lacks a field, or has an unknown one", got=wrong[0], fix=fix)
    for name, hint in hints.items():
        try:
            TypeAdapter(hint).validate_python(stored[name], strict=True)
        except ValidationError as invalid:
            reason = invalid.errors(include_url=False)[0]["msg"]
            raise error(f"{path.name} is broken: {name}: {reason}", got=str(path), fix=fix) from None
    return kind(**stored)
