"""When a gate may stop, and its verdict: of the items so far, or of the fixed-n rule after all of them."""

from __future__ import annotations

from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest
from mlflow_compress.config import GateConfig
from mlflow_compress.config.policy import Policy, policy_yaml
from mlflow_compress.decide.gate_values import gate_values
from mlflow_compress.decide.gates import SPEED, Gate, in_words, without_speed
from mlflow_compress.decide.item_checks import ItemPolicy
from mlflow_compress.decide.policy_gates import gates_of, read
from mlflow_compress.metrics.core.compute import compute_all, headline
from mlflow_compress.metrics.core.metric_inputs import MetricInputs, MetricSettings
from mlflow_compress.records import RunRecords
from mlflow_compress.results import GateRow, GateVerdict, RunLink
from mlflow_compress.stages.evaluation.baseline import Baseline
from mlflow_compress.stages.gating.item_blocks import Keys, joined, restricted
from mlflow_compress.stages.gating.progress_of_checks import ChecksSoFar
from mlflow_compress.stages.gating.timing import TimedForGate
from mlflow_compress.stages.model_names import Made, compresses
from mlflow_compress.stages.quantize import size_values


def at_once(wanted: ItemPolicy, made: Made, timed: TimedForGate, verdict: str) -> list[GateRow]:
    """Return the gates that need no item, those of one verdict."""
    sizes = size_values(made) if isinstance(made, CheckpointManifest) else {}
    values = {**sizes, **timed.values, "gate/kl_items": 0.0}
    absent = without_speed(timed.reason)
    rows = []
    for number in sorted(wanted.at_once):
        gate = wanted.gates[number]
        checks = gate.checks(values)
        found = "pass" if all(check.passed for check in checks) else "fail"
        if found == verdict:
            by = "timing" if isinstance(gate, Gate) and gate.metric.startswith(SPEED) else "checkpoint"
            rows.append(_row(number, "; ".join(in_words(check, absent) for check in checks), found, by))
    return rows


def _row(number: int, reason: str, verdict: str, by: str, n: int = 0) -> GateRow:
    return GateRow(
        gate=number + 1,
        name=reason,
        verdict=verdict,  # type: ignore[arg-type]
        decided_after=None,
        by=by,  # type: ignore[arg-type]
        value=None,
        limit=None,
        n=n,
        reason=reason,
    )


def is_sure(policy: Policy, wanted: ItemPolicy, so_far: ChecksSoFar, order: Keys) -> bool:
    """Return whether more items can no longer change the verdict, at the error level."""
    verdicts = [so_far.of_gate(gate) for gate in range(len(wanted.gates)) if gate not in wanted.at_once]
    if "fail" in verdicts:
        return True
    seen = order[: so_far.n_items]
    enough = len(seen) >= policy.require.items and all(
        sum(name == task for name, _ in seen) >= fewest for task, fewest in policy.require.items_by_task.items()
    )
    return enough and all(verdict == "pass" for verdict in verdicts)


def verdict_of_gate(
    config: GateConfig,
    policy: Policy,
    wanted: ItemPolicy,
    so_far: ChecksSoFar,
    records: RunRecords,
    baseline: Baseline,
    made: Made,
    timed: TimedForGate,
    available: int,
    label: str,
    run: RunLink,
) -> GateVerdict:
    """Return the verdict: of the items so far, or of the fixed-n rule where all of them left a gate open."""
    decided_at_once = [row for found in ("pass", "fail") for row in at_once(wanted, made, timed, found)]
    rows = [*decided_at_once, *so_far.rows()]
    by_items = {gate: so_far.of_gate(gate) for gate in range(len(wanted.gates)) if gate not in wanted.at_once}
    failed = {row.gate for row in rows if row.verdict == "fail"}
    open_gates = [gate for gate, verdict in by_items.items() if verdict == "undecided"]
    all_used = so_far.n_items == available
    if all_used and open_gates and not failed:
        decided = _fixed_n(config, policy, wanted, records, baseline, open_gates)
        rows = [row for row in rows if row.gate - 1 not in open_gates] + decided
        failed = {row.gate for row in rows if row.verdict == "fail"}
    remarks = [timed.remark] if timed.remark else []
    anomalous = []
    if policy.anomalies.zero_kl and compresses(made.method) and _all_zero(so_far):
        anomalous.append(f"Anomalous: every KL is exactly 0, although method '{made.method}' changes weights.")
    passed = not failed and not anomalous
    share = f"{so_far.n_items} of {available} items"
    saved = "" if all_used else f" ({100 * (1 - so_far.n_items / available):.0f} % saved)"
    after = (
        "by the fixed-n rule after all items" if any(row.by == "all items" for row in rows) else f"after {share}{saved}"
    )
    names = "; ".join(row.reason or row.name for row in rows if row.verdict == "fail")
    why = "every gate passes" if passed else f"it fails {names}" if names else "it is anomalous"
    sentence = f"{made.label} {'passes' if passed else 'does not pass'}, {after}: {why}."
    if not passed and open_gates and not all_used:
        remarks.append("Gates that are undecided were not needed: one that fails is enough.")
    return GateVerdict(
        passed=passed,
        verdict=sentence,
        rows=tuple(sorted(rows, key=lambda row: row.gate)),
        items_used=so_far.n_items,
        items_available=available,
        error=config.error,
        seed=config.source.seed,
        policy_sha256=policy.sha256,
        policy=policy_yaml(policy),
        variant=made.label,
        baseline=label,
        baseline_run_id=baseline.run_id,
        remarks=(
            f"The baseline was {'evaluated now' if baseline.fresh else 'found in the store'}.",
            *anomalous,
            *remarks,
        ),
        run=run,
    )


def _all_zero(so_far: ChecksSoFar) -> bool:
    found = [
        value for name, values in so_far.values.items() if name.startswith("distance/kl_clipped") for value in values
    ]
    return bool(found) and max(found) <= 0.0


def _fixed_n(
    config: GateConfig,
    policy: Policy,
    wanted: ItemPolicy,
    records: RunRecords,
    baseline: Baseline,
    open_gates: list[int],
) -> list[GateRow]:
    """Return what a promotion would say of the gates that all items together have left open."""
    items = records.items
    assert items is not None
    keys = list(zip(items.column("task").tolist(), items.column("item_id").tolist(), strict=True))
    seed = config.source.seed
    inputs = MetricInputs(
        baseline=restricted(baseline.records, joined(keys)),
        variant=records,
        settings=MetricSettings(seed=seed, split_seed=seed),
    )
    results = compute_all(inputs)
    pooled = headline(results)
    values = {
        **{name: result.value for name, result in pooled.items()},
        **gate_values(pooled),
        **read(results, gates_of(policy).readings),
    }
    rows = []
    for number in open_gates:
        checks = wanted.gates[number].checks(values)
        verdict = "pass" if all(check.passed for check in checks) else "fail"
        rows.append(_row(number, "; ".join(check.reason for check in checks), verdict, "all items", len(keys)))
    return rows
