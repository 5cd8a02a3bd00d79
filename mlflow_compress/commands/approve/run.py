"""An approval: checks that a decision still holds, and moves the alias."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

from mlflow_compress.commands.shared.inputs import model_label
from mlflow_compress.commands.shared.past_runs import registered_model_of
from mlflow_compress.commands.shared.tabular import Tabular, lines_of_run
from mlflow_compress.config import Policy, as_text, read_policy
from mlflow_compress.config.policy import PINNED, Waiver
from mlflow_compress.errors import ConfigError
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.model_registry import holder, move_alias, note_decision, receipt_of, waiting_versions
from mlflow_compress.tracking.store import RunLink
from mlflow_compress.tracking.tracker import Tracker

if TYPE_CHECKING:
    from mlflow_compress.commands.approve.command import ApproveConfig


@dataclass(frozen=True, kw_only=True)
class Approval(Tabular):
    """An alias that a reviewer's approval has moved."""

    # What moved, and to whom
    registered_model: str
    alias: str
    variant: str
    version: str
    replaced: str | None  # The version that had it
    by: str  # Who has approved
    reason: str | None  # Why, as it was given
    decision_run_id: str  # The run that has decided
    policy_sha256: str  # By which policy
    receipt_sha256: str | None  # The receipt of the evaluation, where one was exported
    verdict: str  # What happened, in one sentence
    run: RunLink  # The run that holds it

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        return [{name: value for name, value in asdict(self).items() if name not in ("verdict", "run")}]

    def as_text(self) -> str:
        return "\n\n".join([self.verdict, *lines_of_run(self.run)])


def _require_holds(condition: bool, what: str, allowed: str, got: str) -> None:
    if not condition:
        fix = "Run promote with needs=approval again"
        raise ConfigError(f"The decision no longer holds: {what}", allowed=allowed, got=got, fix=fix)


def run_approve(config: "ApproveConfig") -> Approval:
    """Move the alias to a version that waits. Nothing is written where the decision no longer holds.

    It holds while the policy has the same hash, the same version has the alias, its waiver has not expired, and no
    newer decision was made.
    """
    tracker = Tracker(config.experiment)
    assert config.version is not None and config.by is not None
    number, by = config.version, config.by
    name = registered_model_of(tracker, config.model)
    waiting = waiting_versions(tracker, name)
    if number not in waiting:
        raise ConfigError(
            f"This version of {name} does not wait for an approval", allowed=sorted(waiting) or "none waits", got=number
        )
    version, alias = waiting[number]
    decided = tracker.client.get_run(version.tags[run_names.DECISION])
    run_id, tags = str(decided.info.run_id), decided.data.tags
    record = tracker.json_of(decided, "decision.json")
    policy = Policy(**yaml.safe_load(record["policy"]["text"])).sha256
    asked = policy if config.policy is None else read_policy(config.policy).sha256
    for sha256 in (asked, tags[run_names.POLICY], version.tags[run_names.POLICY]):
        _require_holds(sha256 == policy, "the policy is another one", policy, sha256)
    wanted = {run_names.REGISTERED_MODEL: name, run_names.ALIAS: alias}
    newest = str(tracker.find_finished("promote", **wanted)[0].info.run_id)
    _require_holds(newest == run_id, "there is a newer one", run_id, newest)
    now, before = holder(tracker, name, alias), (record["before"] or {}).get("version")
    has = None if now is None else now.version
    _require_holds(has == before, f"'{alias}' was moved since", f"version {before}", f"version {has}")
    if now is not None and now.pinned:
        raise ConfigError(f"Version {has} of {name} is pinned and is not replaced", fix=f"Remove its alias '{PINNED}'")
    if run_names.WAIVER in tags:
        Waiver(**record["waiver"]).require_valid()
    variant, label = version.tags.get(run_names.VARIANT, f"version {number}"), model_label(config.model)
    verdict = f"{variant} (version {number}) is now '{alias}', approved by {by}"
    verdict += f", before it version {has}." if has else "."
    verdict += f" {tags[run_names.WAIVER]}." if run_names.WAIVER in tags else ""
    receipt = receipt_of(tracker, str(version.run_id))
    given = {run_names.APPROVED_BY: by, **receipt}
    copied = {key: tags[key] for key in (run_names.POLICY, run_names.WAIVER) if key in tags}
    moved = {run_names.MOVED_TO: number, **({run_names.MOVED_FROM: has} if has else {})}
    named = {run_names.BASE_MODEL: label, run_names.VARIANT: variant, run_names.DECISION: run_id}
    every = {**named, **wanted, **copied, **given, **moved, run_names.VERDICT: verdict}
    with tracker.run(f"approve {label}", "approve", every) as run:
        run.log_params({**as_text(config), "model": label})
        note = "\n\n".join(filter(None, [verdict, config.reason and f"Reason: {config.reason}", tags["verdict"]]))
        move_alias(tracker, name, alias, number)  # first: a version that was not moved still waits
        note_decision(tracker, name, number, run_id, note, {**receipt, run_names.APPROVAL: f"approved by {by}"})
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
