"""Compression methods, one file each, and the pipeline that runs them: check, compress, reload to verify, publish."""

from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest
from mlflow_compress.compression.method import METHODS, CompressionJob, Method, MethodConfig, method_config
from mlflow_compress.compression.pipeline import compress_model

__all__ = [
    "METHODS",
    "CheckpointManifest",
    "CompressionJob",
    "Method",
    "MethodConfig",
    "compress_model",
    "method_config",
]
