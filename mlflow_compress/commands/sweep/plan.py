"""Plans a sweep: what is made, what it costs, what is left out and why."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlflow_compress.commands.evaluate.baseline import evaluation_id, evaluation_of_sample
from mlflow_compress.commands.evaluate.items import suite_of
from mlflow_compress.commands.evaluate.models import open_baseline, open_variant
from mlflow_compress.commands.evaluate.run import readable
from mlflow_compress.commands.judge.judge_instructions import instructions_of
from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.commands.main.run import check_served, name_of, resolved_parameters, stage_keys, variant_key
from mlflow_compress.commands.quantize.run import new_checkpoint_folder
from mlflow_compress.commands.shared.named_method import calibration_set, method_settings
from mlflow_compress.commands.shared.named_models import SERVED_METHOD, folder_or_hub, model_label, model_path
from mlflow_compress.commands.shared.scores import stage_seconds, wall_seconds
from mlflow_compress.commands.sweep.grid import asked_for
from mlflow_compress.commands.sweep.parameters import SweepConfig
from mlflow_compress.commands.sweep.result import PlannedVariant, SweepPlan
from mlflow_compress.compression.method import METHODS, CalibratedConfig, MethodConfig
from mlflow_compress.config import CompressionConfig
from mlflow_compress.config.declarations import AUTO
from mlflow_compress.engines.endpoint.served_model import check_same_model
from mlflow_compress.errors import ConfigError, MissingDependencyError, UnsupportedError
from mlflow_compress.items.contamination import check_contamination
from mlflow_compress.models.source_model import SourceModel
from mlflow_compress.models.source_model import resolve as resolve_source
from mlflow_compress.models.stored_weights import read_headers, total_bytes
from mlflow_compress.paths import absolute_paths
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracker import Tracker

_SHARED = ("calibration", "calibration_samples", "calibration_length", "method_args")


@dataclass(frozen=True, kw_only=True)
class Combination:
    """One variant of a sweep."""

    name: str  # Its short name, such as "awq-4bit-g128"
    config: MainConfig  # The parameters of its main job
    settings: MethodConfig | None  # The method's checked settings; None of a served model
    replicate_of: str = ""  # The name of the variant that this one is a further make of

    @property
    def method(self) -> str:
        return SERVED_METHOD if self.settings is None else self.config.compression.method

    @property
    def own_settings(self) -> dict[str, Any]:
        """The method's settings by name; none of a served model."""
        return {} if self.settings is None else self.settings.settings()

    @property
    def shown(self) -> dict[str, object]:
        """What tells it from another variant of its name."""
        if self.settings is None:
            return {"checkpoint": self.config.compression.checkpoint, "tokenizer": self.config.served.tokenizer}
        return {**self.own_settings, "calibration": Path(self.config.compression.calibration).name}


def combinations(config: SweepConfig) -> tuple[list[Combination], dict[str, str]]:
    """Return the variants of a sweep, and why the other combinations are not supported, by what was asked for.

    A method without a setting such as bits takes part once. Two combinations with equal settings are one variant.
    """
    unique: dict[tuple[str, str], Combination] = {}
    left_out: dict[str, str] = {}
    for asked in asked_for(config):
        method, given = asked.get("method", SERVED_METHOD), _own(asked)
        try:
            variant = absolute_paths(config.main_config(**given))
            settings = _settings(variant)
        except (UnsupportedError, MissingDependencyError) as error:
            rest = [f"{name}={value}" for name, value in given.items() if name != "method" and value != AUTO]
            left_out.setdefault(" ".join([method, *rest]), str(error))
            continue
        known = variant.served if settings is None else variant.compression.calibration
        key = (method, repr((settings, variant.compression.checkpoint, known)))
        unique.setdefault(key, Combination(name=name_of(variant), config=variant, settings=settings))
    if not unique:
        reasons = [f"{name}: {reason}" for name, reason in left_out.items()]
        raise ConfigError("No combination of this sweep is supported", got="; ".join(reasons) or "an empty grid")
    named = _with_own_names(list(unique.values()))
    every = list(named)
    for number in range(2, config.variants.replicates + 1):
        for one in named:
            if isinstance(one.settings, CalibratedConfig):  # of the others every make is the same
                method_args = {**one.config.compression.method_args, "seed": str(one.settings.seed + number - 1)}
                variant = one.config.with_values(method_args=method_args, judge=False, speed=False)
                name = f"{one.name} (replicate {number})"
                again = Combination(name=name, config=variant, settings=_settings(variant), replicate_of=one.name)
                every.append(again)
    made = [(one.method, one.settings, one.config.compression.calibration) for one in every]
    if twice := [one.name for one, key in zip(every, made, strict=True) if one.replicate_of and made.count(key) > 1]:
        raise ConfigError("The grid holds a replicate of one of its variants", got=twice[0], fix="Give one seed")
    return every, left_out


