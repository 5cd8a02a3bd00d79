"""The parameters of a sweep: those of the main job, with several methods, bits and group sizes."""

from pathlib import Path
from typing import Any

from mlflow_compress.commands.main.parameters import LogWeights, MainConfig
from mlflow_compress.commands.report.parameters import ReportConfig
from mlflow_compress.config.declarations import (
    AUTO,
    Group,
    Names,
    OptionalText,
    Pairs,
    Parameters,
    Target,
    like,
    option,
)
from mlflow_compress.config.groups import (
    AnswerConfig,
    AutoOrCount,
    CompressionConfig,
    EngineConfig,
    EvaluationConfig,
    InferenceConfig,
    JudgeModelConfig,
    SamplingConfig,
    ServedConfig,
    SourceConfig,
    TimingConfig,
    TracesConfig,
)


class GridConfig(Group):
    """Which variants, and what they share."""

    methods: Names = option("rtn,gptq,awq", "compression methods, comma-separated (mlflow-compress methods lists them)")
    bits: Names = option(
        "auto", "bits per weight, comma-separated; 'auto' takes each method's default; every combination is a variant"
    )
    group_size: Names = option(
        "auto", "weights that share one scale, comma-separated; 'auto' takes each method's default"
    )
    grid: OptionalText = option(
        None,
        "YAML file with a list of combinations, of axes per method, or of served models; in place of methods",
        path="file",
    )
    calibration: str = like(CompressionConfig, "calibration")
    calibration_samples: AutoOrCount = like(CompressionConfig, "calibration_samples")
    calibration_length: int = like(CompressionConfig, "calibration_length")
    replicates: int = option(
        1,
        "makes of each variant, each with other calibration samples, which shows how much is luck; further makes are "
        "evaluated alone, and methods that read no calibration text are made once",
        ge=1,
    )
    method_args: Pairs = like(CompressionConfig, "method_args")
    target: Target = like(CompressionConfig, "target")
    output_dir: str = like(CompressionConfig, "output_dir")


class SweepConfig(Parameters):
    """Many variants of one baseline, evaluated alike: a main run each, and a scoreboard of all."""

    source: SourceConfig = SourceConfig()
    variants: GridConfig = GridConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    sampling: SamplingConfig = SamplingConfig()
    traces: TracesConfig = TracesConfig()
    inference: InferenceConfig = InferenceConfig()
    running: EngineConfig = EngineConfig()
    served: ServedConfig = ServedConfig()
    answers: AnswerConfig = AnswerConfig()
    judging: JudgeModelConfig = JudgeModelConfig()
    timing: TimingConfig = TimingConfig()
    judge: bool = like(MainConfig, "judge")
    speed: bool = like(MainConfig, "speed")
    log_weights: LogWeights = like(MainConfig, "log_weights")
    policy: OptionalText = like(ReportConfig, "policy")
    dry_run: bool = option(False, "show the plan with estimates of time and disk, and do nothing")

    def main_config(self, **variant: Any) -> MainConfig:
        """Return the parameters of one variant's main job.

        - `**variant`: Parameters of the compression, or of a served model, which replace those that all variants share.
        """
        not_shared = {"bits": AUTO, "group_size": AUTO}  # a sweep has several
        if self.sampling.items == AUTO and self.policy is not None:
            variant = {"items": f"{AUTO}:{Path(self.policy).absolute()}", **variant}
        return self.of_stage(MainConfig, **{"experiment": self.experiment, **not_shared, **variant})
