"""The plan of a whole job: what each stage would compute, read and write, and how long that takes on a machine."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlflow_compress.commands.evaluate.baseline import noise_sample
from mlflow_compress.commands.evaluate.items import suite_of, with_chat_template
from mlflow_compress.commands.evaluate.outputs import WINDOW, scored_texts
from mlflow_compress.commands.evaluate.own_text import MOST_CHAINS
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.judge.answers import graded_tokens
from mlflow_compress.commands.judge.judge_instructions import instructions_of
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.commands.plan.parameters import PlanConfig
from mlflow_compress.commands.shared.named_models import model_label, model_path
from mlflow_compress.commands.shared.tabular import Tabular, aligned_lines
from mlflow_compress.compression.method import METHODS, method_config, require_placed
from mlflow_compress.compression.one_layer import seconds_of_a_form
from mlflow_compress.errors import ConfigError
from mlflow_compress.items.sources.instructions import Instruction
from mlflow_compress.items.suite import Suite
from mlflow_compress.items.task import TraceCorpus
from mlflow_compress.models.identity import max_length
from mlflow_compress.models.model_files import open_config, open_tokenizer
from mlflow_compress.models.peft_adapter import ADAPTER, base_of
from mlflow_compress.models.placement import BALANCED, placement, room_for_states
from mlflow_compress.scoring import costs as formulas
from mlflow_compress.scoring.costs import (
    GeneratedWork,
    ModelShape,
    Offloaded,
    PassGroupSize,
    Workload,
    model_shape,
    workload,
)
from mlflow_compress.scoring.engine import default_limits
from mlflow_compress.scoring.generation.chat_format import chat_format
from mlflow_compress.scoring.generation.generation_rows import GenerationConfig
from mlflow_compress.scoring.plan.corpus_windows import Positions, Windows, cut
from mlflow_compress.scoring.plan.encoding import Encoder
from mlflow_compress.scoring.plan.packing import plan_packs


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """The cost of one stage."""

    stage: str
    times: int  # How often it runs: once for a baseline, once for each variant
    # Tokens that the layers compute; the same without shared prefixes
    tokens: int
    tokens_unshared: int
    operations: float | None  # Floating-point operations; None where there is no formula
    # From and to the storage
    bytes_read: float
    bytes_written: float
    memory: float  # Bytes that one copy of the model and its work need at once, without the libraries themselves
    # Of one run layer by layer: how often the weights that do not fit are read, and bytes of hidden states in memory
    reads: int
    states_memory: float
    # Of all its runs; None where there is no formula, no price, or too few devices
    seconds: float | None
    dollars: float | None


@dataclass(frozen=True, kw_only=True)
class CostPlan(Tabular):
    """The plan: what each stage costs, and how the model lies on the devices."""

    model: str
    # All weights; those that one token is multiplied with, without embeddings and head
    parameters: float
    active_parameters: float
    # Devices there are; devices that one copy of the model needs; copies that work side by side (0: it does not fit)
    devices: int
    devices_per_copy: int
    copies: int
    stages: tuple[StageCost, ...]
    waiting_bytes: float  # Bytes of the weights that do not fit (device=balanced)
    states_bytes: float  # Bytes of the baseline's stored states
    checkpoint_bytes: float  # Bytes of one compressed checkpoint
    notes: tuple[str, ...]  # What the figures assume, and what they leave out

    @property
    def seconds(self) -> float | None:
        each = [stage.seconds for stage in self.stages]
        return None if any(s is None for s in each) else sum(s or 0.0 for s in each)

    @property
    def summary(self) -> str:
        active = f", {self.active_parameters / 1e9:.3g} billion a token" if self.active_parameters else ""
        where = (
            f"{self.copies} {'copy' if self.copies == 1 else 'copies'} on {self.devices_per_copy} of {self.devices} "
            f"{'device' if self.devices == 1 else 'devices'} each"
            if self.copies
            else f"does not fit on {self.devices}: one copy needs {self.devices_per_copy} devices"
        )
        return f"{self.model}: {self.parameters / 1e9:.3g} billion weights{active}; {where}"

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        return [asdict(stage) for stage in self.stages]

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "seconds": self.seconds}

    def as_text(self) -> str:
        from mlflow_compress.reporting.numbers import bytes_text, duration

        def sized(n: float) -> str:
            return bytes_text(round(n))

        def known(value: float | None, text: Callable[[float], str]) -> str:
            return "unknown" if value is None else text(value)

        priced = any(stage.dollars is not None for stage in self.stages)
        heads = ("stage", "times", "tokens", "unshared", "operations", "read", "written", "memory", "time")
        rows = [
            (
                s.stage,
                str(s.times),
                f"{s.tokens:,}",
                f"{s.tokens_unshared:,}",
                known(s.operations, "{:.2e}".format),
                sized(s.bytes_read),
                sized(s.bytes_written),
                sized(s.memory),
                known(s.seconds, duration),
                *([known(s.dollars, "${:,.2f}".format)] if priced else []),
            )
            for s in self.stages
        ]
        lines = [f"{self.summary}.", "", *aligned_lines([(*heads, *(["dollars"] if priced else [])), *rows]), ""]
        lines.append(
            f"All stages: {known(self.seconds, duration)}. States of the baseline: {sized(self.states_bytes)}. "
            f"One checkpoint: {sized(self.checkpoint_bytes)}."
        )
        layers = [
            f"Layer by layer, {s.stage}: {s.reads:,} {'read' if s.reads == 1 else 'reads'} of "
            f"{sized(self.waiting_bytes)}, {sized(s.states_memory)} of states in memory."
            for s in self.stages
            if s.reads
        ]
        return "\n".join([*lines, *layers, *(f"- {note}." for note in self.notes)])


def scored_work(suite: Suite, encoder: Encoder, *, batch_tokens: int, head_rows: int) -> Workload:
    """Return the work of scoring a suite: packs with shared prefixes for options, windows for corpora."""
    encoded = [e for e in encoder.encode(suite.requests) if e.fits]
    sequences = [e.inputs for e in encoded]
    plan = plan_packs(sequences, [len(e.targets) for e in encoded], batch_tokens=batch_tokens)
    work = workload(plan, sum(map(len, sequences)), head_rows)
    if written := [corpus.name for corpus in suite.corpora if isinstance(corpus, TraceCorpus)]:
        raise ConfigError(
            "The baseline writes this corpus, so its cost is not known beforehand", got=written[0], fix="Leave it out"
        )
    for _, text, most, _ in scored_texts(suite):
        windows, _ = cut(encoder, text, window=WINDOW, max_tokens=most).plan(batch_tokens)
        work += workload(windows, windows.n_tokens, head_rows)
    return work


def _instruction_answers(
    instructions: list[Instruction], tokenizer: Any, config: PlanConfig, max_length: int
) -> tuple[GeneratedWork, GeneratedWork]:
    """Return the answers that are graded (every turn, after the longest earlier ones), and the samples of the first."""
    chat, system = chat_format(tokenizer), config.inference.system_prompt or ""
    longest, limit = graded_tokens(config.answers, max_length), config.answers.max_new_tokens
    firsts: list[int] = []
    later: list[int] = []
    for one in instructions:
        length = len(tokenizer(chat.prompt([one.turns[0]], system=system))["input_ids"])
        firsts.append(length)
        for turn in one.turns[1:]:
            length += longest + len(tokenizer(turn)["input_ids"])
            later.append(length)
    graded = generated(firsts + later, longest, config)
    return graded, generated(firsts, limit, config, samples=config.answers.num_samples)


def generated(prompts: list[int], longest: int, config: PlanConfig, *, samples: int = 1) -> GeneratedWork:
    """Return answers to prompts, which are as long as the plan is told, or as they may be."""
    given = config.machine.answer_tokens
    return GeneratedWork(
        prompts=prompts, samples=samples, longest=longest, usual=longest if given == "auto" else min(given, longest)
    )


@dataclass(frozen=True)
class _SuiteAnswers:
    """The answers that a suite asks for."""

    of_both: list[GeneratedWork]  # Each model writes these
    of_baseline: list[GeneratedWork]  # Those, and what the baseline alone writes
    thoughts: list[GeneratedWork]  # Of these, the thoughts that both models read

    @classmethod
    def of(cls, suite: Suite, encoder: Encoder, config: PlanConfig) -> "_SuiteAnswers":
        written: list[GeneratedWork] = []
        again: list[GeneratedWork] = []
        thoughts: list[GeneratedWork] = []
        for task in suite.tasks:
            if (how := task.answering) is None:
                continue
            lengths = [len(ids) for ids in encoder.ids(task.items.column("prompt").tolist())]
            answers = partial(generated, longest=how.max_new_tokens, config=config)
            written += [answers(lengths), *([answers(lengths, samples=how.samples)] if how.samples else [])]
            if how.thinking is not None:  # the baseline draws again, and writes its thoughts
                again.append(written[-1])
                thoughts.append(answers(lengths[:MOST_CHAINS]))
        return cls(of_both=written, of_baseline=[*written, *again, *thoughts], thoughts=thoughts)


def _chains_work(prompts: Sequence[int], usual: int, *, batch_tokens: int, head_rows: int) -> Workload:
    """Return the work of scoring the baseline's own thoughts, one behind each prompt, if all are of one length."""
    sizes = sorted((n + usual for n in prompts), reverse=True)
    scored: list[Positions] = [np.arange(n - usual, n) for n in sizes]
    windows = Windows([np.zeros(n, dtype=np.int32) for n in sizes], scored, last_is_read=False)
    plan, _ = windows.plan(batch_tokens)
    return workload(plan, plan.n_tokens, head_rows)


