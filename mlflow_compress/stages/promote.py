"""The promote stage: gates and ranks the variants of one evaluation by a policy, and moves the alias to the first."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

from mlflow_compress.config import PromoteConfig, as_text
from mlflow_compress.config.declarations import NONE
from mlflow_compress.config.policy import Policy, policy_yaml, read_policy
from mlflow_compress.decide.champion import HeadToHead, Incumbent, Settlement, head_to_head, settle
from mlflow_compress.decide.gates import DECODE_SPEEDUP, GATE_DROP, GATE_FLIPS, MEMORY_RATIO, Gate
from mlflow_compress.decide.policy_gates import GateReading, PolicyGates, gates_of, ranking_of
from mlflow_compress.decide.promotion import Candidate, Score, decide
from mlflow_compress.results import Promotion
from mlflow_compress.stages.promotion.candidate_values import candidates_of, records_of
from mlflow_compress.stages.promotion.competition import Competition, check_evaluation, choose
from mlflow_compress.stages.promotion.decision_files import (
    decision_markdown,
    decision_record,
    remarks_of,
    verdict_of,
)
from mlflow_compress.stages.resuming.noted_commands import unfinished_until_ended
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.logged_models.aliases import check_alias, holder, move_alias, note_decision
from mlflow_compress.tracking.logged_models.model_registry import (
    create_model,
    planned_model,
    register,
    versions_by_run,
)
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker


def policy_of(config: PromoteConfig) -> Policy:
    """Return the policy that the parameters name, with the bounds that they give beside it."""
    return read_policy(config.policy).overridden(
        max_kl=config.max_kl,
        max_kl_outliers_pct=config.max_kl_outliers_pct,
        max_flips_pct=config.max_flips_pct,
        max_accuracy_drop_pct=config.max_accuracy_drop_pct,
        min_decode_speedup=config.min_decode_speedup,
        max_memory_ratio=config.max_memory_ratio,
    )


def _bounds(policy: Policy, gates: PolicyGates) -> dict[str, object]:
    """Return the bounds of the standard gates by the names of their parameters, "none" for a gate that is not there."""
    pooled = {gate.metric: gate.bound for gate in gates.gates if isinstance(gate, Gate)}
    speedup = GateReading(metric=DECODE_SPEEDUP, end="lower").name
    return {
        "max_kl": policy.kl.max_kl if policy.kl else NONE,
        "max_kl_outliers_pct": policy.kl.max_outliers_pct if policy.kl else NONE,
        "max_flips_pct": pooled.get(GATE_FLIPS, NONE),
        "max_accuracy_drop_pct": pooled.get(GATE_DROP, NONE),
        "min_decode_speedup": pooled.get(speedup, NONE),
        "max_memory_ratio": pooled.get(MEMORY_RATIO, NONE),
    }


def _compare(tracker: Tracker, candidate: Candidate, incumbent: Incumbent | None, evaluation: str) -> HeadToHead | str:
    """Return the direct comparison of a challenger with the champion, or the reason why there is none."""
    if incumbent is None:
        return "nobody has the alias"
    if incumbent.evaluation != evaluation:
        return "the champion was measured on other items"
    sides = [records_of(tracker, run_id) for run_id in (incumbent.run_id, candidate.run_id)]
    champion, challenger = sides
    if isinstance(champion, str):
        return champion
    return challenger if isinstance(challenger, str) else head_to_head(champion, challenger)


def run_promote(config: PromoteConfig) -> Promotion:
    """Gate and rank the finished variants of one evaluation, and move the alias to the best one that passes.

    Only the winner is registered: the registry lists what may be deployed, and 200 variants need no 200 versions. Wrong
    parameters are refused before a run is made. A dry run writes nothing.

    Raises
    ------
    ConfigError
        There is no finished variant, the evaluation or the model is ambiguous, the alias is not allowed, or the policy
        cannot be used.
    """
    check_alias(config.alias)
    check_evaluation(config.evaluation)
    policy = policy_of(config)
    gates = gates_of(policy)
    ranking = ranking_of(policy.objective)
    with nullcontext() if config.dry_run else unfinished_until_ended(config):
        return _promote(config, policy, gates, ranking)


def _promote(
    config: PromoteConfig, policy: Policy, gates: PolicyGates, ranking: tuple[Score, tuple[str, ...]]
) -> Promotion:
    score, ranked_by = ranking
    tracker = Tracker(config.experiment)
    competition = choose(tracker, config)
    evaluation = competition.evaluation
    name, naming = planned_model(tracker, competition.label, evaluation.base_weights)
    incumbent = holder(tracker, name, config.alias)
    versions = {run_id: str(version.version) for run_id, version in versions_by_run(tracker, name).items()}
    candidates = candidates_of(tracker, evaluation.variants, competition.label, versions, gates)
    decision = decide(candidates, gates.gates, rules=gates.rules, score=score, ranked_by=ranked_by)

    def compare(candidate: Candidate) -> HeadToHead | str:
        return _compare(tracker, candidate, incumbent, evaluation.id)

    settlement = settle(decision, incumbent, policy.champion, evaluation.id, compare)
    remarks = remarks_of(competition, naming, settlement, decision, gates)
    found = Promotion(
        decision=decision,
        outcome=settlement.outcome,
        champion=settlement.winner.name if settlement.winner else incumbent.name if incumbent else None,
        registered_model=name,
        alias=config.alias,
        verdict=verdict_of(settlement, config.alias, incumbent, None),
        remarks=tuple(remarks),
        policy_sha256=policy.sha256,
        policy=policy_yaml(policy),
        run=None,
    )
    if config.dry_run:
        given = tracker.note_given_run(f"promote {competition.label} (dry run)", found.verdict)
        made = [f"Run {given} was made by `mlflow run`, and holds its parameters alone."] if given else []
        dry = "Dry run: nothing is registered, and no alias moves."
        return replace(found, remarks=(dry, *made, *remarks))
    tags = {
        run_names.BASE_MODEL: competition.label,
        run_names.EVALUATION: evaluation.id,
        run_names.BASE_WEIGHTS: evaluation.base_weights,
        run_names.REGISTERED_MODEL: name,
        run_names.ALIAS: config.alias,
        run_names.POLICY: policy.sha256,
    }
    with tracker.run(f"promote {competition.label}", "promote", tags) as run:
        version = _apply(tracker, run, settlement, competition, name, config.alias, incumbent, versions)
        verdict = verdict_of(settlement, config.alias, incumbent, version)
        if version is not None and settlement.winner is not None:
            decision = decision.with_version(settlement.winner.run_id, version)
        run.log_params(
            {**as_text(config), **_bounds(policy, gates), "model": competition.label, "evaluation": evaluation.id}
        )
        record = decision_record(competition, name, policy, gates, decision, settlement, incumbent)
        run.log_json({**record, "version": version, "verdict": verdict}, "decision.json")
        run.log_table(decision.as_table(), "decision_table.json")
        note = decision_markdown(verdict, remarks, decision)
        run.log_text(note + "\n", "decision.md")
        run.log_text(policy_yaml(policy), "policy.yaml")
        promoted = "nothing" if settlement.outcome == "nothing" else found.champion
        run.set_tags({run_names.VERDICT: verdict, "promoted": promoted, "outcome": settlement.outcome})
        run.set_note(note)
    return replace(found, decision=decision, verdict=verdict, run=tracker.link(run.run_id))


def _apply(
    tracker: Tracker,
    run: TrackedRun,
    settlement: Settlement,
    competition: Competition,
    name: str,
    alias: str,
    incumbent: Incumbent | None,
    versions: dict[str, str],
) -> str | None:
    """Register the winner and move the alias to it, where it moves; return the winner's version."""
    winner = settlement.winner
    if winner is None:
        return None
    if settlement.outcome == "unchanged":
        return winner.version
    variant = next(v for v in competition.evaluation.variants if v.run.info.run_id == winner.run_id)
    create_model(tracker, name, competition.evaluation.base_weights)
    version = versions.get(winner.run_id) or register(tracker, name, variant.run)
    # The tags come first: a history that lacks a move is worse than one with a move that did not end.
    run.set_tags({run_names.MOVED_TO: version, **({run_names.MOVED_FROM: incumbent.version} if incumbent else {})})
    note_decision(tracker, name, version, run.run_id)
    move_alias(tracker, name, alias, version)
    return version
