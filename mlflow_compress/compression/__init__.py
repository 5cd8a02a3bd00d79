"""Compression methods, one file each, and the one way to run them: check, compress, prove, publish."""

from mlflow_compress.compression.base import METHODS, Job, Method, MethodConfig
from mlflow_compress.compression.checkpoint_manifest import Manifest
from mlflow_compress.compression.method_settings import method_config
from mlflow_compress.compression.pipeline import compress_model

__all__ = ["METHODS", "Job", "Manifest", "Method", "MethodConfig", "compress_model", "method_config"]
