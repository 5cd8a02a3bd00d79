"""The decision that `docs/how-to/promotion.md` explains line by line, made again from what the page's sweep measured.

`demo_decision.json` holds what the sweep of that section left: of every main run its tags and MLflow metrics, its pooled
results (`metrics.json`), which items it has right, and their KL. From these the section's `promote` decides here, and
must print the very lines of the page; the main job's table is made of the same results. The sweep is not repeated here,
because its last digits differ between processors; tests/docs runs the section's commands. To write the file and the
section's outputs again, run its commands in an empty folder, then ``python -m tests.golden.test_demo_decision FOLDER``
and ``python tools/write_demo_table.py``, and mend the numbers in the text that a test names.
"""

import base64
import contextlib
import io
import json
import os
import re
import shlex
import sys
from decimal import Decimal
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from mlflow.entities import Metric, Param, Run, RunData, RunInfo, RunTag

import mlflow_compress as mc
from mlflow_compress import cli
from mlflow_compress.commands.promote import run as promote
from mlflow_compress.commands.promote.run import headline_of
from mlflow_compress.commands.shared import scores
from mlflow_compress.commands.shared.named_models import read_manifest
from mlflow_compress.commands.shared.stored import metrics_file
from mlflow_compress.decide.gates import DELTA, FLIPS, GATE_DROP, GATE_FLIPS, KL, gate_values
from mlflow_compress.decide.scoreboard import Scoreboard, ScoredVariant, scoreboard
from mlflow_compress.decide.separation import ItemScores
from mlflow_compress.metrics.core.metric_registry import all_keys, headline_keys
from mlflow_compress.metrics.kl_tail import TOP_ITEM, TOP_PERCENT
from mlflow_compress.metrics.stats.intervals import paired_difference, share_interval
from mlflow_compress.reporting.headline import headline_table
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.evaluations import evaluations
from mlflow_compress.tracking.store import RESOLVED
from mlflow_compress.tracking.tracker import Tracker
from tests.docs.blocks import DOCS, ROOT, Block, blocks_of

sys.path.append(str(ROOT / "tools"))

import write_demo_table
from write_demo_table import pooled

STORED = Path(__file__).with_name("demo_decision.json")
PAGE = DOCS / "how-to" / "promotion.md"
HEAD = "## A decision, line by line"
TABLE_OF = "gptq-4bit-g128"  # the page shows its table
TAGS = (
    run_names.BASE_MODEL,
    run_names.BASE_WEIGHTS,
    run_names.CHECKPOINT_SHA256,
    run_names.EVALUATION,
    run_names.METHOD,
    run_names.SERVED_BY,
    run_names.VARIANT,
)
PARAMS = ("calibration", f"{RESOLVED}calibration")
CACHES = ("base_cache_bytes_per_token", "cache_bytes_per_token")  # Not in what was stored before they were measured
SIZES = ("base_size_bytes", "size_bytes", "size_ratio", "bits_per_weight", "sparsity", *CACHES)
ROWS = {  # of the main job's table
    "gate/kl_clipped_upper": "KL per item, clipped (nats)",
    "gate/kl_above_clip_pct_upper": "Items above the clip",
    GATE_FLIPS: "Answers flipped",
    GATE_DROP: "Accuracy",
}
NUMBER = r"\d(?:[\d,]*\d)?(?:\.\d+)?(?:e-\d+)?"


def section() -> str:
    return PAGE.read_text().partition(f"\n{HEAD}\n")[2].partition("\n## ")[0]


def blocks(mark: str) -> list[Block]:
    return [block for block in blocks_of(PAGE) if mark in block.marks and block.text in section()]


@cache
def stored() -> dict[str, Any]:
    return json.loads(STORED.read_text())


def bits(text: str) -> Any:
    """Return 0 and 1 per item from hexadecimal digits, shape (n_items,)."""
    return np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8), count=stored()["items"]).astype(float)


def scored(variant: dict[str, Any]) -> ScoredVariant:
    right, n = bits(variant["right"]), stored()["items"]
    items = ItemScores(
        task=np.full(n, "demo", dtype=object),
        item_id=np.arange(n).astype(str).astype(object),
        correct=right,
        kl=np.frombuffer(base64.b64decode(variant["kl"]), np.float32).astype(float),
        flipped=np.abs(right - bits(stored()["baseline_right"])),
        group=np.arange(n),
    )
    tags = variant["tags"]
    return ScoredVariant(
        name=tags[run_names.VARIANT], method=tags[run_names.METHOD], run_id=variant["run_id"], items=items
    )


