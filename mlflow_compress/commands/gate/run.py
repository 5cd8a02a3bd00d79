"""Evaluates a checkpoint in random blocks of items until the policy's verdict is sure, and publishes the verdict."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mlflow_compress import files as atomic
from mlflow_compress.commands.command import Say, silent
from mlflow_compress.commands.evaluate import models
from mlflow_compress.commands.evaluate.baseline import StoredBaseline, find_or_evaluate, item_keys, noise_sample
from mlflow_compress.commands.evaluate.items import suite_of
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.evaluate.run import conditions, readable, states_for
from mlflow_compress.commands.gate.parameters import GateConfig
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.commands.judge.run import run_judge
from mlflow_compress.commands.promote.result import NOTHING_PASSES
from mlflow_compress.commands.quantize.run import size_values
from mlflow_compress.commands.shared.get_or_create import digest, resumable_workdir
from mlflow_compress.commands.shared.named_models import (
    ServedVariant,
    VariantManifest,
    baseline_label,
    compresses,
    described,
)
from mlflow_compress.commands.shared.tabular import Tabular, lines_of_run
from mlflow_compress.commands.speed.parameters import SpeedConfig
from mlflow_compress.commands.speed.run import run_speed
from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest
from mlflow_compress.config import as_text
from mlflow_compress.config.policy import Objective, Policy, policy_yaml, read_policy
from mlflow_compress.decide.direction import harm_of
from mlflow_compress.decide.gates import SPEED, Check, Gate, in_words, without_speed
from mlflow_compress.decide.item_checks import VALUES, ItemCheck, ItemPolicy, check_places, item_policy
from mlflow_compress.decide.promotion import (
    NO_KL_OF_SERVED,
    PolicyAnswer,
    gate_numbers,
    gates_of,
    lacking_shares,
    policy_answer,
    read_gates,
)
from mlflow_compress.errors import ConfigError
from mlflow_compress.kept import keeping
from mlflow_compress.metrics.core.account import Account, take_account
from mlflow_compress.metrics.core.item_table import ItemTable, row_keys
from mlflow_compress.metrics.core.metric_inputs import MetricInputs, MetricSettings, headline
from mlflow_compress.metrics.core.metric_registry import compute_all
from mlflow_compress.metrics.stats.arrays import Float
from mlflow_compress.metrics.stats.sequential import ItemGroups, Verdict, decide_checks, random_order
from mlflow_compress.records import ItemKey, RunRecords
from mlflow_compress.reporting.headline import for_users
from mlflow_compress.reporting.tables import Table, escape_markdown
from mlflow_compress.scoring.plan.encoding import Shortened
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.live_processes import scratch_folder
from mlflow_compress.tracking.run_names import RECORDS
from mlflow_compress.tracking.store import RunLink
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker, opened

DecidedBy = Literal["items", "all items", "checkpoint", "timing", "answers"]


@dataclass(frozen=True, kw_only=True)
class GateRow:
    """One check of a gate, or a gate that was decided as a whole."""

    gate: int  # Number of the policy's gate; a gate on KL has two checks
    name: str  # The claim: "distance/flips_pct <= 5"
    verdict: Literal["pass", "fail", "undecided"]
    decided_after: int | None = None  # Items that the gate had looked at; None where items did not decide
    # What decided: the items so far, the fixed-n rule after all of them, the checkpoint's size, a timing of it, or what
    # both models answer to instructions
    by: DecidedBy
    value: float | None = None  # The value so far, in the metric's unit; None where no item has one
    limit: float | None = None  # The limit
    n: int = 0  # Items that have a value
    reason: str = ""  # What a promotion says of the gate, where all items or the checkpoint decided


@dataclass(frozen=True, kw_only=True)
class GateVerdict(Tabular):
    """Whether a checkpoint is near enough to its baseline, and how many items that took."""

    passed: bool  # Whether every gate passes
    verdict: str  # The same, in one sentence
    rows: tuple[GateRow, ...]  # What decided
    # Items that were looked at, and those that the whole evaluation has
    items_used: int
    items_available: int
    error: float  # Probability that any early verdict is wrong, at most
    seed: int  # Of the random order
    # The policy's hash, and its text
    policy_sha256: str
    policy: str
    # Names of the two models
    variant: str
    baseline: str
    baseline_run_id: str  # The run that holds the baseline's records
    remarks: tuple[str, ...]  # What else there is to say
    run: RunLink  # The run that holds the verdict

    @property
    def exit_code(self) -> int:
        return 0 if self.passed else NOTHING_PASSES

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        return [asdict(row) for row in self.rows]

    def as_text(self) -> str:
        lines = [self.verdict, *self.remarks, ""]
        for row in self.rows:
            after = "" if row.decided_after is None else f", after {row.decided_after} items"
            value = "" if row.value is None else f": {row.value:.4g} on {row.n} items"
            lines.append(f"{row.gate}. {row.verdict}: {row.reason or row.name}{value}{after}")
        return "\n\n".join(["\n".join(lines), *lines_of_run(self.run)])


def _restricted(records: RunRecords, keys: pa.Array) -> RunRecords:
    """Return the records of some items alone, in the original order of their options."""
    kept = {}
    for column in fields(records):
        table = getattr(records, column.name)
        if column.name not in ("items", "option_scores", "option_distances", "generations") or table is None:
            continue
        part = type(table)(table.table.filter(pc.is_in(row_keys(table), value_set=keys)))
        if column.name.startswith("option"):
            part = part.where(permutation=0)
        kept[column.name] = part if len(part) else None
    return RunRecords(**kept)


def blocks(order: models.ItemKeys, group: Mapping[ItemKey, int], size: int) -> Iterator[tuple[int, models.ItemKeys]]:
    """Iterate over the blocks of an order, numbered; the last one may be smaller. Groups of items stay whole."""
    start = number = 0
    while start < len(order):
        end = min(start + size, len(order))
        while end < len(order) and group[order[end]] == group[order[end - 1]]:
            end += 1
        yield number, order[start:end]
        start, number = end, number + 1


def shuffled(keys: Sequence[ItemKey], group: Mapping[ItemKey, int], seed: int) -> list[ItemKey]:
    """Return the items in the order in which they are looked at: groups in random order, each one's items together."""
    members: dict[int, list[ItemKey]] = {}
    for key in sorted(keys):
        members.setdefault(group[key], []).append(key)
    groups = list(members.values())
    if not groups:
        return []
    return [key for place in random_order([first for first, *_ in groups], seed=seed) for key in groups[place]]


