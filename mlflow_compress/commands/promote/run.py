"""Who has an alias: a policy gates and ranks the variants of one evaluation; approvals and rollbacks move it too."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from mlflow_compress import demo
from mlflow_compress.commands.promote.parameters import ApproveConfig, HistoryConfig, PromoteConfig, RollbackConfig
from mlflow_compress.commands.promote.result import AliasHistory, Approval, Promotion, Rollback, Tenure
from mlflow_compress.commands.shared.get_or_create import unfinished_until_ended
from mlflow_compress.commands.shared.named_models import model_label, model_path
from mlflow_compress.commands.shared.past_runs import candidates_of
from mlflow_compress.commands.shared.scores import score_runs
from mlflow_compress.commands.shared.stored import stored_results
from mlflow_compress.config import as_text, is_endpoint, read_policy
from mlflow_compress.config.declarations import AUTO, NONE
from mlflow_compress.config.policy import PINNED, Policy, Waiver, policy_of, policy_yaml, read_waiver
from mlflow_compress.decide.champion import (
    HeadToHead,
    Incumbent,
    Settlement,
    choice_notes,
    head_to_head,
    settle,
    to_compare,
)
from mlflow_compress.decide.direction import harm_of
from mlflow_compress.decide.gates import DECODE_SPEEDUP, GATE_DROP, GATE_FLIPS, MEMORY_RATIO, Gate
from mlflow_compress.decide.promotion import Candidate, Decision, GateReading, PolicyGates, gates_of
from mlflow_compress.errors import ConfigError
from mlflow_compress.metrics.core.metric_inputs import headline
from mlflow_compress.models.source_model import local_model_folder
from mlflow_compress.models.stored_weights import hash_weights
from mlflow_compress.records import MetricResult, RunRecords
from mlflow_compress.reporting.tables import Column, Table
from mlflow_compress.tracking import model_registry, run_names
from mlflow_compress.tracking.evaluations import EvaluationGroup, evaluations
from mlflow_compress.tracking.run_names import RECORDS
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker


def _base_weights(model: str) -> str | None:
    """Return the hash of the weights in a folder (or of the demo); None for a name."""
    if model in demo.MODELS or Path(model).is_dir():
        return hash_weights(local_model_folder(model_path(model)))[1]
    return None


def _registered_model_of(tracker: Tracker, model: str) -> str:
    """Return the registered model of a baseline, given by its folder or by a name that only one model has."""
    label, weights = model_label(model), _base_weights(model)
    every = model_registry.registered_models(tracker, label)
    names = [name for name, owner in every.items() if weights in (None, owner)]
    if len(names) != 1:
        what = "Nothing was promoted of this model" if not names else f"'{label}' is the name of {len(names)} models"
        fix = "Promote a variant first" if not names else "Give the model's folder"
        raise ConfigError(what, allowed=sorted(every) or None, got=model, fix=fix)
    return names[0]


@dataclass(frozen=True, kw_only=True)
class _Competition:
    """The variants that compete for promotion."""

    label: str  # The baseline's short name
    evaluation: EvaluationGroup  # The evaluation whose variants compete
    left_out: tuple[str, ...]  # Description of each group of runs that cannot be compared with this evaluation


def _of_one_model(every: Sequence[EvaluationGroup], config: PromoteConfig, label: str) -> list[EvaluationGroup]:
    """Return the evaluations of one baseline, given by its folder or by a name that only one model has."""
    hashes = list(dict.fromkeys(evaluation.base_weights for evaluation in every))
    listed = [f"weights {key[:8]}: {', '.join(e.described for e in every if e.base_weights == key)}" for key in hashes]
    weights = _base_weights(config.model)
    if weights is not None and weights not in hashes:
        raise ConfigError(
            f"The finished variants of '{label}' were made from other weights than those in this folder",
            allowed=listed,
            got=f"weights {weights[:8]}",
            fix="Run the main job for this model first",
        )
    if weights is None and len(hashes) > 1 and config.evaluation == AUTO:
        raise ConfigError(
            f"'{label}' is the name of {len(hashes)} different models",
            allowed=listed,
            got=label,
            fix="Give the model's folder, or choose with evaluation=ID",
        )
    return [evaluation for evaluation in every if weights in (None, evaluation.base_weights)]


def choose_competition(tracker: Tracker, config: PromoteConfig) -> _Competition:
    """Return the variants that compete: those of the requested evaluation, or of the one with the most items."""
    if is_endpoint(config.model):
        raise ConfigError(
            "Parameter 'model' names a served baseline by its address",
            got=config.model,
            fix="Give the name that its runs show: what baseline_served_model was",
        )
    label = model_label(config.model)
    every = evaluations(tracker, label)
    if not every:
        raise ConfigError(
            f"The tracking store has no finished variant of '{label}' that can be compared",
            fix="Run the main job for a variant first",
        )
    eligible = _of_one_model(every, config, label)
    matching = eligible if config.evaluation == AUTO else [e for e in eligible if e.id.startswith(config.evaluation)]
    if config.evaluation != AUTO and len(matching) != 1:
        what = "No evaluation of this model has this id" if not matching else "Several evaluations have this id"
        raise ConfigError(what, allowed=[e.described for e in matching or eligible], got=config.evaluation)
    chosen = matching[0]
    left_out = [
        e.described + ("" if e.base_weights == chosen.base_weights else f" of other base weights {e.base_weights[:8]}")
        for e in every
        if e.id != chosen.id
    ]
    return _Competition(label=label, evaluation=chosen, left_out=tuple(left_out))


def _verdict_of(settlement: Settlement, alias: str, incumbent: Incumbent | None, version: str | None) -> str:
    """Return what happened to the alias, in one sentence. `version` is the winner's; None before it is registered."""
    winner = settlement.winner
    if settlement.outcome == "nothing":
        return f"No candidate passes every gate; alias '{alias}' is not moved."
    if settlement.outcome == "waiting" and winner is not None:
        now = f", held by version {incumbent.version}" if incumbent else ""
        waits = "would wait" if version is None else f"(version {version}) waits"
        return f"{winner.name} {waits} for an approval to become '{alias}'{now}."
    if winner is None or settlement.outcome == "unchanged":
        assert incumbent is not None
        name = winner.name if winner is not None else incumbent.name
        return f"{name} (version {incumbent.version}) stays '{alias}'."
    before = f", previously version {incumbent.version}" if incumbent else ""
    if version is None:
        return f"{winner.name} would become '{alias}'{before}."
    return f"{winner.name} (version {version}) is now '{alias}'{before}."


