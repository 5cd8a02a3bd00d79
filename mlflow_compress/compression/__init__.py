"""Compression methods, one file each, and the pipeline that runs them: check, compress, reload to verify, publish."""

from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest as CheckpointManifest
from mlflow_compress.compression.method import METHODS as METHODS
from mlflow_compress.compression.method import CompressionJob as CompressionJob
from mlflow_compress.compression.method import Method as Method
from mlflow_compress.compression.method import MethodConfig as MethodConfig
from mlflow_compress.compression.method import method_config as method_config
from mlflow_compress.compression.pipeline import compress_model as compress_model