def in_order(values: Float, items: models.ItemKeys, order: models.ItemKeys) -> list[float]:
    """Return one value per item of `order`; `items` names those of the values."""
    by_key = dict(zip(items, values.tolist(), strict=True))
    return [by_key[key] for key in order if key in by_key]


@dataclass(frozen=True, kw_only=True)
class _ItemsInGroups:
    """Which items belong together because they share something, such as a passage."""

    of: Mapping[ItemKey, int]  # Code of each item's group
    largest: Mapping[str, int]  # By check: most items of one group that it is about

    @classmethod
    def find(cls, checks: Sequence[ItemCheck], view: ItemTable, headline: Sequence[str]) -> "_ItemsInGroups":
        """Return the groups of the items, of which some checks are about some."""
        names = zip(view.task.tolist(), view.item_id.tolist(), strict=True)
        largest = {
            check.claim.name: int(np.bincount(view.group[rows]).max()) if len(rows) else 1
            for check in checks
            for rows in [check.rows(view, headline)]
        }
        return cls(of=dict(zip(names, view.group.tolist(), strict=True)), largest=largest)


@dataclass(kw_only=True)
class _ChecksSoFar:
    """The checks of a policy, and their values in the order in which items were looked at."""

    policy: ItemPolicy
    headline: tuple[str, ...]  # Families that pooled checks are about
    error: float  # Level of all verdicts together
    in_groups: _ItemsInGroups
    values: dict[str, list[float]] = field(default_factory=dict)  # By check: one value per item that has one
    sums: dict[str, Float] = field(default_factory=dict)  # By check: what the metric divides by what, so far
    groups: dict[str, list[int]] = field(default_factory=dict)  # By check: the group of each of these items
    # Verdict of every decided check, with the number of items that the gate had looked at
    decided_at: dict[str, tuple[Verdict, int]] = field(default_factory=dict)
    n_items: int = 0  # Items looked at
    parts: list[RunRecords] = field(default_factory=list)  # The variant's records of every block
    shortened: Shortened = field(default_factory=Shortened)  # Items that it could not read whole

    def look(self, inputs: MetricInputs, order: models.ItemKeys) -> None:
        """Take the items of one block, and decide what can be decided."""
        view = inputs.view
        names = list(zip(view.task.tolist(), view.item_id.tolist(), strict=True))
        for check in self.policy.checks:
            rows = check.rows(view, self.headline)
            values, *parts = (of[rows] for of in check.values(inputs))
            there = np.isfinite(values)
            self.sums[check.claim.name] = self.sums.get(check.claim.name, 0.0) + np.sum([of[there] for of in parts], 1)
            items = [names[row] for row in rows[there]]
            self.values.setdefault(check.claim.name, []).extend(in_order(values[there], items, order))
            groups = np.array([self.in_groups.of[item] for item in items], dtype=np.float64)
            self.groups.setdefault(check.claim.name, []).extend(map(int, in_order(groups, items, order)))
        self.n_items += len(order)
        claims = [check.claim for check in self.policy.checks]
        together = {
            name: ItemGroups(np.array(self.groups[name], dtype=np.int64), largest) if largest > 1 else None
            for name, largest in self.in_groups.largest.items()
        }
        for name, verdict in decide_checks(claims, self.values, together, error=self.error).items():
            if verdict != "undecided":
                self.decided_at.setdefault(name, (verdict, self.n_items))

    def by_gate(self) -> dict[int, Verdict]:
        """Return what the items say of each gate: it passes when all of its checks do, and fails when one does."""
        without_items = self.policy.at_once | self.policy.of_answers
        return {n: self._of_gate(n) for n in range(len(self.policy.gates)) if n not in without_items}

    def _of_gate(self, gate: int) -> Verdict:
        verdicts = [
            self.decided_at.get(check.claim.name, ("undecided", 0))[0]
            for check in self.policy.checks
            if check.gate == gate
        ]
        if "fail" in verdicts:
            return "fail"
        return "pass" if verdicts and all(verdict == "pass" for verdict in verdicts) else "undecided"

    def rows(self) -> list[GateRow]:
        """Return one row per check: the value so far, and when it was decided."""
        return [self._row(check) for check in self.policy.checks]

    def _row(self, check: ItemCheck) -> GateRow:
        claim = check.claim
        decided, factor = self.decided_at.get(claim.name), VALUES[check.metric].factor
        total, divisor = self.sums.get(claim.name, (0.0, 0.0))
        return GateRow(
            gate=check.gate + 1,
            name=claim.name.rpartition(" (gate")[0],
            verdict="undecided" if decided is None else decided[0],
            decided_after=None if decided is None else decided[1],
            by="items",
            value=factor * float(total / divisor) if divisor else None,
            limit=factor * check.limit,
            n=len(self.values.get(claim.name, [])),
        )


