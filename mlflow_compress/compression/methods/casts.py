"""Base of the casts to 16-bit floating types, which halve a float32 model."""

from pathlib import Path

from mlflow_compress.compression.backends import llmcompressor_backend as backend
from mlflow_compress.compression.layers import save_and_measure
from mlflow_compress.compression.method import CompressionJob, Logits, Method, MethodConfig, register
from mlflow_compress.errors import UnsupportedError
from mlflow_compress.models.stored_weights import main_dtype, read_headers


class _Cast(Method[MethodConfig]):
    """Stores every weight in another floating type.

    Only the stored weights are rounded. As for every variant, ``-P dtype=`` sets the dtype of the evaluation: use
    ``dtype=bfloat16`` to include the rounding of computations.
    """

    stored: str  # Dtype, by torch's name
    format = "safetensors"
    Config = MethodConfig
    runs_in = ("vLLM", "llama.cpp")
    linear_only = False
    from_disk = True

    def check_folder(self, folder: Path) -> None:
        if main_dtype(read_headers(folder)) == self.stored:
            raise UnsupportedError(
                f"The model is already stored in {self.stored}: the cast would change nothing",
                got=str(folder),
                fix="Use method=none for the control",
            )

    def compress(self, job: CompressionJob[MethodConfig]) -> Logits:
        import torch

        wanted = getattr(torch, self.stored)
        largest = torch.finfo(wanted).max
        with backend.loaded(job) as model:
            # Module by module: `named_parameters` of a whole model keeps all that it has read from a disk.
            each = (own for name, part in model.named_modules() for own in part.named_parameters(name, recurse=False))
            for name, parameter in each:
                if parameter.numel() and float(parameter.abs().max()) > largest:
                    raise UnsupportedError(
                        f"The weights of {name} do not fit into {self.stored}",
                        allowed=f"magnitudes up to {largest:g}",
                        got=f"{float(parameter.abs().max()):g}",
                        fix="Use method=bf16",
                    )
            return save_and_measure(job, model, wanted)


@register
class Bf16(_Cast):
    """Cast to bfloat16."""

    name = "bf16"
    stored = "bfloat16"
    description = "Cast to bfloat16: the simplest way to halve a float32 model"
    reference = "Kalamkar et al. 2019, https://arxiv.org/abs/1905.12322"


@register
class Fp16(_Cast):
    """Cast to float16."""

    name = "fp16"
    stored = "float16"
    description = "Cast to IEEE half precision; a weight above 65,504 is refused"
    reference = "IEEE 754-2019 binary16"
