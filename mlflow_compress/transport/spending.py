"""Tokens and money of the calls of one run: counted from the answers, bounded before each call by a budget."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from mlflow_compress.config import read_file
from mlflow_compress.errors import ConfigError
from mlflow_compress.transport.replies import Usage

_MILLION = 1e6
BYTES_PER_TOKEN = 4
"""Bytes of UTF-8 per token of English text, for estimates."""


class Price(BaseModel):
    """Price per million tokens of a prompt and of a reply, in any currency. Reasoning tokens are part of the reply."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    prompt: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    completion: Annotated[float, Field(ge=0, allow_inf_nan=False)]

    def of(self, prompt: float, completion: float) -> float:
        return (self.prompt * prompt + self.completion * completion) / _MILLION


def read_prices(path: Path) -> dict[str, Price]:
    """Return the prices of a YAML file, ``model: {prompt: 2.5, completion: 10}``, by model."""
    content = read_file(path, parameter="judge_prices")
    try:
        return TypeAdapter(dict[str, Price]).validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(
            f"A price in {path} cannot be used: {first['msg']}",
            allowed="lines of 'model: {prompt: 2.5, completion: 10}', per million tokens",
            got=".".join(map(str, first["loc"])),
        ) from None


def prompt_bytes(messages: Sequence[Mapping[str, str]]) -> int:
    """Return the length of a prompt in bytes of UTF-8."""
    return sum(len(message["content"].encode()) for message in messages)


def likely_tokens(messages: Sequence[Mapping[str, str]]) -> float:
    """Return about how many tokens a prompt has: four letters of English are one, and so is any other character."""
    texts = [message["content"] for message in messages]
    other = sum(not character.isascii() for text in texts for character in text)
    return other + (sum(map(len, texts)) - other) / BYTES_PER_TOKEN


def longest_prompt(n_bytes: int) -> int:
    """Return tokens that a prompt of so many bytes does not exceed: a rare script has one for each byte."""
    return n_bytes + 32


@dataclass
class _Tokens:
    """What the calls to one model took."""

    # Completions received; those whose endpoint did not say how many tokens they took, which no sum counts
    calls: int = 0
    without_usage: int = 0
    unanswered: int = 0  # Requests that were sent and not answered in time, which may have been paid for
    prompt: int = 0  # Tokens
    completion: int = 0
    reasoning: int | None = None  # Those of the completion tokens that were reasoning; None if no reply tells

    def add(self, usage: Usage | None) -> None:
        self.calls += 1
        if usage is None:
            self.without_usage += 1
            return
        self.prompt += usage.prompt
        self.completion += usage.completion
        if usage.reasoning is not None:
            self.reasoning = (self.reasoning or 0) + usage.reasoning


@dataclass
class Budget:
    """How much money there is, and how much of it is left. The runs of a sweep share one."""

    max_cost: float = 0.0  # Most that may be spent; 0 is no limit
    # What was spent, and what the calls under way can cost. A call without usage counts as the most that it can cost.
    spent: float = 0.0
    under_way: float = 0.0


@dataclass
class Spending:
    """Counts what the calls of one run take, and lets no call begin that may exceed the budget."""

    prices: Mapping[str, Price] = field(default_factory=dict)  # By model; empty if costs are not asked for
    budget: Budget = field(default_factory=Budget)  # What the calls are paid from
    by_model: dict[str, _Tokens] = field(default_factory=dict)  # What was taken so far

    def most(self, model: str, n_bytes: int, max_completion: int) -> float:
        """Return the most that a call can cost; 0 without a budget."""
        return self.prices[model].of(longest_prompt(n_bytes), max_completion) if self.budget.max_cost else 0.0

    def is_decided(self, most: float) -> bool:
        """Return whether it is known if the budget allows a call, whatever the calls under way will cost."""
        budget = self.budget
        return budget.spent + most > budget.max_cost or budget.spent + budget.under_way + most <= budget.max_cost

    def begin(self, most: float) -> bool:
        """Return whether the budget allows a call, and keep free what it can cost."""
        if self.budget.max_cost and self.budget.spent + most > self.budget.max_cost:
            return False
        self.budget.under_way += most
        return True

    def end(self, model: str, most: float, usage: Usage | None, *, answered: bool, lost: bool = False) -> None:
        """Count a call that `begin` has allowed: its tokens, or the most that it can cost where its answer is lost.

        The server may have worked on a call that was sent and never answered, and ask for its money.
        """
        self.budget.under_way -= most
        tokens = self.by_model.setdefault(model, _Tokens()) if answered or lost else _Tokens()
        tokens.unanswered += lost
        if lost:
            self.budget.spent += most
        if not answered:
            return
        tokens.add(usage)
        if self.budget.max_cost:
            self.budget.spent += most if usage is None else self.prices[model].of(usage.prompt, usage.completion)

    @property
    def calls(self) -> int:
        return sum(tokens.calls for tokens in self.by_model.values())

    @property
    def cost(self) -> float | None:
        if not self.prices:
            return None
        return sum(self.prices[model].of(t.prompt, t.completion) for model, t in self.by_model.items())

    def values(self) -> dict[str, float]:
        """Return calls, tokens and cost as metrics; what no reply has told is missing."""
        total = list(self.by_model.values())
        metrics: dict[str, float] = {"judge/calls": self.calls}
        if without := sum(t.without_usage for t in total):
            metrics["judge/calls_without_usage"] = without
        if lost := sum(t.unanswered for t in total):
            metrics["judge/calls_unanswered"] = lost
        if metrics["judge/calls"] > without:
            metrics["judge/prompt_tokens"] = sum(t.prompt for t in total)
            metrics["judge/completion_tokens"] = sum(t.completion for t in total)
            reasoning = [t.reasoning for t in total if t.reasoning is not None]
            if reasoning:
                metrics["judge/reasoning_tokens"] = sum(reasoning)
            if self.cost is not None:
                metrics["judge/cost"] = self.cost
        return metrics
