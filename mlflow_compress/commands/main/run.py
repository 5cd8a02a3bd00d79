"""The main job: checks its parameters, runs quantize, evaluate, judge and speed as child projects, and publishes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Any

from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.commands.main.result import VariantRun
from mlflow_compress.commands.quantize.parameters import QuantizeConfig
from mlflow_compress.commands.quantize.run import method_settings, resolved, variant_name
from mlflow_compress.commands.shared.get_or_create import digest
from mlflow_compress.commands.shared.inputs import (
    SERVED_METHOD,
    baseline_label,
    calibration_set,
    described,
    instructions_of,
    not_served,
    read_manifest,
    suite_of,
)
from mlflow_compress.commands.shared.past_runs import ServedFacts, weights_of
from mlflow_compress.commands.shared.progress import Progress
from mlflow_compress.commands.shared.unfinished import unfinished_until_ended
from mlflow_compress.commands.speed.parameters import SpeedConfig
from mlflow_compress.compression.method import AUTO, METHODS, NONE
from mlflow_compress.config import (
    EMBEDDED,
    CompressionConfig,
    Parameters,
    as_text,
    is_endpoint,
    parameters,
    parse,
)
from mlflow_compress.errors import ConfigError, StageError, TrackingError
from mlflow_compress.home import out_folder
from mlflow_compress.items.contamination import check_contamination
from mlflow_compress.items.prompt_style import styles_of
from mlflow_compress.items.sources.calibration_sets import CalibrationSet
from mlflow_compress.judges.judge_registry import chosen_judges
from mlflow_compress.judges.session import prices_of
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.live_processes import scratch_folder
from mlflow_compress.tracking.projects import run_stage
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker, tracking_uri
from mlflow_compress.tracking.views import save_leaderboard
from mlflow_compress.transport.addresses import VARIABLES, without_password

_OWN_ENGINES = ("local", "ray", "vllm")  # known without importing them
_OF_SERVED = ("checkpoint", "output_dir")  # parameters of the compression that a served variant may have


def check(config: MainConfig) -> dict[str, object]:
    """Check the parameters without a model. Return all that are known by now, with "auto" resolved.

    The checks read tasks, instructions and calibration text, and refuse calibration text that holds evaluation items.
    So a misspelt task is refused before an hour of compression. For the demo and for files, the checks import neither
    torch nor transformers. For tasks of lm-evaluation-harness they do, because that package imports both.
    """
    if config.running.engine not in _OWN_ENGINES:
        from mlflow_compress.engines.interface import engine_of_files  # imports torch

        engine_of_files(config.running.engine)
    calibration, suite = _compression(config), suite_of(config.evaluate_config())
    if calibration is not None:
        check_contamination(calibration.plain(), suite.tasks, suite.corpora)
    if config.judge:
        instructions_of(config.judge_config())
        prices_of(config.judging)
        if config.answers.judges != "all":
            chosen_judges(config.answers.judges)
    return resolved_parameters(config, calibration)


def _compression(config: MainConfig) -> CalibrationSet | None:
    """Check method and settings, and return the calibration text; None where there is none."""
    if config.is_served:
        check_served(config)
        return None
    if is_endpoint(config.source.model):
        raise not_served("model", config.source.model)
    compression = config.quantize_config
    METHODS.get(config.compression.method).require_backend(method_settings(compression))
    return calibration_set(compression)


def check_served(config: MainConfig) -> None:
    """Refuse a served variant without a name, and one with settings of a compression, which would have no effect."""
    described(config.evaluate_config(config.compression.checkpoint))
    default = CompressionConfig()
    for name, value in config.compression.model_dump().items():
        unused = value != getattr(default, name) and (name, value) != ("method", "checkpoint")
        if unused and name not in _OF_SERVED:
            raise ConfigError(
                f"Parameter {name!r} is given beside a served model, which is not compressed here",
                got=as_text(config)[name],
                fix="Leave it out",
            )


def name_of(config: MainConfig) -> str:
    """Return the variant's short name, such as "awq-4bit-g128" or "endpoint-my-llama"."""
    if config.is_served:
        return described(config.evaluate_config(config.compression.checkpoint)).label
    return variant_name(config.quantize_config)


def resolved_parameters(config: MainConfig, calibration: CalibrationSet | None) -> dict[str, object]:
    """Return the parameters that are known before a model is loaded, with "auto" resolved."""
    known = {
        **as_text(config),
        **_resolved_compression(config, calibration),
        "tasks": EMBEDDED if config.evaluation.tasks == AUTO else config.evaluation.tasks,
        "instructions": EMBEDDED if config.answers.instructions == AUTO else config.answers.instructions,
        "prompt_style": ",".join(styles_of(config.evaluation.prompt_style)),
    }
    return {name: value for name, value in known.items() if value != AUTO and name != "resume"}


