"""``engine=ray``: transformers on the workers of a Ray cluster."""

from mlflow_compress.engines.ray import remote_model as remote_model
