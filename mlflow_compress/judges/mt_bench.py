"""The MT-Bench judge: GPT-4 or another model behind an OpenAI-compatible endpoint grades answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlflow_compress.config import JudgeConfig
from mlflow_compress.judges.endpoint import OPENAI_URL, EndpointConfig
from mlflow_compress.judges.grading import MtBenchConfig, MtBenchJudge
from mlflow_compress.judges.judge_registry import JUDGES, Judge, Judged, JudgeInputs

KEY_VARIABLE = "OPENAI_API_KEY"
URL_VARIABLE = "OPENAI_BASE_URL"

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
JUDGMENTS = "judgments.jsonl"  # file of the judgment cache


@dataclass(frozen=True)
class Skipped:
    """Grading is skipped; `reason` is a sentence for tag and note."""

    reason: str


def judge_config_from_env(
    environment: Mapping[str, str],
    *,
    model: str = "gpt-4",
    base_url: str = "auto",
    repeats: int = 1,
    concurrency: int = 4,
) -> MtBenchConfig | Skipped:
    """Return the configuration of the judge, or the reason why grading is skipped.

    Parameters
    ----------
    environment : mapping
        Usually ``os.environ``. The key is read from OPENAI_API_KEY only.
    model, repeats, concurrency : str, int, int
        As in `MtBenchConfig`.
    base_url : str
        "auto" is OPENAI_BASE_URL if set, otherwise OpenAI's own address.
    """
    key = environment.get(KEY_VARIABLE, "").strip()
    if not key:
        return Skipped(f"No MT-Bench grades: {KEY_VARIABLE} is not set")
    url = (environment.get(URL_VARIABLE, "").strip() or OPENAI_URL) if base_url == "auto" else base_url
    endpoint = EndpointConfig(base_url=url, key=key)
    return MtBenchConfig(endpoint=endpoint, model=model, repeats=repeats, concurrency=concurrency)


def _open(settings: JudgeConfig, folder: Path) -> Callable[[JudgeInputs], Judged]:
    """Return the judge. Without a key, it skips every judgment and gives the reason."""
    config = judge_config_from_env(
        os.environ,
        model=settings.answers.judge_model,
        base_url=settings.answers.judge_base_url,
        repeats=settings.answers.judge_repeats,
    )
    if isinstance(config, Skipped):
        skipped = Judged(skipped=config.reason, parameters={"judge_model": "none"})
        return lambda inputs: skipped
    grader = MtBenchJudge(config, cache=folder / JUDGMENTS)

    def judge(inputs: JudgeInputs) -> Judged:
        grades = {
            who: grader.judge(inputs.instructions, answers, label=f"judge {who}")
            for who, answers in inputs.graded.items()
        }
        return Judged(judgments=grades, parameters={"judge_model": settings.answers.judge_model})

    return judge


JUDGES.register("mt_bench")(
    Judge(
        open=_open,
        requires=f"A key in {KEY_VARIABLE}, and reference answers for math, reasoning and coding.",
        source=(
            "FastChat llm_judge, single-answer grading with its prompts; ratings are read more strictly, and an "
            "unreadable one is asked for again, then counted as unscored"
        ),
    )
)
