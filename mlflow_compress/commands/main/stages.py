"""The stages of one variant, as children of its main run, and what they have found, from compression to verdict."""

import hashlib
import json
import os
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from mlflow_compress.commands.command import Say
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.evaluate.result import Measurement
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.commands.quantize.parameters import QuantizeConfig
from mlflow_compress.commands.shared.named_models import SERVED_METHOD, model_path, read_manifest
from mlflow_compress.commands.shared.stored import read_account, stored_results
from mlflow_compress.commands.shared.tabular import lines_of_run
from mlflow_compress.commands.speed.parameters import SpeedConfig
from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest
from mlflow_compress.config import ENDPOINT, Parameters, as_given, is_endpoint, parameters
from mlflow_compress.decide.gates import gate_values
from mlflow_compress.decide.promotion import PolicyAnswer
from mlflow_compress.errors import StageError
from mlflow_compress.kept import kept
from mlflow_compress.metrics.core.account import Account
from mlflow_compress.metrics.core.metric_inputs import MetricInputs, MetricSettings, headline
from mlflow_compress.metrics.core.metric_registry import unmet
from mlflow_compress.models.source_model import resolve
from mlflow_compress.models.stored_weights import hash_weights
from mlflow_compress.records import MetricResult, RunRecords
from mlflow_compress.reporting.headline import not_computed
from mlflow_compress.reporting.numbers import duration_text
from mlflow_compress.reporting.verdict import answer_by_default, verdict, worst_slice
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.live_processes import own_host
from mlflow_compress.tracking.projects import run_stage
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker
from mlflow_compress.warm_python import WarmPython


@dataclass(frozen=True, kw_only=True)
class VariantRun(Measurement):
    """Everything that the stages of one variant found: what its main run shows."""

    baseline: str  # The baseline's short name
    model: str  # The baseline as it was named
    verdict: str  # What was found, in one sentence
    manifest: CheckpointManifest | None  # How the checkpoint was made, and what it weighs; None of a served model
    checkpoint: str  # Its folder, or where it is served
    gates: Mapping[str, float]  # The upper ends of intervals that a promotion reads
    account: Account  # What was asked, and what became of it
    failed: Mapping[str, str] = field(default_factory=dict)  # Error message of every stage that failed

    def to_dict(self) -> dict[str, Any]:
        return {
            **super().to_dict(),
            "baseline": self.baseline,
            "verdict": self.verdict,
            "checkpoint": self.checkpoint,
            "manifest": None if self.manifest is None else asdict(self.manifest),
            "account": self.account.to_dict(),
            "gates": dict(self.gates),
            "failed": dict(self.failed),
        }

    def as_text(self) -> str:
        from mlflow_compress.reporting.headline import for_users, headline_table
        from mlflow_compress.reporting.scoreboard_text import wrapped

        table = headline_table(self.pooled, self.manifest, failed_stages=self.failed)
        after = f"Next:          mlflow-compress promote --model {shlex.quote(self.model)}"
        sentences = filter(None, (self.verdict, for_users(self.pooled), self.account.sentence))
        said = [line for text in sentences for line in wrapped(text)]
        links = [*lines_of_run(self.run), *([] if self.failed else [after])]
        return "\n\n".join(["\n".join(said), table, "\n".join(links)])


_CONFIGS: dict[str, type[Parameters]] = {
    "quantize": QuantizeConfig,
    "evaluate": EvaluateConfig,
    "judge": JudgeConfig,
    "speed": SpeedConfig,
}
STAGES = {stage: parameters(cls).keys() - {"checkpoint", "experiment"} for stage, cls in _CONFIGS.items()}
"""The stages of the main job in their order, and the parameters that a user gives each."""


_MAY_FAIL = ("judge", "speed")  # the other results are usable without them

StartStage = Callable[[Tracker, str, Parameters, TrackedRun], str]
"""Runs a stage with its parameters as a child of a run, and returns the child's run id."""


def as_project(python: WarmPython, output: tuple[int, int] = (1, 2)) -> StartStage:
    """Return what runs a stage as an MLflow project, in a process of its own that writes to these open files."""
    return lambda tracker, stage, config, parent: run_stage(
        tracker, stage, as_given(config), parent=parent, python=python, output=output
    )


_RUNS = 5  # number of newest finished runs behind an estimate

_WHAT = {
    "quantize": "compresses the model and loads it again to check it",
    "evaluate": "scores both models on the same items",
    "judge": "lets both models answer the instructions",
    "speed": "times both models alternately in the runtime of the variant's format",
}


