"""The pairwise judge: which of the baseline's and the variant's answer is better, asked in both orders."""

from collections.abc import Callable, Mapping
from pathlib import Path

from mlflow_compress.config import JudgeModelConfig
from mlflow_compress.judges.asking import (
    Judgment,
    Question,
    answers_to,
    read_verdict,
    records,
    references,
    shown_answers,
)
from mlflow_compress.judges.judge_registry import JUDGES, Judge, Judged, JudgeInputs
from mlflow_compress.judges.prompts import OURS, Prompt, pair_prompt, read_pair_prompts
from mlflow_compress.judges.session import KEY_VARIABLE, Session, skipping
from mlflow_compress.records import Judgments

_TASK = "pairwise"
_IDENTICAL = Judgment(0.5, None, "Not asked: the answers are identical, which is a tie", "none")


def _comparisons(inputs: JudgeInputs, templates: Mapping[str, Prompt]) -> list[tuple[Question, bool]]:
    """Return every pair of answers in both orders, and whether the two are identical, with all that is shown."""
    texts = {who: shown_answers(inputs.graded[who]) for who in ("baseline", "variant")}
    comparisons = []
    for item in inputs.instructions:
        base, variant = (answers_to(item, texts[who]) for who in ("baseline", "variant"))
        for turn in range(len(item.turns)):
            for order, (first, second) in enumerate(((base, variant), (variant, base))):
                prompt = pair_prompt(templates, item.category, turn, item.turns, first, second, references(item))
                same = base[: turn + 1] == variant[: turn + 1]
                comparisons.append((Question(item.item_id, prompt, order, turn, item.category), same))
    return comparisons


def _for_the_variant(judgment: Judgment, order: int) -> Judgment:
    """Return the judgment with 1 where the variant's answer is better. In order 0 it is B, in order 1 it is A."""
    if judgment.value is None or order == 1:
        return judgment
    return Judgment(1 - judgment.value, None, judgment.text, judgment.judge, judgment.sent)


def _open(settings: JudgeModelConfig, folder: Path) -> Callable[[JudgeInputs], Judged]:
    """Return the judge. Without a key, it skips every comparison and gives the reason."""
    templates = OURS if settings.judge_prompts is None else read_pair_prompts(Path(settings.judge_prompts))
    session = Session.open(settings, folder)
    if isinstance(session, str):
        return skipping(session)

    def judge(inputs: JudgeInputs) -> Judged:
        pairs = _comparisons(inputs, templates)
        by_model = session.ask([one for one, same in pairs if not same], read_verdict, inputs)
        parts = []
        for model, replies in by_model.items():
            rest = iter(replies)
            verdicts = [_IDENTICAL if same else _for_the_variant(next(rest), one.repeat) for one, same in pairs]
            task = _TASK if len(by_model) == 1 else f"{_TASK}/{model}"
            parts.append(records([one for one, _ in pairs], verdicts, task=task))
        return Judged(judgments={"variant": Judgments.concat(parts)}, **session.account())

    return judge


JUDGES.register(_TASK)(
    Judge(
        open=_open,
        settings=JudgeModelConfig,
        requires=f"A key in {KEY_VARIABLE}, and reference answers for math, reasoning and coding.",
        source=(
            "FastChat llm_judge, pairwise comparison in both orders; its prompts where `judge_args: prompts` names "
            "them, our own otherwise; identical answers are a tie without being asked"
        ),
        on_request=True,
    )
)
