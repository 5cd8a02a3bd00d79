"""Times a baseline and a variant in turn, so that what else the machine does weighs on both alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from mlflow_compress.records.kinds import Timings
from mlflow_compress.scoring.speed.measured_model import MeasuredModel, Memory, RuntimeCall

BATCHES = (1, 8)
"""Sequences that are generated together: one user, and a busy server."""


@dataclass(frozen=True, kw_only=True)
class TimingPlan:
    """What is generated, and how often."""

    tokens: Sequence[int]  # Token ids of a text; prompts are cut from it
    prompt_tokens: int  # Length of a prompt
    new_tokens: int  # Tokens that are generated for it
    repeats: int  # Rounds that count; one more comes before them, to warm up

    def prompts(self, batch: int, repeat: int) -> list[list[int]]:
        """Return other prompts for each sequence and round: no cache of a runtime can have read them before."""
        n = len(self.tokens)
        starts = [(7919 * (repeat * max(BATCHES) + number)) % n for number in range(batch)]
        return [[self.tokens[(start + i) % n] for i in range(self.prompt_tokens)] for start in starts]


@dataclass(frozen=True, kw_only=True)
class ModelTimes:
    """What was measured of one model."""

    timings: Timings  # When each token was there
    load_seconds: float | None  # Time to load it; None of a served model
    memory: Memory | None  # What it takes; None of a served model
    described: Mapping[str, str]  # Runtime with version, device and dtype


class Generates(Protocol):
    """Interface of a model that can be timed."""

    def generate(self, prompts: Sequence[Sequence[int]], n_new: int) -> list[float]:
        """Continue all prompts together by `n_new` tokens; return the seconds from the start to each step's end."""


def timings_in_turn(
    models: Mapping[str, Generates], plan: TimingPlan, after_round: Callable[[], None] = lambda: None
) -> dict[str, Timings]:
    """Return when each token was there, by the model's name.

    In every round each model generates once, and the order turns round from one round to the next.
    """
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in models}
    for repeat in range(-1, plan.repeats):
        for batch in BATCHES:
            for name in list(models)[:: 1 if repeat % 2 else -1]:
                seconds = models[name].generate(plan.prompts(batch, repeat + 1), plan.new_tokens)
                if repeat >= 0:
                    rows[name] += [
                        {
                            "batch": batch,
                            "repeat": repeat,
                            "step": step,
                            "prompt_tokens": plan.prompt_tokens,
                            "seconds": at,
                        }
                        for step, at in enumerate(seconds)
                    ]
                after_round()
    return {name: Timings.from_rows(found) for name, found in rows.items()}


def timed_in_turn(
    calls: Mapping[str, RuntimeCall], plan: TimingPlan, after_round: Callable[[], None] = lambda: None
) -> dict[str, ModelTimes]:
    """Return what was measured of each model, by its name in `calls`.

    All models are loaded, one after the other. Then they are timed in turn. They are in memory at the same time.

    Raises `WorkerError`: a runtime cannot load its model, or has ended.
    """
    with ExitStack() as stack:
        models = {}
        for name, call in calls.items():
            models[name] = stack.enter_context(MeasuredModel(call))
            models[name].open()
        timings = timings_in_turn(models, plan, after_round)
        return {
            name: ModelTimes(
                timings=timings[name],
                load_seconds=model.load_seconds,
                memory=model.memory(),
                described=model.described,
            )
            for name, model in models.items()
        }
