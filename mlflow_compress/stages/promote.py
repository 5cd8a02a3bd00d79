"""The promote stage: registers the variants of one evaluation, gates and ranks them, and moves the alias."""

from __future__ import annotations

from dataclasses import asdict

from mlflow_compress.compression.method import METHODS
from mlflow_compress.config import PromoteConfig
from mlflow_compress.decide.promotion import Candidate, Decision, decide, standard_gates
from mlflow_compress.results import Promotion
from mlflow_compress.stages.candidates import Competition, check_evaluation, choose
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.evaluations import Variant
from mlflow_compress.tracking.logged_models.model_registry import check_alias, move_alias, register, registered_model
from mlflow_compress.tracking.tracker import Tracker


def _candidate(variant: Variant, version: str) -> Candidate:
    """Return a registered variant as a candidate of the promotion policy."""
    method = variant.run.data.tags[run_names.METHOD]
    return Candidate(
        name=variant.name,
        run_id=variant.run.info.run_id,
        version=version,
        method=method,
        metrics=variant.run.data.metrics,
        items=variant.items,
        compresses=METHODS.get(method).compresses,
    )


def _verdict(decision: Decision, alias: str, former: str | None) -> str:
    """Return what happened to the alias, in one sentence."""
    winner = decision.champion
    if winner is None:
        return f"No candidate passes every gate; alias '{alias}' is not moved."
    if former == winner.version:
        return f"{winner.name} (version {winner.version}) stays '{alias}'."
    before = f", before it version {former}" if former else ""
    return f"{winner.name} (version {winner.version}) is now '{alias}'{before}."


def _remarks(competition: Competition, naming: str | None) -> list[str]:
    """Return remarks on the decision: what was compared, what was left out, which names are not unique."""
    lines = [f"Compared: {competition.evaluation.described}, baseline '{competition.label}'."]
    lines += [f"Left out, not comparable: {group}." for group in competition.left_out]
    names_of_several = sorted({v.checkpoint[0] for v in competition.evaluation.variants if v.name != v.checkpoint[0]})
    lines += [
        f"'{name}' is the name of several checkpoints; they are shown with digits of their hashes."
        for name in names_of_several
    ]
    return [*lines, naming] if naming else lines


def _note(decision: Decision, verdict: str, remarks: list[str]) -> str:
    """Return the run's note: the verdict, the remarks, and a table of candidates with reasons."""
    lines = [verdict, "", *(f"- {remark}" for remark in remarks), ""]
    lines += ["| rank | variant | version | items | passed | reasons |", "|---|---|---|---|---|---|"]
    for outcome in decision.outcomes:
        c = outcome.candidate
        cells = (outcome.rank or "", c.name, c.version, "unknown" if c.items is None else c.items)
        passed = "yes" if outcome.passed else "no"
        lines.append(f"| {' | '.join(map(str, cells))} | {passed} | {'; '.join(outcome.reasons)} |")
    return "\n".join(lines)


def run_promote(config: PromoteConfig) -> Promotion:
    """Register and gate the finished variants of one evaluation, and move the alias to the best one that passes.

    Wrong parameters are refused before a run is made.

    Raises
    ------
    ConfigError
        There is no finished variant, the evaluation or the model is ambiguous, or the alias is not allowed.
    """
    check_alias(config.alias)
    check_evaluation(config.evaluation)
    tracker = Tracker(config.experiment)
    competition = choose(tracker, config)
    evaluation, label = competition.evaluation, competition.label
    tags = {
        run_names.BASE_MODEL: label,
        run_names.EVALUATION: evaluation.id,
        run_names.BASE_WEIGHTS: evaluation.base_weights,
    }
    with tracker.run(f"promote {label}", "promote", tags) as run:
        name, naming = registered_model(tracker, label, evaluation.base_weights)
        candidates = [_candidate(v, str(register(tracker, name, v).version)) for v in evaluation.variants]
        policy = standard_gates(
            max_kl=config.max_kl,
            max_kl_outliers_pct=config.max_kl_outliers_pct,
            max_flips_pct=config.max_flips_pct,
            max_accuracy_drop_pct=config.max_accuracy_drop_pct,
        )
        decision = decide(candidates, policy)
        former = move_alias(tracker, name, config.alias, decision.champion.version) if decision.champion else None
        verdict = _verdict(decision, config.alias, former)
        remarks = _remarks(competition, naming)
        run.log_params({**config.values(), "model": label, "evaluation": evaluation.id})
        record = {
            "registered_model": name,
            "evaluation": {"id": evaluation.id, "items": evaluation.items, "base_weights": evaluation.base_weights},
            "left_out": competition.left_out,
            "gates": [asdict(gate) for gate in policy],
            "decision": asdict(decision),
        }
        run.log_json(record, "decision.json")
        run.log_table(decision.as_table(), "decision_table.json")
        run.set_tags(
            {run_names.VERDICT: verdict, "promoted": decision.champion.name if decision.champion else "nothing"}
        )
        run.set_note(_note(decision, verdict, remarks))
    return Promotion(
        decision=decision,
        registered_model=name,
        alias=config.alias,
        verdict=verdict,
        remarks=tuple(remarks),
        run=tracker.link(run.run_id),
    )
