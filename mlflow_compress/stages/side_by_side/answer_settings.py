"""Which variants' answers can be compared: those to the same instructions, with the same settings and encoder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlflow_compress.metrics.core.metric_registry import METRICS
from mlflow_compress.tracking.logged_values import RESOLVED

ANSWERS_RUN = "baseline_answers_run_id"  # tag of a judge run


@dataclass(frozen=True)
class AnswerSetting:
    """What a similarity of answers depends on, besides the models.

    Attributes
    ----------
    answers_run : str
        The run of the baseline's answers: one per instructions and settings of generation.
    encoder_id : str or None
        Identity of the encoder; None where a judge run of an earlier release does not tell.
    encoder : str
        Its name.
    """

    answers_run: str
    encoder_id: str | None
    encoder: str


def finished_judge(children: Mapping[str, Any]) -> Any | None:
    """Return a variant's judge run, if it finished."""
    judge = children.get("judge")
    return judge if judge is not None and judge.info.status == "FINISHED" else None


def answer_setting(judge: Any) -> AnswerSetting | None:
    """Return the setting of a judge run; None if it embedded no answers."""
    params = judge.data.params
    name = params.get(f"{RESOLVED}encoder", params.get("encoder"))
    if not any(metric in judge.data.metrics for metric in similarity_metrics()) or name is None:
        return None
    return AnswerSetting(judge.data.tags[ANSWERS_RUN], params.get("encoder_id"), name)


def unlike(settings: Mapping[str, AnswerSetting]) -> dict[str, str]:
    """Return the variants that cannot be compared with most of the others, and why, as the end of a sentence."""
    if not settings:
        return {}
    wanted = common(settings)
    found = {}
    for name, own in settings.items():
        if own.answers_run != wanted.answers_run:
            found[name] = "its answers are to other instructions, or were generated with other settings"
        elif (own.encoder_id or own.encoder) != (wanted.encoder_id or wanted.encoder):
            found[name] = f"its answers were embedded by {_named(own)}, those of the others by {_named(wanted)}"
    return found


def common(settings: Mapping[str, AnswerSetting]) -> AnswerSetting:
    """Return the setting that most variants have; of several, the first."""
    return Counter(settings.values()).most_common(1)[0][0]


def _named(setting: AnswerSetting) -> str:
    return f"{setting.encoder} ({setting.encoder_id[:8] if setting.encoder_id else 'not known which'})"


def similarity_metrics() -> frozenset[str]:
    """Return the names of the metrics that are computed from embedded answers."""
    return frozenset(
        key.name for _, metric in METRICS.items() if "embeddings" in metric.requires for key in metric.keys
    )
