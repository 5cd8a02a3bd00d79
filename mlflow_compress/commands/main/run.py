"""The main job: checks its parameters, runs quantize, evaluate, judge and speed as child projects, and publishes."""

import os
import platform
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from threading import Thread
from types import MappingProxyType

from mlflow_compress.commands.command import Say, silent
from mlflow_compress.commands.evaluate.items import suite_of
from mlflow_compress.commands.judge.judge_instructions import instructions_of
from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.commands.main.stages import STAGES, Progress, Stages, StartStage, VariantRun, as_project
from mlflow_compress.commands.quantize.run import resolved, variant_name
from mlflow_compress.commands.shared.get_or_create import digest, unfinished_until_ended
from mlflow_compress.commands.shared.name_checks import OWN_ENGINES
from mlflow_compress.commands.shared.named_method import calibration_set, method_settings
from mlflow_compress.commands.shared.named_models import (
    SERVED_METHOD,
    baseline_label,
    described,
    is_small,
    model_path,
    not_served,
)
from mlflow_compress.compression.checkpoint_manifest import MANIFEST_FILE
from mlflow_compress.compression.method import METHODS
from mlflow_compress.config import (
    EMBEDDED,
    CompressionConfig,
    as_text,
    is_endpoint,
    parse,
)
from mlflow_compress.config.declarations import AUTO, NONE
from mlflow_compress.config.groups import named_python
from mlflow_compress.errors import ConfigError, StageError, TrackingError
from mlflow_compress.home import out_folder
from mlflow_compress.items.contamination import check_contamination
from mlflow_compress.items.prompt_style import styles_of
from mlflow_compress.items.sources.calibration_sets import CalibrationSet
from mlflow_compress.judges.session import KEY_VARIABLE
from mlflow_compress.kept import keeping
from mlflow_compress.models.placement import certainly_on_cpu
from mlflow_compress.models.source_model import local_model_folder
from mlflow_compress.scoring.engine_identity import code_identity, package_hash
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker, tracking_uri
from mlflow_compress.transport.endpoint import VARIABLES, without_password
from mlflow_compress.warm_python import WarmPython

_OF_SERVED = ("checkpoint", "output_dir")  # parameters of the compression that a served variant may have


def check(config: MainConfig) -> dict[str, object]:
    """Check the parameters without a model, and return all that are known by now, with "auto" resolved.

    A misspelt task is refused before an hour of compression, and so is calibration text that holds evaluation items.
    Torch and transformers are imported only for tasks of lm-evaluation-harness, which imports both.
    """
    if config.running.engine not in OWN_ENGINES:
        from mlflow_compress.engines.interface import engine_of_files  # imports torch

        engine_of_files(config.running.engine)
    calibration = None
    if config.is_served:
        check_served(config)
    elif is_endpoint(config.source.model):
        raise not_served("model", config.source.model)
    else:
        METHODS.get(config.compression.method).require_backend(method_settings(config.compression, config.source))
        calibration = calibration_set(config.compression, config.source)
    suite = suite_of(config.evaluate_config())
    if calibration is not None:
        check_contamination(calibration.plain(), suite.tasks, suite.corpora)
    if config.judge:
        instructions_of(config.judge_config())
    return resolved_parameters(config, calibration)


def check_served(config: MainConfig) -> None:
    """Refuse a served variant without a name, and one with settings of a compression, which would have no effect."""
    described(config.compression.checkpoint, config.source, config.served)
    default = CompressionConfig()
    for name, value in config.compression.model_dump().items():
        unused = value != getattr(default, name) and (name, value) != ("method", "checkpoint")
        if unused and name not in _OF_SERVED:
            raise ConfigError(
                f"Parameter {name!r} is given for a served model, which is not compressed here",
                got=as_text(config)[name],
                fix="Leave it out",
            )


def name_of(config: MainConfig) -> str:
    """Return the variant's short name, such as "awq-4bit-g128" or "endpoint-my-llama"."""
    if config.is_served:
        return described(config.compression.checkpoint, config.source, config.served).label
    return variant_name(config.quantize_config)


