"""The parameters of each command, composed of groups."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from mlflow_compress.config.declarations import EMBEDDED, Command, OptionalNames, OptionalText, OrNone, like, option
from mlflow_compress.config.groups import (
    AnswerConfig,
    CompressionConfig,
    EngineConfig,
    EvaluationConfig,
    InferenceConfig,
    JudgeModelConfig,
    ServedConfig,
    SourceConfig,
    TimingConfig,
    TracesConfig,
    is_endpoint,
)

LogWeights = Literal["auto", "true", "false"]
CHECKPOINT = "folder of the compressed checkpoint (what quantize wrote)"
CHECKPOINT_OR_SERVED = f"{CHECKPOINT}, or endpoint:http://host:port/v1 of a served model"


class QuantizeConfig(Command):
    """The quantize stage: which method, with which settings, calibrated on what."""

    source: SourceConfig = SourceConfig()
    compression: CompressionConfig = CompressionConfig()


class EvaluateConfig(Command):
    """The evaluate stage: the variant against its baseline on the same items."""

    source: SourceConfig = SourceConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    traces: TracesConfig = TracesConfig()
    inference: InferenceConfig = InferenceConfig()
    running: EngineConfig = EngineConfig()
    served: ServedConfig = ServedConfig()
    checkpoint: OptionalText = option(None, CHECKPOINT_OR_SERVED, path="folder")


class JudgeConfig(Command):
    """The judge stage: answers of both models to the same instructions, compared and graded."""

    source: SourceConfig = SourceConfig()
    answers: AnswerConfig = AnswerConfig()
    judging: JudgeModelConfig = JudgeModelConfig()
    inference: InferenceConfig = InferenceConfig()
    running: EngineConfig = EngineConfig()
    served: ServedConfig = ServedConfig()
    checkpoint: OptionalText = option(None, CHECKPOINT_OR_SERVED, path="folder")


class SpeedConfig(Command):
    """The speed stage: the variant in the runtime that it is meant for, timed in turn with its baseline."""

    source: SourceConfig = SourceConfig()
    timing: TimingConfig = TimingConfig()
    vllm_python: OptionalText = like(EngineConfig, "vllm_python")
    served: ServedConfig = ServedConfig()
    checkpoint: OptionalText = option(None, CHECKPOINT_OR_SERVED, path="folder")


_NAMED_MODEL = "baseline whose variants compete: 'demo', a folder, or a name that runs show"
_ALIAS = "registry alias that moves to the winner"


def _named(value: str) -> str:
    if not value.strip():
        raise ValueError("a name that is not empty")
    return value


Alias = Annotated[str, AfterValidator(_named)]
Bound = Annotated[Annotated[float, Field(ge=0)] | None, OrNone]


class PromoteConfig(Command):
    """The promote stage: gates on interval bounds, rank by size, move the alias."""

    model: str = option(EMBEDDED, _NAMED_MODEL)
    evaluation: str = option(
        "auto", "evaluation id whose variants compete (6 or more digits of it); 'auto' is the one with the most items"
    )
    policy: OptionalText = option(
        None, "YAML file that decides; none: the default policy, which `mlflow-compress policy` prints", path="file"
    )
    max_kl: Bound = option(None, "largest KL (nats): upper end of its 95 % interval; none: the policy's (0.05)")
    max_kl_outliers_pct: Bound = option(
        None,
        "largest share of items above the KL clip limit in percent: upper end; read where KL has no valid interval; "
        "none: the policy's (1)",
    )
    max_flips_pct: Bound = option(
        None, "largest share of flipped answers in percent: upper end of its interval; none: the policy's (5)"
    )
    max_accuracy_drop_pct: Bound = option(
        None, "largest accuracy drop in points: upper end of its interval; none: the policy's (2)"
    )
    min_decode_speedup: Bound = option(
        None,
        "smallest accepted decode speed over the baseline's, one sequence at a time (1.2 is a fifth faster): lower end "
        "of its 95 % interval; none: the policy's (no such gate)",
    )
    max_memory_ratio: Bound = option(
        None,
        "largest accepted peak memory while serving over the baseline's (0.5 is half): measured once, without "
        "interval; none: the policy's (no such gate)",
    )
    alias: Alias = option("champion", _ALIAS)
    dry_run: bool = option(False, "decide and say what would happen; nothing is registered, logged or moved")


class RollbackConfig(Command):
    """Move an alias back to the version that had it before."""

    model: str = option(EMBEDDED, "baseline: 'demo', a folder, or a name that runs show")
    alias: Alias = option("champion", "registry alias that moves back")
    reason: OptionalText = option(None, "why, in your words; kept with the run")


class HistoryConfig(Command):
    """Who had an alias when, by which decision and policy."""

    model: str = option(EMBEDDED, "baseline: 'demo', a folder, or a name that runs show")
    alias: Alias = option("champion", "registry alias")


class GateConfig(Command):
    """Evaluate a checkpoint in random blocks of items, until a policy's verdict is sure. For CI."""

    source: SourceConfig = SourceConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    traces: TracesConfig = TracesConfig()
    inference: InferenceConfig = InferenceConfig()
    served: ServedConfig = ServedConfig()
    timing: TimingConfig = TimingConfig()
    vllm_python: OptionalText = like(EngineConfig, "vllm_python")
    checkpoint: OptionalText = option(None, CHECKPOINT_OR_SERVED, path="folder")
    policy: OptionalText = option(
        None, "YAML file that decides; none: the default policy, which `mlflow-compress policy` prints", path="file"
    )
    min_decode_speedup: Bound = like(PromoteConfig, "min_decode_speedup")
    max_memory_ratio: Bound = like(PromoteConfig, "max_memory_ratio")
    error: float = option(0.05, "probability that any early verdict is wrong, at most", gt=0, lt=1)
    block: int = option(20, "items per block: the gate looks after each", ge=1)
    output: OptionalText = option(
        None, "folder that receives verdict.json and verdict.md; none: the run alone has them"
    )

    @property
    def evaluate_config(self) -> EvaluateConfig:
        """The evaluation whose items the gate looks at, and whose baseline it needs."""
        return EvaluateConfig(
            source=self.source,
            evaluation=self.evaluation,
            traces=self.traces,
            inference=self.inference,
            served=self.served,
            checkpoint=self.checkpoint,
        )

    @property
    def speed_config(self) -> SpeedConfig:
        """How the checkpoint is timed, where the policy asks for speed or memory."""
        return SpeedConfig(
            source=self.source, timing=self.timing, vllm_python=self.vllm_python, checkpoint=self.checkpoint
        )