def _remarks_of(competition: _Competition, naming: str | None, settlement: Settlement) -> list[str]:
    """Return remarks on the decision: what was compared and left out, names of several, why the champion stays."""
    lines = [f"Compared: {competition.evaluation.described}, baseline '{competition.label}'."]
    lines += [f"Left out, not comparable: {group}." for group in competition.left_out]
    names_of_several = sorted({v.checkpoint[0] for v in competition.evaluation.variants if v.name != v.checkpoint[0]})
    lines += [
        f"'{name}' is the name of several checkpoints; they are shown with digits of their hashes."
        for name in names_of_several
    ]
    lines += [f"{reason[:1].upper()}{reason[1:]}." for reason in settlement.reasons]
    return [*lines, naming] if naming else lines


def _decision_markdown(verdict: str, remarks: list[str], decision: Decision) -> str:
    """Return the decision as Markdown: the verdict, the remarks, and a table of candidates with reasons."""
    lines = [verdict, "", *(f"- {remark}" for remark in remarks), ""]
    shown: dict[str, Any] = {name: cells for name, cells in decision.as_table().items() if name != "run_id"}
    rows = list(zip(*shown.values(), strict=True))
    return "\n".join([*lines, Table(columns=[Column(name, left=True) for name in shown], rows=rows).markdown()])


