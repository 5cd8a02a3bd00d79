"""The judge models of one run: asked one after the other, with one cache and one account."""

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlflow_compress.config import JudgeModelConfig
from mlflow_compress.errors import ConfigError
from mlflow_compress.judges import asking
from mlflow_compress.judges.judge_registry import Judged, JudgeInputs
from mlflow_compress.kept import kept
from mlflow_compress.transport.endpoint import OPENAI_URL, VARIABLES, EndpointConfig, call_limits, shown_url
from mlflow_compress.transport.replies import BUDGET, ReplyCache
from mlflow_compress.transport.spending import Budget, Price, Spending, read_prices

KEY_VARIABLE = "OPENAI_API_KEY"
_URL_VARIABLE = VARIABLES["judge_base_url"]
_JUDGMENTS = "judgments.jsonl"  # file of the judgment cache
_METRIC_NAME = re.compile(r"[\w.:/-]+", re.ASCII)


def _judge_models(settings: JudgeModelConfig) -> list[str]:
    """Return the judge models that are asked for, none twice. The names of several become part of metric names."""
    names = [name.strip() for name in settings.judge_model.split(",")]
    if len(set(names)) != len(names):
        raise ConfigError("A judge model is named twice", got=settings.judge_model)
    if odd := [name for name in names if len(names) > 1 and not _METRIC_NAME.fullmatch(name)]:
        allowed = "letters, digits, and - . _ / : in the name of one of several judge models"
        raise ConfigError("A judge model's name cannot be part of a metric's name", allowed=allowed, got=odd[0])
    return names


def prices_of(settings: JudgeModelConfig) -> dict[str, Price]:
    """Return the prices of the judge models; empty if none are given. A limit without prices is refused."""
    if settings.judge_prices is None:
        if settings.judge_max_cost:
            fix = "Give judge_prices=FILE with a line 'model: {prompt: 2.5, completion: 10}', per million tokens"
            raise ConfigError("judge_args: max_cost needs prices", got=settings.judge_max_cost, fix=fix)
        return {}
    prices = read_prices(Path(settings.judge_prices))
    if missing := [model for model in _judge_models(settings) if model not in prices]:
        raise ConfigError(
            f"{settings.judge_prices} has no price of a judge model", allowed=sorted(prices), got=missing[0]
        )
    return prices


def spending_of(settings: JudgeModelConfig) -> Spending:
    """Return the account of one run, with its prices and the budget, which the runs of a sweep share."""
    most = settings.judge_max_cost
    return Spending(prices_of(settings), kept(("judge budget", most), lambda: Budget(most)))


def endpoint_from(environment: Mapping[str, str], settings: JudgeModelConfig) -> EndpointConfig | str:
    """Return address and key of the judge, or the reason why judging is skipped, as a sentence.

    The key is read from OPENAI_API_KEY only. OPENAI_BASE_URL is the address where `judge_base_url` is "auto"; and where
    it is the same address, OPENAI_BASE_URL may add a user and a password.
    """
    key = environment.get(KEY_VARIABLE, "").strip()
    if not key:
        return f"No grades by a judge model: {KEY_VARIABLE} is not set"
    there = environment.get(_URL_VARIABLE, "").strip()
    same = settings.judge_base_url == "auto" or (there and settings.judge_base_url == shown_url(there))
    url = (there or OPENAI_URL) if same else settings.judge_base_url
    return EndpointConfig(base_url=url, key=key, **call_limits(settings))


def skipping(reason: str) -> Callable[[JudgeInputs], Judged]:
    """Return a judge that skips everything and gives the reason."""
    skipped = Judged(skipped=reason, parameters={"judge_model": "none"})
    return lambda inputs: skipped


@dataclass
class Session:
    """The judge models of one run, and what became of their judgments."""

    askers: Sequence[asking.Asker]  # One per judge model; they share the cache
    max_unscored: float  # Share of judgments without a value above which the stage fails
    _judgments: dict[str, list[asking.Judgment]] = field(default_factory=dict)  # By the model that was asked

    @classmethod
    def open(cls, settings: JudgeModelConfig, folder: Path) -> "Session | str":
        """Return the session, or the reason why judging is skipped. A broken setting is a `ConfigError`."""
        endpoint = endpoint_from(os.environ, settings)
        if isinstance(endpoint, str):
            return endpoint
        prices_of(settings)
        cache = ReplyCache(folder / _JUDGMENTS, asking.KEPT_FIELDS)
        askers = [
            asking.Asker(endpoint=endpoint, model=model, attempts=settings.judge_attempts, cache=cache)
            for model in _judge_models(settings)
        ]
        return cls(askers, settings.judge_max_unscored)

    def ask(
        self, questions: Sequence[asking.Question], read: asking.ReadGradeFrom, inputs: JudgeInputs
    ) -> dict[str, list[asking.Judgment]]:
        """Return every judge model's judgments of the questions, by model, after saying what they may cost."""
        for asker in self.askers:
            inputs.say(asking.estimate(asker, questions, read, inputs.spending.prices))
        by_model = {}
        for asker in self.askers:
            by_model[asker.model] = asker.ask_all(questions, read, spending=inputs.spending)
            self._judgments.setdefault(asker.model, []).extend(by_model[asker.model])
        return by_model

    def account(self) -> dict[str, Any]:
        judgments = [one for part in self._judgments.values() for one in part]
        reasons = Counter(judgment.reason for judgment in judgments if judgment.reason is not None)
        n, unscored = len(judgments), reasons.total()
        counts = {f"judge/unscored/{reason}": float(number) for reason, number in sorted(reasons.items())}
        listed = ", ".join(f"{number} {reason}" for reason, number in reasons.most_common())
        failed = None
        if reasons[BUDGET]:
            failed = (
                f"Stopped at judge_args: max_cost: {n - reasons[BUDGET]} of {n} judgments are saved. The "
                "same command continues from there, and may spend as much again"
            )
        elif mixed := self._mixed():
            failed = (
                f"{mixed}: their ratings do not come from one judge. All judgments are saved. Name one of them as "
                "judge_model, and its ratings are asked for anew"
            )
        elif n and unscored > self.max_unscored * n:
            failed = (
                f"{unscored} of {n} judgments have no rating: {listed}. That is more than "
                f"judge_args: max_unscored={self.max_unscored:g}. All judgments are saved: the same command asks "
                "only for failed calls, and a larger `judge_args: attempts` for unreadable ones too"
            )
        return {
            "values": {
                "judge/judgments": float(n),
                "judge/unscored": float(unscored),
                **counts,
            },
            "failed": failed,
            "parameters": self._parameters(),
        }

    def _mixed(self) -> str:
        """Return which models have answered in the name of one, and how often; empty where each name is one model."""
        for model, judgments in self._judgments.items():
            answered = Counter(j.judge.rsplit(" ", 1)[0] for j in judgments if j.sent is not None)
            if len(answered) > 1:
                return f"{model} was answered by " + " and ".join(f"{one} ({n})" for one, n in answered.most_common())
        return ""

    def _parameters(self) -> dict[str, str]:
        """Return which models were asked, which answered, and what was sent to them."""
        answers = [j for part in self._judgments.values() for j in part if j.value is not None or j.sent is not None]
        sent = {", ".join(f"{k}={v}" for k, v in j.sent.items()) for j in answers if j.sent is not None}
        parameters = {
            "judge_model": ",".join(asker.model for asker in self.askers),
            "judge_answered_by": ",".join(sorted({j.judge.rsplit(" ", 1)[0] for j in answers})),
            "judge_sent": "; ".join(sorted(sent)),
        }
        return {name: value for name, value in parameters.items() if value}