def _resolved_compression(config: MainConfig, calibration: CalibrationSet | None) -> dict[str, object]:
    """Return the parameters of the compression; a served variant has none."""
    if not config.is_served:
        compression = config.quantize_config
        return resolved(compression, method_settings(compression), calibration)
    unused = {name: NONE for name in CompressionConfig.model_fields if name != "checkpoint"}
    return {**unused, "method": SERVED_METHOD}


# Where work is done, how calls are made, and what they may cost decide no result.
_NOT_DECIDING = (
    "checkpoint",
    "device",
    "engine",
    "workers",
    "cpus_per_worker",
    "ray_address",
    "experiment",
    "judge_base_url",
    "judge_concurrency",
    "judge_timeout",
    "judge_max_retries",
    "judge_requests_per_minute",
    "judge_tokens_per_minute",
    "judge_prices",
    "judge_max_cost",
    "judge_traces",
    "endpoint_concurrency",
    "endpoint_timeout",
    "endpoint_max_retries",
)


def variant_key(config: MainConfig, checkpoint: str, evaluation: str) -> str:
    """Return a hash of everything that decides the results of a main run.

    - `checkpoint`: The name of the checkpoint's folder, which ends in a digest of the method, its settings, the
      calibration text and the baseline's weights. Of a served variant, the digest of what is known of it.
    """
    deciding: dict[str, object] = {
        "checkpoint": checkpoint,
        "evaluation": evaluation,
        "noise_items": config.evaluation.noise_items,
        "log_weights": config.log_weights,
    }
    if config.judge:
        judge = config.judge_config()
        deciding["judge"] = {name: value for name, value in as_text(judge).items() if name not in _NOT_DECIDING}
        deciding["instructions"] = [asdict(instruction) for instruction in instructions_of(judge)]
    if config.speed:
        from mlflow_compress.engines.vllm.vllm_environment import named_python  # not above: its package imports torch

        # With vLLM at hand, a variant may have a speed that it could not have before.
        deciding["speed"] = {**config.timing.model_dump(), "vllm": named_python(config.running.vllm_python) is not None}
    return digest(deciding)


_NOT_OF_A_STAGE = {"checkpoint", "experiment"}

STAGES = {
    "quantize": parameters(QuantizeConfig).keys() - _NOT_OF_A_STAGE,
    "evaluate": parameters(EvaluateConfig).keys() - _NOT_OF_A_STAGE,
    "judge": parameters(JudgeConfig).keys() - _NOT_OF_A_STAGE,
    "speed": parameters(SpeedConfig).keys() - _NOT_OF_A_STAGE,
}
"""The stages of the main job in their order, and the parameters that a user gives each."""


def finished_stages(tracker: Tracker, run_id: str) -> dict[str, str]:
    """Return the run id of every finished stage of a main run, by stage. An unknown run is a `ConfigError`."""
    try:
        children = tracker.children(run_id)
    except TrackingError as error:
        raise ConfigError("This run cannot be resumed: the store has none of this id", got=run_id) from error
    return {stage: child.info.run_id for stage in STAGES if (child := children.get(stage)) and _is_finished(child)}


def _is_finished(run: Any) -> bool:
    return bool(run.info.status == "FINISHED")


def resumed(config: MainConfig, run_id: str, tracker: Tracker, finished: Collection[str]) -> MainConfig:
    """Return the parameters of the run to resume, changed by those of `config` that differ from their defaults."""
    run = tracker.client.get_run(run_id)
    try:
        stored = tracker.fetch_json(run_id, run_names.PARAMETERS)
    except TrackingError as error:
        raise ConfigError("This run cannot be resumed: it holds no parameters", got=run_id) from error
    if run.info.status in ("FINISHED", "RUNNING"):
        raise ConfigError(
            f"Run {run_id} is {run.info.status}",
            allowed="a main run that is FAILED or KILLED",
            fix="Start the same command again without resume: finished work is reused",
        )
    defaults = as_text(MainConfig())
    given = {name: value for name, value in as_text(config).items() if value != defaults[name]}
    used = {name for stage in finished for name in STAGES[stage]}
    if changed := sorted(name for name in given.keys() & used if given[name] != stored[name]):
        raise ConfigError(
            f"Parameter '{changed[0]}' belongs to a finished stage and cannot change",
            allowed=stored[changed[0]],
            got=given[changed[0]],
            fix="Leave it out, or start a new run",
        )
    return parse(MainConfig, {**stored, **given})


