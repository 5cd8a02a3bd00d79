"""Models that a server has, at an address ``endpoint:https://...``."""

from mlflow_compress.engines.endpoint import endpoint_engine as endpoint_engine
