"""The parameters of an evaluation."""

from mlflow_compress.config.declarations import OptionalText, Parameters, option
from mlflow_compress.config.groups import (
    CHECKPOINT_OR_SERVED,
    EngineConfig,
    EvaluationConfig,
    InferenceConfig,
    SamplingConfig,
    ServedConfig,
    SourceConfig,
    TracesConfig,
)


class EvaluateConfig(Parameters):
    """The evaluate stage: the variant against its baseline on the same items."""

    source: SourceConfig = SourceConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    sampling: SamplingConfig = SamplingConfig()
    traces: TracesConfig = TracesConfig()
    inference: InferenceConfig = InferenceConfig()
    running: EngineConfig = EngineConfig()
    served: ServedConfig = ServedConfig()
    checkpoint: OptionalText = option(None, CHECKPOINT_OR_SERVED, path="folder")