class ResumeConfig(Command):
    """Do again what was killed, or was cut off from the tracking server; what is computed is found on disk."""

    dry_run: bool = option(False, "list the commands that did not end, and do nothing")


class ReportConfig(Command):
    """The report: one page over the variants of an evaluation, or its tables for a pull request."""

    runs: OptionalNames = option(None, "ids of main runs of one evaluation, comma-separated, or of a sweep's run")
    output: str = option("report.html", "file to write: .html, .md, .csv or .json")
    policy: OptionalText = option(
        None, "YAML file that says which variant to ship; none: the default policy of promote", path="file"
    )
    format: Literal["auto", "html", "md", "csv", "json"] = option(
        "auto", "what is written; 'auto' goes by the file name"
    )


class MainConfig(Command):
    """quantize -> evaluate -> judge -> speed for one variant, under one parent run; a served one is not quantized."""

    source: SourceConfig = SourceConfig()
    compression: CompressionConfig = CompressionConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    traces: TracesConfig = TracesConfig()
    inference: InferenceConfig = InferenceConfig()
    running: EngineConfig = EngineConfig()
    served: ServedConfig = ServedConfig()
    answers: AnswerConfig = AnswerConfig()
    judging: JudgeModelConfig = JudgeModelConfig()
    timing: TimingConfig = TimingConfig()
    judge: bool = option(True, "run the judge stage")
    speed: bool = option(True, "run the speed stage")
    log_weights: LogWeights = option(
        "auto",
        "store the checkpoint with the registered model; 'auto' does up to 2 GiB, larger ones are referred to by path",
    )
    resume: OptionalText = option(None, "id of a main run that failed: run only the stages that it lacks, then publish")

    @property
    def is_served(self) -> bool:
        """Whether the variant is a model that a server has: nothing is compressed."""
        return is_endpoint(self.compression.checkpoint)

    @property
    def quantize_config(self) -> QuantizeConfig:
        """The parameters of the first stage."""
        return QuantizeConfig(source=self.source, compression=self.compression)

    def evaluate_config(self, checkpoint: str | None = None) -> EvaluateConfig:
        """Return the parameters of the second stage, for what the first one has written, or a served model."""
        return EvaluateConfig(
            source=self.source,
            evaluation=self.evaluation,
            traces=self.traces,
            inference=self.inference,
            running=self.running,
            served=self.served,
            checkpoint=checkpoint,
        )

    def judge_config(self, checkpoint: str | None = None) -> JudgeConfig:
        """Return the parameters of the third stage, for what the first one has written, or a served model."""
        return JudgeConfig(
            source=self.source,
            answers=self.answers,
            judging=self.judging,
            inference=self.inference,
            running=self.running,
            served=self.served,
            checkpoint=checkpoint,
        )

    def speed_config(self, checkpoint: str | None = None) -> SpeedConfig:
        """Return the parameters of the last stage, for what the first one has written, or a served model."""
        return SpeedConfig(
            source=self.source,
            timing=self.timing,
            vllm_python=self.running.vllm_python,
            served=self.served,
            checkpoint=checkpoint,
        )