_BATCH = GenerationConfig().batch_rows
_FREE = 0.9  # share of a device's memory that a model and its work may take
_SCALE_BITS = 16 / 128  # a scale of 16 bits for every 128 weights


class _StageCosts:
    """The costs of each stage, and how the model lies on the devices: `per_copy`, `copies`, as in `CostPlan`.

    - `stored_bytes`, `number_bytes`: Bytes of one weight in the baseline's files, and of one number while the model
      runs.
    """

    def __init__(
        self,
        config: PlanConfig,
        shape: ModelShape,
        scored: Workload,
        *,
        stored_bytes: int,
        number_bytes: int,
        offloaded: Offloaded | None = None,
    ) -> None:
        self.config, self.shape, self.offloaded = config, shape, offloaded
        self.stored_bytes, self.number_bytes = stored_bytes, number_bytes
        on_cpu, given = _on_cpu(config), config.machine
        # What is "auto" is an H100, or this machine where a CPU is asked for.
        memory, flops, bandwidth = formulas.this_machine() if on_cpu else (80 * 2.0**30, 400e12, 2.5e12)
        self.machine = formulas.Machine(
            fresh=formulas.fresh_bytes() if offloaded and on_cpu else math.inf,  # of a GPU it was not measured
            devices=given.devices,
            memory=memory if given.device_memory == "auto" else given.device_memory * 2**30,
            flops=flops if given.device_tflops == "auto" else given.device_tflops * 1e12,
            bandwidth=bandwidth if given.device_bandwidth == "auto" else given.device_bandwidth * 1e12,
            disk=given.disk_bandwidth * 1e9,
            price=given.price,
        )
        linear, bits = shape.dense + shape.experts, config.bits + (_SCALE_BITS if config.bits < 16 else 0)
        self.bits = bits
        self.base = float(shape.parameters * stored_bytes)
        self.checkpoint = linear * bits / 8 + (shape.parameters - linear) * stored_bytes
        self.states = formulas.states_bytes(shape, scored, number_bytes)
        most = max(self._memory(scored, captures=True), self._memory(scored, heads=2))
        self.per_copy = given.devices if offloaded else ceil(most / (_FREE * self.machine.memory))
        self.copies = self.machine.devices // self.per_copy

    def compression(self) -> StageCost:
        """Return the cost of compressing the model. Methods whose work has no formula have no seconds."""
        method, length = METHODS.get(self.config.method), self.config.calibration_length
        tokens, operations, computing = 0, 0.0 if not method.needs_calibration else None, 0.0
        if method.needs_calibration:
            samples = self.config.calibration_samples
            default = getattr(method.Config(), "calibration_samples", 0)  # of every method that is calibrated
            tokens = length * (default if samples == "auto" else samples)
            operations = formulas.calibration_operations(method.name, self.shape, tokens, length)
            solving = 0.0 if _on_cpu(self.config) else formulas.solving_seconds(method.name, self.shape)
            computing = solving + (operations or 0.0) / self.machine.flops
        return self._cost(
            f"quantize ({method.name})",
            Workload(tokens=tokens, tokens_unshared=tokens),
            operations,
            computing=None if operations is None else computing,
            read=self.base,
            written=self.checkpoint,
            memory=self._memory(Workload(groups=(PassGroupSize(longest_unit=length),)), heads=0),
            times=self.config.made,
            alone=True,
        )

    def evaluated(
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
        expanded: bool = False,
    ) -> StageCost:
        """Return the cost of scoring and of answering; the bytes are those of one run.

        Layers of a variant that wait on the disk are `expanded` to the dtype there.
        """
        work, operations = scored, formulas.scoring_operations(self.shape, scored, heads=heads)
        reads, states = self._reads(scored)
        computing, ahead = operations / self.machine.flops, 0.0
        if self.offloaded is not None:  # each layer but the first of a sweep is read while the one before it computes
            as_read = 1.0 if expanded else self.stored_bytes / self.number_bytes
            behind_first = reads * as_read * (self.offloaded.waiting - self.offloaded.largest)
            ahead = min(behind_first, computing * self.machine.disk)
            computing += self._extra_seconds(scored, reads)
        for part in answers:
            written_work = part.workload(_BATCH)
            reads += part.steps(_BATCH) if self.offloaded else 0  # one for each token
            work += written_work
            operations += formulas.scoring_operations(self.shape, written_work)
            computing += formulas.answer_seconds(
                self.shape, part, number_bytes=self.number_bytes, batch=_BATCH, machine=self.machine
            )

        memory = max(self._memory(scored, heads=heads, captures=captures), self._memory(work, layers=self.shape.layers))
        if self.offloaded is not None:
            read += as_read * (self.offloaded.opening + reads * self.offloaded.waiting)
            written += self.offloaded.waiting if expanded else 0.0
        cost = self._cost(
            stage,
            work,
            operations,
            computing=computing,
            read=read,
            ahead=ahead,
            written=written,
            memory=memory,
            times=times,
        )
        return replace(cost, reads=reads, states_memory=states)

    def screened(self, offloaded: Offloaded, scored: Workload, form_seconds: tuple[float, float]) -> StageCost:
        """Return the cost of scoring all variants in forms of the layers, each made while the layer is in memory.

        `form_seconds` are those of making a form: of any layer, and of each of its weights. A form is written once
        plain and once compressed.
        """
        shape, variants, (always, each) = self.shape, self.config.variants, form_seconds
        weights = (shape.dense + shape.experts) / shape.layers  # of one layer
        reads, states = self._reads(scored, variants)
        operations = variants * formulas.scoring_operations(shape, scored, heads=2)
        n_forms = variants * reads * shape.layers
        written = n_forms * weights * (self.stored_bytes + self.bits / 8)
        as_read = self.stored_bytes / self.number_bytes
        read = self.states + as_read * (offloaded.opening + reads * offloaded.waiting)
        computing = operations / self.machine.flops + n_forms * (always + each * weights)
        # Beside the baseline's layer: two forms of it in float32 while one is made (pruning sorts a third), and then
        # one and what computing it takes.
        kept = self._memory(Workload(tokens_unshared=scored.tokens_unshared, states=scored.states), variants=variants)
        making = kept + 4 * weights * (2 if METHODS.get(self.config.method).supported_bits else 3)
        memory = max(making, self._memory(scored, heads=2, variants=variants) + 4 * weights)
        cost = self._cost(
            "screen",
            Workload(tokens=variants * scored.tokens, tokens_unshared=variants * scored.tokens_unshared),
            operations,
            computing=computing + self._extra_seconds(scored, reads, variants),
            read=read,
            # Files of a form are still in the system's memory when they are read.
            ahead=min(as_read * reads * (offloaded.waiting - offloaded.largest), computing * self.machine.disk),
            written=written,
            memory=memory,
            times=1,
            alone=True,
        )
        return replace(cost, reads=reads, states_memory=states)

    def _extra_seconds(self, scored: Workload, reads: int, variants: int = 1) -> float:
        if self.offloaded is None:
            return 0.0
        return self.offloaded.extra_seconds(
            self.shape, scored, reads, number_bytes=self.number_bytes, machine=self.machine, streams=variants
        )

    def _reads(self, work: Workload, variants: int = 1) -> tuple[int, int]:
        state_bytes = variants * self.shape.hidden * self.number_bytes
        return self.offloaded.reads(work, state_bytes) if self.offloaded else (0, 0)

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
        ahead: float = 0.0,
        alone: bool = False,
    ) -> StageCost:
        """Return the cost of a stage; `computing` is the seconds of one copy for all of one run's work.

        Of the bytes that are `read`, those `ahead` are read meanwhile. Where the stage works `alone`, one copy does it
        while the others wait.
        """
        seconds = None
        if computing is not None and self.copies:
            sharing = 1 if alone else self.copies
            seconds = times * (computing / sharing + (read - ahead + written) / self.machine.disk)
        return StageCost(
            stage=stage,
            times=times,
            tokens=work.tokens,
            tokens_unshared=work.tokens_unshared,
            operations=operations,
            bytes_read=read,
            bytes_written=written,
            memory=memory,
            reads=0,
            states_memory=0.0,
            seconds=seconds,
            dollars=self.machine.dollars(seconds),
        )

    def _memory(
        self, work: Workload, *, heads: int = 1, captures: bool = False, variants: int = 1, layers: int = 1
    ) -> float:
        shape, weights = self.shape, float(self.shape.parameters * self.number_bytes)
        if self.offloaded is not None:  # one layer at a time, and its keys and values; those of all `layers` of answers
            shape = replace(shape, layers=layers)
            weights += self.offloaded.largest - self.offloaded.waiting + self._reads(work, variants)[1]
        return formulas.scoring_memory(
            shape,
            work,
            self.number_bytes,
            weights=weights,
            heads=heads,
            captures=captures,
        )