def _needed_items(
    checks: Sequence[ItemCheck], inputs: MetricInputs, headline: Sequence[str]
) -> tuple[list[ItemKey], int]:
    """Return the items that some check is about and that the baseline has answered, and how many it has not.

    Of problems with several drawn answers none is left out: some of these may be read where the greedy one is not.
    """
    view = inputs.view
    rows = sorted({int(row) for check in checks for row in check.rows(view, headline)})
    drawn = {row for check in checks if VALUES[check.metric].family for row in check.rows(view, headline).tolist()}
    answered = [row for row in rows if row in drawn or inputs.baseline_predictions.scored[row, 0]]
    return [(str(view.task[row]), str(view.item_id[row])) for row in answered], len(rows) - len(answered)


@dataclass(frozen=True, kw_only=True)
class _GateWork:
    """What one gate has to decide, and from what."""

    config: GateConfig
    policy: Policy
    wanted: ItemPolicy  # The policy's gates, with the checks of items
    made: VariantManifest  # The variant
    timed: "_MeasuredForGate"
    judged: "Callable[[], _MeasuredForGate]"  # Lets both models answer instructions, at the first call
    baseline: StoredBaseline
    families: tuple[str, ...]  # Families that pooled checks are about
    order: models.ItemKeys  # The items in the order in which they are looked at
    groups: _ItemsInGroups
    n_unanswered: int  # Items that the baseline has not answered, and that no gate looks at
    conditions: Mapping[str, str]  # Under which the variant is compared

    def inputs(self, records: RunRecords) -> MetricInputs:
        items = records.items
        assert items is not None
        seed = self.config.source.seed
        return MetricInputs(
            baseline=_restricted(self.baseline.records, row_keys(items)),
            variant=records,
            settings=MetricSettings(seed=seed, split_seed=seed),
        )

    def account(self, so_far: _ChecksSoFar) -> Account:
        """Return the account of the items so far; those that the baseline has not answered count in proportion."""
        if not so_far.parts:
            return Account(asked=0, setting=self.conditions)
        short = so_far.shortened
        looked = take_account(
            self.inputs(models.joined_records(so_far.parts)),
            cut=short.cut,
            too_long=short.too_long,
            setting=self.conditions,
        )
        left_out = round(self.n_unanswered * so_far.n_items / len(self.order))
        more = {"the baseline gave none": left_out} if left_out else {}
        return replace(looked, asked=looked.asked + left_out, unscored={**looked.unscored, **more})


