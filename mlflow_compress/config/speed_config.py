"""The parameters of the speed stage."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mlflow_compress.config.commands import CHECKPOINT
from mlflow_compress.config.declarations import Command, Group, OptionalText, option
from mlflow_compress.config.groups import AutoOrCount, SourceConfig


class TimingConfig(Group):
    """What is generated to measure speed."""

    speed_prompt_tokens: AutoOrCount = option(
        "auto", "tokens of each prompt that is read; 'auto' is 256, or half of a shorter context"
    )
    speed_new_tokens: Annotated[int, Field(ge=2)] | Literal["auto"] = option(
        "auto", "tokens that are written after each prompt; 'auto' is 64, or a quarter of a shorter context"
    )
    speed_repeats: int = option(
        7, "rounds that count, after one to warm up; baseline and variant take turns in each", ge=2
    )
    speed_threads: AutoOrCount = option("auto", "threads on a CPU; 'auto' is one per core that this process may use")
    vllm_python: OptionalText = option(
        None,
        "Python of an environment with vLLM; none: MLFLOW_COMPRESS_VLLM_PYTHON, and without it vLLM is not used",
        path="file",
    )


class SpeedConfig(Command):
    """The speed stage: the variant in the runtime that it is meant for, timed in turn with its baseline."""

    source: SourceConfig = SourceConfig()
    timing: TimingConfig = TimingConfig()
    checkpoint: OptionalText = option(None, CHECKPOINT, path="folder")
