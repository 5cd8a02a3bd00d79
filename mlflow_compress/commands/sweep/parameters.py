"""The parameters of a sweep: those of the main job, with several methods, bits and group sizes."""

from pathlib import Path
from typing import Any, Literal

from mlflow_compress.commands.main.parameters import LogWeights, MainConfig
from mlflow_compress.commands.report.parameters import ReportConfig
from mlflow_compress.config import declarations, groups

Save = Literal["all", "passing", "winner"]


class _GridConfig(declarations.Group):
    """Which variants, and what they share."""

    methods: declarations.Names = declarations.option(
        "rtn,gptq,awq", "compression methods, comma-separated (mlflow-compress list methods lists them)"
    )
    bits: declarations.Names = declarations.option(
        "auto", "bits per weight, comma-separated; 'auto' takes each method's default; every combination is a variant"
    )
    group_size: declarations.Names = declarations.option(
        "auto", "weights that share one scale, comma-separated; 'auto' takes each method's default"
    )
    grid: declarations.OptionalText = declarations.option(
        None,
        "YAML file with a list of combinations, axes per method, or served models; replaces methods",
        path="file",
    )
    calibration: str = declarations.like(groups.CompressionConfig, "calibration")
    calibration_samples: groups.AutoOrCount = declarations.like(groups.CompressionConfig, "calibration_samples")
    calibration_length: int = declarations.like(groups.CompressionConfig, "calibration_length")
    replicates: int = declarations.option(
        1,
        "checkpoints per variant, each with other calibration samples, to show how much is luck; the further ones are "
        "only evaluated; a method without calibration text makes one",
        ge=1,
    )
    method_args: declarations.Pairs = declarations.like(groups.CompressionConfig, "method_args")
    target: declarations.Target = declarations.like(groups.CompressionConfig, "target")
    output_dir: str = declarations.like(groups.CompressionConfig, "output_dir")


class SweepConfig(declarations.Parameters):
    """Many variants of one baseline, evaluated on the same items: a main run each, and one scoreboard."""

    source: groups.SourceConfig = groups.SourceConfig()
    variants: _GridConfig = _GridConfig()
    evaluation: groups.EvaluationConfig = groups.EvaluationConfig()
    sampling: groups.SamplingConfig = groups.SamplingConfig()
    traces: groups.TracesConfig = groups.TracesConfig()
    inference: groups.InferenceConfig = groups.InferenceConfig()
    running: groups.EngineConfig = groups.EngineConfig()
    served: groups.ServedConfig = groups.ServedConfig()
    answers: groups.AnswerConfig = groups.AnswerConfig()
    judging: groups.JudgeModelConfig = groups.JudgeModelConfig()
    timing: groups.TimingConfig = groups.TimingConfig()
    judge: bool = declarations.like(MainConfig, "judge")
    speed: bool = declarations.like(MainConfig, "speed")
    log_weights: LogWeights = declarations.like(MainConfig, "log_weights")
    policy: declarations.OptionalText = declarations.like(ReportConfig, "policy")
    save: Save = declarations.option(
        "all",
        "device=balanced: which variants are written. 'passing' and 'winner' first score those of methods without "
        "calibration text, in one read of the baseline's weights; 'passing' then writes those that do not fail the "
        "policy, 'winner' only the smallest that passes",
    )
    dry_run: bool = declarations.option(False, "show the plan with estimates of time and disk, and do nothing")

    @property
    def computes_here(self) -> bool:
        return not self.dry_run

    def require_known(self) -> None:
        from mlflow_compress.compression.method import METHODS

        for method in self.variants.methods.split(",") if self.variants.grid is None else ():
            if method.strip():
                METHODS.get(method.strip())

    def main_config(self, **variant: Any) -> MainConfig:
        """Return the parameters of one variant's main job: its own replace those that all variants share."""
        not_shared = {"bits": declarations.AUTO, "group_size": declarations.AUTO}  # a sweep has several
        if self.sampling.items == declarations.AUTO and self.policy is not None:
            variant = {"items": f"{declarations.AUTO}:{Path(self.policy).absolute()}", **variant}
        return self.of_stage(MainConfig, **{"experiment": self.experiment, **not_shared, **variant})
