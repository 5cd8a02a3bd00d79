"""Parameters of every command: what they are called, what they accept, and how they are read from text and files."""

from mlflow_compress.config.commands import (
    EvaluateConfig,
    JudgeConfig,
    MainConfig,
    PromoteConfig,
    QuantizeConfig,
    ReportConfig,
)
from mlflow_compress.config.declarations import EMBEDDED, Command, Group, parameters
from mlflow_compress.config.groups import (
    AnswerConfig,
    CompressionConfig,
    EvaluationConfig,
    InferenceConfig,
    SourceConfig,
)
from mlflow_compress.config.reading import as_text, check_text, parse, read_file
from mlflow_compress.config.sweep_config import GridConfig, SweepConfig

__all__ = [
    "EMBEDDED",
    "AnswerConfig",
    "Command",
    "CompressionConfig",
    "EvaluateConfig",
    "EvaluationConfig",
    "GridConfig",
    "Group",
    "InferenceConfig",
    "JudgeConfig",
    "MainConfig",
    "PromoteConfig",
    "QuantizeConfig",
    "ReportConfig",
    "SourceConfig",
    "SweepConfig",
    "as_text",
    "check_text",
    "parameters",
    "parse",
    "read_file",
]