def _decision_record(
    competition: _Competition,
    registered_model: str,
    policy: Policy,
    gates: PolicyGates,
    decision: Decision,
    settlement: Settlement,
    incumbent: Incumbent | None,
    waiver: Waiver | None,
) -> dict[str, Any]:
    """Return everything that decided, as plain values: what competed, the policy with its hash, and every reason."""
    evaluation = competition.evaluation
    return {
        "registered_model": registered_model,
        "evaluation": {"id": evaluation.id, "items": evaluation.items, "base_weights": evaluation.base_weights},
        "left_out": competition.left_out,
        "policy": {"sha256": policy.sha256, "text": policy_yaml(policy)},
        "gates": [asdict(gate) for gate in gates.gates],
        "outcome": settlement.outcome,
        "waiver": None if waiver is None else waiver.model_dump(mode="json"),
        "before": asdict(incumbent) if incumbent else None,
        "against_champion": asdict(settlement.compared) if settlement.compared else None,
        "decision": {
            "champion": settlement.winner.name if settlement.winner else None,
            "outcomes": [
                {
                    "candidate": {
                        **{k: v for k, v in asdict(outcome.candidate).items() if k != "stages"},
                        "stages": None if outcome.candidate.stages is None else sorted(outcome.candidate.stages),
                    },
                    "passed": outcome.passed,
                    "answer": outcome.answer.text(),
                    "rank": outcome.rank,
                    "reasons": outcome.reasons,
                }
                for outcome in decision.outcomes
            ],
        },
    }


def _bounds(policy: Policy, gates: PolicyGates) -> dict[str, object]:
    """Return the bounds of the standard gates by the names of their parameters, "none" for a gate that is not there."""
    pooled = {gate.metric: gate.bound for gate in gates.gates if isinstance(gate, Gate)}
    speedup = GateReading(metric=DECODE_SPEEDUP, end="lower").name
    memory = GateReading(metric=MEMORY_RATIO, end="upper").name
    return {
        "max_kl": policy.kl.max_kl if policy.kl else NONE,
        "max_kl_outliers_pct": policy.kl.max_outliers_pct if policy.kl else NONE,
        "max_flips_pct": pooled.get(GATE_FLIPS, NONE),
        "max_accuracy_drop_pct": pooled.get(GATE_DROP, NONE),
        "min_decode_speedup": pooled.get(speedup, NONE),
        "max_memory_ratio": pooled.get(memory, NONE),
    }


def _records_of(tracker: Tracker, main_run: str) -> RunRecords | str:
    """Return the records that a main run's evaluation has left, or the reason why there are none."""
    evaluate = tracker.child_ids(main_run).get("evaluate")
    if evaluate is None:
        return f"run {main_run[:8]} has no evaluate run"
    return RunRecords.read(tracker.fetch(evaluate, RECORDS))


def _compare(tracker: Tracker, incumbent: Incumbent | None, evaluation: str, candidate: Candidate) -> HeadToHead | str:
    """Return the direct comparison of a challenger with the champion, or the reason why there is none."""
    assert incumbent is not None  # nobody else is compared with
    if incumbent.evaluation != evaluation:
        return "the champion was measured on other items"
    champion, challenger = (_records_of(tracker, one.run_id) for one in (incumbent, candidate))
    if isinstance(champion, str):
        return champion
    return challenger if isinstance(challenger, str) else head_to_head(champion, challenger)


def run_promote(config: PromoteConfig, asked_by: Mapping[str, str] | None = None) -> Promotion:
    """Gate and rank the finished variants of one evaluation, and move the alias to the best one that passes.

    Only the winner is registered: the registry lists what may be deployed, and 200 variants need no 200 versions. Wrong
    parameters are refused before a run is made. A dry run writes nothing. `asked_by`: more tags of the decision's run.
    """
    policy = config.read_policy()
    waiver = None if config.waiver is None else read_waiver(config.waiver)
    gates = gates_of(policy, config.policy)
    with nullcontext() if config.dry_run else unfinished_until_ended(config):
        return _promote(config, policy, gates, waiver, asked_by or {})


