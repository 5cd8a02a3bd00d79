"""The promote stage: register every variant of a baseline, gate, rank, move the alias, keep the reasons."""

from __future__ import annotations

from dataclasses import asdict

from mlflow_compress.compress.base import METHODS
from mlflow_compress.config import PromoteConfig
from mlflow_compress.errors import ConfigError
from mlflow_compress.promotion import Candidate, Decision, Gate, decide
from mlflow_compress.stages.gate_values import GATE_DROP, GATE_FLIPS, GATE_KL
from mlflow_compress.stages.variant import model_label
from mlflow_compress.tracking import names
from mlflow_compress.tracking.registry import (
    RESERVED_ALIASES,
    move_alias,
    register,
    registered_name,
    registrable_runs,
)
from mlflow_compress.tracking.store import Tracker
from mlflow_compress.tracking.views import how_to_open


def gates(config: PromoteConfig) -> list[Gate]:
    """Return the gates of a promotion, each on the upper end of an interval."""
    return [
        Gate(metric=GATE_KL, bound=config.max_kl, label="KL (upper end)"),
        Gate(metric=GATE_FLIPS, bound=config.max_flips_pct, label="flips in % (upper end)"),
        Gate(metric=GATE_DROP, bound=config.max_accuracy_drop_pct, label="accuracy drop in points (upper end)"),
    ]


def _note(decision: Decision, config: PromoteConfig, former: str | None) -> str:
    """Return the run's note: the verdict in plain words, then every candidate with its reasons."""
    winner = decision.champion
    if winner is None:
        first = f"No candidate passes every gate; alias '{config.alias}' is not moved."
    elif former == winner.version:
        first = f"{winner.name} (version {winner.version}) stays '{config.alias}'."
    else:
        before = f", before it version {former}" if former else ""
        first = f"{winner.name} (version {winner.version}) is now '{config.alias}'{before}."
    lines = [first, "", "| rank | variant | version | passed | reasons |", "|---|---|---|---|---|"]
    for outcome in decision.outcomes:
        c = outcome.candidate
        passed = "yes" if outcome.passed else "no"
        lines.append(f"| {outcome.rank or ''} | {c.name} | {c.version} | {passed} | {'; '.join(outcome.reasons)} |")
    return "\n".join(lines)


def run_promote(config: PromoteConfig) -> str:
    """Register and gate every finished variant of `config.model`, and move the alias to the best one that passes.

    Returns
    -------
    str
        The decision, readable, and where to look at it.

    Raises
    ------
    ConfigError
        When there is no finished variant, or the alias is one that MLflow reserves.
    """
    if config.alias in RESERVED_ALIASES:
        raise ConfigError(
            "This alias is reserved", allowed=f"anything but {', '.join(RESERVED_ALIASES)}", got=config.alias
        )
    tracker = Tracker()
    label = model_label(config.model)
    with tracker.run(f"promote {label}", "promote", {names.BASE_MODEL: label}) as run:
        runs = registrable_runs(tracker, label)
        if not runs:
            raise ConfigError(
                f"The tracking store has no finished variant of '{label}'", fix="Run the main job for a variant first"
            )
        name = registered_name(label)
        candidates = [
            Candidate(
                name=variant.data.tags[names.VARIANT],
                run_id=variant.info.run_id,
                version=str(register(tracker, name, variant).version),
                method=variant.data.tags[names.METHOD],
                metrics=variant.data.metrics,
                compresses=METHODS.get(variant.data.tags[names.METHOD]).compresses,
            )
            for variant in runs
        ]
        policy = gates(config)
        decision = decide(candidates, policy)
        former = move_alias(tracker, name, config.alias, decision.champion.version) if decision.champion else None
        note = _note(decision, config, former)
        run.log_params({gate.metric: gate.bound for gate in policy})
        run.log_json({"gates": [asdict(g) for g in policy], "decision": asdict(decision)}, "decision.json")
        run.log_table(decision.as_table(), "decision_table.json")
        verdict = note.splitlines()[0]
        run.set_tags({names.VERDICT: verdict, "promoted": decision.champion.name if decision.champion else "nothing"})
        run.set_note(note)
    lines = [verdict, ""]
    for outcome in decision.outcomes:
        sign = f"{outcome.rank}." if outcome.rank else " -"
        lines.append(f"{sign} {outcome.candidate.name}: {'; '.join(outcome.reasons)}")
    return "\n".join([*lines, "", how_to_open(tracker, run.run_id)])