_NOTES = (
    "Operations of matrices, attention and head; attention as if every layer saw the whole text",
    "One copy compresses, and the others wait; they share all other work",
    "A variant is evaluated with its weights expanded to the dtype",
    "Python itself (starting it, its work at each token), compiling kernels, judges and uploads are not counted",
)


_TOO_LONG = (
    "Answers at their maximum length need {:,.0f} GB, and a copy may take {:,.0f} GB: fewer are generated "
    "at once where memory runs out. Allow them fewer tokens (task_args: thinking_max_new_tokens), or use engine=vllm"
)
_LAYERS = "Compression is counted as if the model fitted; weights that wait as if all were on the storage"

_SCREENED = (
    "What making a form of a layer takes is measured on this machine, with random layers; save=passing is counted as "
    "if the policy failed no variant"
)


def run_plan(config: PlanConfig) -> CostPlan:
    """Return the costs of baseline, compression, variants and answers; no weights are read and nothing runs."""
    model_config, tokenizer = _opened(config)
    length = max_length(model_config, tokenizer)
    shape = model_shape(model_config, trust_remote_code=config.source.trust_remote_code)
    suite = suite_of(EvaluateConfig(source=config.source, evaluation=config.evaluation, inference=config.inference))
    suite = with_chat_template(tokenizer, suite, config.inference.system_prompt or "")
    encoder = Encoder(tokenizer, length)
    # Batches and numbers have the size that they have on a GPU, unless a CPU is asked for.
    on_cpu = _on_cpu(config)
    dtype = _dtype("float32" if on_cpu and config.inference.dtype == "auto" else config.inference.dtype, model_config)
    limits = default_limits(shape.vocabulary, on_gpu=not on_cpu)

    scored = scored_work(suite, encoder, **limits)
    again = noise_sample(suite, config.evaluation.noise_items, seed=config.source.seed)
    noise = scored_work(again, encoder, **limits)
    answers = _SuiteAnswers.of(suite, encoder, config)
    for thoughts in answers.thoughts:
        scored += _chains_work(thoughts.prompts, thoughts.usual, **limits)
        first = thoughts.prompts[: config.evaluation.noise_items or None]
        noise += _chains_work(first, thoughts.usual, **limits)

    costs = _StageCosts(
        config,
        shape,
        scored,
        stored_bytes=_dtype("auto", model_config).itemsize,
        number_bytes=dtype.itemsize,
        offloaded=_offloaded(config, model_config, dtype) if config.source.device == BALANCED else None,
    )

    stages = [
        costs.evaluated("baseline", scored, answers.of_baseline, read=costs.base, written=costs.states, captures=True)
    ]
    if noise.tokens:
        stages.append(costs.evaluated("baseline again (noise)", noise, (), read=costs.states, heads=2))
    if config.save != "all":
        stages.append(_screened(config, costs, scored))
    stages.append(costs.compression())
    read, times = costs.checkpoint + costs.states, config.made
    stages.append(costs.evaluated("evaluate", scored, answers.of_both, read=read, heads=2, times=times, expanded=True))
    if config.judge:  # what the judge's own calls cost, its stage estimates
        judged = JudgeConfig(source=config.source, answers=config.answers, inference=config.inference)
        graded, samples = _instruction_answers(instructions_of(judged), tokenizer, config, length)
        twice = (graded, samples, samples)  # the baseline's are drawn twice: their likeness is the noise floor
        stages.append(costs.evaluated("answers of the baseline", Workload(), twice, read=costs.base))
        once = (graded, samples)
        stages.append(costs.evaluated("answers", Workload(), once, read=costs.checkpoint, times=times, expanded=True))

    return CostPlan(
        model=model_label(config.source.model),
        parameters=shape.parameters,
        active_parameters=shape.active,
        devices=config.machine.devices,
        devices_per_copy=costs.per_copy,
        copies=costs.copies,
        stages=tuple(stages),
        waiting_bytes=float(costs.offloaded.waiting) if costs.offloaded else 0.0,
        states_bytes=costs.states,
        checkpoint_bytes=costs.checkpoint,
        notes=_notes(config, costs, stages, on_cpu=on_cpu),
    )


