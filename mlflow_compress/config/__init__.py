"""Parameters of every command: what they are called, what they accept, and how they are read from text and files."""

from mlflow_compress.config.commands import EvaluateConfig, JudgeConfig, MainConfig, PromoteConfig, QuantizeConfig
from mlflow_compress.config.declarations import EMBEDDED, Command, Group, parameters
from mlflow_compress.config.groups import (
    AnswerConfig,
    CompressionConfig,
    EvaluationConfig,
    InferenceConfig,
    JudgeModelConfig,
    SourceConfig,
)
from mlflow_compress.config.reading import as_text, check_text, parse, read_file

__all__ = [
    "EMBEDDED",
    "AnswerConfig",
    "Command",
    "CompressionConfig",
    "EvaluateConfig",
    "EvaluationConfig",
    "Group",
    "InferenceConfig",
    "JudgeConfig",
    "JudgeModelConfig",
    "MainConfig",
    "PromoteConfig",
    "QuantizeConfig",
    "SourceConfig",
    "as_text",
    "check_text",
    "parameters",
    "parse",
    "read_file",
]
