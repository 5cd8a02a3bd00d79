"""llama.cpp's K-quants, without an importance matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlflow_compress.compression.backends.llama_cpp_backend import KQuantConfig, KQuantMethod
from mlflow_compress.compression.method import CompressionJob, register


@dataclass(frozen=True, kw_only=True)
class GgufKConfig(KQuantConfig):
    """Settings of `gguf-k`."""


@register
class GgufK(KQuantMethod):
    """Q6_K to Q2_K: blocks of 16 or 32 with 4- to 8-bit scales, in super-blocks of 256."""

    name = "gguf-k"
    description = "llama.cpp's GGUF with K-quants (Q6_K, Q5_K_M, Q4_K_M, ...), written by llama.cpp itself"
    reference = "https://github.com/ggml-org/llama.cpp/pull/1684 (llama_model_quantize)"
    Config = GgufKConfig

    def importance(self, job: CompressionJob, model: Any) -> None:
        """Return None: all channels are equally important."""