def _notes(config: PlanConfig, costs: _StageCosts, stages: Sequence[StageCost], *, on_cpu: bool) -> tuple[str, ...]:
    """Return what the figures rest on, and what to know of this plan."""
    machine = costs.machine
    device = ("machine like this one", "machines like this one") if on_cpu else ("GPU", "GPUs")
    assumed = (
        f"Times are of {machine.devices} {device[machine.devices > 1]} with {machine.memory / 2**30:.3g} GiB, "
        f"{machine.flops / 1e12:.3g} Tflop/s and {machine.bandwidth / 1e12:.2g} TB/s: "
        "device, devices, device_memory, device_tflops and device_bandwidth name another"
    )
    given = config.machine.answer_tokens
    lengths_of = "their maximum length" if given == "auto" else f"{given:,} tokens, or their maximum length if shorter"
    room, most = costs.per_copy * _FREE * machine.memory, max(stage.memory for stage in stages)
    spread = f"The layers of one copy lie on {costs.per_copy} devices, which work one after another"
    return (
        assumed,
        *_NOTES,
        f"Answers are counted with {lengths_of}; memory is that of {_BATCH} at once at their maximum length",
        *([_TOO_LONG.format(most / 1e9, room / 1e9)] if most > room else []),
        *([spread] if costs.per_copy > 1 else []),
        *([_LAYERS] if costs.offloaded else []),
        *([_SCREENED] if config.save != "all" else []),
    )