def _promote(
    config: PromoteConfig, policy: Policy, gates: PolicyGates, waiver: Waiver | None, asked_by: Mapping[str, str]
) -> Promotion:
    tracker = Tracker(config.experiment)
    competition = choose_competition(tracker, config)
    evaluation = competition.evaluation
    name, naming = model_registry.planned_model(tracker, competition.label, evaluation.base_weights)
    incumbent = model_registry.holder(tracker, name, config.alias)
    versions = {
        run_id: str(version.version) for run_id, version in model_registry.versions_by_run(tracker, name).items()
    }
    candidates = candidates_of(tracker, evaluation.variants, competition.label, versions, gates)
    decision = unwaived = gates.decide(candidates)
    if waiver is not None:
        gates = _without(policy, waiver.requirement)
        decision = gates.decide(candidates)
    compare = partial(_compare, tracker, incumbent, evaluation.id)
    settlement = settle(decision, incumbent, policy.champion, evaluation.id, compare)
    if config.needs == "approval" and settlement.outcome == "promoted":
        settlement = replace(settlement, outcome="waiting")
    winner = settlement.winner
    failed = [f for o in unwaived.outcomes if o.candidate is winner and not o.passed for f in o.failed]
    waived = "" if waiver is None or not failed else f" {waiver.described}. Without it: {'; '.join(failed)}."
    remarks = _remarks_of(competition, naming, settlement)
    if waiver is not None and not failed:
        remarks.append(f"The waiver of {waiver.requirement} makes no difference to the winner.")
    remarks += _about_choice(tracker, winner, decision, policy, gates)

    def verdict_with(version: str | None) -> str:
        return _verdict_of(settlement, config.alias, incumbent, version) + waived

    has_it = incumbent if settlement.outcome == "waiting" else winner or incumbent
    promotion = Promotion(
        decision=decision,
        outcome=settlement.outcome,
        champion=has_it.name if has_it else None,
        registered_model=name,
        alias=config.alias,
        verdict=verdict_with(None),
        remarks=tuple(remarks),
        policy_sha256=policy.sha256,
        policy=policy_yaml(policy),
        run=None,
    )
    if config.dry_run:
        return _dry(promotion, tracker, competition.label)
    receipt = {} if winner is None else model_registry.receipt_of(tracker, winner.run_id)
    tags = {**_tags(competition, name, config.alias, policy), **asked_by, **receipt}
    tags |= {} if waiver is None or not failed else {run_names.WAIVER: waiver.described}
    noted = {run_names.POLICY: policy.sha256, **receipt}
    passed = [reason for o in decision.outcomes if o.candidate is winner for reason in o.reasons]

    def words(version: str) -> str:
        return "\n".join([verdict_with(version), "", *(f"- {line}" for line in [*remarks, *passed])])

    with tracker.run(f"promote {competition.label}", "promote", tags) as run:
        version = _apply(tracker, run, settlement, competition, name, config.alias, incumbent, versions, noted, words)
        verdict = verdict_with(version)
        if version is not None and winner is not None:
            decision = decision.with_version(winner.run_id, version)
        run.log_params(
            {**as_text(config), **_bounds(policy, gates), "model": competition.label, "evaluation": evaluation.id}
        )
        record = _decision_record(competition, name, policy, gates, decision, settlement, incumbent, waiver)
        run.log_json({**record, "version": version, "verdict": verdict}, "decision.json")
        run.log_table(decision.as_table(), "decision_table.json")
        note = _decision_markdown(verdict, remarks, decision)
        run.log_text(note + "\n", "decision.md")
        run.log_text(policy_yaml(policy), "policy.yaml")
        promoted = "nothing" if settlement.outcome == "nothing" else promotion.champion or "nothing"
        run.set_tags({run_names.VERDICT: verdict, "promoted": promoted, "outcome": settlement.outcome})
        run.set_note(note)
    return replace(promotion, decision=decision, verdict=verdict, run=tracker.link(run.run_id))


