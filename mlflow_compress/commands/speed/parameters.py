"""The parameters of a measurement of speed."""

from mlflow_compress.config.declarations import OptionalText, Parameters, like, option
from mlflow_compress.config.groups import CHECKPOINT_OR_SERVED, EngineConfig, ServedConfig, SourceConfig, TimingConfig


class SpeedConfig(Parameters):
    """The speed stage: the variant in the runtime that it is meant for, timed in turn with its baseline."""

    source: SourceConfig = SourceConfig()
    timing: TimingConfig = TimingConfig()
    vllm_python: OptionalText = like(EngineConfig, "vllm_python")
    served: ServedConfig = ServedConfig()
    checkpoint: OptionalText = option(None, CHECKPOINT_OR_SERVED, path="folder")