def run_of(variant: dict[str, Any]) -> Run:
    data = RunData(
        metrics=[Metric(name, value, 0, 0) for name, value in variant["metrics"].items()],
        params=[Param(name, value) for name, value in variant["params"].items()],
        tags=[RunTag(name, value) for name, value in variant["tags"].items()],
    )
    return Run(RunInfo(variant["run_id"], "1", "", "FINISHED", 0, 1, "active"), data)


def decided() -> str:
    """Return what the section's `promote` prints where the store holds the stored runs, and nobody has the alias."""
    variants = {variant["run_id"]: variant for variant in stored()["variants"]}

    def board(tracker: Any, run_ids: list[str]) -> Scoreboard:
        return scoreboard([scored(variants[run_id]) for run_id in run_ids], baseline="demo", evaluation=None)

    tracker = SimpleNamespace(
        find_finished=lambda stage, **tags: [run_of(variant) for variant in variants.values()],
        child_ids=lambda run_id: {"evaluate": run_id},
        fetch_json=lambda run_id, name: metrics_file(pooled(variants[run_id]).values()),
        note_given_run=lambda name, note: None,
    )
    [command] = [line for block in blocks("run") for line in block.text.splitlines() if " promote " in line]
    output = io.StringIO()
    with (
        mock.patch.multiple(
            promote,
            Tracker=lambda experiment: tracker,
            score_runs=board,
        ),
        mock.patch.multiple(
            promote.model_registry,
            planned_model=lambda *_: ("demo", None),
            holder=lambda *_: None,
            versions_by_run=lambda *_: {},
        ),
        mock.patch("mlflow_compress.commands.promote.command.require_tag"),  # there is no store on disk
        contextlib.redirect_stdout(output),
    ):
        assert cli.main(shlex.split(command)[1:]) == 0
    return output.getvalue()


def table(variant: dict[str, Any]) -> str:
    """Return the table that the main job of a variant prints."""
    return headline_table(pooled(variant), SimpleNamespace(**dict.fromkeys(SIZES) | variant["sizes"])) + "\n"  # type: ignore[arg-type]


def by_hand() -> str:
    """Return what the section's Python prints."""
    [block] = [block for block in blocks("run") if block.language == "python"]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(block.text, PAGE.name, "exec"), {})
    return output.getvalue()


def printed() -> list[str]:
    """Return what the section's commands print."""
    [of_page] = [variant for variant in stored()["variants"] if variant["tags"][run_names.VARIANT] == TABLE_OF]
    return [decided(), table(of_page), by_hand()]


def test_the_page_shows_what_is_printed_and_no_other_number() -> None:
    assert [block.text for block in blocks("printed")] == printed()
    text = section()
    for block in blocks("run") + blocks("printed"):
        text = text.replace(block.text, "")
    there = set(re.findall(NUMBER, "\n".join(block.text for block in blocks("run") + blocks("printed"))))
    assert [number for number in re.findall(NUMBER, text) if number not in there] == []


@pytest.mark.parametrize("page", write_demo_table.PAGES, ids=lambda page: page.name)
def test_the_table_of_the_readme_and_of_the_docs_is_that_of_the_same_runs(page: Path) -> None:
    assert write_demo_table.with_table(page.read_text()) == page.read_text(), "run tools/write_demo_table.py"


def test_what_is_computed_by_hand_is_what_is_decided_and_every_line_is_explained() -> None:
    assert [line for line in by_hand().splitlines() if line not in decided()] == []
    # A line is explained where the text quotes its beginning as code.
    quoted = [quote for quote in re.findall(r"`([^`\n]+)`", section()) if len(quote) > len("dry run")]
    for line in filter(None, decided().splitlines()):
        assert any(line.strip().startswith(quote) for quote in quoted), line