def resolved_parameters(config: MainConfig, calibration: CalibrationSet | None) -> dict[str, object]:
    """Return the parameters that are known before a model is loaded, with "auto" resolved."""
    if config.is_served:
        compression: dict[str, object] = {name: NONE for name in CompressionConfig.model_fields if name != "checkpoint"}
        compression["method"] = SERVED_METHOD
    else:
        compression = resolved(config.quantize_config, method_settings(config.compression, config.source), calibration)
    known = {
        **{name: value for name, value in as_text(config).items() if name != "items"},
        **config.sampling.logged,
        **compression,
        "tasks": EMBEDDED if config.evaluation.tasks == AUTO else config.evaluation.tasks,
        "instructions": EMBEDDED if config.answers.instructions == AUTO else config.answers.instructions,
        "prompt_style": ",".join(styles_of(config.evaluation.prompt_style)),
    }
    return {name: value for name, value in known.items() if value != AUTO and name != "resume"}


# Where work is done, how calls are made, and what they may cost decide no result. The dtype is part of the evaluation,
# where "auto" is what it stands for.
_NOT_DECIDING = (
    "checkpoint",
    "device",
    "dtype",
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

    - `checkpoint`: The name of the checkpoint's folder, which ends in a digest; of a served variant, that of its facts.
    """
    return digest(_deciding(config, checkpoint, evaluation))


def stage_keys(config: MainConfig, checkpoint: str, evaluation: str) -> dict[str, str]:
    """Return the same in parts, by tag of the main run: the evaluation, and the judge and the speed if they are wanted.

    A run that has more stages than are wanted holds the results too.
    """
    deciding = _deciding(config, checkpoint, evaluation)
    parts: dict[str, dict[str, object]] = {
        run_names.JUDGED_KEY: {name: deciding.pop(name) for name in ("judge", "instructions") if name in deciding},
        run_names.TIMED_KEY: {name: deciding.pop(name) for name in ("speed",) if name in deciding},
    }
    return {run_names.EVALUATED_KEY: digest(deciding), **{tag: digest(part) for tag, part in parts.items() if part}}


def _deciding(config: MainConfig, checkpoint: str, evaluation: str) -> dict[str, object]:
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
        # With vLLM at hand, a variant may have a speed that it could not have before.
        deciding["speed"] = {**config.timing.model_dump(), "vllm": named_python(config.running.vllm_python) is not None}
    return deciding


def finished_stages(tracker: Tracker, run_id: str) -> dict[str, str]:
    """Return the run id of every finished stage of a main run, by stage."""
    children = tracker.children(run_id)
    finished = {stage: child.info.run_id for stage, child in children.items() if child.info.status == "FINISHED"}
    return {stage: finished[stage] for stage in STAGES if stage in finished}


def resumed(config: MainConfig, run_id: str, tracker: Tracker, finished: Collection[str]) -> MainConfig:
    """Return the parameters of the run to resume, changed by those of `config` that differ from their defaults."""
    run = tracker.client.get_run(run_id)
    try:
        stored = tracker.fetch_json(run_id, run_names.PARAMETERS)
    except TrackingError as error:
        raise ConfigError("This run cannot be resumed: it has no parameters", got=run_id) from error
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


def run_main(config: MainConfig, python: WarmPython, say: Say = silent) -> VariantRun:
    """Compress, evaluate and judge one variant, in forks of an interpreter, and return the results.

    Parameters are checked before a run is made. Where a stage fails, the main run is FAILED with its message; a failed
    judge leaves the other results published. `resume`, or the same command again, then does the rest.
    """
    with without_password(config.judge_config()) as judging, keeping():
        given = config.with_values(**{name: judging.values()[name] for name in VARIABLES})
        config, finished = given, {}
        if given.resume is not None:
            tracker = Tracker(given.experiment)
            try:
                given = given.with_values(resume=tracker.look_up(given.resume).run_id)
            except TrackingError as error:
                raise ConfigError(
                    "This run cannot be resumed: the store has none of this id", got=given.resume
                ) from error
            finished = finished_stages(tracker, str(given.resume))
            config = resumed(given, str(given.resume), tracker, finished)
        config = config.with_values(output_dir=str(out_folder(config.compression.output_dir, tracking_uri())))
        known = check(config)
        asked = None if config.resume is not None else _digest_of(config)
        with unfinished_until_ended(given):
            tracker = Tracker(given.experiment)
            if asked is not None and (earlier := _done_before(tracker, config, asked, say)):
                return earlier
            # Publishing needs it; it is imported while the first stage runs, because matplotlib alone takes a second.
            Thread(target=import_module, args=("mlflow_compress.commands.main.summary",), daemon=True).start()
            together = config.judge and config.running.engine == "local" and is_small(config.source)
            start = as_project(python)
            if not certainly_on_cpu(config.source.device):
                # In a process of its own, each stage would start the GPU, load its kernels and read its items again.
                from mlflow_compress.commands.main.in_process import in_process

                start = partial(in_process, say=say)
            return run_variant(
                config,
                tracker,
                known,
                say=say,
                finished=finished,
                start=start,
                # The evaluation takes longer, and ends with work for one core only: the judge has the other one then.
                beside=partial(python.another, nice=7) if together else None,
                more_tags={} if asked is None else {run_names.ASKED: asked},
            )


_OF_KERNELS = ("ATEN_", "CUDA_", "MKL_", "NUMBA_", "OMP_")  # how environment variables begin that decide last bits


_OF_LATER_STAGES = {"judge", "speed", *(STAGES["judge"] | STAGES["speed"]) - (STAGES["quantize"] | STAGES["evaluate"])}

_PLUG_INS = ("commands", "engines", "judges", "methods", "metrics", "tasks")


def _digest_of(config: MainConfig) -> str | None:
    """Return a hash of all that decides a main run but its judge and speed: parameters, files, software, machine.

    None where a model is served.
    """
    if config.is_served or is_endpoint(config.source.model):
        return None
    folders = [local_model_folder(model_path(config.source.model))]
    if config.compression.checkpoint is not None:
        folders.append(Path(config.compression.checkpoint))
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    calibration = calibration_set(config.compression, config.source)
    # The package by its source: a metric that has changed is computed again, whatever the version.
    entries = (point for kind in _PLUG_INS for point in entry_points(group=f"mlflow_compress.{kind}"))
    plug_ins = [f"{point.value} {point.dist.version if point.dist else None}" for point in entries]
    deciding = {
        "parameters": {name: value for name, value in as_text(config).items() if name not in _OF_LATER_STAGES},
        "files": [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files],
        "suite": suite_of(config.evaluate_config()).hashes,
        "calibration": [] if calibration is None else calibration.plain(),
        "software": [code_identity(), package_hash(), sys.version, *sorted(plug_ins)],
        "machine": [platform.node(), platform.processor(), os.cpu_count(), certainly_on_cpu("auto")],
        "environment": {name: os.environ[name] for name in os.environ if name.startswith(_OF_KERNELS)},
    }
    return digest(deciding)


def _done_before(tracker: Tracker, config: MainConfig, asked: str, say: Say) -> VariantRun | None:
    """Return the results of a finished main run that has what is asked, and whose checkpoint is still there."""
    later = stage_keys(config, "", "")
    del later[run_names.EVALUATED_KEY]  # `asked` stands for it
    for run in tracker.find_finished("main", **{run_names.ASKED: asked, **later}):
        run_id = run.info.run_id
        children = finished_stages(tracker, run_id)
        if config.judge and os.environ.get(KEY_VARIABLE):
            skipped = tracker.run_of(children["judge"]).data.tags.get(run_names.SKIPPED, "")
            if KEY_VARIABLE in skipped:  # there was no key then
                continue
        if "evaluate" in children and (Path(run.data.tags[run_names.CHECKPOINT]) / MANIFEST_FILE).is_file():
            label, name = baseline_label(config.source, config.served), name_of(config)
            say(f"Done before, and nothing has changed since: the results are those of run {run_id}")
            target = f"experiments/{run.info.experiment_id}/runs/{run_id}"
            tracker.note_given_run(f"see {name} {label}", f"The results are in run [{name} {label}](#/{target}).")
            return Stages(config, tracker, TrackedRun(tracker.client, run_id), label, name, children).found()
    return None


def run_variant(
    config: MainConfig,
    tracker: Tracker,
    known: Mapping[str, object],
    *,
    say: Say = silent,
    finished: Mapping[str, str] = MappingProxyType({}),
    start: StartStage,
    beside: Callable[[], WarmPython] | None = None,
    more_tags: Mapping[str, str] = MappingProxyType({}),
) -> VariantRun:
    """Compress, evaluate and judge one variant under its main run; for `beside` see `Stages`."""
    label, variant = baseline_label(config.source, config.served), name_of(config)
    method = SERVED_METHOD if config.is_served else config.compression.method
    tags = {run_names.BASE_MODEL: label, run_names.VARIANT: variant, run_names.METHOD: method, **more_tags}
    if config.resume is None:
        again = " (replicate)" if run_names.REPLICATE_OF in more_tags else ""
        opened = tracker.run(f"{variant} {label}{again}", "main", tags)
    else:
        tracker.hand_over(config.resume)
        opened = tracker.reopen(config.resume)

    with opened as run:
        run.log_json({**as_text(config), "resume": "none"}, run_names.PARAMETERS)
        run.log_params(known)
        stages = Stages(config, tracker, run, label, variant, children=dict(finished))
        stages.run_all(start, Progress(tracker, label, say), beside)
        say("[publish] draws figures, writes the report and logs the model")
        served, evaluation = stages.served, stages.evaluation
        what = str(stages.facts["weights"]) if served is not None else Path(stages.checkpoint).name
        known_now = {run_names.EVALUATION: evaluation, run_names.BASELINE_RUN: stages.baseline_run}
        keys = {run_names.VARIANT_KEY: variant_key(config, what, evaluation), **stage_keys(config, what, evaluation)}
        run.set_tags({**known_now, **keys, run_names.ON_LEADERBOARD: "shown"})
        if served is not None:
            facts = {**served, run_names.EVALUATE_RUN: stages.evaluate}
            run.set_tags({name: facts[name] for name in run_names.SERVED_TAGS})
        unknown = [name for name, value in as_text(config).items() if value == AUTO]
        for child in stages.children.values():
            params = tracker.client.get_run(child).data.params
            run.log_params({name: params[name] for name in unknown if params.get(name, AUTO) != AUTO})
        # Imported here, because matplotlib takes a second to import and is not needed when a stage fails.
        from mlflow_compress.commands.main.summary import publish

        published = publish(stages)
        for stage, message in stages.failed.items():
            run.set_tags({run_names.FAILED_STAGE: stage})
            fix = f"The other stages are published. Do the rest with the same parameters and resume={run.run_id}"
            raise StageError(message, stage=stage, fix=fix, published=published, broke_off=stages.broke_off)
    if served is None:
        keep_one_row(tracker, run.run_id, keys)
    return published


def keep_one_row(tracker: Tracker, run_id: str, keys: Mapping[str, str]) -> None:
    """Take earlier runs of the same variant off the leaderboard whose stages this one has too, and all their metrics.

    A judge that was asked alike has given no grades where there was no key.
    """
    measured = tracker.run_of(run_id).data.metrics.keys()
    for older in tracker.find_finished("main", **{run_names.EVALUATED_KEY: keys[run_names.EVALUATED_KEY]}):
        later = (older.data.tags.get(tag) for tag in (run_names.JUDGED_KEY, run_names.TIMED_KEY))
        has_less = set(later) <= {None, *keys.values()} and older.data.metrics.keys() <= measured
        if older.info.run_id != run_id and has_less:
            TrackedRun(tracker.client, older.info.run_id).set_tags({run_names.ON_LEADERBOARD: f"see run {run_id}"})
