"""Times a baseline and a variant in turn, so that what else the machine does weighs on both alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from mlflow_compress.records.timings import Timings
from mlflow_compress.scoring.speed.measured_model import MeasuredModel, Memory, RuntimeCall

BATCHES = (1, 8)
"""Sequences that are generated together: one user, and a busy server."""


@dataclass(frozen=True, kw_only=True)
class TimingPlan:
    """What is generated, and how often.

    Attributes
    ----------
    tokens : sequence of int
        Token ids of a text; prompts are cut from it.
    prompt_tokens : int
        Length of a prompt.
    new_tokens : int
        Tokens that are generated for it.
    repeats : int
        Rounds that count; one more comes before them, to warm up.
    """

    tokens: Sequence[int]
    prompt_tokens: int
    new_tokens: int
    repeats: int

    def prompts(self, batch: int, repeat: int) -> list[list[int]]:
        """Return other prompts for each sequence and round: no cache of a runtime can have read them before."""
        n = len(self.tokens)
        starts = [(7919 * (repeat * max(BATCHES) + number)) % n for number in range(batch)]
        return [[self.tokens[(start + i) % n] for i in range(self.prompt_tokens)] for start in starts]


@dataclass(frozen=True, kw_only=True)
class ModelTimes:
    """What was measured of one model.

    Attributes
    ----------
    timings : Timings
        When each token was there.
    load_seconds : float
        Time to load it.
    memory : Memory
        What it takes.
    described : mapping of str to str
        Runtime with version, device and dtype.
    """

    timings: Timings
    load_seconds: float
    memory: Memory
    described: Mapping[str, str]


def timed_in_turn(
    calls: Mapping[str, RuntimeCall], plan: TimingPlan, after_round: Callable[[], None] = lambda: None
) -> dict[str, ModelTimes]:
    """Return what was measured of each model, by its name in `calls`.

    All models are loaded, one after the other. In every round each of them generates once, and the order turns round
    from one to the next. They are in memory at the same time.

    Raises
    ------
    WorkerError
        A runtime cannot load its model, or has ended.
    """
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in calls}
    with ExitStack() as stack:
        models = {}
        for name, call in calls.items():
            models[name] = stack.enter_context(MeasuredModel(call))
            models[name].open()
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
        return {
            name: ModelTimes(
                timings=Timings.from_rows(rows[name]),
                load_seconds=model.load_seconds,
                memory=model.memory(),
                described=model.described,
            )
            for name, model in models.items()
        }
