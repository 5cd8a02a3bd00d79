"""Compression methods, one file each, and the one way to run them: check, compress, prove, publish."""

from mlflow_compress.compress.base import METHODS, Job, Method, MethodConfig
from mlflow_compress.compress.manifest import Manifest
from mlflow_compress.compress.run import compress_model
from mlflow_compress.compress.settings import method_config

__all__ = ["METHODS", "Job", "Manifest", "Method", "MethodConfig", "compress_model", "method_config"]
