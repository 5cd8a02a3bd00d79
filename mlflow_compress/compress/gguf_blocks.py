"""GGUF: llama.cpp's file format, with its plain block quantizations, in pure Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlflow_compress.compress import gguf_file
from mlflow_compress.compress.base import Job, Method, MethodConfig, register, require_bits
from mlflow_compress.compress.source import SourceModel
from mlflow_compress.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

BITS = (8, 5, 4)
BLOCK = 32
ROPE_TYPES = ("default", "llama3")


@dataclass(frozen=True, kw_only=True)
class Config(MethodConfig):
    """Settings of `gguf`."""

    bits: int = 4
    """8, 5 or 4: the types Q8_0, Q5_0 and Q4_0, each with one float16 scale for 32 weights."""
    embeddings: bool = False
    """Quantize the embeddings and the head as well, as files made by llama.cpp do."""

    def __post_init__(self) -> None:
        """Refuse bits without a type."""
        require_bits("gguf", self.bits, BITS)


@register
class Gguf(Method):
    """Symmetric round-to-nearest in blocks of 32; transformers reads the file and computes with the values it means.

    llama.cpp itself also rounds activations to 8 bits on many devices, which adds to the distance measured here. K- and
    i-quants need llama.cpp's own quantizer and are not offered. The file carries a byte-level BPE vocabulary; with any
    other tokenizer it carries none, and llama.cpp then takes token ids only.
    """

    name = "gguf"
    description = "llama.cpp's GGUF with Q8_0, Q5_0 or Q4_0 blocks, written in pure Python"
    reference = "https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (package gguf)"
    format = "gguf"
    Config = Config
    runs_in = ("llama.cpp",)
    supported_bits = BITS
    requires = ("gguf",)

    def label(self, config: Any) -> str:
        """Return ``gguf-q4_0``, with ``-all`` where embeddings and head are quantized too."""
        return f"gguf-q{config.bits}_0{'-all' if config.embeddings else ''}"

    def check(self, config: Any, source: SourceModel) -> None:
        """Refuse architectures without a known mapping, scaled positions, and rows that are no whole blocks."""
        if source.architecture not in gguf_file.ARCHITECTURES:
            raise UnsupportedError(
                "The names of this architecture's tensors in GGUF are not known here",
                allowed=sorted(gguf_file.ARCHITECTURES),
                got=source.architecture,
            )
        for name, (_, in_features) in source.linear.items():
            if in_features % BLOCK:
                raise UnsupportedError(
                    f"GGUF's blocks do not divide the {in_features} input features of {name}",
                    allowed=f"multiples of {BLOCK}",
                    got=in_features,
                )
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(source.folder, local_files_only=True)
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope not in ROPE_TYPES:
            raise UnsupportedError(
                "GGUF files of models whose positions are scaled in this way are not written here",
                allowed=ROPE_TYPES,
                got=rope,
            )

    def compress(self, job: Job) -> torch.Tensor:
        """Quantize, put the values that the blocks mean into the model, and write both file and configuration."""
        import gguf
        import numpy as np
        import torch

        model = job.source.load(job.device)
        architecture = gguf_file.ARCHITECTURES[job.source.architecture]
        kinds = gguf.GGMLQuantizationType
        kind, full = kinds[f"Q{job.config.bits}_0"], kinds.F32
        plain = {"float32": kinds.F32, "bfloat16": kinds.BF16, "float16": kinds.F16}[job.source.dtype]
        blocks = {*job.source.linear, *(("model.embed_tokens", "lm_head") if job.config.embeddings else ())}
        tensors: dict[str, tuple[Any, Any]] = {}
        for name, parameter in model.named_parameters():
            module, _, part = name.rpartition(".")
            quantized = part == "weight" and module in blocks
            stored = kind if quantized else plain if parameter.ndim > 1 else full  # norms and biases are float32
            data = gguf.quants.quantize(parameter.data.float().cpu().numpy(), stored)
            if quantized:
                parameter.data.copy_(torch.from_numpy(gguf.quants.dequantize(data, stored)))
            if architecture == "llama" and module.endswith(("q_proj", "k_proj")):
                query = module.endswith("q_proj")
                heads = model.config.num_attention_heads if query else model.config.num_key_value_heads
                data = gguf_file.interleave_heads(data, heads)
            tensors[gguf_file.to_gguf_name(name)] = (data, stored)
        factors = rope_factors(model)
        if not np.allclose(factors, 1.0):
            tensors["rope_freqs.weight"] = (factors, full)
        tokenizer = job.source.tokenizer()
        model.config.dtype = job.source.torch_dtype
        for part in (model.config, model.generation_config, tokenizer):
            part.save_pretrained(job.folder)
        file_type = gguf.LlamaFileType[f"MOSTLY_Q{job.config.bits}_0"]
        gguf_file.write(job.folder / gguf_file.FILE, model.config, architecture, file_type, tensors, tokenizer)
        return job.probe.logits(model)


def rope_factors(model: Any) -> Any:
    """Return by what llama.cpp divides each rotary frequency; float32, shape (head_dim / 2,), 1 without scaling."""
    import torch

    rotary = model.model.rotary_emb.inv_freq.float().cpu()
    exponents = torch.arange(len(rotary), dtype=torch.float64) / len(rotary)
    plain = model.config.rope_parameters["rope_theta"] ** -exponents
    return (plain / rotary.double()).float().numpy()
