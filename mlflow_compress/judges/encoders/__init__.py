"""What turns answers into vectors: a sentence encoder on this machine, or an endpoint that embeds texts."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class AnswerEncoder(Protocol):
    """Interface of an encoder."""

    @property
    def name(self) -> str:
        """Name for people: "all-MiniLM-L6-v2 (embedded)", a hub name, a folder, or "NAME at ADDRESS"."""

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return one vector per text, shape (n, d); equal texts have equal vectors."""

    @property
    def identity(self) -> str:
        """Digest of everything that decides a vector. Vectors of unlike encoders are never compared."""