_WITH_RESULTS = ("evaluate", "judge", "speed")
_MAY_FAIL = ("judge", "speed")  # the other results are usable without them
_FROM_EVALUATE = (run_names.EVALUATION, run_names.BASELINE_RUN)  # tags by which main runs are compared


def _silent(line: str) -> None:
    """Print nothing."""


StartStage = Callable[[Tracker, str, Parameters, TrackedRun], str]
"""Runs a stage with its parameters as a child of a run, and returns the child's run id."""


def as_project(tracker: Tracker, stage: str, config: Parameters, parent: TrackedRun) -> str:
    """Run a stage as an MLflow project, in a process of its own."""
    return run_stage(tracker, stage, as_text(config), parent=parent)


@dataclass
class Stages:
    """The stages of one variant, run one after the other as children of its main run."""

    config: MainConfig
    tracker: Tracker
    run: TrackedRun
    progress: Progress
    start: StartStage = as_project
    children: dict[str, str] = field(default_factory=dict)  # Run id of every finished stage
    # Error message of every failed stage whose failure leaves the other results usable
    failed: dict[str, str] = field(default_factory=dict)

    def run_all(self) -> None:
        """Run the stages that are not finished. A failed judge, or speed, does not stop the run."""
        asked = {"quantize": not self.config.is_served, "judge": self.config.judge, "speed": self.config.speed}
        wanted = [stage for stage in STAGES if asked.get(stage, True)]
        for number, stage in enumerate(wanted, start=1):
            if stage in self.children:
                self.progress.skip(stage, number, len(wanted))
                continue
            self.progress.begin(stage, number, len(wanted))
            try:
                self.children[stage] = self.start(self.tracker, stage, self._config(stage), self.run)
            except StageError as error:
                if stage not in _MAY_FAIL:
                    raise
                self.failed[stage] = error.what

    def _config(self, stage: str) -> Parameters:
        if stage == "quantize":
            return self.config.quantize_config
        if stage == "evaluate":
            return self.config.evaluate_config(self.checkpoint)
        config = self.config
        return (config.judge_config if stage == "judge" else config.speed_config)(self.checkpoint)

    @property
    def checkpoint(self) -> str:
        """The compressed checkpoint's folder, or the address of a served one."""
        if self.config.is_served:
            return str(self.config.compression.checkpoint)
        return str(self.tracker.client.get_run(self.children["quantize"]).data.tags[run_names.CHECKPOINT])

    @property
    def served(self) -> ServedFacts | None:
        """What its evaluation says of a served variant; None of a checkpoint."""
        return ServedFacts.of(self.tracker, self.children["evaluate"]) if self.config.is_served else None


def _import_ahead() -> None:
    """Import what publishing needs while the first stage runs in its own process; matplotlib alone takes a second."""
    Thread(target=import_module, args=("mlflow_compress.commands.main.summary",), daemon=True).start()


def _copy_from_children(stages: Stages) -> None:
    """Copy tags and resolved parameters from the stages' runs to the main run."""
    client, run = stages.tracker.client, stages.run
    evaluated = client.get_run(stages.children["evaluate"]).data
    served = stages.served
    what = served.weights if served is not None else Path(stages.checkpoint).name
    key = variant_key(stages.config, what, evaluated.tags[run_names.EVALUATION])
    run.set_tags({**{name: evaluated.tags[name] for name in _FROM_EVALUATE}, run_names.VARIANT_KEY: key})
    if served is not None:
        known = {**served.settings(), run_names.EVALUATE_RUN: served.evaluate_run}
        run.set_tags({name: known[name] for name in run_names.SERVED})
    unknown = [name for name, value in as_text(stages.config).items() if value == AUTO]
    for child in stages.children.values():
        params = client.get_run(child).data.params
        run.log_params({name: params[name] for name in unknown if params.get(name, AUTO) != AUTO})


def _base_weights(stages: Stages) -> str:
    """Return the hash of the baseline's weights; of a served one, the digest of what is known of it."""
    if not stages.config.is_served:
        return read_manifest(stages.checkpoint).base_weights_hash
    if not is_endpoint(stages.config.source.model):
        return weights_of(stages.config.source.model)
    client = stages.tracker.client
    baseline = client.get_run(stages.children["evaluate"]).data.tags[run_names.BASELINE_RUN]
    return str(client.get_run(baseline).data.params["weights"])


