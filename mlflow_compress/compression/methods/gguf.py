"""GGUF: llama.cpp's file format, with its plain block quantizations, in pure Python."""

from typing import Any

from mlflow_compress.compression import gguf_model
from mlflow_compress.compression.gguf_model import ForTensors, QuantizingGgufConfig
from mlflow_compress.compression.method import CompressionJob, Logits, register
from mlflow_compress.models import gguf_file


class _GgufConfig(QuantizingGgufConfig):
    """Settings of `gguf`."""

    bits: int = 4  # 8, 5 or 4: the types Q8_0, Q5_0 and Q4_0, each with one float16 scale per 32 weights


@register
class Gguf(ForTensors[_GgufConfig]):
    """Symmetric round-to-nearest in blocks of 32; transformers computes with the dequantized values of the file.

    llama.cpp also rounds activations to 8 bits on many devices, which adds to the distance measured here. With `native`
    llama.cpp computes the logits, so the distance includes it. llama.cpp's K-quants are the methods `gguf-k` and
    `gguf-imatrix`. The file contains the vocabulary of a byte-level BPE; for what it cannot be used otherwise, see
    `gguf_file.text_warning`.
    """

    name = "gguf"
    description = "llama.cpp's GGUF with Q8_0, Q5_0 or Q4_0 blocks, written in pure Python"
    reference = "https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (package gguf)"
    Config = _GgufConfig
    block = 32
    experts = True
    supported_bits = (8, 5, 4)
    requires = ("gguf",)

    def label(self, config: _GgufConfig) -> str:
        """Return ``gguf-q4_0``; ``-all``: embeddings and head too; ``-native``: computed by llama.cpp."""
        return f"gguf-q{config.bits}_0{'-all' if config.embeddings else ''}{config.native_label}"

    def packages(self, config: _GgufConfig) -> tuple[tuple[str, ...], str | None]:
        if not config.native:
            return super().packages(config)
        return (*self.requires, gguf_model.LLAMA_CPP_PACKAGE), gguf_model.LLAMA_CPP_EXTRA

    def tensor_type(self, config: _GgufConfig) -> str:
        return f"Q{config.bits}_0"

    def file_type(self, config: _GgufConfig) -> str:
        return f"MOSTLY_Q{config.bits}_0"

    def compress(self, job: CompressionJob[_GgufConfig]) -> Logits:
        import gguf

        model, path = gguf_model.load_llama_like(job.source, job.device), job.folder / gguf_file.GGUF_FILE
        blocks = {*job.source.linear, *(("model.embed_tokens", "lm_head") if job.config.embeddings else ())}
        quantized, plain = (
            gguf.GGMLQuantizationType[self.tensor_type(job.config)],
            gguf_model.plain_kind(job.source.dtype),
        )

        def kind_of(name: str, parameter: Any) -> Any:
            module, _, part = name.rpartition(".")
            in_blocks = (part == "weight" and module in blocks) or name.endswith(gguf_model.EXPERT_TENSORS)
            return quantized if in_blocks else plain(parameter)

        tensors = gguf_model.tensors_of(model, kind_of)
        gguf_model.save(job, model, gguf.LlamaFileType[self.file_type(job.config)], tensors, path)
        return gguf_model.file_logits(job, model, path)
