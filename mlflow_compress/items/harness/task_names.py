"""Names in the harness's collection, searched as text, because building the harness's index takes seconds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

_DEFINED = re.compile(r"""(?m)^\s*(?:-\s*)?["']?(?:task|group|tag)["']?\s*:\s*["']?([\w\-.+]+)""")


def collection() -> Path:
    """Return the folder of the harness's task definitions, without importing `lm_eval`."""
    found = find_spec("lm_eval")
    assert found is not None and found.submodule_search_locations, "lm_eval is a core dependency"
    return Path(next(iter(found.submodule_search_locations))) / "tasks"


@lru_cache(maxsize=1)
def _texts() -> dict[Path, str]:
    """Return the text of every definition file, by path."""
    paths = (path for path in collection().rglob("*") if "yaml" in path.name and path.is_file())
    return {path: path.read_text(encoding="utf-8", errors="replace") for path in sorted(paths)}


def is_mentioned(name: str) -> bool:
    """Return whether any definition contains the name as a word. If not, no task, group or tag has this name."""
    word = re.compile(rf"(?<![\w\-.+]){re.escape(name)}(?![\w\-.+])")
    return any(name in text and word.search(text) for text in _texts().values())


def folder_of_task(name: str) -> str | None:
    """Return the folder of a task's definition; None for groups, tags, and names with several definitions.

    A task needs only its own file and the files that it includes by path.
    """
    key = rf"""(?m)^["']?(task|group)["']?\s*:\s*["']?{re.escape(name)}["']?\s*$"""
    found = [
        (path, match.group(1)) for path, text in _texts().items() if name in text and (match := re.search(key, text))
    ]
    if len(found) != 1 or found[0][1] != "task" or found[0][0].suffix != ".yaml":
        return None
    return found[0][0].parent.relative_to(collection()).as_posix()


def defined_names() -> list[str]:
    """Return the names of tasks, groups and tags, for suggestions. Tags that are given as a list are left out."""
    return sorted({name for text in _texts().values() for name in _DEFINED.findall(text)})


def definition(name: str, folders: Sequence[str]) -> bytes:
    """Return a task's name and the contents of its folders: definitions and their Python files."""
    parts = [name.encode()]
    for folder in folders:
        for path in sorted((collection() / folder).rglob("*")):
            if path.is_file() and ("yaml" in path.name or path.suffix == ".py"):
                where = path.relative_to(collection()).as_posix()
                parts.append(where.encode() + b"\n" + path.read_bytes())
    return b"\n".join(parts)