def _screened(config: PlanConfig, costs: _StageCosts, scored: Workload) -> StageCost:
    if costs.offloaded is None:
        raise ConfigError(
            "Variants are scored before they are written only if the model does not fit into memory",
            allowed="device=balanced, and less max_memory than the model takes",
            got=f"device={config.source.device}, max_memory={config.source.max_memory}",
            fix="Leave save out",
        )
    method = METHODS.get(config.method)
    bits = {"bits": config.bits} if config.bits in method.supported_bits else {}
    settings = method_config(method.name, **bits)
    require_placed(method, settings, config.source.device)
    return costs.screened(costs.offloaded, scored, seconds_of_a_form(method.name, settings))


def _on_cpu(config: PlanConfig) -> bool:
    source = config.source
    return source.device == "cpu" or (source.device == BALANCED and set(source.max_memory) == {"cpu"})


def _offloaded(config: PlanConfig, model_config: Any, dtype: torch.dtype) -> Offloaded | None:
    given = config.source.max_memory
    if "cpu" not in given:
        raise ConfigError(
            "A plan for device=balanced needs the host's memory",
            got="max_memory without cpu",
            fix="Set max_memory=cpu=60GiB,0=20GiB (0 is the first GPU)",
        )
    memory, room = placement(BALANCED, given)["max_memory"], room_for_states(given)
    memory["cpu"] -= room
    trusted = config.source.trust_remote_code
    return formulas.offloaded(model_config, dtype, memory, room=room, trust_remote_code=trusted)


def _dtype(name: str, model_config: Any) -> torch.dtype:
    """Return a dtype by its name; 'auto' is the configuration's, and float32 where it has none."""
    named = getattr(model_config, "dtype", None) if name == "auto" else name
    if isinstance(named, torch.dtype):
        return named
    torch_dtype = getattr(torch, str(named or "float32"))
    assert isinstance(torch_dtype, torch.dtype)
    return torch_dtype


def _opened(config: PlanConfig) -> tuple[Any, Any]:
    """Return configuration and tokenizer; a hub id costs the download of both, and never of weights."""
    model = model_path(config.source.model)
    if (Path(model) / ADAPTER).is_file():
        model = base_of(Path(model))  # they are the base's; nothing is merged for a plan
    trusted = config.source.trust_remote_code
    tokenizer = model_path(config.tokenizer) if config.tokenizer else model
    return open_config(model, trust_remote_code=trusted), open_tokenizer(tokenizer, trust_remote_code=trusted)
