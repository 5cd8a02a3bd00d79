"""Times a variant and its baseline in the runtime that the variant is meant for, and logs both."""

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mlflow_compress import demo
from mlflow_compress.commands.evaluate.models import open_baseline, open_variant
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.evaluate.result import Measurement
from mlflow_compress.commands.shared.get_or_create import store_of_command
from mlflow_compress.commands.shared.named_models import (
    baseline_label,
    described,
    folder_or_hub,
    model_path,
    not_served,
)
from mlflow_compress.commands.shared.past_runs import description, skipped_tag
from mlflow_compress.commands.shared.stored import log_results
from mlflow_compress.commands.shared.tabular import lines_of_run
from mlflow_compress.commands.speed.parameters import SpeedConfig
from mlflow_compress.compression.gguf_model import write_plain
from mlflow_compress.config import is_endpoint
from mlflow_compress.config.groups import VLLM_PYTHON, named_python
from mlflow_compress.engines.endpoint.served_timing import served_times
from mlflow_compress.engines.vllm_environment import find_python
from mlflow_compress.errors import ConfigError
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import compute_all
from mlflow_compress.metrics.speed import serving_speed
from mlflow_compress.models import checkpoint_config
from mlflow_compress.models.identity import IdentifiedModel
from mlflow_compress.models.loading import LoadConfig, open_light
from mlflow_compress.models.source_model import resolve
from mlflow_compress.records import MetricResult, RunRecords, ServingMemory, Timings
from mlflow_compress.scoring.speed import timing
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.live_processes import scratch_folder
from mlflow_compress.tracking.run_names import RECORDS
from mlflow_compress.tracking.tracker import Tracker

_WITHIN = 0.1  # of a ratio: the ends of an interval that is narrow enough


def _imprecise(results: Sequence[MetricResult]) -> list[MetricResult]:
    """Return the ratios of speed whose interval is wider than that."""
    ratios = [(r, r.low, r.high) for r in results if r.name.startswith(("speed/decode_ratio", "speed/prefill_ratio"))]
    return [r for r, low, high in ratios if low and high and max(r.value / low, high / r.value) > 1 + _WITHIN]


@dataclass(frozen=True, kw_only=True)
class SpeedMeasurement(Measurement):
    """Tokens per second, waits between tokens, memory and load time; empty, with the reason, if nothing was timed."""

    baseline: str  # The baseline's short name
    # What was measured once per model: seconds to load it, and resident memory
    values: Mapping[str, float] = field(default_factory=dict)
    described: Mapping[str, str] = field(default_factory=dict)  # Runtime with version, device, dtype, threads

    @property
    def summary(self) -> str:
        if not self.results:
            return f"{self.name} was not timed: {'; '.join(dict.fromkeys(self.not_computed.values()))}"
        parts = []
        if "speed/decode_ratio_batch_1" not in self.pooled:
            writing, first = self.pooled["speed/decode_tokens_per_second_batch_1"], self.pooled["speed/first_token_ms"]
            speed = f"{writing.value:.3g} tokens per second written, first token after {first.value:.3g} ms"
            return f"{self.name} in {self._runtime}, without its baseline: {speed}"
        for what, batch in (("decode", 1), ("decode", 8), ("prefill", 1), ("prefill", 8)):
            ratio = self.pooled[f"speed/{what}_ratio_batch_{batch}"]
            parts.append(f"{what} (batch {batch}) {ratio.value:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]")
        if memory := self.pooled.get("speed/memory_peak_ratio"):
            parts.append(f"peak memory {memory.value:.2f}x [{memory.low:.2f}, {memory.high:.2f}]")
        wide = _imprecise(self.results)
        noisy = f" (noisy: after {wide[0].n} rounds an interval is wider than {_WITHIN:.0%})" if wide else ""
        return f"{self.name} against {self.baseline} in {self._runtime}: {', '.join(parts)}{noisy}"

    @property
    def remark(self) -> str:
        return "" if self.results else self.summary

    @property
    def _runtime(self) -> str:
        runtime = self.described
        number = runtime.get("threads")
        threads = [] if number is None else ["1 thread" if number == "1" else f"{number} threads"]
        return f"{runtime['runtime']} ({', '.join([runtime['dtype'], *threads])})"

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "values": dict(self.values), "described": dict(self.described)}

    def as_text(self) -> str:
        from mlflow_compress.reporting.html import value_table

        lines = [self.summary, *(value_table(self.pooled).lines() if self.pooled else [])]
        lines += [f"{name} {value:.4g}" for name, value in self.values.items()]
        return "\n".join([*lines, *lines_of_run(self.run)])


