"""Parameters of every command: what they are called, what they accept, and how they are read from text and files."""

from mlflow_compress.config.commands import (
    EvaluateConfig,
    GateConfig,
    HistoryConfig,
    JudgeConfig,
    MainConfig,
    PromoteConfig,
    QuantizeConfig,
    ReportConfig,
    ResumeConfig,
    RollbackConfig,
    SpeedConfig,
)
from mlflow_compress.config.declarations import EMBEDDED, Command, Group, parameters
from mlflow_compress.config.diagnose_config import DiagnoseConfig, DiagnosisConfig
from mlflow_compress.config.groups import (
    AnswerConfig,
    CompressionConfig,
    EngineConfig,
    EvaluationConfig,
    InferenceConfig,
    JudgeModelConfig,
    SourceConfig,
    TimingConfig,
    TracesConfig,
)
from mlflow_compress.config.plan_config import MachineConfig, PlanConfig
from mlflow_compress.config.policy import Policy, policy_yaml, read_policy
from mlflow_compress.config.rating_config import BlindConfig, RatingsConfig
from mlflow_compress.config.reading import as_text, check_text, parse, read_file
from mlflow_compress.config.search_config import SearchConfig, SearchSpaceConfig
from mlflow_compress.config.served_config import ENDPOINT, ServedConfig, is_endpoint
from mlflow_compress.config.sweep_config import GridConfig, SweepConfig

__all__ = [
    "EMBEDDED",
    "ENDPOINT",
    "AnswerConfig",
    "BlindConfig",
    "Command",
    "CompressionConfig",
    "DiagnoseConfig",
    "DiagnosisConfig",
    "EngineConfig",
    "EvaluateConfig",
    "EvaluationConfig",
    "GateConfig",
    "GridConfig",
    "Group",
    "HistoryConfig",
    "InferenceConfig",
    "JudgeConfig",
    "JudgeModelConfig",
    "MachineConfig",
    "MainConfig",
    "PlanConfig",
    "Policy",
    "PromoteConfig",
    "QuantizeConfig",
    "RatingsConfig",
    "ReportConfig",
    "ResumeConfig",
    "RollbackConfig",
    "SearchConfig",
    "SearchSpaceConfig",
    "ServedConfig",
    "SourceConfig",
    "SpeedConfig",
    "SweepConfig",
    "TimingConfig",
    "TracesConfig",
    "as_text",
    "check_text",
    "is_endpoint",
    "parameters",
    "parse",
    "policy_yaml",
    "read_file",
    "read_policy",
]