class Progress:
    """Shows which stage begins, with an estimate of its duration."""

    def __init__(self, tracker: Tracker, label: str, say: Say) -> None:
        self._tracker, self._label, self.say = tracker, label, say
        self._past: dict[str, list[float]] = {}  # seconds of earlier runs, by stage

    def begin(self, stage: str, number: int, total: int, *, later: Sequence[str] = (), when: str = "") -> None:
        left, seconds = [self._seconds(one) for one in later], self._seconds(stage)
        known = f": {duration_text(sum(map(statistics.median, left)))}" if left and all(left) else ""
        then = f"; then {', '.join(later)}{known}" if later else ""
        estimate = f"first time for {self._label} on {own_host()}: no estimate"
        if seconds:
            times = "run" if len(seconds) == 1 else f"{len(seconds)} runs"
            estimate = f"{duration_text(statistics.median(seconds))}, as in the last {times} on {own_host()}"
        self.say(f"[{number}/{total}] {stage}{when}: {_WHAT[stage]} ({estimate}{then})")

    def _seconds(self, stage: str) -> list[float]:
        """Return the seconds of the newest finished runs of a stage on this machine."""
        if stage in self._past:
            return self._past[stage]
        runs = self._tracker.find_finished(stage, **{run_names.BASE_MODEL: self._label})
        here = [run for run in runs if run.data.tags.get(run_names.PROCESS, "").startswith(f"{own_host()}-")][:_RUNS]
        seconds = [(run.info.end_time - run.info.start_time) / 1000 for run in here]
        self._past[stage] = [one for one in seconds if one >= 0]  # the clock was set back during the others
        return self._past[stage]