_PROMPT, _NEW = 256, 32


def _plan(config: SpeedConfig, model: IdentifiedModel) -> timing.TimingPlan:
    asked, context = config.timing, model.max_length
    prompt = min(_PROMPT, context // 2) if asked.speed_prompt_tokens == "auto" else asked.speed_prompt_tokens
    new = min(_NEW, context // 4) if asked.speed_new_tokens == "auto" else asked.speed_new_tokens
    text = (demo.DATA_DIR / "corpus.txt").read_text(encoding="utf-8")[:40_000]
    tokens = model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if prompt + new > context:
        raise ConfigError(
            "speed_args: prompt_tokens and new_tokens are longer than the model's context",
            allowed=f"at most {context} together",
            got=prompt + new,
        )
    return timing.TimingPlan(
        tokens=tokens, prompt_tokens=prompt, new_tokens=new, repeats=asked.speed_repeats, enough=are_precise
    )


def are_precise(timings: Mapping[str, Timings]) -> bool:
    """Return whether the interval of every ratio lies within 10 % of it; without a baseline there are no ratios."""
    if "baseline" not in timings:
        return True
    baseline, variant = (RunRecords(timings=timings[who]) for who in ("baseline", "variant"))
    return not _imprecise(serving_speed.compute(MetricInputs(baseline=baseline, variant=variant)))


def _values(times: Mapping[str, timing.ModelTimes]) -> dict[str, float]:
    """Return what is measured once per model."""
    values = {}
    for who, suffix in (("variant", ""), ("baseline", "_baseline")):
        one = times.get(who)
        if one is None:
            continue
        if one.load_seconds is not None:
            values[f"speed/load_seconds{suffix}"] = round(one.load_seconds, 3)
        if one.memory:
            values[f"speed/memory_resident_mb{suffix}"] = round(one.memory[-1].resident / 2**20, 1)
    return values


def measure(config: SpeedConfig, folder: Path, runtime: str, python: str, device: str) -> dict[str, timing.ModelTimes]:
    """Time the checkpoint and its baseline in turn, in processes of their own."""
    base = model_path(config.source.model)
    with folder_or_hub("model", base):
        model = open_light(LoadConfig(path=base, device="cpu", trust_remote_code=config.source.trust_remote_code))
    plan = _plan(config, model)
    of_variant = timing.RuntimeCall(
        runtime=runtime,
        python=python,
        folder=str(folder),
        dtype="auto",
        device=device,
        n_threads=threads_of(config),
        n_context=plan.prompt_tokens + plan.new_tokens,
        n_batch=max(timing.BATCHES),
    )
    with ExitStack() as stack:
        of_baseline = replace(of_variant, folder=str(model.path))
        if runtime == timing.LLAMA_CPP:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            source = resolve(base, trust_remote_code=config.source.trust_remote_code)
            write_plain(source, scratch / "baseline.gguf")
            of_baseline = replace(of_variant, folder=str(scratch / "baseline.gguf"))
            of_variant = replace(of_variant, folder=str(checkpoint_config.weight_files(folder)[0]))
        return timing.timed_in_turn({"baseline": of_baseline, "variant": of_variant}, plan)


def threads_of(config: SpeedConfig) -> int:
    """Return the threads on a CPU: those that are given, those of the environment, or one per core."""
    if config.timing.speed_threads != "auto":
        return config.timing.speed_threads
    if (named := os.environ.get("OMP_NUM_THREADS", "")).isdecimal() and int(named) > 0:
        return int(named)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_speed(config: SpeedConfig, store: Tracker | str | None = None) -> SpeedMeasurement:
    """Run the stage in its own run, and return what was measured.

    A variant that no runtime here computes in its own format is not timed: the run says why, and has no speed.
    """
    asked = EvaluateConfig(source=config.source, served=config.served, checkpoint=config.checkpoint)
    if is_endpoint(config.source.model) and not is_endpoint(config.checkpoint):
        raise not_served("model", config.source.model)
    made, label = described(asked.checkpoint, asked.source, asked.served), baseline_label(asked.source, asked.served)
    with (
        store_of_command(config, store) as opened,
        opened.run(f"speed {made.label} {label}", "speed", {run_names.BASE_MODEL: label}) as run,
    ):
        tags = {run_names.VARIANT: made.label, run_names.METHOD: made.method}
        run.set_tags({**tags, run_names.CHECKPOINT: config.checkpoint})
        times, reason = _timed(config, asked)
        records = {who: _records(times.get(who)) for who in ("baseline", "variant")}
        runtime: Mapping[str, str] = {}
        missing = {"speed": reason, "serving_memory": reason}
        results: list[MetricResult] = []

        if reason:
            run.set_tags(skipped_tag(reason))
        else:
            runtime = times["variant"].described
            no_memory = {"serving_memory": "a server's memory cannot be measured from here"}
            missing = {} if times["variant"].memory else no_memory
            results = compute_all(MetricInputs(baseline=records["baseline"], variant=records["variant"]))
            run.log_params(description(runtime))
            run.log_values(_values(times))
        run.log_params(asked.source.reason)
        log_results(run, results)
        run.log_json(missing, "not_computed.json")
        with scratch_folder(opened.uri) as folder:
            for who, tables in records.items():
                tables.write(folder / who)
            run.log_folder(folder, RECORDS)
        measurement = SpeedMeasurement(
            name=made.label,
            results=tuple(results),
            not_computed=missing,
            records_folder=opened.fetch(run.run_id, RECORDS) / "variant",
            run=opened.link(run.run_id),
            baseline=label,
            values=_values(times),
            described=runtime,
        )
        run.set_note(f"**{made.label}** was not timed: {reason}." if reason else f"**{measurement.summary}**")
    return measurement


def _timed(config: SpeedConfig, asked: EvaluateConfig) -> tuple[Mapping[str, timing.ModelTimes], str]:
    """Return what was measured of each model, or why nothing was."""
    if is_endpoint(config.checkpoint):
        base = open_baseline(asked)
        variant = open_variant(asked, base)
        models = {"baseline": base, "variant": variant} if base.abilities.served else {"variant": variant}
        timed = served_times(models, _plan(config, base))
        return ({}, timed) if isinstance(timed, str) else (timed, "")
    folder, device = Path(str(config.checkpoint)), "cpu"
    if config.source.device != "cpu" and torch.cuda.is_available():
        device = "cuda"
    choice, python = timing.runtime_of(folder, device), sys.executable
    if choice.runtime == timing.VLLM:
        if named_python(config.vllm_python) is None:
            reason = f"the format is vLLM's, and no environment with vLLM is given (vllm_python, or {VLLM_PYTHON})"
            return {}, reason
        python = find_python(config.vllm_python)
    if choice.runtime is None:
        return {}, choice.reason
    return measure(config, folder, choice.runtime, python, device), ""


def _records(times: timing.ModelTimes | None) -> RunRecords:
    """Return the records of a model; of one that was not timed none, and no memory of one that a server has."""
    if times is None:
        return RunRecords(timings=Timings.from_rows([]), serving_memory=ServingMemory.from_rows([]))
    rows = [
        {"process": number, "resident_bytes": one.resident, "peak_bytes": one.peak}
        for number, one in enumerate(times.memory)
    ]
    return RunRecords(timings=times.timings, serving_memory=ServingMemory.from_rows(rows))