def _publish(stages: Stages, label: str, variant: str) -> VariantRun:
    """Log the results of the finished stages on the main run, and return them."""
    # Imported here, because matplotlib takes a second to import and is not needed when a stage fails.
    from mlflow_compress.commands.evaluate.stored import read_account, stored_results
    from mlflow_compress.commands.main.summary import StageOutputs, publish
    from mlflow_compress.decide.gates import gate_values
    from mlflow_compress.metrics.core.metric_inputs import headline

    tracker, children, config = stages.tracker, stages.children, stages.config
    results = stored_results(tracker, *(children[stage] for stage in _WITH_RESULTS if stage in children))
    evaluated = tracker.look_up(children["evaluate"]).metrics
    outputs = StageOutputs(
        label=label,
        variant=variant,
        checkpoint=stages.checkpoint,
        manifest=None if stages.config.is_served else read_manifest(stages.checkpoint),
        served=stages.served,
        base_weights=_base_weights(stages),
        pooled=headline(results),
        results=results,
        children=children,
        dtype=config.inference.dtype,
        seed=config.source.seed,
        account=read_account(tracker, children["evaluate"]),
        log_weights=config.log_weights,
        failed=stages.failed,
    )
    with scratch_folder(tracker.uri) as folder:
        skipped = publish(outputs, tracker, stages.run, folder)
    # After the headline: MLflow's page of two runs opens on the metric that was logged first.
    items = {run_names.ITEMS: evaluated[run_names.ITEMS]} if run_names.ITEMS in evaluated else {}
    stages.run.log_values({**items, **outputs.account.values()})
    save_leaderboard(tracker, stages.run.run_id)
    return VariantRun(
        name=variant,
        results=tuple(results),
        not_computed=skipped,
        records_folder=tracker.fetch(children["evaluate"], run_names.RECORDS),
        run=tracker.link(stages.run.run_id),
        baseline=label,
        verdict=outputs.verdict,
        manifest=outputs.manifest,
        checkpoint=outputs.checkpoint,
        gates=gate_values(outputs.pooled),
        account=outputs.account,
        failed=stages.failed,
    )


def _open(config: MainConfig, tracker: Tracker, tags: Mapping[str, object]) -> AbstractContextManager[TrackedRun]:
    """Open the main run: the one to resume, or a new one."""
    if config.resume is None:
        name = f"{tags[run_names.VARIANT]} {tags[run_names.BASE_MODEL]}"
        return tracker.run(name, "main", tags)
    tracker.hand_over(config.resume)
    return tracker.reopen(config.resume)


def run_main(config: MainConfig, say: Callable[[str], None] = _silent) -> VariantRun:
    """Compress, evaluate and judge one variant, and return the results.

    Parameters are checked before a run is made, as far as that is possible without a model. The main run ends FINISHED
    with every headline metric, or FAILED with the failing stage's message. If only the judge fails, the results of the
    other stages are published first. `resume`, or the same command again, then does the rest.
    """
    with without_password(config.judge_config()) as judging:
        return _run_main(config.with_values(**{name: judging.values()[name] for name in VARIABLES}), say)


def _run_main(given: MainConfig, say: Callable[[str], None]) -> VariantRun:
    config, finished = given, {}
    if given.resume is not None:
        tracker = Tracker(given.experiment)
        finished = finished_stages(tracker, given.resume)
        config = resumed(given, given.resume, tracker, finished)
    config = config.with_values(output_dir=str(out_folder(config.compression.output_dir, tracking_uri())))
    known = check(config)
    with unfinished_until_ended(given):
        _import_ahead()
        return run_variant(config, Tracker(given.experiment), known, say=say, finished=finished)


def run_variant(
    config: MainConfig,
    tracker: Tracker,
    known: Mapping[str, object],
    *,
    say: Callable[[str], None] = _silent,
    finished: Mapping[str, str] = MappingProxyType({}),
    start: StartStage = as_project,
    more_tags: Mapping[str, str] = MappingProxyType({}),
) -> VariantRun:
    """Compress, evaluate and judge one variant under its main run, and return the results."""
    label, variant = baseline_label(config.evaluate_config()), name_of(config)
    method = SERVED_METHOD if config.is_served else config.compression.method
    tags = {run_names.BASE_MODEL: label, run_names.VARIANT: variant, run_names.METHOD: method}
    with _open(config, tracker, {**tags, **more_tags}) as run:
        run.log_json({**as_text(config), "resume": "none"}, run_names.PARAMETERS)
        run.log_params(known)
        progress = Progress(tracker, label, say)
        stages = Stages(config, tracker, run, progress, start=start, children=dict(finished))
        stages.run_all()
        say("[publish] draws figures, writes the report and logs the model")
        _copy_from_children(stages)
        found = _publish(stages, label, variant)
        for stage, message in stages.failed.items():
            run.set_tags({run_names.FAILED_STAGE: stage})
            fix = f"The other stages are published. Do the rest with the same parameters and resume={run.run_id}"
            raise StageError(message, stage=stage, fix=fix, published=found)
    return found
