"""Base of methods that write GGUF files, in which every tensor may have a type of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from mlflow_compress.compression.method import CompressionJob


class ForTensors(ABC):
    """A method that gives all linear layers types of GGUF by itself, or some of them for `mixed`."""

    @abstractmethod
    def tensor_type(self, config: Any) -> str:
        """Return the GGUF type of a layer with these settings: "Q4_K". Settings that mix types are a `ConfigError`."""

    @abstractmethod
    def file_type(self, config: Any) -> str:
        """Return llama.cpp's name of a file with these settings: "MOSTLY_Q4_K_M"."""

    def importance(self, job: CompressionJob, model: Any) -> dict[str, np.ndarray[Any, Any]] | None:
        """Return the importance of each input channel of each tensor, by GGUF name; None where all are equal."""
        return None