def _tags(competition: _Competition, registered_model: str, alias: str, policy: Policy) -> dict[str, str]:
    """Return the tags of a decision's run: what it was about, and by which policy."""
    return {
        run_names.BASE_MODEL: competition.label,
        run_names.EVALUATION: competition.evaluation.id,
        run_names.BASE_WEIGHTS: competition.evaluation.base_weights,
        run_names.REGISTERED_MODEL: registered_model,
        run_names.ALIAS: alias,
        run_names.POLICY: policy.sha256,
    }


def _dry(promotion: Promotion, tracker: Tracker, label: str) -> Promotion:
    """Return a decision that nothing was done about, and say so, also in the run that `mlflow run` has made."""
    given = tracker.note_given_run(f"promote {label} (dry run)", promotion.verdict)
    made = [f"Run {given} was made by `mlflow run`, and has only its parameters."] if given else []
    return replace(
        promotion, remarks=("Dry run: nothing is registered, and no alias moves.", *made, *promotion.remarks)
    )


def _without(policy: Policy, requirement: str) -> PolicyGates:
    each = policy.without_each()
    if requirement not in each:
        raise ConfigError("The policy has no such requirement to waive", allowed=list(each), got=requirement)
    return gates_of(each[requirement])


def headline_of(tracker: Tracker, main_run: str) -> dict[str, MetricResult]:
    """Return the pooled results of a main run's evaluation by key; nothing where it has no evaluation."""
    evaluate = tracker.child_ids(main_run).get("evaluate")
    return {} if evaluate is None else headline(stored_results(tracker, evaluate))


def _about_choice(
    tracker: Tracker, winner: Candidate | None, decision: Decision, policy: Policy, gates: PolicyGates
) -> list[str]:
    """Return what a reader of the decision should know: the winner's accuracy, and which closer ones lost."""
    remarks = []
    if winner is not None and (harm := harm_of(headline_of(tracker, winner.run_id), policy.margin)):
        remarks.append(f"Accuracy of {winner.name}: {harm.text}.")
    if winner is decision.champion:
        runs = [run_id for run_id in to_compare(decision) if "evaluate" in tracker.child_ids(run_id)]
        remarks += choice_notes(decision, score_runs(tracker, runs) if len(runs) > 1 else None, gates.gates)
    return remarks


def _apply(
    tracker: Tracker,
    run: TrackedRun,
    settlement: Settlement,
    competition: _Competition,
    name: str,
    alias: str,
    incumbent: Incumbent | None,
    versions: dict[str, str],
    noted: dict[str, str],
    words: Callable[[str], str],
) -> str | None:
    """Register the winner and move the alias to it, where it moves; return the winner's version."""
    winner = settlement.winner
    if winner is None or settlement.outcome == "unchanged":
        model_registry.end_waiting(tracker, name, alias)
        return None if winner is None else winner.version
    variant = next(v for v in competition.evaluation.variants if v.run.info.run_id == winner.run_id)
    model_registry.create_model(tracker, name, competition.evaluation.base_weights)
    version = versions.get(winner.run_id) or model_registry.register_version(tracker, name, variant.run)
    # A version that somebody has registered by hand lacks these tags.
    noted = {**model_registry.version_tags(variant.run), **noted}
    waits = settlement.outcome == "waiting"
    if not waits:  # the tags come first: a history that lacks a move is worse than one with a move that did not end
        run.set_tags({run_names.MOVED_TO: version, **({run_names.MOVED_FROM: incumbent.version} if incumbent else {})})
    model_registry.note_decision(tracker, name, version, run.run_id, words(version), noted)
    model_registry.end_waiting(tracker, name, alias, version if waits else None)
    if not waits:
        model_registry.move_alias(tracker, name, alias, version)
    return version


def _require_holds(condition: bool, what: str, allowed: str, got: str) -> None:
    if not condition:
        fix = "Run promote with needs=approval again"
        raise ConfigError(f"The decision is no longer valid: {what}", allowed=allowed, got=got, fix=fix)