@pytest.mark.parametrize("number", range(6))
def test_items_results_gates_and_table_agree(number: int) -> None:
    variant = stored()["variants"][number]
    results, metrics, items = pooled(variant), variant["metrics"], scored(variant).items
    n, before = stored()["items"], bits(stored()["baseline_right"])
    lost, gained = (int(((before - items.correct) == sign).sum()) for sign in (1, -1))
    flips, delta, kl = (results[name] for name in (FLIPS, DELTA, KL))
    assert (flips.low, flips.high) == pytest.approx([100 * end for end in share_interval(lost + gained, n)])
    assert (delta.low, delta.high) == pytest.approx(paired_difference(gained, lost, n))
    assert kl.value == pytest.approx(items.kl.mean())
    assert {name: metrics[name] for name in (FLIPS, DELTA, KL)} == {r.name: r.value for r in (flips, delta, kl)}
    gates = gate_values(results)
    assert gates == {name: value for name, value in metrics.items() if name.startswith("gate/")}
    # Rounded, they are what the row of the main job's table shows in the brackets, as the page says.
    for gate, label in ROWS.items():
        if gate in gates:
            [line] = [line for line in table(variant).splitlines() if line.startswith(f"{label}  ")]
            low, high = map(Decimal, re.findall(r"\[(\S+), (\S+)\]", line)[0])
            end = -low if label == "Accuracy" else high
            assert Decimal(gates[gate]).quantize(end) == end, line


@pytest.mark.parametrize(("gate", "label"), ROWS.items())
def test_the_page_names_the_row_of_each_gate(gate: str, label: str) -> None:
    [row] = [line for line in section().splitlines() if f"`{gate}`" in line]
    assert f'"{label}"' in row


def write(folder: Path) -> None:
    """Write the stored file from a folder in which the section's commands were run, and the section's outputs."""
    os.chdir(folder)
    tracker = Tracker("auto")
    [group] = evaluations(tracker, "demo")
    wanted = {TOP_ITEM.name, TOP_PERCENT.name}
    for declared in all_keys().values():
        if declared.gate is not None or declared in headline_keys():
            wanted |= {declared.name, f"{declared.name}_baseline", declared.difference or "", declared.floor or ""}
    baselines: dict[str, Any] = {}
    variants = []
    for one in group.variants:
        run = one.run
        items = scores._items(tracker, tracker.children(run.info.run_id)["evaluate"], baselines)
        assert items is not None and len(set(items.group.tolist())) == len(items.group)
        before = np.abs(items.correct - items.flipped)
        results = [r for r in headline_of(tracker, run.info.run_id).values() if r.name in wanted]
        manifest = read_manifest(run.data.tags[run_names.CHECKPOINT])
        variants.append(
            {
                "run_id": run.info.run_id,
                "tags": {name: run.data.tags[name] for name in TAGS},
                "params": {name: run.data.params[name] for name in PARAMS if name in run.data.params},
                "metrics": run.data.metrics,
                "sizes": {name: getattr(manifest, name) for name in SIZES},
                "results": [[r.name, r.value, r.low, r.high, r.n, r.n_unscored, r.p] for r in results],
                "right": np.packbits(items.correct.astype(bool)).tobytes().hex(),
                "kl": base64.b64encode(items.kl.astype(np.float32).tobytes()).decode(),
            }
        )
    found = {"items": len(before), "baseline_right": np.packbits(before.astype(bool)).tobytes().hex()}
    lines = ",\n".join(json.dumps(variant) for variant in variants)
    STORED.write_text(f'{json.dumps(found)[:-1]}, "variants": [\n{lines}\n]}}\n')
    for block, text in zip(blocks("printed"), printed(), strict=True):
        PAGE.write_text(PAGE.read_text().replace(f"```{block.head}\n{block.text}```", f"```{block.head}\n{text}```"))


if __name__ == "__main__":
    write(Path(sys.argv[1]))


NUMBERS = Path(__file__).parent / "demo_rtn.json"
# Measured, not derived: what rounding does to a log-probability is bounded in test_demo_records.py, but where two answers
# or ranks are nearly alike a share moves by a whole token, and an end of its interval by a step: by 9e-4 of itself at
# most, with the default kernels as with AVX-512. The distance of the demo from itself is nothing but rounding.
RELATIVE, ABSOLUTE = 1e-3, 1e-6


@pytest.mark.ci
def test_every_number_of_a_demo_run_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    before = {(name, task, category): rest for name, task, category, *rest in json.loads(NUMBERS.read_text())}
    found = mc.evaluate(mc.compress("demo", "rtn", bits=4, store=tmp_path), store=tmp_path).results
    now = {(r.name, r.task, r.category): [r.value, r.low, r.high, r.n, r.n_unscored] for r in found}
    assert now.keys() == before.keys()
    for key, (value, low, high, n, n_unscored) in before.items():
        assert now[key][3:] == [n, n_unscored], key
        assert now[key][:3] == [
            x if x is None else pytest.approx(x, rel=RELATIVE, abs=ABSOLUTE) for x in (value, low, high)
        ], key
