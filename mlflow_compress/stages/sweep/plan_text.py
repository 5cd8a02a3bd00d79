"""The plan of a sweep as text: what is made, what it costs, what is left out and why."""

from __future__ import annotations

from mlflow_compress.reporting.numbers import bytes_text
from mlflow_compress.results import PlannedVariant, SweepPlan
from mlflow_compress.stages.main_run.progress import duration


def plan_text(plan: SweepPlan) -> str:
    """Return one line per variant, then the sums, then the combinations that are not made."""
    rows = [("variant", "time", "size"), *(_row(plan, variant) for variant in plan.variants)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [f"{plan.summary}; evaluation {plan.evaluation[:8]}", ""]
    lines += [f"{name:<{widths[0]}}  {time:>{widths[1]}}  {size:>{widths[2]}}" for name, time, size in rows]
    lines += ["", *_sums(plan)]
    lines += ["", "Not made:", *(f"- {name}: {why}" for name, why in plan.left_out.items())] if plan.left_out else []
    return "\n".join(lines)


def _row(plan: SweepPlan, variant: PlannedVariant) -> tuple[str, str, str]:
    time = "unknown" if variant.seconds is None else f"about {duration(variant.seconds)}"
    size = bytes_text(int(plan.base_size_bytes if variant.size_bytes is None else variant.size_bytes))
    on_disk = f"{'at most' if variant.size_bytes is None else 'about'} {size}" if variant.size_bytes != 0 else "served"
    return (
        variant.name,
        time if variant.finished_run is None else f"finished, run {variant.finished_run[:8]}",
        on_disk,
    )


def _sums(plan: SweepPlan) -> list[str]:
    if not plan.to_do:
        return ["Nothing to do: every variant is finished."]
    n_unknown = sum(1 for variant in plan.to_do if variant.seconds is None)
    known = sum(variant.seconds or 0.0 for variant in plan.to_do)
    if not n_unknown:
        time = f"about {duration(known)}, as in earlier runs of this store"
    elif n_unknown == len(plan.to_do):
        time = "unknown: the store has no finished run of these methods on this evaluation"
    else:
        time = (
            f"about {duration(known)}, and that of {n_unknown} {'variant' if n_unknown == 1 else 'variants'} is unknown"
        )
    copies = "the checkpoints, and a copy of each with its model" if plan.copies == 2 else "the checkpoints"
    return [f"Time: {time}.", f"Disk: about {bytes_text(int(plan.disk_bytes))} ({copies}; records are not counted)."]