def run_approve(config: ApproveConfig, number: str, by: str) -> Approval:
    """Move the alias to a version that waits. Nothing is written where the decision no longer holds."""
    tracker = Tracker(config.experiment)
    name = _registered_model_of(tracker, config.model)
    waiting = model_registry.waiting_versions(tracker, name)
    if number not in waiting:
        raise ConfigError(
            f"This version of {name} does not wait for an approval",
            allowed=sorted(waiting) or "no version waits",
            got=number,
        )
    version, alias = waiting[number]
    decided = tracker.client.get_run(version.tags[run_names.DECISION])
    run_id, tags = str(decided.info.run_id), decided.data.tags
    record = tracker.json_of(decided, "decision.json")
    policy = policy_of(yaml.safe_load(record["policy"]["text"]), f"of the decision {run_id}").sha256
    asked = policy if config.policy is None else read_policy(config.policy).sha256
    for sha256 in (asked, tags[run_names.POLICY], version.tags[run_names.POLICY]):
        _require_holds(sha256 == policy, "the policy has changed", policy, sha256)
    wanted = {run_names.REGISTERED_MODEL: name, run_names.ALIAS: alias}
    newest = str(tracker.find_finished("promote", **wanted)[0].info.run_id)
    _require_holds(newest == run_id, "there is a newer decision", run_id, newest)
    now, before = model_registry.holder(tracker, name, alias), (record["before"] or {}).get("version")
    has = None if now is None else now.version
    _require_holds(has == before, f"'{alias}' has moved since", f"version {before}", f"version {has}")
    if now is not None and now.pinned:
        raise ConfigError(f"Version {has} of {name} is pinned and is not replaced", fix=f"Remove its alias '{PINNED}'")
    if run_names.WAIVER in tags:
        Waiver(**record["waiver"]).require_valid()

    variant, label = version.tags.get(run_names.VARIANT, f"version {number}"), model_label(config.model)
    verdict = f"{variant} (version {number}) is now '{alias}', approved by {by}"
    verdict += f", previously version {has}." if has else "."
    verdict += f" {tags[run_names.WAIVER]}." if run_names.WAIVER in tags else ""
    receipt = model_registry.receipt_of(tracker, str(version.run_id))
    given = {run_names.APPROVED_BY: by, **receipt}
    copied = {key: tags[key] for key in (run_names.POLICY, run_names.WAIVER) if key in tags}
    moved = {run_names.MOVED_TO: number, **({run_names.MOVED_FROM: has} if has else {})}
    named = {run_names.BASE_MODEL: label, run_names.VARIANT: variant, run_names.DECISION: run_id}
    every = {**named, **wanted, **copied, **given, **moved, run_names.VERDICT: verdict}
    with tracker.run(f"approve {label}", "approve", every) as run:
        run.log_params({**as_text(config), "model": label})
        note = "\n\n".join(filter(None, [verdict, config.reason and f"Reason: {config.reason}", tags["verdict"]]))
        model_registry.move_alias(tracker, name, alias, number)  # first: a version that was not moved still waits
        noted = {**receipt, run_names.APPROVAL: f"approved by {by}"}
        model_registry.note_decision(tracker, name, number, run_id, note, noted)
        tracker.add_to(run_id).set_tags(given)
        run.set_note(note)
    return Approval(
        registered_model=name,
        alias=alias,
        variant=variant,
        version=number,
        replaced=has,
        by=by,
        reason=config.reason,
        decision_run_id=run_id,
        policy_sha256=policy,
        receipt_sha256=receipt.get(run_names.RECEIPT),
        verdict=verdict,
        run=tracker.link(run.run_id),
    )


