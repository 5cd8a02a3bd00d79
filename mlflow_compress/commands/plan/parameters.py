"""The parameters of a plan: what is to be done, and on what machine."""

from typing import Annotated, Literal

from pydantic import Field

from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.commands.sweep.parameters import Save, SweepConfig
from mlflow_compress.config import groups
from mlflow_compress.config.declarations import Group, OptionalText, OrNone, Parameters, Together, like, option

AutoOrNumber = Annotated[float, Field(gt=0)] | Literal["auto"]


_MACHINE_ARGS = Together("machine_args", "the machine, and how long answers are: name=value,name=value")


class _MachineConfig(Group):
    """The machine. Give what a device sustains, not the peak of its data sheet."""

    devices: int = option(1, "GPUs, or machines without one", ge=1)
    device_memory: AutoOrNumber = option(
        "auto", "GiB of one device; auto: 80, with device=cpu the memory of this machine", within=_MACHINE_ARGS
    )
    device_tflops: AutoOrNumber = option(
        "auto",
        "10^12 operations per second that one device sustains in the dtype; auto: 400 (an H100 in bfloat16), with "
        "device=cpu measured on this machine in float32",
        within=_MACHINE_ARGS,
    )
    device_bandwidth: AutoOrNumber = option(
        "auto",
        "TB per second that one device reads from its own memory; auto: 2.5 (an H100), with device=cpu measured on "
        "this machine",
        within=_MACHINE_ARGS,
    )
    answer_tokens: groups.AutoOrCount = option(
        "auto",
        "average tokens of an answer, reasoning included, as measured by a run; auto: the longest allowed answer",
        within=_MACHINE_ARGS,
    )
    disk_bandwidth: float = option(
        2.0, "GB per second of the storage, for all devices together", gt=0, within=_MACHINE_ARGS
    )
    price: Annotated[Annotated[float, Field(ge=0)] | None, OrNone] = option(
        None, "dollars per hour for one device; none: no dollars", within=_MACHINE_ARGS
    )


class PlanConfig(Parameters):
    """Estimate what every stage costs: tokens, operations, bytes, memory, seconds, dollars. Nothing is run."""

    source: groups.SourceConfig = groups.SourceConfig()
    tokenizer: OptionalText = option(None, "folder or hub id of the tokenizer; none: the model's own", path="folder")
    method: str = like(groups.CompressionConfig, "method")
    bits: int = option(4, "bits per weight of the compressed linear layers", ge=1, le=16)
    calibration_samples: groups.AutoOrCount = like(groups.CompressionConfig, "calibration_samples")
    calibration_length: int = like(groups.CompressionConfig, "calibration_length")
    variants: int = option(1, "variants of this baseline", ge=1)
    evaluation: groups.EvaluationConfig = groups.EvaluationConfig()
    inference: groups.InferenceConfig = groups.InferenceConfig()
    answers: groups.AnswerConfig = groups.AnswerConfig()
    judge: bool = like(MainConfig, "judge")
    save: Save = like(SweepConfig, "save")
    machine: _MachineConfig = _MachineConfig()

    @property
    def made(self) -> int:
        """How many of the variants are made."""
        return 1 if self.save == "winner" else self.variants

    @property
    def computes_here(self) -> bool:
        return False
