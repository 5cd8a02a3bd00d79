"""Runs llama.cpp's quantizer for K-quants: 2 to 6 bits in blocks of 256, with types that differ by layer."""

from __future__ import annotations

import ctypes
import tempfile
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mlflow_compress.compression.gguf import gguf_model
from mlflow_compress.compression.method import CompressionJob, Method, require_bits
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.models import gguf_file
from mlflow_compress.models.source_model import SourceModel

if TYPE_CHECKING:
    import numpy as np
    import torch

BLOCK = 256
BITS = (6, 5, 4, 3, 2)
MIXES = {6: ("M",), 5: ("M", "S"), 4: ("M", "S"), 3: ("L", "M", "S"), 2: ("M",)}


@dataclass(frozen=True, kw_only=True)
class KQuantConfig(gguf_model.BaseGgufConfig):
    """Settings of the K-quant methods."""

    bits: int = 4
    """Bits of most weights; `Q4_K_M` is 4 bits with mix M."""
    mix: Literal["L", "M", "S"] = "M"
    """How many sensitive layers get more bits: large, medium or small. Q6_K and Q2_K have only one mix."""
    embeddings: bool = False
    """Quantize the embeddings and the head too, as in files made by llama.cpp."""

    def __post_init__(self) -> None:
        """Raise an error for bits and mixes without a GGUF type."""
        require_bits("gguf-k", self.bits, BITS)
        if self.mix not in MIXES[self.bits]:
            raise ConfigError(
                f"There is no {self.bits}-bit K-quant of this mix", allowed=MIXES[self.bits], got=self.mix
            )

    @property
    def type_name(self) -> str:
        """llama.cpp's name of the type, for example ``Q4_K_M``."""
        return f"Q{self.bits}_K" if len(MIXES[self.bits]) == 1 else f"Q{self.bits}_K_{self.mix}"


class KQuantMethod(Method):
    """Base of the methods whose file is written by llama.cpp's own quantizer.

    transformers computes with the dequantized values; with `native`, llama.cpp computes.
    """

    format = "gguf"
    runs_in = ("llama.cpp",)
    supported_bits = BITS
    requires = (gguf_model.PACKAGE,)
    extra = gguf_model.EXTRA

    def label(self, config: Any) -> str:
        """Return ``gguf-q4_k_m``; ``-all``: embeddings and head too; ``-native``: computed by llama.cpp."""
        kind = f"{self.name.removesuffix('-k')}-{config.type_name.lower()}"
        return f"{kind}{'-all' if config.embeddings else ''}{'-native' if config.native else ''}"

    def check(self, config: Any, source: SourceModel) -> None:
        """Raise an error as `gguf` does, and for rows that are not complete blocks: llama.cpp would use other types."""
        gguf_model.require_known(source, BLOCK)

    @abstractmethod
    def importance(self, job: CompressionJob, model: Any) -> dict[str, np.ndarray[Any, Any]] | None:
        """Return the importance of each input channel of each tensor, by GGUF name; None where all are equal."""

    def compress(self, job: CompressionJob) -> torch.Tensor:
        """Write the base as GGUF, let llama.cpp quantize the file, and return the new file's logits."""
        import gguf

        model, path = gguf_model.load(job), job.folder / gguf_file.FILE
        plain = gguf_model.plain_kind(job.source.dtype)
        tensors = gguf_model.tensors_of(model, lambda _, parameter: plain(parameter))
        importance = self.importance(job, model)
        with tempfile.TemporaryDirectory(dir=job.folder) as scratch:
            full = Path(scratch) / gguf_file.FILE
            gguf_model.save(job, model, gguf.LlamaFileType.ALL_F32, tensors, full)
            embedding_type = None if job.config.embeddings else int(tensors["token_embd.weight"][1])
            quantize_file(full, path, gguf.LlamaFileType[f"MOSTLY_{job.config.type_name}"], embedding_type, importance)
        return gguf_model.file_logits(job, model, path)


def quantize_file(
    source: Path,
    target: Path,
    file_type: int,
    embedding_type: int | None = None,
    importance: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> None:
    """Quantize a GGUF file with `llama_model_quantize`.

    Parameters
    ----------
    source, target : Path
        File to read, and to write.
    file_type : int
        A member of `gguf.LlamaFileType`.
    embedding_type : int or None
        `gguf.GGMLQuantizationType` of the embeddings; the head is then not quantized. None: llama.cpp chooses both.
    importance : mapping or None
        The importance matrix: float32, shape (in_features,), by GGUF tensor name.

    Raises
    ------
    UnsupportedError
        llama.cpp did not write the file.
    """
    import gguf
    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = int(file_type)
    if embedding_type is not None:
        settings.token_embedding_type, settings.quantize_output_tensor = embedding_type, False
    entries = _entries(importance) if importance is not None else None
    if entries is not None:
        settings.imatrix = entries
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(settings)) != 0:
        raise UnsupportedError("llama.cpp could not quantize the model", got=gguf.LlamaFileType(file_type).name)


def _entries(importance: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    """Return the importance matrix as a C array for llama.cpp; an entry without a name marks its end."""
    import llama_cpp
    import numpy as np

    entries = (llama_cpp.llama_model_imatrix_data * (len(importance) + 1))()
    for entry, (name, values) in zip(entries, importance.items(), strict=False):
        numbers = np.ascontiguousarray(values, dtype=np.float32)
        entry.name, entry.size = name.encode(), numbers.size
        entry.data = (ctypes.c_float * numbers.size)(*numbers)
    return entries
