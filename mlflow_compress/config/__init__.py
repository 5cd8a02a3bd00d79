"""Parameters of every command: what they are called, what they accept, and how they are read from text and files."""

from mlflow_compress.config.declarations import EMBEDDED as EMBEDDED
from mlflow_compress.config.declarations import Group as Group
from mlflow_compress.config.declarations import Parameters as Parameters
from mlflow_compress.config.declarations import as_text as as_text
from mlflow_compress.config.declarations import check_text as check_text
from mlflow_compress.config.declarations import parameters as parameters
from mlflow_compress.config.declarations import parse as parse
from mlflow_compress.config.declarations import read_file as read_file
from mlflow_compress.config.groups import ENDPOINT as ENDPOINT
from mlflow_compress.config.groups import SEED as SEED
from mlflow_compress.config.groups import AnswerConfig as AnswerConfig
from mlflow_compress.config.groups import CompressionConfig as CompressionConfig
from mlflow_compress.config.groups import EngineConfig as EngineConfig
from mlflow_compress.config.groups import EvaluationConfig as EvaluationConfig
from mlflow_compress.config.groups import InferenceConfig as InferenceConfig
from mlflow_compress.config.groups import JudgeModelConfig as JudgeModelConfig
from mlflow_compress.config.groups import JudgeSettings as JudgeSettings
from mlflow_compress.config.groups import ServedConfig as ServedConfig
from mlflow_compress.config.groups import SourceConfig as SourceConfig
from mlflow_compress.config.groups import TimingConfig as TimingConfig
from mlflow_compress.config.groups import TracesConfig as TracesConfig
from mlflow_compress.config.groups import is_endpoint as is_endpoint
from mlflow_compress.config.policy import Policy as Policy
from mlflow_compress.config.policy import policy_yaml as policy_yaml
from mlflow_compress.config.policy import read_policy as read_policy
