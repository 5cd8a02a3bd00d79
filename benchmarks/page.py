"""Seconds to build the page over variants, its size, and seconds until it is usable in headless Chromium.

Random lettered items with prompts of MMLU's length: 14,042 items x 8 variants, which must be usable in under 3 s;
20,000 items x 8, in under 5 MB; and 200 variants of 1,620 items, usable in under 3 s. Needs Chromium on the path.

    python benchmarks/page.py                    # prints one JSON line per page
    python benchmarks/page.py --forms            # the changed answers as JSON and as Parquet, compressed
"""

import argparse
import gzip
import io
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pyarrow as pa
import pyarrow.parquet as pq
from page_records import run_records

from mlflow_compress.decide.gates import RATIO, SIZE, gate_values, standard_gates
from mlflow_compress.decide.promotion import Candidate, decide
from mlflow_compress.decide.scoreboard import ScoredVariant, scoreboard
from mlflow_compress.decide.separation import item_scores
from mlflow_compress.metrics.core.metric_inputs import MetricInputs, MetricSettings, headline
from mlflow_compress.metrics.core.metric_registry import METRICS
from mlflow_compress.reporting.page.page_content import PageContent, PageVariant, changes_of, explorer_data
from mlflow_compress.reporting.page.variants_page import gate_texts, render_page
from tests.browser import browser

_METRICS = ("flips", "accuracy_delta", "divergence", "kl_clipped", "kl_concentration", "kl_items")
_BASE_BYTES = 16_000_000_000


def content(n_items: int, n_variants: int) -> tuple[PageContent, float]:
    """Return a page's content, and the seconds that the changed answers took."""
    baseline, records = run_records(n_items, n_variants)
    settings = MetricSettings(resamples=100)
    scored, shown, candidates, seconds = [], [], [], 0.0
    for number, record in enumerate(records):
        inputs = MetricInputs(baseline=baseline, variant=record, settings=settings)
        results = [result for name in _METRICS for result in METRICS.get(name).compute(inputs)]
        size = _BASE_BYTES * (0.6 - 0.4 * number / n_variants)
        sizes = {SIZE: size, RATIO: _BASE_BYTES / size, "size/bits_per_weight": 16 * size / _BASE_BYTES}
        name, pooled = f"random-{number:03d}", headline(results)
        own = ScoredVariant(
            name=name, method="rtn", run_id=f"{number:032x}", results=pooled, sizes=sizes, items=item_scores(inputs)
        )
        scored.append(own)
        started = time.perf_counter()
        changes = changes_of(baseline, record)
        seconds += time.perf_counter() - started
        shown.append(
            PageVariant(name=name, verdict=name, run_id=own.run_id or "", address="", results=results, changes=changes)
        )
        metrics = gate_values(pooled) | {key: result.value for key, result in pooled.items()} | sizes
        candidates.append(Candidate(name=name, run_id="", version=None, method="rtn", metrics=metrics))
    gates = standard_gates()
    board = scoreboard(scored, baseline="random", evaluation="0" * 16)
    by_name = {variant.name: variant for variant in shown}
    return (
        PageContent(
            board=board,
            decision=decide(candidates, gates),
            policy="the default policy",
            objective="size",
            gates=gate_texts(gates),
            variants=[by_name[row.name] for row in board.finished],
            items=baseline.items,
        ),
        seconds,
    )


def measure(n_items: int, n_variants: int, repeats: int) -> dict[str, object]:
    """Return sizes and seconds of one page; a fresh browser opens it each time."""
    found, changes_seconds = content(n_items, n_variants)
    started = time.perf_counter()
    page = render_page(found)
    render_seconds = time.perf_counter() - started
    usable, filtered = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        path.write_text(page, encoding="utf-8")
        for _ in range(repeats):
            with browser() as chromium:
                chromium.show(path.as_uri())
                usable.append(chromium.ready() / 1000)
                filtered.append(chromium.run(_FILTER) / 1000)
                assert chromium.errors == []
    return {
        "items": n_items,
        "variants": n_variants,
        "changed answers": sum(len(v.changes.changed.rows) for v in found.variants if v.changes),
        "bytes": len(page.encode()),
        "seconds, changed answers of all variants": round(changes_seconds, 2),
        "seconds, rendering": round(render_seconds, 2),
        "seconds until usable": statistics.median(usable),
        "seconds of one filter": round(statistics.median(filtered), 3),
        "peak MiB of building": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


# Chooses one variant in the explorer, and waits until its first cards are there.
_FILTER = """(async () => {
  const select = document.querySelector("#flip-filter select[name=variant]");
  const start = performance.now();
  select.value = select.options[select.options.length - 1].value;
  const count = document.querySelector("#flip-count").textContent;
  select.dispatchEvent(new Event("input", { bubbles: true }));
  while (document.querySelector("#flip-count").textContent === count) await new Promise((go) => setTimeout(go, 5));
  document.body.getBoundingClientRect();
  return performance.now() - start;
})()"""


def forms(n_items: int, n_variants: int) -> dict[str, int]:
    """Return the bytes of the changed answers in each form that was considered."""
    baseline, records = run_records(n_items, n_variants)
    assert baseline.items is not None
    data = explorer_data(baseline.items, {str(n): changes_of(baseline, r) for n, r in enumerate(records)})
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
    names = ("id", "task", "category", "prefix", "rest", "options", "gold", "accepted", "margin", "side")
    items = pa.Table.from_pylist([dict(zip(names, item, strict=True)) for item in data["items"]])
    sides = ("item", "kind", "kl", "side")
    listed = [dict(zip(sides, change, strict=True)) for own in data["changes"] for change in own]
    changes = pa.Table.from_pylist(listed)

    def parquet(compression: str, level: int) -> int:
        total = 0
        for table in (items, changes):
            out = io.BytesIO()
            pq.write_table(table, out, compression=compression, compression_level=level)
            total += out.tell()
        return total

    return {
        "JSON": len(text),
        "JSON, gzip": len(gzip.compress(text, 6)),
        "Parquet, gzip": parquet("gzip", 9),
        "Parquet, zstd": parquet("zstd", 19),
        "Parquet, brotli": parquet("brotli", 11),
    }


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--forms", action="store_true")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--pages", default="14042x8,20000x8,1620x200", help="items x variants, comma-separated")
    given = options.parse_args()
    for page_size in given.pages.split(","):
        n, variants = map(int, page_size.split("x"))
        print(json.dumps(forms(n, variants) if given.forms else measure(n, variants, given.repeats)), flush=True)
