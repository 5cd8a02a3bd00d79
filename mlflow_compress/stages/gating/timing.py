"""The speed and memory that a gate's policy asks for: measured once, before the items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mlflow_compress.config import SpeedConfig
from mlflow_compress.config.policy import Objective, Policy
from mlflow_compress.decide.policy_gates import gates_of, read
from mlflow_compress.stages.speed.run_speed import run_speed
from mlflow_compress.tracking.store import Store


@dataclass(frozen=True, kw_only=True)
class TimedForGate:
    """What timing has found.

    Attributes
    ----------
    values : mapping of str to float
        What gates read, by name; empty where nothing was timed.
    reason : str
        Why nothing was timed.
    remark : str
        What was found, in one sentence; empty where the policy does not ask.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    remark: str = ""


def timed_for_gate(config: SpeedConfig, policy: Policy, store: Store) -> TimedForGate:
    """Time the checkpoint beside its baseline in a run of its own, where a gate asks; return what gates read of it."""
    gates = gates_of(policy.model_copy(update={"objective": Objective()}))  # a gate ranks nothing
    if not gates.asks_speed:
        return TimedForGate()
    measured = run_speed(config, store)
    return TimedForGate(
        values=read(measured.results, gates.readings),
        reason="; ".join(dict.fromkeys(measured.not_computed.values())),
        remark=f"{measured.summary}.",
    )
