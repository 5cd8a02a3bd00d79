"""Turns amounts of work into the costs of stages on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from mlflow_compress.compression.method import METHODS
from mlflow_compress.config import PlanConfig
from mlflow_compress.results import StageCost
from mlflow_compress.scoring.costs import cost_formulas as formulas
from mlflow_compress.scoring.costs.model_shape import ModelShape
from mlflow_compress.scoring.costs.workload import GroupSize, Workload
from mlflow_compress.scoring.generation.sampling import GenerationConfig
from mlflow_compress.stages.planning.workloads import GeneratedWork

_FREE = 0.9  # share of a device's memory that a model and its work may take
_SCALE_BITS = 16 / 128  # a scale of 16 bits for every 128 weights


class StageCosts:
    """The costs of each stage.

    Parameters
    ----------
    config : PlanConfig
    shape : ModelShape
    scored : Workload
        What is scored of the suite.
    stored_bytes, number_bytes : int
        Bytes of one weight in the baseline's files, and of one number while the model runs.

    Attributes
    ----------
    per_copy : int
        Devices that one copy of the model needs.
    copies : int
        Copies that work side by side; 0 where not even one fits.
    states : float
        Bytes of the baseline's states.
    checkpoint : float
        Bytes of one compressed checkpoint.
    """

    def __init__(
        self, config: PlanConfig, shape: ModelShape, scored: Workload, *, stored_bytes: int, number_bytes: int
    ) -> None:
        self.config, self.shape, self.scored = config, shape, scored
        self.number_bytes = number_bytes
        given = config.machine
        self.machine = formulas.Machine(
            devices=given.devices,
            memory=given.device_memory * 2**30,
            flops=given.device_tflops * 1e12,
            bandwidth=given.device_bandwidth * 1e12,
            disk=given.disk_bandwidth * 1e9,
            price=given.price,
        )
        linear, bits = shape.dense + shape.experts, config.bits + (_SCALE_BITS if config.bits < 16 else 0)
        self.base = float(shape.parameters * stored_bytes)
        self.checkpoint = linear * bits / 8 + (shape.parameters - linear) * stored_bytes
        self.states = formulas.states_bytes(shape, scored, number_bytes)
        most = max(self._memory(scored, captures=True), self._memory(scored, heads=2))
        self.per_copy = ceil(most / (_FREE * self.machine.memory))
        self.copies = self.machine.devices // self.per_copy

    def baseline(self, noise: Workload, answers: Sequence[GeneratedWork]) -> list[StageCost]:
        """Return the costs of evaluating the baseline, and a sample of the items once more."""
        found = [self._evaluated("baseline", self.scored, answers, read=self.base, written=self.states, captures=True)]
        if noise.tokens:
            found.append(self._evaluated("baseline again (noise)", noise, (), read=self.states, heads=2))
        return found

    def compression(self) -> StageCost:
        """Return the cost of compressing the model. Methods whose work has no formula have no seconds."""
        method, length = METHODS.get(self.config.method), self.config.calibration_length
        tokens, operations = 0, 0.0 if not method.needs_calibration else None
        if method.needs_calibration:
            asked = self.config.calibration_samples
            default = getattr(method.Config(), "calibration_samples", 0)  # of every method that is calibrated
            tokens = length * (default if asked == "auto" else asked)
            operations = formulas.calibration_operations(method.name, self.shape, tokens, length)
        return self._cost(
            f"quantize ({method.name})",
            Workload(tokens=tokens, tokens_unshared=tokens),
            operations,
            computing=None if operations is None else operations / self.machine.flops,
            read=self.base,
            written=self.checkpoint,
            memory=self._memory(Workload(groups=(GroupSize(longest_unit=length),)), heads=0),
            times=self.config.variants,
            alone=True,
        )

    def variant(self, answers: Sequence[GeneratedWork]) -> StageCost:
        """Return the cost of evaluating every variant against the stored baseline."""
        read = self.checkpoint + self.states
        return self._evaluated("evaluate", self.scored, answers, read=read, heads=2, times=self.config.variants)

    def answers(self, graded: GeneratedWork, samples: GeneratedWork) -> list[StageCost]:
        """Return the costs of answering. What the judge's own calls cost, its stage estimates."""
        kinds = (
            # The baseline's samples are drawn twice: their likeness is the noise floor.
            ("answers of the baseline", (graded, samples, samples), 1, self.base),
            ("answers", (graded, samples), self.config.variants, self.checkpoint),
        )
        return [
            self._evaluated(stage, Workload(), parts, read=read, times=times) for stage, parts, times, read in kinds
        ]

    def _evaluated(
        self,
        stage: str,
        scored: Workload,
        answers: Sequence[GeneratedWork],
        *,
        read: float,
        written: float = 0.0,
        heads: int = 1,
        times: int = 1,
        captures: bool = False,
    ) -> StageCost:
        work, operations = scored, formulas.scoring_operations(self.shape, scored, heads=heads)
        computing = operations / self.machine.flops
        for part in answers:
            work += part.work
            operations += formulas.scoring_operations(self.shape, part.work)
            computing += self._answer_seconds(part)
        memory = self._memory(work, heads=heads, captures=captures)
        return self._cost(
            stage, work, operations, computing=computing, read=read, written=written, memory=memory, times=times
        )

    def _cost(
        self,
        stage: str,
        work: Workload,
        operations: float | None,
        *,
        computing: float | None,
        read: float,
        written: float,
        memory: float,
        times: int,
        alone: bool = False,
    ) -> StageCost:
        """Return the cost of a stage; `computing` is the seconds of one copy for all of one run's work.

        Where the stage works `alone`, one copy does it while the others wait.
        """
        seconds = None
        if computing is not None and self.copies:
            sharing = 1 if alone else self.copies
            seconds = times * (computing / sharing + (read + written) / self.machine.disk)
        return StageCost(
            stage=stage,
            times=times,
            tokens=work.tokens,
            tokens_unshared=work.tokens_unshared,
            operations=operations,
            bytes_read=read,
            bytes_written=written,
            memory=memory,
            seconds=seconds,
            dollars=self.machine.dollars(seconds),
        )

    def _memory(self, work: Workload, *, heads: int = 1, captures: bool = False) -> float:
        return formulas.scoring_memory(
            self.shape,
            work,
            self.number_bytes,
            weights=float(self.shape.parameters * self.number_bytes),
            heads=heads,
            captures=captures,
        )

    def _answer_seconds(self, part: GeneratedWork) -> float:
        return formulas.answer_seconds(
            self.shape,
            part.work,
            number_bytes=self.number_bytes,
            batch=GenerationConfig(max_new_tokens=part.new_tokens).batch_rows,
            new_tokens=part.new_tokens,
            answers=part.answers,
            machine=self.machine,
        )
