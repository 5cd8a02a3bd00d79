"""The parameters of each command, composed of groups."""

from __future__ import annotations

from typing import Literal

from mlflow_compress.config.declarations import EMBEDDED, Command, OptionalText, option
from mlflow_compress.config.groups import (
    AnswerConfig,
    CompressionConfig,
    EvaluationConfig,
    InferenceConfig,
    JudgeModelConfig,
    SourceConfig,
)

CHECKPOINT = "folder of the compressed checkpoint (what quantize wrote)"


class QuantizeConfig(Command):
    """The quantize stage: which method, with which settings, calibrated on what."""

    source: SourceConfig = SourceConfig()
    compression: CompressionConfig = CompressionConfig()


class EvaluateConfig(Command):
    """The evaluate stage: the variant against its baseline on the same items."""

    source: SourceConfig = SourceConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    inference: InferenceConfig = InferenceConfig()
    checkpoint: OptionalText = option(None, CHECKPOINT, path="folder")


class JudgeConfig(Command):
    """The judge stage: answers of both models to the same instructions, compared and graded."""

    source: SourceConfig = SourceConfig()
    answers: AnswerConfig = AnswerConfig()
    judging: JudgeModelConfig = JudgeModelConfig()
    inference: InferenceConfig = InferenceConfig()
    checkpoint: OptionalText = option(None, CHECKPOINT, path="folder")


class PromoteConfig(Command):
    """The promote stage: gates on interval bounds, rank by size, move the alias."""

    model: str = option(EMBEDDED, "baseline whose variants compete: 'demo', a folder, or a name that runs show")
    evaluation: str = option(
        "auto", "evaluation id whose variants compete (6 or more digits of it); 'auto' is the one with the most items"
    )
    max_kl: float = option(0.05, "largest KL (nats): upper end of its 95 % interval", ge=0)
    max_kl_outliers_pct: float = option(
        1.0,
        "largest share of items above the KL clip limit in percent: upper end; read where KL has no valid interval",
        ge=0,
    )
    max_flips_pct: float = option(5.0, "largest share of flipped answers in percent: upper end of its interval", ge=0)
    max_accuracy_drop_pct: float = option(2.0, "largest accuracy drop in points: upper end of its interval", ge=0)
    alias: str = option("champion", "registry alias that moves to the winner")


class MainConfig(Command):
    """quantize -> evaluate -> judge for one variant, under one parent run."""

    source: SourceConfig = SourceConfig()
    compression: CompressionConfig = CompressionConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    inference: InferenceConfig = InferenceConfig()
    answers: AnswerConfig = AnswerConfig()
    judging: JudgeModelConfig = JudgeModelConfig()
    judge: bool = option(True, "run the judge stage")
    log_weights: Literal["auto", "true", "false"] = option(
        "auto",
        "store the checkpoint with the registered model; 'auto' does up to 2 GiB, larger ones are referred to by path",
    )
    resume: OptionalText = option(None, "id of a main run that failed: run only the stages that it lacks, then publish")

    @property
    def quantize_config(self) -> QuantizeConfig:
        """The parameters of the first stage."""
        return QuantizeConfig(source=self.source, compression=self.compression)

    def evaluate_config(self, checkpoint: str | None = None) -> EvaluateConfig:
        """Return the parameters of the second stage, for the checkpoint that the first one has written."""
        return EvaluateConfig(
            source=self.source, evaluation=self.evaluation, inference=self.inference, checkpoint=checkpoint
        )

    def judge_config(self, checkpoint: str | None = None) -> JudgeConfig:
        """Return the parameters of the third stage, for the checkpoint that the first one has written."""
        return JudgeConfig(
            source=self.source,
            answers=self.answers,
            judging=self.judging,
            inference=self.inference,
            checkpoint=checkpoint,
        )
