"""What a diagnosis leaves in its run: metrics, tables, figures, the page, and the distances of every swap."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from pathlib import Path

from mlflow_compress import atomic
from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest
from mlflow_compress.config import DiagnoseConfig, as_text
from mlflow_compress.metrics.diagnosis.diagnosis_summary import GroupsFound
from mlflow_compress.records import SwapDistances
from mlflow_compress.results import Diagnosis
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.shared_store.live_processes import scratch_folder
from mlflow_compress.tracking.store import OpenRun, Store

_MOST_KINDS = 8
PREFIX = "diagnose"


def logged_params(config: DiagnoseConfig) -> dict[str, str]:
    """Return the parameters of the measuring. Those of the compression are logged by it, with "auto" resolved."""
    text = as_text(config)
    groups = (config.evaluation, config.diagnosis, config.inference)
    names = ["model", *(name for group in groups for name in type(group).model_fields)]
    return {name: text[name] for name in names}


def diagnosis_values(diagnosis: Diagnosis) -> dict[str, float]:
    """Return the metrics of the run, all below one prefix and fewer than 50, whatever the model."""
    found = diagnosis.found
    values = {
        "kl": found.whole.value,
        "kl_together": found.together.value,
        "kl_no_swap": found.no_swap,
        "kl_sum_of_groups": found.sum_of_parts,
        "kl_largest_group": found.largest.kl.value,
        "groups": len(found.groups),
        "groups_without_noise_control": sum(group.no_noise is not None for group in found.groups),
        "texts": found.n_texts,
        "tokens": found.whole.n,
        "seconds": round(diagnosis.seconds, 2),
    }
    for name, result in (("kl", found.whole), ("additivity", found.additivity), ("against_noise", found.noise_ratio)):
        if result is not None:
            values[name] = result.value
            for end in ("low", "high"):
                if (bound := getattr(result, end)) is not None:
                    values[f"{name}_{end}"] = bound
    values |= {f"kl_of_kind/{kind.replace('+', '_')}": kl for kind, kl in kind_sums(found)[:_MOST_KINDS]}
    values |= {f"kl_at/{_key(result.category)}": result.value for result in diagnosis.positions}
    values |= {f"kl_of_class/{_key(result.category)}": result.value for result in diagnosis.classes}
    return {f"{PREFIX}/{name}": value for name, value in values.items()}


def kind_sums(found: GroupsFound) -> list[tuple[str, float]]:
    """Return the summed KL of the groups of each kind of matrix, largest first."""
    sums: dict[str, float] = defaultdict(float)
    for group in found.groups:
        sums[group.kind] += group.kl.value
    return sorted(sums.items(), key=lambda item: -item[1])


def _key(category: str | None) -> str:
    return str(category).replace(" ", "_")


def groups_csv(diagnosis: Diagnosis) -> str:
    """Return the table of groups as CSV; a missing value is an empty cell."""
    rows = diagnosis.to_rows()
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def write_diagnosis(
    store: Store, run: OpenRun, diagnosis: Diagnosis, records: SwapDistances, manifest: CheckpointManifest
) -> None:
    """Log everything on the run."""
    from mlflow_compress.reporting.diagnosing.diagnosis_page import render_diagnosis
    from mlflow_compress.reporting.figures import draw_diagnosis

    run.log_values(diagnosis_values(diagnosis))
    run.log_json(diagnosis.to_dict(), "diagnosis.json")
    with scratch_folder(store.uri) as folder:
        figures = draw_diagnosis(diagnosis.found, diagnosis.positions, diagnosis.classes, folder / "figures")
        page = render_diagnosis(
            title=f"{diagnosis.name} against {diagnosis.baseline}: where it moves",
            sentence=diagnosis.summary,
            found=diagnosis.found,
            figures=figures,
            categories=diagnosis.categories,
            texts=diagnosis.texts,
            setup=_setup(diagnosis, manifest),
        )
        _file(run, folder / "diagnosis.html", page)
        _file(run, folder / "groups.csv", groups_csv(diagnosis))
        run.log_folder(folder / "figures", "figures")
        records.write(folder / run_names.RECORDS)
        run.log_folder(folder / run_names.RECORDS, run_names.RECORDS)
    run.set_tags({run_names.VERDICT: diagnosis.summary})
    run.set_note(diagnosis.summary)


def _file(run: OpenRun, path: Path, text: str) -> None:
    atomic.write(path, text.encode())
    run.log_file(path)


def _setup(diagnosis: Diagnosis, manifest: CheckpointManifest) -> dict[str, object]:
    """Return what the page says of the set-up."""
    return {
        "method": manifest.method,
        "settings": manifest.settings,
        "checkpoint": diagnosis.checkpoint,
        "tokens measured": diagnosis.found.whole.n,
        "groups with the baseline's weights": len(diagnosis.unchanged),
        "every layer computed for every group because": diagnosis.whole_model_reason or "only those behind a swap were",
        "seconds": round(diagnosis.seconds, 1),
        "run": diagnosis.run.run_id,
    }
