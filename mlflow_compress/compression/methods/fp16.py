"""fp16: IEEE half precision, 11 bits of mantissa and magnitudes up to 65,504."""

from mlflow_compress.compression.method import register
from mlflow_compress.compression.shared.casts import Cast


@register
class Fp16(Cast):
    """Cast to float16."""

    name = "fp16"
    stored = "float16"
    description = "Cast to IEEE half precision; a weight above 65,504 is refused"
    reference = "IEEE 754-2019 binary16"
