"""What a diagnosis leaves in its run: metrics, tables, figures, the page, and the distances of every swap."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mlflow_compress import files as atomic
from mlflow_compress.commands.diagnose.parameters import DiagnoseConfig, DiagnosisConfig
from mlflow_compress.commands.diagnose.result import Diagnosis
from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest
from mlflow_compress.config import as_text
from mlflow_compress.errors import ConfigError
from mlflow_compress.items.suite import Suite
from mlflow_compress.items.task import Corpus
from mlflow_compress.metrics.diagnosis import GroupsFound, MovedText, ShownText, SwapTable
from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.records import SwapDistances
from mlflow_compress.scoring.plan.corpus_windows import Windows, cut_windows
from mlflow_compress.scoring.plan.encoding import Encoder
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.live_processes import scratch_folder
from mlflow_compress.tracking.store import OpenRun, Store

_CONTEXT = 12  # tokens shown before a change


def corpora_of(suite: Suite, tasks: str) -> list[Corpus]:
    """Return the running texts of a suite. A suite without one is refused, and so is `traces`."""
    found = [corpus for corpus in suite.corpora if isinstance(corpus, Corpus)]
    if not found or len(found) < len(suite.corpora):
        raise ConfigError(
            "A diagnosis needs running text that is there already",
            allowed="tasks with a corpus: demo, wikitext2, or a file such as corpus.txt",
            got=tasks,
            fix="Add a corpus to 'tasks', and leave 'traces' out",
        )
    return found


def texts_of(corpora: Sequence[Corpus], model: LoadedModel, asked: DiagnosisConfig) -> dict[str, Windows]:
    """Return the texts of every corpus: windows one after the other, of which every token but the first is scored.

    Raises
    ------
    ConfigError, DataError
        The window is longer than the model's context, or the corpus shorter than two windows.
    """
    encoder = Encoder(model.tokenizer, model.max_length)
    found = {}
    for corpus in corpora:
        limits = [n for n in (asked.corpus_tokens, corpus.max_tokens) if n]
        windows = cut_windows(encoder, corpus.text, asked.corpus_window, min(limits) if limits else None)
        found[corpus.name] = replace(windows, scored=[np.arange(1, asked.corpus_window)] * len(windows.ids))
    return found


class TokenTexts:
    """What the tokens of the measured texts read as."""

    def __init__(self, windows: Mapping[str, Windows], tokenizer: Any) -> None:
        self._windows, self._tokenizer = windows, tokenizer
        self._after = cache(self._read_after)

    def rows(self, table: SwapTable) -> tuple[np.ndarray[Any, Any], list[str], list[str]]:
        """Return the token, its own text, and the text of the token before, of every row of a table."""
        tokens, own, before = [], [], []
        for code, position in zip(table.text.tolist(), table.position.tolist(), strict=True):
            previous, token = (int(self._ids(*table.texts[code])[position + step]) for step in (-1, 0))
            tokens.append(token)
            own.append(self._after(previous, token))
            before.append(self._text([previous]))
        return np.asarray(tokens, dtype=np.int64), own, before

    def shown(self, moved: MovedText) -> ShownText:
        """Return a moved text with the words around its first change."""
        ids = self._ids(moved.task, moved.item_id)
        begins = self._text(ids[1 : _CONTEXT + 1].tolist())
        place = moved.first_change
        if place is None or moved.baseline_top is None or moved.variant_top is None:
            return ShownText(moved=moved, begins=begins)
        previous = int(ids[place - 1])
        return ShownText(
            moved=moved,
            begins=begins,
            context=self._text(ids[max(0, place - _CONTEXT) : place].tolist()),
            actual=self._after(previous, int(ids[place])),
            baseline=self._after(previous, moved.baseline_top),
            variant=self._after(previous, moved.variant_top),
        )

    def _ids(self, task: str, item_id: str) -> np.ndarray[Any, Any]:
        return np.asarray(self._windows[task].ids[int(item_id)])

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _read_after(self, previous: int, token: int) -> str:
        """Return a token's text as it reads after another: alone, some tokenizers drop its space."""
        return self._text([previous, token])[len(self._text([previous])) :]


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
    from mlflow_compress.reporting.diagnosis_page import render_diagnosis
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
