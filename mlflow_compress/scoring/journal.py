"""Results of an unfinished pass on disk, so that a killed run resumes where it stopped."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from mlflow_compress.errors import StoreError
from mlflow_compress.files import read_json_object, read_typed
from mlflow_compress.scoring.baseline_store import StateWriter, write_file

Arrays = dict[str, npt.NDArray[Any]]
_IDENTITY = "identity.json"
_FIX = "Delete the folder to start again"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Label:
    """What the JSON file of a part says of its arrays."""

    groups: int
    sha256: str
    note: dict[str, Any]


class Journal:
    """Results of one pass, written in parts, in order.

    `identity` is what the results depend on (weights, plan, targets, baseline, ...).
    """

    def __init__(self, folder: Path, identity: Mapping[str, str]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / _IDENTITY
        if path.is_file():
            stored = read_json_object(path, error=StoreError)
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
        while (path := self._path(".json")).is_file():
            label = read_typed(path, _Label, error=StoreError, fix=_FIX)
            path = self._path(".safetensors")
            data = path.read_bytes() if path.is_file() else b""
            if hashlib.sha256(data).hexdigest() != label.sha256:
                raise StoreError(f"{path.name} was changed after it was written", got=str(self.folder), fix=_FIX)
            try:
                parts.append((label.groups, load(data), label.note))
            except SafetensorError as error:
                raise StoreError(f"{path.name} is not a safetensors file: {error}", got=str(self.folder)) from error
            self._n_parts += 1
        return parts

    def append(self, groups: int, arrays: Arrays, note: Mapping[str, Any]) -> None:
        """Write the next part; `groups` is the number of groups done so far.

        The JSON file is written last, and makes the part valid.
        """
        data = save({key: np.ascontiguousarray(value) for key, value in arrays.items()})
        label = _Label(groups, write_file(self._path(".safetensors"), data), dict(note))
        write_file(self._path(".json"), json.dumps(asdict(label)).encode())
        self._n_parts += 1

    def _path(self, suffix: str) -> Path:
        return self.folder / f"part-{self._n_parts:05d}{suffix}"


class PassParts:
    """Finished parts of a pass, in any order. They are the same whoever computed them: this process, or workers.

    `resume` is the folder of unfinished results, and what they depend on; None keeps nothing on disk. `label` names the
    pass in the log.
    """

    def __init__(
        self,
        n_groups: int,
        resume: tuple[Path, Mapping[str, str]] | None,
        capture: StateWriter | None,
        *,
        label: str,
    ) -> None:
        self._capture = capture
        self._journal = Journal(*resume) if resume is not None else None
        self._missing = set(range(n_groups))
        self._parts: dict[int, tuple[Arrays, Mapping[str, Any] | None]] = {}  # by their first groups
        for stop, arrays, note in self._journal.load() if self._journal is not None else []:
            self._keep(int(note["first"]), stop, arrays, note["captured"])
        if self._parts:
            logger.info("%s resumes: %d of %d groups are finished", label, n_groups - len(self._missing), n_groups)

    def missing(self) -> list[int]:
        return sorted(self._missing)

    def add(self, first: int, stop: int, arrays: Arrays, captured: Mapping[str, Any] | None) -> None:
        """Add the results of the groups `first` to `stop` - 1, and what was written of their states."""
        self._keep(first, stop, arrays, captured)
        if self._journal is not None:
            self._journal.append(stop, arrays, {"first": first, "captured": captured})

    def _keep(self, first: int, stop: int, arrays: Arrays, captured: Mapping[str, Any] | None) -> None:
        self._parts[first] = arrays, captured
        self._missing.difference_update(range(first, stop))

    def joined(self) -> Arrays:
        """Return the results of all groups, of which there is at least one, and add their states to the store."""
        parts = [part for _, part in sorted(self._parts.items())]
        if self._capture is not None:
            self._capture.adopt([captured for _, captured in parts if captured is not None])
        return joined_arrays([arrays for arrays, _ in parts])


def joined_arrays(parts: Sequence[Arrays]) -> Arrays:
    """Return the results of several groups, one after the other."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