def at_once(work: _GateWork) -> list[GateRow]:
    """Return the gates that need no item."""
    made, timed = work.made, work.timed
    sizes = size_values(made) if isinstance(made, CheckpointManifest) else {}
    values = {**sizes, **timed.values, "gate/kl_items": 0.0}
    rows = []
    for number in sorted(work.wanted.at_once):
        gate = work.wanted.gates[number]
        by_timing = isinstance(gate, Gate) and gate.metric.startswith(SPEED)
        row = _row(number, gate.checks(values), "timing" if by_timing else "checkpoint", without_speed(timed.reason))
        rows.append(row)
    return rows


def _row(
    number: int, checks: Sequence[Check], by: DecidedBy, absent: Mapping[str, str] = MappingProxyType({})
) -> GateRow:
    """Return a gate that was decided as a whole, with what a promotion says of it."""
    reason, passed = "; ".join(in_words(check, absent) for check in checks), all(check.passed for check in checks)
    return GateRow(gate=number + 1, name=reason, verdict="pass" if passed else "fail", by=by, reason=reason)


def _is_sure(work: _GateWork, so_far: _ChecksSoFar) -> bool:
    """Return whether more items can no longer change the verdict, at the error level."""
    policy, verdicts = work.policy, so_far.by_gate().values()
    if "fail" in verdicts:
        return True
    seen = work.order[: so_far.n_items]
    enough = len(seen) >= policy.require.items and all(
        sum(name == task for name, _ in seen) >= fewest for task, fewest in policy.require.items_by_task.items()
    )
    return enough and all(verdict == "pass" for verdict in verdicts)


