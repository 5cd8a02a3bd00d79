"""Results as text for a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow_compress.commands.compare.result import Comparison
    from mlflow_compress.commands.diagnose.result import Diagnosis
    from mlflow_compress.commands.evaluate.result import AnswerEvaluation, Evaluation
    from mlflow_compress.commands.gate.result import GateVerdict
    from mlflow_compress.commands.main.result import VariantRun
    from mlflow_compress.commands.plan.result import CostPlan
    from mlflow_compress.commands.promote.result import AliasHistory, Promotion, Rollback
    from mlflow_compress.commands.quantize.result import CompressedModel
    from mlflow_compress.commands.rate.result import BlindSheet, HumanRatings
    from mlflow_compress.commands.report.result import VariantsReport
    from mlflow_compress.commands.resume.result import Resumed
    from mlflow_compress.commands.search.result import Search
    from mlflow_compress.commands.shared.listing import Listing
    from mlflow_compress.commands.speed.result import SpeedMeasurement
    from mlflow_compress.commands.sweep.result import Sweep, SweepPlan
    from mlflow_compress.config import Policy
    from mlflow_compress.tracking.store import RunLink


def _where(run: RunLink | None) -> list[str]:
    return [run.how_to_open] if run is not None and run.how_to_open else []


def compressed_text(found: CompressedModel) -> str:
    """Return size and cost, and where the checkpoint lies."""
    return "\n".join([found.summary, f"Checkpoint: {found.folder}", *_where(found.run)])


def evaluation_text(found: Evaluation) -> str:
    """Return the verdict, and where the records came from."""
    source = "found in the store" if found.baseline_found else "evaluated now"
    lines = [found.summary, f"Baseline run {found.baseline_run_id} ({source})."]
    if found.variant_found_in is not None:
        lines.append(f"Records of the variant: found in run {found.variant_found_in}.")
    return "\n".join([*lines, *_where(found.run)])


def answers_text(found: AnswerEvaluation) -> str:
    """Return the headline values, one per line, what the judgments took, and what was left out."""
    from mlflow_compress.reporting.answers_page import account_rows

    lines = [f"{name} {result.value:.4f}" for name, result in found.pooled.items()]
    lines += [f"{name}: {text}" for name, text in account_rows(found.account)]
    return "\n".join([*lines, *([found.skipped] if found.skipped else []), *_where(found.run)])


def speed_text(found: SpeedMeasurement) -> str:
    """Return the ratios in one line, then every value, and where to look."""
    lines = [found.summary, *(f"{name} {result.value:.4g}" for name, result in found.pooled.items())]
    lines += [f"{name} {value:.4g}" for name, value in found.values.items()]
    return "\n".join([*lines, *_where(found.run)])


def variant_text(found: VariantRun) -> str:
    """Return the verdict, the headline table, and where to look."""
    from mlflow_compress.reporting.headline import headline_table

    table = headline_table(
        found.pooled,
        found.manifest,
        gates=found.gates,
        n_truncated=found.n_truncated,
        failed_stages=found.failed,
    )
    return "\n\n".join([found.verdict, table, *_where(found.run)])


def promotion_text(found: Promotion) -> str:
    """Return what happened to the alias, what competed, and every candidate with its reasons."""
    lines = [found.verdict, *found.remarks, ""]
    for outcome in found.decision.outcomes:
        sign = f"{outcome.rank}." if outcome.rank else " -"
        items = "" if outcome.candidate.items is None else f" ({outcome.candidate.items} items)"
        lines.append(f"{sign} {outcome.candidate.name}{items}: {'; '.join(outcome.reasons)}")
    return "\n\n".join(["\n".join(lines), *_where(found.run)])


def rollback_text(found: Rollback) -> str:
    """Return who has the alias again."""
    return "\n\n".join([found.verdict, *_where(found.run)])


def history_text(found: AliasHistory) -> str:
    """Return one line per move of the alias, newest first."""
    heads = ("since (UTC)", "version", "variant", "by", "run", "policy")
    rows = [
        (t.since[:19], t.version, t.variant, t.by, t.run_id[:8], "" if t.policy_sha256 is None else t.policy_sha256[:8])
        for t in found.tenures
    ]
    return "\n".join([f"{found.summary}.", *found.remarks, "", *_aligned([heads, *rows])])


def gate_text(found: GateVerdict) -> str:
    """Return the verdict, one line per check, and what else there is to say."""
    lines = [found.verdict, *found.remarks, ""]
    for row in found.rows:
        after = "" if row.decided_after is None else f", after {row.decided_after} items"
        value = "" if row.value is None else f": {row.value:.4g} on {row.n} items"
        lines.append(f"{row.gate}. {row.verdict}: {row.reason or row.name}{value}{after}")
    return "\n\n".join(["\n".join(lines), *_where(found.run)])


def policy_text(policy: Policy) -> str:
    """Return a policy as YAML with comments, and its hash as the last one."""
    from mlflow_compress.config import policy_yaml
    from mlflow_compress.decide.policy_gates import gates_of

    gates_of(policy)  # refuses metrics that do not exist
    return f"{policy_yaml(policy)}# sha256 {policy.sha256}"


def report_text(found: VariantsReport) -> str:
    """Return the scoreboard, and where the page lies."""
    from mlflow_compress.reporting.scoreboard_text import scoreboard_text

    return "\n".join([found.summary, "", scoreboard_text(found.board), "", f"Report: {found.path}"])


def blind_text(found: BlindSheet) -> str:
    """Return how many pairs there are, and who gets which file."""
    return "\n".join([found.summary, *_aligned([(f"For {row['for']}:", row["file"]) for row in found.to_rows()])])


def ratings_text(found: HumanRatings) -> str:
    """Return the win rate, one line per result, and what is missing."""
    rows = [
        (
            f"{result.name}{f' ({result.task})' if result.task else ''}",
            f"{result.value:.3f}",
            "" if result.low is None else f"[{result.low:.3f}, {result.high:.3f}]",
            f"n {result.n}",
        )
        for result in found.results
        if result.category is None
    ]
    lines = [f"{found.summary}.", "", *_aligned(rows)]
    if found.n_identical:
        lines.append(f"{found.n_identical} pairs of identical answers are ties of every rater.")
    lines += [f"{rater} has not rated {n} of the pairs." for rater, n in found.missing.items() if n]
    return "\n\n".join(["\n".join(lines), *_where(found.run)])


def sweep_text(found: Sweep | SweepPlan) -> str:
    """Return the plan of a dry run; of a sweep what was found, the scoreboard, and where to look."""
    from mlflow_compress.commands.sweep.plan import sweep_plan_text
    from mlflow_compress.commands.sweep.result import Sweep

    if not isinstance(found, Sweep):
        return sweep_plan_text(found)
    return "\n\n".join([found.found, found.text, *_where(found.run)])


def comparison_text(comparison: Comparison) -> str:
    """Return accuracy of both, the difference, flips, and McNemar's test."""
    found = comparison.found
    low, high = (100 * bound for bound in found["accuracy_delta_interval"])
    flips_low, flips_high = found["flips_pct_interval"]
    w2w = "" if found["w2w"] is None else f", wrong to another wrong {found['w2w']}"
    accuracies = f"{100 * found['accuracy_baseline']:.2f} % -> {100 * found['accuracy_variant']:.2f} %"
    lines = [
        f"items      {found['n']}"
        + (f" ({found['n_unscored']} more without an answer)" if found["n_unscored"] else ""),
        f"accuracy   {accuracies}, difference {100 * found['accuracy_delta']:+.2f} points [{low:+.2f}, {high:+.2f}]",
        f"flips      {found['flips_pct']:.2f} % [{flips_low:.2f}, {flips_high:.2f}]: "
        f"right to wrong {found['c2w']}, wrong to right {found['w2c']}{w2w}",
        f"McNemar    p = {found['mcnemar_p']:.4g}",
    ]
    if found["all_flips_pct"] is not None:
        lines.insert(3, f"all flips  {found['all_flips_pct']:.2f} %")
    if found.get("rule"):
        lines.append(f"scored by  {found['rule']}")
    return "\n".join(lines)


