"""The parameters of a comparison of answers."""

from mlflow_compress.config.declarations import OptionalText, option
from mlflow_compress.config.groups import CHECKPOINT_OR_SERVED, EngineConfig, JudgeSettings, ServedConfig


class JudgeConfig(JudgeSettings):
    """The judge stage: answers of both models to the same instructions, compared and graded."""

    running: EngineConfig = EngineConfig()
    served: ServedConfig = ServedConfig()
    checkpoint: OptionalText = option(None, CHECKPOINT_OR_SERVED, path="folder")
