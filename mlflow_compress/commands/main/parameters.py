"""The parameters of the main job: those of its stages."""

from typing import Literal

from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.commands.quantize.parameters import QuantizeConfig
from mlflow_compress.config import groups
from mlflow_compress.config.declarations import OptionalText, Parameters, option

LogWeights = Literal["auto", "true", "false"]


class MainConfig(Parameters):
    """quantize -> evaluate -> judge -> speed for one variant, under one parent run; a served model is not quantized."""

    source: groups.SourceConfig = groups.SourceConfig()
    compression: groups.CompressionConfig = groups.CompressionConfig()
    evaluation: groups.EvaluationConfig = groups.EvaluationConfig()
    sampling: groups.SamplingConfig = groups.SamplingConfig()
    traces: groups.TracesConfig = groups.TracesConfig()
    inference: groups.InferenceConfig = groups.InferenceConfig()
    running: groups.EngineConfig = groups.EngineConfig()
    served: groups.ServedConfig = groups.ServedConfig()
    answers: groups.AnswerConfig = groups.AnswerConfig()
    judging: groups.JudgeModelConfig = groups.JudgeModelConfig()
    timing: groups.TimingConfig = groups.TimingConfig()
    judge: bool = option(True, "run the judge stage")
    speed: bool = option(True, "run the speed stage")
    log_weights: LogWeights = option(
        "auto",
        "store the checkpoint with the registered model; 'auto' does up to 2 GiB, larger ones are referenced by path",
    )
    resume: OptionalText = option(None, "id of a main run that failed: run only its missing stages, then publish")

    @property
    def is_served(self) -> bool:
        """Whether the variant is a model that a server has: nothing is compressed."""
        return groups.is_endpoint(self.compression.checkpoint)

    @property
    def quantize_config(self) -> QuantizeConfig:
        return self.of_stage(QuantizeConfig)

    def evaluate_config(self, checkpoint: str | None = None) -> EvaluateConfig:
        return self.of_stage(EvaluateConfig, checkpoint=checkpoint)

    def judge_config(self, checkpoint: str | None = None) -> JudgeConfig:
        return self.of_stage(JudgeConfig, checkpoint=checkpoint)