def _verdict_of_gate(work: _GateWork, so_far: _ChecksSoFar, label: str, run: RunLink) -> GateVerdict:
    """Return the verdict: of the items so far, or of the fixed-n rule where all of them left a gate open."""
    policy, made, available = work.policy, work.made, len(work.order)
    rows = [*at_once(work), *so_far.rows()]
    failed = {row.gate for row in rows if row.verdict == "fail"}
    open_gates = [gate for gate, verdict in so_far.by_gate().items() if verdict == "undecided"]
    all_used = so_far.n_items == available
    # An interval of 95 % holds for a number of items that was fixed before: not for where a gate has stopped.
    results = compute_all(work.inputs(models.joined_records(so_far.parts))) if all_used and so_far.parts else []
    harm = harm_of(headline(results), policy.margin)
    answer = PolicyAnswer(word="passes")
    if all_used and open_gates and not failed:
        # What a promotion would say of the gates that all items together have left open
        values = gate_numbers(results, gates_of(policy).readings)
        checks = {number: work.wanted.gates[number].checks(values) for number in open_gates}
        answer = policy_answer([one for of_gate in checks.values() for one in of_gate], so_far.n_items)
        decided = [_row(number, of_gate, "all items") for number, of_gate in checks.items()]
        rows = [row for row in rows if row.gate - 1 not in open_gates]
        rows += [replace(row, n=so_far.n_items) for row in decided]
        failed = {row.gate for row in rows if row.verdict == "fail"}
    answered = _MeasuredForGate() if failed else work.judged()
    for number in sorted(work.wanted.of_answers):
        row = _row(number, work.wanted.gates[number].checks(answered.values), "answers")
        rows.append(replace(row, verdict="undecided") if failed else row)
    failed |= {row.gate for row in rows if row.verdict == "fail"}
    account = work.account(so_far)
    lacking = lacking_shares(policy.require, account.values()) if account.asked else []
    anomalous = []
    kl = [one for name, values in so_far.values.items() if name.startswith("distance/kl_clipped") for one in values]
    if policy.anomalies.zero_kl and compresses(made.method) and kl and max(kl) <= 0.0:
        anomalous.append(f"Anomalous: every KL is exactly 0, although method '{made.method}' changes weights.")

    passed = not failed and not anomalous and not lacking
    share = f"{so_far.n_items} of {available} items"
    saved = "" if all_used else f" ({100 * (1 - so_far.n_items / available):.0f} % saved)"
    fixed_n = any(row.by == "all items" for row in rows)
    after = "by the fixed-n rule after all items" if fixed_n else f"after {share}{saved}"
    names = "; ".join(row.reason or row.name for row in rows if row.verdict == "fail")
    if lacking:
        answer = PolicyAnswer(word="open", why="; ".join(lacking))
    elif anomalous or any(row.verdict == "fail" and row.gate - 1 not in open_gates for row in rows):
        answer = PolicyAnswer(word="fails", why=names or "it is anomalous")
    given = f" Seed {seed}." if (seed := work.conditions.get("seed")) else ""
    sentence = f"{made.label}: {answer.text()}; {after}.{given}"
    undecided = "One failed gate is enough; the other gates stay undecided."
    return GateVerdict(
        passed=passed,
        verdict=sentence,
        rows=tuple(sorted(rows, key=lambda row: row.gate)),
        items_used=so_far.n_items,
        items_available=available,
        error=work.config.error,
        seed=work.config.source.seed,
        policy_sha256=policy.sha256,
        policy=policy_yaml(policy),
        variant=made.label,
        baseline=label,
        baseline_run_id=work.baseline.run_id,
        remarks=(
            account.sentence,
            f"The baseline was {'evaluated now' if work.baseline.fresh else 'found in the store'}.",
            *([f"Accuracy, of all items: {harm.text}."] if harm is not None else []),
            *anomalous,
            *filter(None, (work.timed.remark, answered.remark)),
            *([undecided] if not passed and open_gates and not all_used else []),
        ),
        run=run,
    )


@dataclass(frozen=True, kw_only=True)
class _MeasuredForGate:
    """What another stage has found for the gates that read it."""

    values: Mapping[str, float] = field(default_factory=dict)  # What gates read, by name; empty where it did not run
    reason: str = ""  # Why nothing was timed
    remark: str = ""  # What was found, in one sentence; empty where the policy does not ask


def _timed_for_gate(config: SpeedConfig, policy: Policy, store: Tracker) -> _MeasuredForGate:
    """Time the checkpoint beside its baseline in a run of its own, where a gate asks; return what gates read of it."""
    gates = gates_of(policy.model_copy(update={"objective": Objective()}))  # a gate ranks nothing
    if not gates.asks_speed:
        return _MeasuredForGate()
    measured = run_speed(config, store)
    return _MeasuredForGate(
        values=read_gates(measured.results, gates.readings),
        reason="; ".join(dict.fromkeys(measured.not_computed.values())),
        remark=f"{measured.summary}.",
    )


def _judged_for_gate(config: JudgeConfig, policy: Policy, store: Tracker) -> _MeasuredForGate:
    """Let both models answer instructions in a run of its own, and return what gates read of the answers."""
    results = list(run_judge(config, store).results)
    return _MeasuredForGate(values=read_gates(results, gates_of(policy).readings), remark=for_users(headline(results)))


_DECIDED = {
    "checkpoint": "from the checkpoint",
    "timing": "by timing",
    "answers": "by the answers to instructions",
    "all items": "after all items",
}


