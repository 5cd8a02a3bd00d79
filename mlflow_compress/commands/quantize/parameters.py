"""The parameters of a compression."""

from mlflow_compress.config.declarations import Parameters
from mlflow_compress.config.groups import CompressionConfig, SourceConfig


class QuantizeConfig(Parameters):
    """The quantize stage: which method, with which settings, calibrated on what."""

    source: SourceConfig = SourceConfig()
    compression: CompressionConfig = CompressionConfig()
