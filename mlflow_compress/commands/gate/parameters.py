"""The parameters of a gate: an evaluation, a policy, and how sure a verdict must be."""

from mlflow_compress.commands.promote.parameters import Bound, PromoteConfig
from mlflow_compress.config import groups
from mlflow_compress.config.declarations import OptionalText, Parameters, like, option


class GateConfig(Parameters):
    """Evaluate a checkpoint in random blocks of items, until a policy's verdict is sure. For CI."""

    source: groups.SourceConfig = groups.SourceConfig()
    evaluation: groups.EvaluationConfig = groups.EvaluationConfig()
    traces: groups.TracesConfig = groups.TracesConfig()
    inference: groups.InferenceConfig = groups.InferenceConfig()
    served: groups.ServedConfig = groups.ServedConfig()
    timing: groups.TimingConfig = groups.TimingConfig()
    answers: groups.AnswerConfig = groups.AnswerConfig(judges="similarity,divergent_tokens")
    vllm_python: OptionalText = like(groups.EngineConfig, "vllm_python")
    checkpoint: OptionalText = option(None, groups.CHECKPOINT_OR_SERVED, path="folder")
    policy: OptionalText = option(
        None,
        "YAML file of the policy; none: the default policy, which `mlflow-compress promote policy` prints",
        path="file",
    )
    min_decode_speedup: Bound = like(PromoteConfig, "min_decode_speedup")
    max_memory_ratio: Bound = like(PromoteConfig, "max_memory_ratio")
    error: float = option(0.05, "largest probability that any early verdict is wrong", gt=0, lt=1)
    block: int = option(20, "items per block; the gate checks after each block", ge=1)
    output: OptionalText = option(None, "folder that receives verdict.json and verdict.md; none: only the run has them")