def run_rollback(config: RollbackConfig) -> Rollback:
    """Move the alias back, and its "-previous" to the version that had it. A second rollback undoes the first."""
    tracker = Tracker(config.experiment)
    label = model_label(config.model)
    name = _registered_model_of(tracker, config.model)
    now, before = (
        model_registry.holder(tracker, name, alias)
        for alias in (config.alias, model_registry.previous_alias(config.alias))
    )
    if now is None:
        raise ConfigError(f"No version of {name} has this alias", got=config.alias)
    if before is None:
        raise ConfigError(f"No version of {name} had this alias before, or it was deleted", got=config.alias)
    if now.pinned:
        raise ConfigError(
            f"Version {now.version} of {name} is pinned and is not replaced", fix=f"Remove its alias '{PINNED}' first"
        )

    verdict = f"{before.name} (version {before.version}) is '{config.alias}' again, in place of version {now.version}."
    tags = {
        run_names.BASE_MODEL: label,
        run_names.REGISTERED_MODEL: name,
        run_names.ALIAS: config.alias,
        run_names.MOVED_FROM: now.version,
        run_names.MOVED_TO: before.version,
        run_names.VARIANT: before.name,
        run_names.VERDICT: verdict,
    }
    with tracker.run(f"rollback {label}", "rollback", tags) as run:
        run.log_params({**as_text(config), "model": label})
        note = verdict if config.reason is None else f"{verdict}\n\nReason: {config.reason}"
        model_registry.note_decision(tracker, name, before.version, run.run_id, note)
        model_registry.move_alias(tracker, name, config.alias, before.version)
        run.set_note(note)
    return Rollback(
        registered_model=name,
        alias=config.alias,
        variant=before.name,
        version=before.version,
        replaced=now.version,
        reason=config.reason,
        verdict=verdict,
        run=tracker.link(run.run_id),
    )


def _time(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="seconds")


def _tenure(run: Any, until: str | None) -> Tenure:
    tags = run.data.tags
    return Tenure(
        since=_time(run.info.end_time),
        until=until,
        variant=tags["promoted"] if tags[run_names.STAGE] == "promote" else tags[run_names.VARIANT],
        version=tags[run_names.MOVED_TO],
        by=tags[run_names.STAGE],
        run_id=run.info.run_id,
        policy_sha256=tags.get(run_names.POLICY),
        verdict=tags[run_names.VERDICT],
        reason=None if run.data.params.get("reason", NONE) == NONE else run.data.params["reason"],
        approved_by=tags.get(run_names.APPROVED_BY),
        waiver=tags.get(run_names.WAIVER),
        receipt_sha256=tags.get(run_names.RECEIPT),
    )


def read_history(config: HistoryConfig) -> AliasHistory:
    """Return who had an alias when, newest first. Moves by hand leave no run; the last one of them is named."""
    tracker = Tracker(config.experiment)
    name = _registered_model_of(tracker, config.model)
    wanted = {run_names.REGISTERED_MODEL: name, run_names.ALIAS: config.alias}
    runs = [run for stage in ("promote", "approve", "rollback") for run in tracker.find_finished(stage, **wanted)]
    moves = sorted((r for r in runs if run_names.MOVED_TO in r.data.tags), key=lambda run: run.info.end_time)
    ends = [_time(run.info.end_time) for run in moves[1:]]
    tenures = [_tenure(run, until) for run, until in zip(moves, [*ends, None], strict=False)]
    now = model_registry.holder(tracker, name, config.alias)
    remarks = [
        f"Version {number} waits for an approval as '{alias}', "
        f"by the decision of run {version.tags[run_names.DECISION][:8]}."
        for number, (version, alias) in model_registry.waiting_versions(tracker, name).items()
        if alias == config.alias
    ]
    recorded = tenures[-1].version if tenures else None
    if now is None:
        remarks.append(f"No version of {name} has the alias '{config.alias}' now.")
    elif now.version != recorded:
        remarks.append(f"Version {now.version} has '{config.alias}' now: it was moved by hand.")
    return AliasHistory(
        registered_model=name,
        alias=config.alias,
        tenures=tuple(reversed(tenures)),
        holder=None if now is None else now.version,
        remarks=tuple(remarks),
    )