def _settings(variant: MainConfig) -> MethodConfig | None:
    """Return the checked settings of a variant's method; None of a served model, whose parameters are checked too."""
    if variant.is_served:
        check_served(variant)
        return None
    settings = method_settings(variant.compression, variant.source)
    METHODS.get(variant.compression.method).require_backend(settings)
    return settings


def _own(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return a combination without the settings that its method does not have: it then takes part once."""
    if "method" not in asked:  # a served model: what the methods share is not for it
        default = CompressionConfig()
        return {**{name: getattr(default, name) for name in _SHARED}, **asked}
    settings = METHODS.get(asked["method"]).Config.model_fields
    return {name: value for name, value in asked.items() if name not in ("bits", "group_size") or name in settings}


def _with_own_names(every: list[Combination]) -> list[Combination]:
    """Return the variants under names that differ: where two have one name, the parameters that differ follow it."""
    named = []
    for one in every:
        same = [other.shown for other in every if other.name == one.name]
        differing = [f"{name}={value}" for name, value in one.shown.items() if any(o[name] != value for o in same)]
        named.append(one if len(same) == 1 else replace(one, name=f"{one.name} ({', '.join(differing)})"))
    return named


@dataclass(frozen=True, kw_only=True)
class PreparedVariant:
    """A variant that can be made."""

    asked: Combination  # Its name and parameters
    known: dict[str, object]  # What its main run logs as parameters, with "auto" resolved
    key: str  # See `variant_key`
    parts: Mapping[str, str]  # See `stage_keys`
    replicate_of: str | None = None  # The folder's name of the checkpoint that is made again
    # What the server of a served variant says now (see `evaluation.served`)
    served: Mapping[str, object] | None = None

    @property
    def name(self) -> str:
        return self.asked.name

    def finished_run(self, tracker: Tracker) -> str | None:
        """Return the newest finished main run that holds its results, and maybe more; None where it is to be made."""
        again: list[Any] = []
        for tags in ({run_names.VARIANT_KEY: self.key}, self.parts):
            runs = [] if again else tracker.find_finished("main", **tags)
            again += [run for run in runs if run.data.tags.get(run_names.REPLICATE_OF) == self.replicate_of]
        if not again:
            return None
        run_id = str(again[0].info.run_id)
        if self.served is not None:
            check_same_model(self.served, tracker.fetch_json(tracker.child_ids(run_id)["evaluate"], run_names.FACTS))
        return run_id


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A sweep that can start: its baseline, the evaluation id that its variants share, and the variants."""

    source: SourceModel
    evaluation: str
    variants: tuple[PreparedVariant, ...]


def prepare_sweep(config: SweepConfig, chosen: list[Combination], store: Tracker) -> Prepared:
    """Read tasks, instructions and calibration text, check them, and return the variants with their keys.

    The baseline's own answers (`tasks=traces`) are part of the keys. So they are written now, but for a dry run.
    """
    first = chosen[0].config
    if config.sampling.size is not None:
        for refused, why in (
            (config.variants.replicates > 1, "Replicates of a variant are compared on all items"),
            (any(one.settings is None for one in chosen), "Served models are scored on all items"),
        ):
            if refused:
                raise ConfigError(why, got=f"items={config.sampling.items}", fix="Leave it out, or set items=all")
    suite = suite_of(first.evaluate_config())
    if config.judge:
        instructions_of(first.judge_config())
    calibrations = [
        None if one.settings is None else calibration_set(one.config.compression, one.config.source) for one in chosen
    ]
    for checked in {c.name: c for c in calibrations if c is not None}.values():
        check_contamination(checked.plain(), suite.tasks, suite.corpora)
    path = model_path(config.source.model)
    base = open_baseline(first.evaluate_config())
    with folder_or_hub("model", path):
        source = resolve_source(path, trust_remote_code=config.source.trust_remote_code)

    read = readable(store, base, suite, first.evaluate_config(), write=not config.dry_run)
    evaluation = evaluation_of_sample(evaluation_id(base, read, first.evaluate_config()), first.sampling)
    variants = []
    folders: dict[str, str] = {}  # Of checkpoints, by variant
    for one, calibration in zip(chosen, calibrations, strict=True):
        known = resolved_parameters(one.config, calibration)
        if one.settings is None:
            # One whose server cannot be used now is refused before the sweep.
            model = open_variant(one.config.evaluate_config(one.config.compression.checkpoint), base).at_server
            assert model is not None
            served = model.server_identity()
            named = (one.config, str(served["weights"]), evaluation)
            key, parts = variant_key(*named), stage_keys(*named)
            variants.append(PreparedVariant(asked=one, known=known, key=key, parts=parts, served=served))
            continue
        texts = calibration.rendered(source.tokenizer()) if calibration else []
        folder = new_checkpoint_folder(one.config.quantize_config, one.settings, source.folder, texts)
        key = variant_key(one.config, folder.name, evaluation)
        parts = stage_keys(one.config, folder.name, evaluation)
        folders[one.name] = folder.name
        again = folders.get(one.replicate_of)
        variants.append(PreparedVariant(asked=one, known=known, key=key, parts=parts, replicate_of=again))
    return Prepared(source=source, evaluation=evaluation, variants=tuple(variants))


_RUNS = 5  # number of newest finished runs behind an estimate
_LOGGED_UP_TO = 2 * 2**30  # with log_weights=auto


def plan_of(config: SweepConfig, prepared: Prepared, left_out: Mapping[str, str], tracker: Tracker) -> SweepPlan:
    """Return the plan: every variant, whether it is finished, and what the others cost."""
    base_bytes = total_bytes(read_headers(prepared.source.folder))
    logged = config.log_weights == "true" or (config.log_weights == "auto" and base_bytes <= _LOGGED_UP_TO)
    runs = tracker.find_finished("main", **{run_names.EVALUATION: prepared.evaluation})[:_RUNS]
    evaluated = _medians(tracker, [run.info.run_id for run in runs])
    compressed = _compression_seconds(config, {v.asked.method for v in prepared.variants}, tracker)
    variants = []
    for variant in prepared.variants:
        finished = variant.finished_run(tracker)
        variants.append(
            PlannedVariant(
                name=variant.name,
                method=variant.asked.method,
                finished_run=finished,
                seconds=None if finished else _seconds(variant.asked, compressed[variant.asked.method], evaluated),
                size_bytes=_size(prepared.source, base_bytes, variant.asked),
            )
        )
    again = {variant.asked.replicate_of for variant in prepared.variants}
    firsts = [variant for variant in prepared.variants if not variant.asked.replicate_of]
    return SweepPlan(
        baseline=model_label(config.source.model),
        evaluation=prepared.evaluation,
        variants=tuple(variants),
        left_out=left_out,
        base_size_bytes=base_bytes,
        copies=2 if logged else 1,
        made_once=tuple(v.name for v in firsts if v.name not in again) if config.variants.replicates > 1 else (),
    )


def _size(source: SourceModel, base_bytes: int, one: Combination) -> float | None:
    """Return the estimated bytes of a variant on this disk; None where its method cannot say, 0 of a served model."""
    if one.settings is None:
        return 0.0
    method = one.config.compression.method
    with METHODS.blaming(method):
        bits = METHODS.get(method).stored_bits(one.settings)
        if bits is not None and not bits > 0:
            raise ValueError(f"stored_bits() gave {bits!r}")
    return None if bits is None else size_estimate(source, base_bytes, bits)


def size_estimate(source: SourceModel, base_bytes: int, bits: float) -> float:
    """Return the estimated bytes of a checkpoint with so many bits per weight in linear layers, all else as it was."""
    weights = sum(rows * columns for rows, columns in source.matrices.values())
    return base_bytes - base_bytes * weights / source.parameters + weights * bits / 8


def _medians(tracker: Tracker, run_ids: list[str]) -> dict[str, float]:
    each = [stage_seconds(tracker, tracker.children(run_id), wall_seconds) for run_id in run_ids]
    stages = {stage for seconds in each for stage in seconds}
    return {stage: statistics.median(seconds[stage] for seconds in each if stage in seconds) for stage in stages}


def _compression_seconds(config: SweepConfig, methods: Iterable[str], tracker: Tracker) -> dict[str, float | None]:
    """Return how long each method's compression took in earlier runs; None where there are none."""
    label = model_label(config.source.model)
    found = {}
    for method in methods:
        runs = tracker.find_finished("main", **{run_names.BASE_MODEL: label, run_names.METHOD: method})[:_RUNS]
        found[method] = _medians(tracker, [run.info.run_id for run in runs]).get("quantize")
    return found


def _seconds(asked: Combination, compressed: float | None, evaluated: Mapping[str, float]) -> float | None:
    """Return the estimated duration of a variant: its method's compression, and evaluation and judge as before."""
    made = 0.0 if asked.settings is None else compressed
    needed = [made, evaluated.get("evaluate"), *([evaluated.get("judge")] if asked.config.judge else [])]
    return None if any(seconds is None for seconds in needed) else sum(seconds or 0.0 for seconds in needed)