def _verdict_markdown(verdict: GateVerdict) -> str:
    """Return the verdict as Markdown, as a job summary shows it."""
    lines = [
        f"## {'Passed' if verdict.passed else 'Failed'}: "
        + escape_markdown(f"{verdict.variant} against {verdict.baseline}"),
        "",
        escape_markdown(verdict.verdict),
        "",
        Table.of(
            [
                {"gate": row.gate, "claim": row.reason or row.name, "verdict": row.verdict}
                | {"decided": _DECIDED.get(row.by, f"after {row.decided_after} items" if row.decided_after else "")}
                | {"value so far": None if row.value is None else float(f"{row.value:.4g}"), "items": row.n or None}
                for row in verdict.rows
            ]
        ).markdown(),
    ]
    notes = [
        *verdict.remarks,
        f"Early verdicts: any of them is wrong with a probability of at most {100 * verdict.error:g} %.",
        f"Order of the items: seed {verdict.seed}. Policy: sha256 {verdict.policy_sha256[:16]}.",
    ]
    return "\n".join([*lines, "", *(f"- {escape_markdown(note)}" for note in notes), ""])


def _write_verdict(verdict: GateVerdict, folder: Path) -> None:
    """Write both files into a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    values = json.dumps({**verdict.to_dict(), "exit_code": verdict.exit_code}, indent=1, allow_nan=False)
    atomic.write(folder / "verdict.json", f"{values}\n".encode())
    atomic.write(folder / "verdict.md", _verdict_markdown(verdict).encode())


def run_gate(
    config: GateConfig,
    store: Tracker | str | None = None,
    progress: Say = silent,
    asked_by: Mapping[str, str] | None = None,
) -> GateVerdict:
    """Evaluate a checkpoint until every gate is decided or one has failed, and return the verdict.

    The baseline is found in the store, or evaluated as a whole. The variant is scored in blocks, on the items that the
    policy reads, in the original order of their options. `asked_by`: more tags of the run.
    """
    policy = read_policy(config.policy).overridden(
        min_decode_speedup=config.min_decode_speedup, max_memory_ratio=config.max_memory_ratio
    )
    wanted = item_policy(policy, config.policy)
    evaluation = config.of_stage(EvaluateConfig)
    made, suite = described(config.checkpoint, config.source, config.served), suite_of(evaluation)
    _check_served(made, policy)

    store = opened(store, config.experiment)
    label = baseline_label(config.source, config.served)
    base, variant = models.open_both(evaluation, progress)
    tags = {run_names.BASE_MODEL: label, run_names.VARIANT: made.label, run_names.METHOD: made.method}
    tags |= {**(asked_by or {}), run_names.POLICY: policy.sha256}
    with (
        keeping(),  # the tokens of a baseline that is evaluated now are stored with it, and not made twice
        models.cores_shared_out(evaluation.running, evaluation.source),
        store.run(f"gate {made.label} {label}", "gate", tags) as run,
    ):
        dtype = models.as_baseline(config.inference, base).dtype
        run.log_params({**as_text(config), "dtype": dtype, "policy_sha256": policy.sha256})
        suite = readable(store, base, suite, evaluation)
        baseline = find_or_evaluate(store, base, suite, evaluation)
        run.set_tags({run_names.EVALUATION: baseline.evaluation, run_names.BASELINE_RUN: baseline.run_id})
        inputs = MetricInputs(baseline=baseline.records)
        families = inputs.headline_families
        wanted = _on_these_items(wanted, inputs.view, families)

        keys, n_unanswered = _needed_items(wanted.checks, inputs, families)
        groups = _ItemsInGroups.find(wanted.checks, inputs.view, families)
        order = shuffled(keys, groups.of, config.source.seed)
        _check_counts(policy, order)
        work = _GateWork(
            config=config,
            policy=policy,
            wanted=wanted,
            made=made,
            timed=_timed_for_gate(config.of_stage(SpeedConfig), policy, store),
            judged=cache(partial(_judged_for_gate, config.of_stage(JudgeConfig), policy, store))
            if wanted.of_answers
            else _MeasuredForGate,
            baseline=baseline,
            families=families,
            order=order,
            groups=groups,
            n_unanswered=n_unanswered,
            conditions=conditions(evaluation, base, variant),
        )

        states = states_for(baseline, base, variant)
        # Other sizes of blocks are other work; another policy may be about other items.
        fingerprint = digest(
            {"stage": "gate", **variant.identity, "baseline": baseline.run_id, "order": order, "block": config.block}
        )
        with resumable_workdir(store.uri, fingerprint) as folder:
            models.recognised_in(folder, variant)
            # The model is loaded for the first block that must be scored.
            listed = item_keys(noise_sample(suite, evaluation.evaluation.noise_items, seed=config.source.seed))
            load_once = cache(lambda: models.scorer_listing(variant, variant.load(), listed))
            scorer = models.BlockScorer(suite=suite, scorer=load_once, states=states, folder=folder)
            so_far = _look(work, scorer, progress)
            verdict = _verdict_of_gate(work, so_far, label, store.link(run.run_id))
            with scratch_folder(store.uri) as scratch:
                models.joined_records(so_far.parts).write(scratch)
                run.log_folder(scratch, RECORDS)
        _log(store, run, verdict)
    if config.output is not None:
        _write_verdict(verdict, Path(config.output))
    return verdict


def _on_these_items(wanted: ItemPolicy, view: ItemTable, families: Sequence[str]) -> ItemPolicy:
    """Return a policy's checks as they are made on the items, without KL where no item has option scores."""
    check_places(wanted.checks, view, families)
    wanted = replace(wanted, checks=tuple(check.within(view) for check in wanted.checks))
    return wanted if set(families) & set(view.scored) else _without_kl(wanted)


