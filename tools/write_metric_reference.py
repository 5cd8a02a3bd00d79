"""Write docs/reference/metrics.md from the registry of metrics: what each number is, its unit, bounds and source.

Run it after a metric is new or changed; a test compares.
"""

import inspect
import math
from pathlib import Path

from mlflow_compress.metrics import METRICS, Metric, MetricKey

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "metrics.md"

HEAD = """# Metric reference

<!-- Written by tools/write_metric_reference.py from the registry of metrics. Do not edit. -->

Every number that a run may show, by the metric that computes it. The name is the key in MLflow. "Better" says which
way is better for the variant. Bounds are checked: a value outside them stops the run. Values by task and category have
the same name with the task (and the category) after a slash.
"""


def _bound(value: float) -> str:
    if math.isinf(value):
        return "no limit" if value > 0 else "no lower limit"
    return f"{value:.4g}"


def _row(key: MetricKey) -> str:
    cells = (
        f"`{key.name}`",
        key.unit,
        key.direction if key.direction != "neither" else "",
        f"{_bound(key.low)} to {_bound(key.high)}",
        key.meaning.replace("|", "\\|"),
    )
    return f"| {' | '.join(cells)} |"


def section(name: str, metric: Metric) -> str:
    """Return one metric: its docstring, its source, what it requires, and a table of its keys."""
    lines = [
        f"## {name}",
        "",
        inspect.getdoc(metric.function) or "",
        "",
        f"Source: {metric.source}.",
        "",
        "Requires: " + ", ".join(f"`{requirement}`" for requirement in metric.requires) + ".",
        "",
        "| name | unit | better | bounds | meaning |",
        "| --- | --- | --- | --- | --- |",
        *map(_row, metric.keys),
    ]
    return "\n".join(lines)


def reference() -> str:
    """Return the whole page."""
    return "\n".join([HEAD, "\n\n".join(section(name, metric) for name, metric in METRICS.items()), ""])


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(reference())
