"""torchao int8: one scale per row of weights and, optionally, one per token of activations."""

from typing import Literal

from mlflow_compress.compression.method import CompressionJob, Logits, Method, MethodConfig, register
from mlflow_compress.errors import UnsupportedError
from mlflow_compress.models import stored_weights
from mlflow_compress.models.architectures.packed_layers import cast_floats


class _TorchAoInt8Config(MethodConfig):
    """Settings of `torchao-int8`."""

    bits: int = 8  # Bits per weight: always 8
    activations: Literal["full", "dynamic"] = "full"
    """"full": only weights are rounded; "dynamic": activations too, to 8 bits with one scale per token."""


@register
class TorchAoInt8(Method[_TorchAoInt8Config]):
    """Round-to-nearest weights by torchao. Its 4-bit weights do not run on a CPU and are not offered."""

    name = "torchao-int8"
    description = "torchao: 8-bit weights rounded to nearest, 8-bit activations on request"
    reference = "https://github.com/pytorch/ao (Int8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig)"
    format = "torchao"
    Config = _TorchAoInt8Config
    runs_in = ("vLLM",)
    supported_bits = (8,)
    by_class = True
    requires = ("torchao",)
    extra = "torchao"

    def label(self, config: _TorchAoInt8Config) -> str:
        return self.name if config.activations == "full" else f"{self.name}-dynamic"

    def compress(self, job: CompressionJob[_TorchAoInt8Config]) -> Logits:
        """Quantize while loading in float32; everything that is not quantized is stored in the base's dtype."""
        import torch
        from torchao import quantization
        from transformers import TorchAoConfig

        kinds = {
            "full": quantization.Int8WeightOnlyConfig,
            "dynamic": quantization.Int8DynamicActivationInt8WeightConfig,
        }
        config = TorchAoConfig(kinds[job.config.activations](), modules_to_not_convert=job.source.ignored)
        model = job.source.load(job.device, quantization_config=config)
        cast_floats(model, job.source.torch_dtype)
        model.config.dtype = job.source.torch_dtype
        model.save_pretrained(job.folder)
        for path in stored_weights.weight_files(job.folder):
            stored_weights.sort_metadata(path)  # the order of torchao's entries differs from run to run
        job.source.save_others(job.folder)
        cast_floats(model, torch.float32)
        try:
            return job.probe.logits(model)
        except NotImplementedError as error:  # a layer whose forward needs more than a product
            raise UnsupportedError(f"torchao cannot compute this model: {error}", got=job.source.architecture) from None