def comparison_json(comparison: Comparison) -> str:
    """Return the comparison as one JSON object."""
    return json.dumps(comparison.to_dict(), allow_nan=False)


def resumed_text(found: Resumed) -> str:
    """Return the commands that had not ended, and what became of each."""
    lines = [f"{one.state}: {one.command}" + (f"\n  {one.outcome}" if one.outcome else "") for one in found.commands]
    return "\n".join([*lines, f"{found.summary}."])


def listing_text(found: Listing) -> str:
    """Return a table with aligned columns."""
    return "\n".join(_aligned([found.columns, *found.rows]))


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]) - 1)]
    return ["  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in table]


def search_text(found: Search) -> str:
    """Return the finding, every variant with the linear mix of its size, and how to read that."""
    from mlflow_compress.reporting.search_tables import search_table

    notes = [f"- {note}." for note in found.notes]
    return "\n\n".join(
        [f"{found.summary}.", "\n".join(search_table(found.to_rows()).lines()), "\n".join(notes), *_where(found.run)]
    )


def plan_text(found: CostPlan) -> str:
    """Return one line per stage, the sums, and what the figures assume."""
    from mlflow_compress.commands.shared.progress import duration
    from mlflow_compress.reporting.numbers import bytes_text

    def sized(n: float) -> str:
        return bytes_text(round(n))

    def known(value: float | None, text: Callable[[float], str]) -> str:
        return "unknown" if value is None else text(value)

    priced = any(stage.dollars is not None for stage in found.stages)
    heads = ("stage", "times", "tokens", "unshared", "operations", "read", "written", "memory", "time")
    rows = [
        (
            s.stage,
            str(s.times),
            f"{s.tokens:,}",
            f"{s.tokens_unshared:,}",
            known(s.operations, "{:.2e}".format),
            sized(s.bytes_read),
            sized(s.bytes_written),
            sized(s.memory),
            known(s.seconds, duration),
            *([known(s.dollars, "${:,.2f}".format)] if priced else []),
        )
        for s in found.stages
    ]
    lines = [f"{found.summary}.", "", *_aligned([(*heads, *(["dollars"] if priced else [])), *rows]), ""]
    lines.append(
        f"All stages: {known(found.seconds, duration)}. States of the baseline: {sized(found.states_bytes)}. "
        f"One checkpoint: {sized(found.checkpoint_bytes)}."
    )
    return "\n".join([*lines, *(f"- {note}." for note in found.notes)])


def diagnosis_text(found: Diagnosis) -> str:
    """Return the groups that move most, and the controls."""
    from mlflow_compress.reporting.diagnosis_page import control_rows, kl_text, ratio_of

    groups = sorted(found.found.groups, key=lambda group: -group.kl.value)[:10]
    width = max(len(group.name) for group in groups)
    lines = [found.summary, "", f"{'group':<{width}}  KL per token (nats)"]
    for group in groups:
        noise = ratio_of(group.against_noise)
        lines.append(f"{group.name:<{width}}  {kl_text(group.kl)}{f'; {noise} x noise of its size' if noise else ''}")
    if (more := len(found.found.groups) - len(groups)) > 0:
        lines.append(f"({more} more in groups.csv)")
    lines += ["", *(f"{name}: {value}" for name, value in control_rows(found.found))]
    return "\n".join([*lines, "", *_where(found.run)])


BY_COMMAND: dict[str, Callable[[Any], str]] = {
    "main": variant_text,
    "quantize": compressed_text,
    "evaluate": evaluation_text,
    "judge": answers_text,
    "diagnose": diagnosis_text,
    "speed": speed_text,
    "promote": promotion_text,
    "rollback": rollback_text,
    "history": history_text,
    "gate": gate_text,
    "plan": plan_text,
    "report": report_text,
    "resume": resumed_text,
    "sweep": sweep_text,
    "search": search_text,
    "blind": blind_text,
    "ratings": ratings_text,
    "methods": listing_text,
    "tasks": listing_text,
}
"""How the result of each command is shown."""
