"""bf16: float32's range with 8 bits of mantissa."""

from mlflow_compress.compression.method import register
from mlflow_compress.compression.shared.casts import Cast


@register
class Bf16(Cast):
    """Cast to bfloat16."""

    name = "bf16"
    stored = "bfloat16"
    description = "Cast to bfloat16: the plainest way to halve a float32 model"
    reference = "Kalamkar et al. 2019, https://arxiv.org/abs/1905.12322"
