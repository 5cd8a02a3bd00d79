"""The pruning curve: answers flip long before accuracy shows it, over layers dropped and over Wanda's ratio.

Every point is a real run: the demonstration model is pruned, its 1,320 lettered questions (5 shots) are answered, and
the answers are compared with the unpruned model's. Points that the file of rows already holds are not run again.

Example
-------
python benchmarks/pruning_curve.py --rows benchmarks/pruning_curve.jsonl --figure benchmarks/pruning_curve.png
"""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from mlflow_compress import demo
from mlflow_compress.commands.evaluate.outputs import run_model
from mlflow_compress.compression import compress_model, method_config
from mlflow_compress.items.suite import Suite, load_suite
from mlflow_compress.items.task import TaskSettings
from mlflow_compress.metrics.core.answer_files import compare_records
from mlflow_compress.models.loading import LoadConfig, load_model
from mlflow_compress.records import RunRecords
from mlflow_compress.scoring.engine import Scorer, ScoringConfig

POINTS = [
    *(("layer-drop", "layers", str(n)) for n in range(1, 5)),
    *(("layer-drop-angular", "layers", str(n)) for n in range(1, 5)),
    *(("wanda", "sparsity", f"0.{tenth}") for tenth in range(1, 9)),
]
PANELS = {
    "layer-drop": "last layers dropped (of 5)",
    "layer-drop-angular": "layers dropped by angular distance (of 5)",
    "wanda": "Wanda: share of zeros",
}


def lettered_questions() -> Suite:
    """Return the demo's lettered questions alone."""
    settings = TaskSettings(num_fewshot=5, num_shuffles=0, seed=42, limit=0)
    suite = load_suite("demo", model="demo", settings=settings)
    return dataclasses.replace(suite, tasks=[t for t in suite.tasks if t.family == "lettered"], corpora=[])


def answers(folder: Path, suite: Suite) -> RunRecords:
    """Let the model in a folder answer."""
    scorer = Scorer(load_model(LoadConfig(path=str(folder), device="cpu")), ScoringConfig())
    return run_model(scorer, suite, generations=False)


def run_missing(rows: Path) -> list[dict[str, Any]]:
    """Run every point that is not in the file yet, append it, and return all."""
    known = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    missing = [point for point in POINTS if not any(point == (r["method"], r["setting"], r["value"]) for r in known)]
    if not missing:
        return known
    suite = lettered_questions()
    baseline = answers(demo.MODEL_DIR, suite)
    calibration = [(demo.DATA_DIR / "calibration.txt").read_text()]
    for method, setting, value in missing:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out"
            settings = method_config(method, **{setting: value})
            manifest = compress_model(str(demo.MODEL_DIR), method, settings, calibration, out)
            found = compare_records(baseline, answers(out, suite))
        kept = ("n", "accuracy_baseline", "accuracy_variant", "accuracy_variant_interval")
        kept = (*kept, "flips_pct", "flips_pct_interval", "all_flips_pct", "mcnemar_p")
        row = {"method": method, "setting": setting, "value": value, "sparsity": manifest.sparsity}
        known.append({**row, **{name: found[name] for name in kept}})
        with rows.open("a") as sink:
            sink.write(json.dumps(known[-1]) + "\n")
        print(
            f"{manifest.label}: accuracy {found['accuracy_variant']:.3f}, flips {found['flips_pct']:.1f} %", flush=True
        )
    return known


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw one panel a method: accuracy and flips with their 95 % intervals, in percent."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(PANELS), figsize=(13, 3.8), sharey=True, layout="constrained")
    for panel, (method, title) in zip(panels, PANELS.items(), strict=True):
        mine = sorted((row for row in rows if row["method"] == method), key=lambda row: float(row["value"]))
        x = [0.0, *(float(row["value"]) for row in mine)]
        before = 100 * rows[0]["accuracy_baseline"]
        accuracy = [before, *(100 * row["accuracy_variant"] for row in mine)]
        flips = [0.0, *(row["flips_pct"] for row in mine)]
        low, high = zip(*(row["accuracy_variant_interval"] for row in mine), strict=True)
        panel.fill_between(x[1:], [100 * v for v in low], [100 * v for v in high], color="tab:blue", alpha=0.15, lw=0)
        low, high = zip(*(row["flips_pct_interval"] for row in mine), strict=True)
        panel.fill_between(x[1:], low, high, color="tab:red", alpha=0.15, lw=0)
        panel.plot(x, accuracy, "o-", color="tab:blue", label="accuracy")
        panel.plot(x, flips, "s--", color="tab:red", label="answers flipped")
        panel.axhline(before, color="tab:blue", lw=0.8, ls=":")
        panel.set_xlabel(title)
        panel.set_ylim(0, 100)
    panels[0].set_ylabel(f"percent of {rows[0]['n']} questions")
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run what is missing and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines, one a point; new points are appended")
    parser.add_argument("--figure", type=Path, required=True, help="PNG or SVG to write")
    arguments = parser.parse_args()
    draw(run_missing(arguments.rows), arguments.figure)


if __name__ == "__main__":
    main()
