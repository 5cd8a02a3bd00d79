"""Write the table of the demo's variants into README and documentation, from the stored results of its runs.

They are those of "A decision, line by line" (`tests/golden/test_demo_decision.py` stores them), so that README,
documentation and the printed decision have the same figures. A test fails while they differ.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow_compress.decide.gates import DELTA, FLIPS, KL
from mlflow_compress.metrics.kl_tail import CLIPPED_KL, shows_clipped
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting import numbers
from mlflow_compress.reporting.verdict import answer_by_default

ROOT = Path(__file__).resolve().parents[1]
STORED = ROOT / "tests" / "golden" / "demo_decision.json"
PAGES = (ROOT / "README.md", ROOT / "docs" / "explanation" / "why-flips.md")
BEGIN, END = "<!-- demo: written by tools/write_demo_table.py -->", "<!-- end of demo -->"
SHOWN = ("gptq-8bit-g128", "hqq-4bit-g64", "gptq-4bit-g128", "hqq-3bit-g64", "gptq-3bit-g128")
HEAD = ("variant", "size", "accuracy", "answers flipped", "KL (nats)", "the default policy")


def pooled(variant: Mapping[str, Any]) -> dict[str, MetricResult]:
    """Return the headline results of a stored variant."""
    return {
        row[0]: MetricResult(row[0], *row[1:4], n=row[4], n_unscored=row[5], p=row[6]) for row in variant["results"]
    }


def _row(variant: Mapping[str, Any]) -> list[str]:
    found, ratio = pooled(variant), variant["sizes"]["size_ratio"]
    clipped = shows_clipped(found)
    kl = numbers.interval_text(found[CLIPPED_KL.name if clipped else KL], numbers.NATS, difference=False)
    name = variant["tags"]["variant"]
    return [
        f"`{name}`",
        numbers.ratio_text(ratio),
        numbers.interval_text(found[DELTA], numbers.SHARE, difference=True),
        numbers.interval_text(found[FLIPS], numbers.PERCENT, difference=False),
        f"{kl}, clipped" if clipped else kl,
        f"**{answer_by_default(name, found, size_ratio=ratio).text()}**",
    ]


def with_table(text: str) -> str:
    """Return a page's text with the table between its marks."""
    before, rest = text.split(BEGIN)
    variants = {one["tags"]["variant"]: one for one in json.loads(STORED.read_text())["variants"]}
    rows = [list(HEAD), ["---"] * len(HEAD), *(_row(variants[name]) for name in SHOWN)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_table(page.read_text()))
