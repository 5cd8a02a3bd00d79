"""The parameters of a measurement of speed."""

from mlflow_compress.config.declarations import OptionalText, Parameters, like, option
from mlflow_compress.config.groups import CHECKPOINT_OR_SERVED, EngineConfig, ServedConfig, SourceConfig, TimingConfig


class SpeedConfig(Parameters):
    """The speed stage: time the variant and its baseline alternately, in the runtime of the variant's format."""

    source: SourceConfig = SourceConfig()
    timing: TimingConfig = TimingConfig()
    vllm_python: OptionalText = like(EngineConfig, "vllm_python")
    served: ServedConfig = ServedConfig()
    checkpoint: OptionalText = option(None, CHECKPOINT_OR_SERVED, path="folder")