def _check_served(made: VariantManifest, policy: Policy) -> None:
    """Refuse a policy that a served model cannot be judged by, before anything is asked of its server."""
    if not isinstance(made, ServedVariant):
        return
    if policy.kl is not None:
        raise ConfigError("The policy has a gate that a served model cannot pass", fix=NO_KL_OF_SERVED)
    if of_size := [gate.metric for gate in policy.gates if gate.metric.startswith("size/")]:
        raise ConfigError(
            "The policy has a gate on size, and the size of a served model is not known",
            got=of_size[0],
            fix="Leave it out",
        )


def _without_kl(policy: ItemPolicy) -> ItemPolicy:
    """Return the policy for generated answers: the gate on KL does not apply, and passes at once."""
    of_kl = frozenset(check.gate for check in policy.checks if check.metric.startswith("distance/kl_"))
    kept = tuple(check for check in policy.checks if check.gate not in of_kl)
    return ItemPolicy(gates=policy.gates, checks=kept, at_once=policy.at_once | of_kl)


def _check_counts(policy: Policy, order: models.ItemKeys) -> None:
    for task, fewest in [(None, policy.require.items), *policy.require.items_by_task.items()]:
        n = sum(task in (None, name) for name, _ in order)
        if n < fewest:
            raise ConfigError(
                f"The policy requires more items{f' of {task}' if task else ''} than the gate looks at",
                allowed=f"at most {n}",
                got=fewest,
            )


def _look(work: _GateWork, scorer: models.BlockScorer, progress: Say) -> _ChecksSoFar:
    """Look at block after block until the verdict is sure; return what is known."""
    so_far = _ChecksSoFar(policy=work.wanted, headline=work.families, error=work.config.error, in_groups=work.groups)
    if any(row.verdict == "fail" for row in at_once(work)):
        return so_far
    for number, keys in blocks(work.order, work.groups.of, work.config.block):
        records, short = scorer.records(number, keys)
        so_far.parts.append(records)
        so_far.shortened = Shortened(so_far.shortened.cut | short.cut, so_far.shortened.too_long | short.too_long)
        so_far.look(work.inputs(records), keys)
        verdicts = so_far.by_gate().values()
        decided = sum(verdict != "undecided" for verdict in verdicts)
        progress(f"{so_far.n_items} of {len(work.order)} items: {decided} of {len(verdicts)} gates decided")
        if _is_sure(work, so_far):
            break
    return so_far


def _log(store: Tracker, run: TrackedRun, verdict: GateVerdict) -> None:
    run.log_values(
        {
            "gate/passed": float(verdict.passed),
            "items/used": verdict.items_used,
            "items/available": verdict.items_available,
        }
    )
    with scratch_folder(store.uri) as scratch:
        _write_verdict(verdict, scratch)
        for path in sorted(scratch.iterdir()):
            run.log_file(path)
    run.set_tags({run_names.VERDICT: verdict.verdict, "passed": str(verdict.passed).lower()})
    run.set_note(_verdict_markdown(verdict))
