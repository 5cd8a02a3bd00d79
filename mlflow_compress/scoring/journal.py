"""Results of an unfinished pass on disk, so that a killed run resumes where it stopped."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from mlflow_compress.errors import StoreError
from mlflow_compress.files import parse_json
from mlflow_compress.scoring.baseline_store import StateWriter, write_file

Arrays = dict[str, npt.NDArray[Any]]
IDENTITY = "identity.json"


class Journal:
    """Results of one pass, written in parts, in order.

    `identity` is what the results depend on (weights, plan, targets, baseline, ...).

    Raises `StoreError` when the folder holds a pass of another identity.
    """

    def __init__(self, folder: Path, identity: Mapping[str, str]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / IDENTITY
        if path.is_file():
            stored = _json(path.read_bytes(), path)
            differ = sorted(k for k in stored.keys() | identity.keys() if stored.get(k) != identity.get(k))
            if differ:
                raise StoreError(
                    f"The folder holds an interrupted pass with other {', '.join(differ)}",
                    got=str(self.folder),
                    fix="Resume with the same settings, or delete the folder to start again",
                )
        else:
            write_file(path, json.dumps(dict(identity), indent=1).encode())
        self._n_parts = 0

    def load(self) -> list[tuple[int, Arrays, dict[str, Any]]]:
        """Return (number of groups done, arrays, note) of every part; a damaged part is a `StoreError`."""
        parts: list[tuple[int, Arrays, dict[str, Any]]] = []
        while (self.folder / f"part-{self._n_parts:05d}.json").is_file():
            label = self.folder / f"part-{self._n_parts:05d}.json"
            note = _json(label.read_bytes(), label)
            kinds = {"groups": int, "sha256": str, "note": dict}
            if not all(isinstance(note.get(name), kind) for name, kind in kinds.items()):
                raise StoreError(f"{label.name} is no note of finished work", fix="Delete the folder to start again")
            path = label.with_suffix(".safetensors")
            data = path.read_bytes() if path.is_file() else b""
            if hashlib.sha256(data).hexdigest() != note.get("sha256"):
                raise StoreError(
                    f"{path.name} was changed after it was written",
                    got=str(self.folder),
                    fix="Delete the folder to start again",
                )
            try:
                parts.append((int(note["groups"]), load(data), dict(note["note"])))
            except SafetensorError as error:
                raise StoreError(f"{path.name} is not a safetensors file: {error}", got=str(self.folder)) from error
            self._n_parts += 1
        return parts

    def append(self, groups: int, arrays: Arrays, note: Mapping[str, Any]) -> None:
        """Write the next part; `groups` is the number of groups done so far.

        The JSON file is written last, and makes the part valid.
        """
        name = f"part-{self._n_parts:05d}"
        data = save({key: np.ascontiguousarray(value) for key, value in arrays.items()})
        digest = write_file(self.folder / f"{name}.safetensors", data)
        label = {"groups": groups, "sha256": digest, "note": dict(note)}
        write_file(self.folder / f"{name}.json", json.dumps(label).encode())
        self._n_parts += 1


def _json(data: bytes, path: Path) -> dict[str, Any]:
    value = parse_json(data, source=path, error=StoreError)
    if not isinstance(value, dict):
        raise StoreError(f"{path.name} holds no object", got=str(path), fix="Delete the folder to start again")
    return value


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Part:
    stop: int
    arrays: Arrays
    captured: Mapping[str, Any] | None


class PassParts:
    """Finished parts of a pass, in any order. They are the same whoever computed them: this process, or workers.

    `resume` is the folder of unfinished results, and what they depend on; None keeps nothing on disk. `label` names the
    pass in the log.

    Raises `StoreError` when the folder holds another pass, or is damaged.
    """

    def __init__(
        self,
        n_groups: int,
        resume: tuple[Path, Mapping[str, str]] | None,
        capture: StateWriter | None,
        *,
        label: str,
    ) -> None:
        self._n_groups = n_groups
        self._capture = capture
        self._journal = Journal(*resume) if resume is not None else None
        self._parts: dict[int, _Part] = {}
        for stop, arrays, note in self._journal.load() if self._journal is not None else []:
            self._parts[int(note["first"])] = _Part(stop, arrays, note["captured"])
        if self._parts:
            n_done = n_groups - len(self.missing())
            logger.info("%s resumes: %d of %d groups are finished", label, n_done, n_groups)

    def missing(self) -> list[int]:
        """Return the numbers of the groups that no part holds, in ascending order."""
        done = {number for first, part in self._parts.items() for number in range(first, part.stop)}
        return [number for number in range(self._n_groups) if number not in done]

    def add(self, first: int, stop: int, arrays: Arrays, captured: Mapping[str, Any] | None) -> None:
        """Add the results of the groups `first` to `stop` - 1, and what was written of their states."""
        self._parts[first] = _Part(stop, arrays, captured)
        if self._journal is not None:
            self._journal.append(stop, arrays, {"first": first, "captured": captured})

    def joined(self) -> Arrays:
        """Return the results of all groups, of which there is at least one, and add their states to the store."""
        parts = [part for _, part in sorted(self._parts.items())]
        if self._capture is not None:
            self._capture.adopt([part.captured for part in parts if part.captured is not None])
        return {name: np.concatenate([part.arrays[name] for part in parts]) for name in parts[0].arrays}
