"""Chooses the variants that compete for promotion: those of one baseline and one evaluation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mlflow_compress.config import PromoteConfig, is_endpoint
from mlflow_compress.errors import ConfigError
from mlflow_compress.stages.model_names import model_label
from mlflow_compress.stages.promotion.registered import base_weights
from mlflow_compress.tracking.evaluations import EvaluationGroup, evaluations
from mlflow_compress.tracking.tracker import Tracker

AUTO = "auto"
_ID = re.compile("[0-9a-f]{6,16}")


@dataclass(frozen=True, kw_only=True)
class Competition:
    """The variants that compete for promotion.

    Attributes
    ----------
    label : str
        The baseline's name.
    evaluation : EvaluationGroup
        The evaluation whose variants compete.
    left_out : tuple of str
        Description of each group of runs that cannot be compared with this evaluation.
    """

    label: str
    evaluation: EvaluationGroup
    left_out: tuple[str, ...]


def check_evaluation(text: str) -> None:
    """Refuse a text that cannot be the beginning of an evaluation id."""
    if text != AUTO and not _ID.fullmatch(text):
        raise ConfigError(
            "Parameter 'evaluation' is not an evaluation id", allowed="auto, or 6 to 16 hexadecimal digits", got=text
        )


def _by_id(every: Sequence[EvaluationGroup], text: str) -> EvaluationGroup:
    """Return the only evaluation whose id begins with `text`."""
    matching = [evaluation for evaluation in every if evaluation.id.startswith(text)]
    if len(matching) != 1:
        what = "No evaluation of this model has this id" if not matching else "Several evaluations have this id"
        raise ConfigError(what, allowed=[e.described for e in matching or every], got=text)
    return matching[0]


def _of_one_model(every: Sequence[EvaluationGroup], config: PromoteConfig, label: str) -> list[EvaluationGroup]:
    """Return the evaluations of one baseline, given by its folder or by a name that only one model has."""
    hashes = list(dict.fromkeys(evaluation.base_weights for evaluation in every))
    listed = [f"weights {key[:8]}: {', '.join(e.described for e in every if e.base_weights == key)}" for key in hashes]
    weights = base_weights(config.model)
    if weights is not None and weights not in hashes:
        raise ConfigError(
            f"The finished variants of '{label}' have other base weights than this folder",
            allowed=listed,
            got=f"weights {weights[:8]}",
            fix="Run the main job for this model first",
        )
    if weights is None and len(hashes) > 1 and config.evaluation == AUTO:
        raise ConfigError(
            f"'{label}' is the name of {len(hashes)} different models",
            allowed=listed,
            got=label,
            fix="Give the model's folder, or choose with -P evaluation=ID",
        )
    return [evaluation for evaluation in every if weights in (None, evaluation.base_weights)]


def choose(tracker: Tracker, config: PromoteConfig) -> Competition:
    """Return the variants that compete: those of the requested evaluation, or of the one with the most items.

    Raises
    ------
    ConfigError
        There is no finished variant; several models have this name; no or several evaluations have this id.
    """
    check_evaluation(config.evaluation)
    if is_endpoint(config.model):
        raise ConfigError(
            "Parameter 'model' names a served baseline by its address",
            got=config.model,
            fix="Give the name that its runs show: what baseline_served_model was",
        )
    label = model_label(config.model)
    every, without = evaluations(tracker, label)
    if not every:
        older = f"; {len(without)} of earlier releases have no evaluation id" if without else ""
        raise ConfigError(
            f"The tracking store has no finished variant of '{label}' that can be compared{older}",
            fix="Run the main job for a variant first",
        )
    eligible = _of_one_model(every, config, label)
    chosen = eligible[0] if config.evaluation == AUTO else _by_id(eligible, config.evaluation)
    left_out = [
        e.described + ("" if e.base_weights == chosen.base_weights else f" of other base weights {e.base_weights[:8]}")
        for e in every
        if e.id != chosen.id
    ]
    if without:
        n = len(without)
        left_out.append(f"{n} {'run' if n == 1 else 'runs'} of an earlier release, without an evaluation id")
    return Competition(label=label, evaluation=chosen, left_out=tuple(left_out))