@dataclass
class Stages:
    """The stages of one variant, run one after the other as children of its main run, and what they have found."""

    config: MainConfig
    tracker: Tracker
    run: TrackedRun
    label: str  # The baseline's and the variant's short names
    variant: str
    children: dict[str, str] = field(default_factory=dict)  # Run id of every finished stage
    # Error message of every failed stage whose failure leaves the other results usable
    failed: dict[str, str] = field(default_factory=dict)
    broke_off: bool = False  # Whether one of them did not fail by an error that would come again

    def run_all(self, start: StartStage, progress: Progress, beside: Callable[[], WarmPython] | None = None) -> None:
        """Run the stages that are not finished. A failed judge, or speed, does not stop the run.

        - `beside`: Makes what runs the judge while the evaluation runs; None runs one after the other.
        """
        asked = {"quantize": not self.config.is_served, "judge": self.config.judge, "speed": self.config.speed}
        wanted = [stage for stage in STAGES if asked.get(stage, True)]
        done = set(self.children)
        for number, stage in enumerate(wanted, start=1):
            if stage in done:
                progress.say(f"[{number}/{len(wanted)}] {stage}: finished before")
            elif stage not in self.children and stage not in self.failed:
                later = [one for one in wanted[number:] if one not in self.children]
                if beside is not None and stage == "evaluate" and later[:1] == ["judge"]:
                    progress.begin(stage, number, len(wanted))
                    progress.begin("judge", number + 1, len(wanted), later=later[1:], when=" at the same time")
                    with beside() as python, self._judge(python):
                        self._run(stage, start)
                else:
                    progress.begin(stage, number, len(wanted), later=later)
                    self._run(stage, start)

    def _run(self, stage: str, start: StartStage) -> None:
        try:
            changes = {} if stage == "quantize" else {"checkpoint": self.checkpoint}
            config = self.config.of_stage(_CONFIGS[stage], **changes)
            self.children[stage] = start(self.tracker, stage, config, self.run)
        except StageError as error:
            if stage not in _MAY_FAIL:
                raise
            self.failed[stage] = error.what
            self.broke_off |= error.broke_off

    @contextmanager
    def _judge(self, python: WarmPython) -> Iterator[None]:
        """Run the judge beside this block, which waits for it at its end. An error in the block ends it.

        What it says comes line by line: it has no terminal, on which its bars would meet those of the block.
        """
        reading, writing = os.pipe()
        with os.fdopen(reading, errors="replace") as lines, ThreadPoolExecutor(2) as pool:
            pool.submit(sys.stderr.writelines, lines)
            judged = pool.submit(self._run, "judge", as_project(python, (1, writing)))
            try:
                yield
                judged.result()
            except BaseException:
                python.__exit__()
                raise
            finally:
                wait([judged])
                os.close(writing)  # the end of its lines

    @property
    def evaluate(self) -> str:
        return self.children["evaluate"]

    @cached_property
    def evaluation(self) -> str:
        return str(self.tracker.client.get_run(self.evaluate).data.tags[run_names.EVALUATION])

    @cached_property
    def baseline_run(self) -> str:
        """The id of the run that holds the baseline's records."""
        return str(self.tracker.client.get_run(self.evaluate).data.tags[run_names.BASELINE_RUN])

    @property
    def checkpoint(self) -> str:
        """The compressed checkpoint's folder, or the address of a served one."""
        if self.config.is_served:
            return str(self.config.compression.checkpoint)
        return str(self.tracker.client.get_run(self.children["quantize"]).data.tags[run_names.CHECKPOINT])

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """What the server of a served variant said when it was evaluated; empty of a checkpoint."""
        return self.tracker.fetch_json(self.evaluate, run_names.FACTS) if self.config.is_served else {}

    @cached_property
    def served(self) -> dict[str, str] | None:
        """Who serves a served variant: its settings; None of a checkpoint."""
        if not self.facts:
            return None
        address = str(self.tracker.client.get_run(self.evaluate).data.tags[run_names.CHECKPOINT])
        return {
            "served_model": str(self.facts["served_model"]),
            "endpoint": address.removeprefix(ENDPOINT),  # without user and password
            "server": str(self.facts["server"]),
            "route": str(self.facts["route"]),
            "served_root": str(self.facts["root"] or "not told"),
        }

    @cached_property
    def manifest(self) -> CheckpointManifest | None:
        return None if self.config.is_served else read_manifest(self.checkpoint)

    @cached_property
    def base_weights(self) -> str:
        """SHA-256 of the baseline's weight files; of a served baseline, the digest of what is known of it."""
        if self.manifest is not None:
            return self.manifest.base_weights_hash
        if not is_endpoint(self.config.source.model):
            folder = resolve(model_path(self.config.source.model)).folder
            return kept(("weights", folder), lambda: hash_weights(folder)[1])
        return str(self.tracker.client.get_run(self.baseline_run).data.params["weights"])

    @cached_property
    def results(self) -> list[MetricResult]:
        measured = (self.children[stage] for stage in ("evaluate", "judge", "speed") if stage in self.children)
        return stored_results(self.tracker, *measured)

    @cached_property
    def pooled(self) -> dict[str, MetricResult]:
        return headline(self.results)

    @cached_property
    def account(self) -> Account:
        return read_account(self.tracker, self.evaluate)

    @cached_property
    def inputs(self) -> MetricInputs:
        seed = self.config.source.seed
        return MetricInputs(
            baseline=self.read(self.baseline_run),
            variant=self.read(self.evaluate),
            noise=self.read(self.baseline_run, run_names.NOISE_RECORDS),
            settings=MetricSettings(seed=seed, split_seed=seed),
        )

    def read(self, run_id: str, folder: str = run_names.RECORDS) -> RunRecords:
        return RunRecords.read(self.tracker.fetch(run_id, folder))

    @cached_property
    def not_computed(self) -> dict[str, str]:
        reasons: dict[str, Mapping[str, str] | str] = {}
        for stage in _MAY_FAIL:
            run_id = self.children.get(stage)
            absent = f"the {stage} stage {'failed' if stage in self.failed else 'was not run'}"
            reasons[stage] = self.tracker.fetch_json(run_id, "not_computed.json") if run_id else absent
        evaluated = unmet(self.inputs)
        return not_computed(self.results, evaluated=evaluated, judged=reasons["judge"], timed=reasons["speed"])

    def found(self) -> VariantRun:
        return VariantRun(
            name=self.variant,
            results=tuple(self.results),
            not_computed=self.not_computed,
            records_folder=self.tracker.fetch(self.evaluate, run_names.RECORDS),
            run=self.tracker.link(self.run.run_id),
            baseline=self.label,
            model=self.config.source.model,
            verdict=self.verdict,
            manifest=self.manifest,
            checkpoint=self.checkpoint,
            gates=gate_values(self.pooled),
            account=self.account,
            failed=self.failed,
        )

    @property
    def method(self) -> str:
        return self.manifest.method if self.manifest is not None else SERVED_METHOD

    @property
    def settings(self) -> Mapping[str, object]:
        """The method's settings; of a served variant, who serves what."""
        return (self.served or {}) if self.manifest is None else self.manifest.settings

    @property
    def checkpoint_sha256(self) -> str:
        """SHA-256 of the method, its settings, and the hash of every weight file; of a served one a digest of facts."""
        if self.manifest is None:
            return str(self.facts["weights"])
        made = [self.manifest.method, self.manifest.settings, self.manifest.weight_files]
        return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()

    @property
    def answer(self) -> PolicyAnswer:
        """The default policy's answer, of this variant alone."""
        made = self.manifest
        return answer_by_default(
            self.variant,
            self.pooled,
            size_ratio=None if made is None else made.size_ratio,
            cache_ratio=None if made is None else made.cache_ratio,
            account=self.account,
        )

    @property
    def verdict(self) -> str:
        made = self.manifest
        return verdict(
            self.variant,
            self.pooled,
            size_ratio=None if made is None else made.size_ratio,
            sparsity=None if made is None else made.sparsity,
            cache_ratio=None if made is None else made.cache_ratio,
            account=self.account,
            served_by=None if made is None else made.served_by,
            slices=worst_slice(self.results),
        )
