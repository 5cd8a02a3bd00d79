"""Finished parts of a pass, each with the results of some groups: from an interrupted run, and from this one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlflow_compress.scoring.baseline_store.state_writer import StateWriter
from mlflow_compress.scoring.checkpointing.journal import Arrays, Journal

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Part:
    stop: int
    arrays: Arrays
    captured: Mapping[str, Any] | None


class PassParts:
    """Finished parts of a pass, in any order. They are the same whoever computed them: this process, or workers.

    Parameters
    ----------
    n_groups : int
        Groups of the pass.
    resume : (Path, mapping of str to str), optional
        Folder of unfinished results, and what they depend on. None: nothing is kept on disk.
    capture : StateWriter, optional
        Writes the states.
    label : str
        The pass, in the log.

    Raises
    ------
    StoreError
        When the folder holds another pass, or is damaged.
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
