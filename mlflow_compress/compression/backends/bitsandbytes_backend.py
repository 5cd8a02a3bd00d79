"""Runs bitsandbytes through transformers, in the only safe order: load, save, then compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mlflow_compress.compression.method import CompressionJob, Method, MethodConfig, require_bits
from mlflow_compress.models.architectures import bnb_4bit

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class FourBitConfig(MethodConfig):
    """Settings of the 4-bit methods."""

    codes: ClassVar[str]
    """Name of the sixteen codes in bitsandbytes."""
    bits: int = 4
    """Bits per weight: always 4."""
    double_quant: bool = False
    """Quantize the scales to 8 bits too, which saves up to 0.37 bits per weight."""

    def __post_init__(self) -> None:
        """Refuse other bits."""
        require_bits(f"bnb-{self.codes}", self.bits, (4,))


class FourBitMethod(Method):
    """Base of the 4-bit methods of bitsandbytes, which differ only in their sixteen codes."""

    runs_in = ("vLLM",)
    supported_bits = (4,)
    by_class = True
    requires = ("bitsandbytes", "accelerate")

    def label(self, config: Any) -> str:
        """Return ``bnb-nf4`` or ``bnb-nf4-dq``."""
        return f"{self.name}-dq" if config.double_quant else self.name

    def compress(self, job: CompressionJob) -> torch.Tensor:
        """Quantize while loading."""
        return quantize_and_save(
            job,
            load_in_4bit=True,
            bnb_4bit_quant_type=job.config.codes,
            bnb_4bit_use_double_quant=job.config.double_quant,
        )


def quantize_and_save(job: CompressionJob, **options: Any) -> torch.Tensor:
    """Quantize while loading, save, and return the logits of the model in memory.

    On a CPU the first forward pass in evaluation mode repacks 4-bit weights in place, and a checkpoint that is saved
    after it is silently corrupt. So the model is saved before any forward pass. On a CPU its 4-bit layers are then
    replaced by layers with the dequantized weights, which compute the logits (see `architectures.bnb_4bit`).

    Quantization starts from the stored weights in float32. Everything that is not quantized is stored in the base's
    dtype, without loss.

    Parameters
    ----------
    job : CompressionJob
        What to compress, and where to write it.
    **options
        Arguments of `transformers.BitsAndBytesConfig`.

    Returns
    -------
    torch.Tensor
        Logits of the in-memory model on the probe, shape (n_positions, vocabulary).
    """
    import torch
    from transformers import BitsAndBytesConfig

    bnb_4bit.import_offline()
    config = BitsAndBytesConfig(llm_int8_skip_modules=job.source.ignored, **options)
    model = job.source.load(job.device, quantization_config=config)
    _cast_unquantized(model, job.source.torch_dtype)
    model.config.dtype = job.source.torch_dtype
    model.save_pretrained(job.folder)
    job.source.tokenizer().save_pretrained(job.folder)
    _cast_unquantized(model, torch.float32)
    bnb_4bit.expand(model)
    return job.probe.logits(model)


def _cast_unquantized(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters that bitsandbytes has not quantized (its own are integers)."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
