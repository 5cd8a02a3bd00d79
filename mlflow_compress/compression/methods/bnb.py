"""bitsandbytes: 4-bit codes in blocks of 64 (NF4, FP4), and LLM.int8(), through transformers."""

from pydantic import Field

from mlflow_compress.compression.method import CompressionJob, Logits, Method, MethodConfig, register
from mlflow_compress.models.architectures import packed_layers


class _FourBitConfig(MethodConfig):
    """Settings of the 4-bit methods."""

    bits: int = 4  # Bits per weight: always 4
    double_quant: bool = False  # Quantize the scales to 8 bits too, which saves up to 0.37 bits per weight


class _FourBitMethod(Method[_FourBitConfig]):
    """Base of the 4-bit methods, which differ only in their sixteen codes."""

    Config = _FourBitConfig
    runs_in = ("vLLM",)
    supported_bits = (4,)
    by_class = True
    requires = ("bitsandbytes", "accelerate")
    extra = "bitsandbytes"

    def label(self, config: _FourBitConfig) -> str:
        return f"{self.name}-dq" if config.double_quant else self.name

    def compress(self, job: CompressionJob[_FourBitConfig]) -> Logits:
        codes = self.name.removeprefix("bnb-")
        return _quantize_and_save(
            job, load_in_4bit=True, bnb_4bit_quant_type=codes, bnb_4bit_use_double_quant=job.config.double_quant
        )


@register
class BnbFp4(_FourBitMethod):
    """bitsandbytes 4-bit floating point."""

    name = "bnb-fp4"
    description = "bitsandbytes FP4: 4-bit floating-point weights in blocks of 64"
    reference = "Dettmers and Zettlemoyer 2023, https://arxiv.org/abs/2212.09720"
    format = "bitsandbytes 4-bit (fp4)"


@register
class BnbNf4(_FourBitMethod):
    """bitsandbytes 4-bit NormalFloat: codes at the quantiles of a normal distribution."""

    name = "bnb-nf4"
    description = "bitsandbytes NF4: 4-bit normal-float weights in blocks of 64 (the format of QLoRA)"
    reference = "Dettmers et al. 2023, https://arxiv.org/abs/2305.14314"
    format = "bitsandbytes 4-bit (nf4)"


class _BnbInt8Config(MethodConfig):
    """Settings of `bnb-int8`."""

    bits: int = 8  # Bits per weight: always 8
    threshold: float = Field(6.0, ge=0)  # Input columns with a value above this are computed in 16 bits


@register
class BnbInt8(Method[_BnbInt8Config]):
    """bitsandbytes 8-bit: one scale per row of weights, and one per row of activations."""

    name = "bnb-int8"
    description = "bitsandbytes LLM.int8(): 8-bit weights and activations, outliers in 16 bits"
    reference = "Dettmers et al. 2022, https://arxiv.org/abs/2208.07339"
    format = "bitsandbytes 8-bit"
    Config = _BnbInt8Config
    runs_in = ("vLLM",)
    supported_bits = (8,)
    by_class = True
    requires = ("bitsandbytes", "accelerate")
    extra = "bitsandbytes"

    def compress(self, job: CompressionJob[_BnbInt8Config]) -> Logits:
        return _quantize_and_save(job, load_in_8bit=True, llm_int8_threshold=job.config.threshold)


def _quantize_and_save(job: CompressionJob[MethodConfig], **options: bool | float | str) -> Logits:
    """Quantize while loading with options of `transformers.BitsAndBytesConfig`, save, and return the logits.

    On a CPU the first forward pass in evaluation mode repacks 4-bit weights in place, and a checkpoint that is saved
    after it is silently corrupt. So the model is saved before any forward pass. On a CPU its 4-bit layers are then
    replaced by layers with the dequantized weights, which compute the logits (see `architectures.packed_layers`).

    Quantization starts from the stored weights in float32. Everything that is not quantized is stored in the base's
    dtype, without loss.
    """
    import torch
    from transformers import BitsAndBytesConfig

    packed_layers.import_offline()
    config = BitsAndBytesConfig(llm_int8_skip_modules=job.source.ignored, **options)
    model = job.source.load(job.device, quantization_config=config)
    packed_layers.cast_floats(model, job.source.torch_dtype)
    model.config.dtype = job.source.torch_dtype
    model.save_pretrained(job.folder)
    job.source.save_others(job.folder)
    packed_layers.cast_floats(model, torch.float32)
    packed_layers.expand(model)
    return job.probe.logits(model)
