"""GGUF: llama.cpp's file format, with its plain block quantizations, in pure Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlflow_compress.compression import gguf_model
from mlflow_compress.compression.gguf_model import ForTensors
from mlflow_compress.compression.method import CompressionJob, Method, register, require_bits
from mlflow_compress.models import gguf_file
from mlflow_compress.models.source_model import SourceModel

if TYPE_CHECKING:
    import torch

BITS = (8, 5, 4)
BLOCK = 32


@dataclass(frozen=True, kw_only=True)
class GgufConfig(gguf_model.BaseGgufConfig):
    """Settings of `gguf`."""

    bits: int = 4
    """8, 5 or 4: the types Q8_0, Q5_0 and Q4_0, each with one float16 scale per 32 weights."""
    embeddings: bool = False
    """Quantize the embeddings and the head too, as in files made by llama.cpp."""

    def __post_init__(self) -> None:
        """Raise an error for bits without a GGUF type."""
        require_bits("gguf", self.bits, BITS)


@register
class Gguf(ForTensors, Method):
    """Symmetric round-to-nearest in blocks of 32; transformers computes with the dequantized values of the file.

    llama.cpp also rounds activations to 8 bits on many devices, which adds to the distance measured here. With `native`
    llama.cpp computes the logits, so the distance includes it. llama.cpp's K-quants are the methods `gguf-k` and
    `gguf-imatrix`. The file contains the vocabulary of a byte-level BPE whose pre-tokenizer llama.cpp knows. With any
    other tokenizer it contains none, and llama.cpp then accepts token ids only.
    """

    name = "gguf"
    description = "llama.cpp's GGUF with Q8_0, Q5_0 or Q4_0 blocks, written in pure Python"
    reference = "https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (package gguf)"
    format = "gguf"
    Config = GgufConfig
    runs_in = ("llama.cpp",)
    supported_bits = BITS
    requires = ("gguf",)

    def label(self, config: Any) -> str:
        """Return ``gguf-q4_0``; ``-all``: embeddings and head too; ``-native``: computed by llama.cpp."""
        return f"gguf-q{config.bits}_0{'-all' if config.embeddings else ''}{'-native' if config.native else ''}"

    def packages(self, config: Any) -> tuple[tuple[str, ...], str | None]:
        """Return the packages, including llama.cpp's where it computes the logits."""
        if not config.native:
            return super().packages(config)
        return (*self.requires, gguf_model.PACKAGE), gguf_model.EXTRA

    def check(self, config: Any, source: SourceModel) -> None:
        """Raise `UnsupportedError` for unknown architectures, scaled positions, and rows of incomplete blocks."""
        gguf_model.require_known_architecture(source, BLOCK)

    def tensor_type(self, config: Any) -> str:
        """Return the block type of these bits."""
        return f"Q{config.bits}_0"

    def file_type(self, config: Any) -> str:
        """Return the name of the type."""
        return f"MOSTLY_Q{config.bits}_0"

    def compress(self, job: CompressionJob) -> torch.Tensor:
        """Quantize, write the file, and return its logits."""
        import gguf

        model, path = gguf_model.load_llama_like(job), job.folder / gguf_file.FILE
        blocks = {*job.source.linear, *(("model.embed_tokens", "lm_head") if job.config.embeddings else ())}
        quantized, plain = (
            gguf.GGMLQuantizationType[self.tensor_type(job.config)],
            gguf_model.plain_kind(job.source.dtype),
        )

        def kind_of(name: str, parameter: Any) -> Any:
            module, _, part = name.rpartition(".")
            return quantized if part == "weight" and module in blocks else plain(parameter)

        tensors = gguf_model.tensors_of(model, kind_of)
        gguf_model.save(job, model, gguf.LlamaFileType[self.file_type(job.config)], tensors, path)
        return gguf_model.file_logits(job, model, path)
