"""Checks everything that a sweep needs before it starts, and finds what earlier runs have done already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlflow_compress.compression.method import METHODS
from mlflow_compress.config import SweepConfig
from mlflow_compress.items.contamination import check_contamination
from mlflow_compress.items.sources.calibration_sets import CalibrationSet
from mlflow_compress.judges.judge_registry import chosen_judges
from mlflow_compress.kept import kept
from mlflow_compress.models.source_model import SourceModel
from mlflow_compress.models.source_model import resolve as resolve_source
from mlflow_compress.scoring.endpoint.served_model import ServedModel
from mlflow_compress.stages.evaluate import readable
from mlflow_compress.stages.evaluation.baseline import evaluation_id
from mlflow_compress.stages.evaluation.open_models import OpenModel, open_baseline, open_variant
from mlflow_compress.stages.evaluation.served import check_same_model, facts
from mlflow_compress.stages.main_run.checked_parameters import resolved_parameters
from mlflow_compress.stages.main_run.variant_key import variant_key
from mlflow_compress.stages.model_names import folder_or_hub, model_path
from mlflow_compress.stages.quantize import checkpoint_folder
from mlflow_compress.stages.sweep.combinations import Combination
from mlflow_compress.stages.task_inputs import calibration_set, instructions_of, suite_of
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.store import Store
from mlflow_compress.tracking.tracker import Tracker


@dataclass(frozen=True, kw_only=True)
class PreparedVariant:
    """A variant that can be made.

    Attributes
    ----------
    asked : Combination
        Its name and parameters.
    known : dict
        What its main run logs as parameters, with "auto" resolved.
    key : str
        See `variant_key`.
    served : mapping of str to object, or None
        What the server of a served variant says now (see `evaluation.served.facts`).
    """

    asked: Combination
    known: dict[str, object]
    key: str
    served: Mapping[str, object] | None = None

    @property
    def name(self) -> str:
        """Its name in the sweep."""
        return self.asked.name

    @property
    def method(self) -> str:
        """Its method."""
        return self.asked.method

    def finished_run(self, tracker: Tracker) -> str | None:
        """Return the newest finished main run that holds its results; None where it is to be made.

        Raises
        ------
        AlignmentError
            Its server has another model under the name now.
        """
        found = tracker.find_finished("main", **{run_names.VARIANT_KEY: self.key})
        if not found:
            return None
        run_id = str(found[0].info.run_id)
        if self.served is not None:
            check_same_model(self.served, tracker.fetch_json(tracker.child_ids(run_id)["evaluate"], run_names.FACTS))
        return run_id


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A sweep that can start: its baseline, the evaluation id that its variants share, and the variants."""

    source: SourceModel
    evaluation: str
    variants: tuple[PreparedVariant, ...]


def prepare(config: SweepConfig, chosen: list[Combination], store: Store) -> Prepared:
    """Read tasks, instructions and calibration text, check them, and return the variants with their keys.

    The baseline's own answers (`tasks=traces`) are part of the keys. So they are written now, but for a dry run.

    Raises
    ------
    ConfigError, DataError
        A parameter is wrong, a data set is missing or broken, or calibration text holds evaluation items.
    CheckpointError
        The baseline is missing or broken.
    """
    first = chosen[0].config
    suite = suite_of(first.evaluate_config())
    if config.judge:
        instructions_of(first.judge_config())
        if config.answers.judges != "all":
            chosen_judges(config.answers.judges)
    calibrations = [_calibration(one) for one in chosen]
    for checked in {c.name: c for c in calibrations if c is not None}.values():
        check_contamination(checked.plain(), suite.tasks, suite.corpora)
    path = model_path(config.source.model)
    base = open_baseline(first.evaluate_config())
    with folder_or_hub("model", path):
        source = resolve_source(path, trust_remote_code=config.source.trust_remote_code)
    read = readable(store, base, suite, first.evaluate_config(), write=not config.dry_run)
    evaluation = evaluation_id(base, read, first.evaluate_config())
    variants = []
    for one, calibration in zip(chosen, calibrations, strict=True):
        known = resolved_parameters(one.config, calibration)
        if one.settings is None:
            served = facts(_served(one, base))
            key = variant_key(one.config, str(served["weights"]), evaluation)
            variants.append(PreparedVariant(asked=one, known=known, key=key, served=served))
            continue
        texts = calibration.rendered(source.tokenizer()) if calibration else []
        folder = checkpoint_folder(one.config.quantize_config, one.settings, source, texts)
        key = variant_key(one.config, folder.name, evaluation)
        variants.append(PreparedVariant(asked=one, known=known, key=key))
    return Prepared(source=source, evaluation=evaluation, variants=tuple(variants))


def _served(one: Combination, base: OpenModel) -> ServedModel:
    """Return a served variant, after its server was asked what it can: one that cannot be used is refused now."""
    found = open_variant(one.config.evaluate_config(one.config.compression.checkpoint), base)
    assert isinstance(found, ServedModel)
    return found


def _calibration(one: Combination) -> CalibrationSet | None:
    if one.settings is None or not METHODS.get(one.config.compression.method).needs_calibration:
        return None
    return kept(
        ("calibration", one.config.compression.calibration), lambda: calibration_set(one.config.quantize_config)
    )
