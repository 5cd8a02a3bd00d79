"""The parameters of a compression."""

from __future__ import annotations

from mlflow_compress.config.declarations import Command
from mlflow_compress.config.groups import CompressionConfig, SourceConfig


class QuantizeConfig(Command):
    """The quantize stage: which method, with which settings, calibrated on what."""

    source: SourceConfig = SourceConfig()
    compression: CompressionConfig = CompressionConfig()
