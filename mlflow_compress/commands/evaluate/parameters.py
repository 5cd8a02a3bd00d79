"""The parameters of an evaluation."""

from mlflow_compress.config import groups
from mlflow_compress.config.declarations import OptionalText, Parameters, option


class EvaluateConfig(Parameters):
    """The evaluate stage: the variant against its baseline on the same items."""

    source: groups.SourceConfig = groups.SourceConfig()
    evaluation: groups.EvaluationConfig = groups.EvaluationConfig()
    sampling: groups.SamplingConfig = groups.SamplingConfig()
    traces: groups.TracesConfig = groups.TracesConfig()
    inference: groups.InferenceConfig = groups.InferenceConfig()
    running: groups.EngineConfig = groups.EngineConfig()
    served: groups.ServedConfig = groups.ServedConfig()
    checkpoint: OptionalText = option(None, groups.CHECKPOINT_OR_SERVED, path="folder")
