"""Running bitsandbytes through transformers, in the one order that is safe: load, save, and only then compute."""

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
    """The sixteen codes' name in bitsandbytes."""
    bits: int = 4
    """Bits of a weight: always 4."""
    double_quant: bool = False
    """Quantize the blocks' scales to 8 bits as well: up to 0.37 bits a weight less."""

    def __post_init__(self) -> None:
        """Refuse other bits."""
        require_bits(f"bnb-{self.codes}", self.bits, (4,))


class FourBitMethod(Method):
    """A 4-bit method of bitsandbytes: the same but for its sixteen codes."""

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
    """Quantize while loading, save, and measure the model in memory afterwards.

    On a CPU the first forward in evaluation mode repacks 4-bit weights in place; a checkpoint saved after that is
    silently corrupt. So the model is saved before any forward. Its 4-bit layers are then expanded to the values that
    they stand for, on a CPU, and the logits come from these (see `architectures.bnb_4bit`).

    Quantization starts from the stored weights widened to float32, and everything left unquantized is stored in the
    base's own type, which loses nothing.

    Parameters
    ----------
    job : CompressionJob
        What to compress and where to write it.
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
    """Cast the parameters that bitsandbytes leaves alone (its own are integers)."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
