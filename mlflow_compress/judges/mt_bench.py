"""The MT-Bench judge: GPT-4 or other models behind an OpenAI-compatible endpoint grade answers."""

from collections.abc import Callable, Mapping
from pathlib import Path

from mlflow_compress.config import JudgeModelConfig
from mlflow_compress.judges.asking import gradings, read_rating, records
from mlflow_compress.judges.judge_registry import JUDGES, Judge, Judged, JudgeInputs
from mlflow_compress.judges.session import KEY_VARIABLE, Session, skipping
from mlflow_compress.records import Judgments

TEMPERATURES: Mapping[str, float] = {
    "writing": 0.7,
    "roleplay": 0.7,
    "extraction": 0.0,
    "math": 0.0,
    "coding": 0.0,
    "reasoning": 0.0,
    "stem": 0.1,
    "humanities": 0.1,
}
"""MT-Bench's generation temperature of graded answers, by category."""
OTHER_TEMPERATURE = 0.7
"""Generation temperature of any other category (such as Vicuna-bench's), as in FastChat."""
_TASK = "mt_bench"


def _open(settings: JudgeModelConfig, folder: Path) -> Callable[[JudgeInputs], Judged]:
    """Return the judge. Without a key, it skips every judgment and gives the reason."""
    session = Session.open(settings, folder)
    if isinstance(session, str):
        return skipping(session)

    def judge(inputs: JudgeInputs) -> Judged:
        repeats = settings.judge_repeats
        questions = {
            who: gradings(inputs.instructions, graded, repeats=repeats) for who, graded in inputs.graded.items()
        }
        by_model = session.ask([one for part in questions.values() for one in part], read_rating, inputs)
        judgments: dict[str, list[Judgments]] = {who: [] for who in questions}
        for model, replies in by_model.items():
            rest = iter(replies)
            for who, part in questions.items():
                task = _TASK if len(by_model) == 1 else f"{_TASK}/{model}"
                judgments[who].append(records(part, [next(rest) for _ in part], task=task))
        return Judged(judgments={who: Judgments.concat(parts) for who, parts in judgments.items()}, **session.account())

    return judge


JUDGES.register(_TASK)(
    Judge(
        open=_open,
        settings=JudgeModelConfig,
        requires=f"A key in {KEY_VARIABLE}, and reference answers for math, reasoning and coding.",
        source=(
            "FastChat llm_judge, single-answer grading with its prompts; ratings are read more strictly, an unreadable "
            "or ambiguous one is asked for again, then counted as unscored"
        ),
    )
)
