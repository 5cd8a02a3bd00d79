"""The headline table as plain text for the terminal, and as Markdown for an MLflow run's note."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from mlflow_compress.metrics.core.metric_registry import all_keys, headline_keys
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.numbers import interval_text, scale_of
from mlflow_compress.reporting.rows import (
    KL,
    HeadlineRow,
    Pooled,
    Sizes,
    headline_rows,
    interval_percent,
    kl_not_trusted,
    noise_floor_text,
    only_generated,
)

_OF_ENGINE = (("kl_mean", "KL"), ("flips_pct", "flips"), ("corpus_kl_mean", "KL on corpora"))
_OF_SERVER = (("flips_pct", "flips"), ("kl_top100", "KL at least"), ("kl_top20", "KL at least"))


def _unscored(pooled: Pooled) -> list[str]:
    """Return the sentences about unscored items (or answers)."""
    found: dict[str, None] = {}
    for key in headline_keys():
        result = pooled.get(key.name)
        if result is not None and result.n_unscored and key.unscored:
            why = "no answer was generated" if key.counted == "items" and only_generated(pooled) else key.unscored
            found[f"{result.n_unscored:,} of {result.n + result.n_unscored:,} {key.counted} unscored: {why}."] = None
    return list(found)


def _sampled(pooled: Pooled, name: str, things: str) -> str | None:
    """Return the size of the noise floor's sample, and that of the distance; None without a floor."""
    distance: MetricResult | None = pooled.get(name)
    floor = noise_floor_text(pooled, name)
    if distance is None or floor is None:
        return None
    if floor.n < distance.n:
        return f"a sample of {floor.n:,} of {distance.n:,} {things}"
    return f"{floor.n:,} {things}"


def _noise(pooled: Pooled) -> list[str]:
    items = _sampled(pooled, KL, "items") or _sampled(pooled, "distance/flips_pct", "items")
    parts = [part for part in (items, _sampled(pooled, "distance/corpus_kl_mean", "corpus tokens")) if part]
    return [f"Noise floor (the baseline against itself in a second run) from {' and '.join(parts)}."] if parts else []


def _engine(pooled: Pooled) -> list[str]:
    """Return the sentence about the engine's own distance; none where transformers runs the models."""
    parts = _distances(pooled, "engine", _OF_ENGINE)
    if not parts:
        return []
    return [f"vLLM's own distance (transformers from vLLM, the baseline's checkpoint in both): {', '.join(parts)}."]


def _server(pooled: Pooled) -> list[str]:
    """Return the sentence about a server's own noise; none where the variant is not served."""
    parts = _distances(pooled, "served", _OF_SERVER)
    return [f"The server's own noise (the same prompts asked twice): {', '.join(parts)}."] if parts else []


def _distances(pooled: Pooled, section: str, named: tuple[tuple[str, str], ...]) -> list[str]:
    return [
        f"{label} {interval_text(result, scale_of(all_keys()[result.name].unit), difference=False)}"
        for name, label in named
        if (result := pooled.get(f"{section}/{name}")) is not None
    ]


def footnotes(pooled: Pooled, *, gates: Mapping[str, float] | None = None, n_truncated: int = 0) -> list[str]:
    """Return the sentences under the headline table; empty if there are none.

    Parameters
    ----------
    pooled : mapping of str to MetricResult
        Pooled results by key: `metrics.headline(results)`.
    gates : mapping of str to float, optional
        Values that promotion gates read, by key.
    n_truncated : int
        Prompts that were too long for the model and lost their beginning.
    """
    notes = []
    if kl_not_trusted(pooled, gates):
        notes.append(
            "The interval of the mean KL cannot be trusted here (few items, or one item holds much of the mean): "
            "the gate reads the clipped mean and the share of items above the clip."
        )
    notes += _unscored(pooled)
    if n_truncated:
        prompts = "1 prompt was" if n_truncated == 1 else f"{n_truncated:,} prompts were"
        notes.append(f"{prompts} longer than the model's context and lost the beginning.")
    return notes + _noise(pooled) + _engine(pooled) + _server(pooled)


def _measured_by(stage: str) -> str:
    """Return the labels of the metrics that only this stage computes, and computes unasked."""
    keys = [key for key in all_keys().values() if key.name.startswith(f"{stage}/") and not key.on_request]
    labels = [key.label for key in keys if key.label]
    return ", ".join(labels) or "what it measures"


def failures(failed_stages: Mapping[str, str] | None) -> list[str]:
    """Return one sentence per failed stage: its error message and the missing metrics.

    Parameters
    ----------
    failed_stages : mapping of str to str, optional
        Error message by name of the stage.
    """
    return [
        f"Stage {stage} failed: {message.rstrip('.')}. Missing: {_measured_by(stage)}."
        for stage, message in (failed_stages or {}).items()
    ]


NOTE_LIMIT = 8000
_PART_LIMIT = 2000  # characters of a verdict or an error message, so that the table fits after them
_WIDTH = 100
_EMPTY = "-"


def _cells(row: HeadlineRow) -> tuple[str, ...]:
    return row.label, row.n or "", row.baseline or _EMPTY, row.variant or _EMPTY, row.difference or _EMPTY


def _header(pooled: Pooled) -> tuple[str, ...]:
    return "metric", "n", "baseline", "variant", f"difference [{interval_percent(pooled)} interval]"


def headline_table(
    pooled: Pooled,
    manifest: Sizes | None = None,
    *,
    gates: Mapping[str, float] | None = None,
    n_truncated: int = 0,
    failed_stages: Mapping[str, str] | None = None,
) -> str:
    """Return the headline table as aligned text, followed by notes.

    Parameters
    ----------
    pooled : mapping of str to MetricResult
        Pooled results by key: `metrics.headline(results)`.
    manifest : Sizes, optional
        The checkpoint's manifest, for the rows about size.
    gates, n_truncated
        See `footnotes.footnotes`.
    failed_stages
        See `footnotes.failures`.
    """
    lines = [_header(pooled), *(_cells(row) for row in headline_rows(pooled, manifest, gates))]
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    text = [
        f"{name:<{widths[0]}}  {n:>{widths[1]}}  {baseline:>{widths[2]}}  {variant:>{widths[3]}}  {difference}"
        for name, n, baseline, variant, difference in lines
    ]
    rule = "-" * min(_WIDTH, max(map(len, text)))
    notes = failures(failed_stages) + footnotes(pooled, gates=gates, n_truncated=n_truncated)
    wrapped = [line for note in notes for line in textwrap.wrap(note, _WIDTH)]
    return "\n".join([text[0], rule, *text[1:], *([rule, *wrapped] if wrapped else [])])


def escape_markdown(text: str) -> str:
    """Return a cell's text without column breaks, line breaks and HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("\n", " ")


def note_markdown(
    sentence: str,
    pooled: Pooled,
    manifest: Sizes | None = None,
    *,
    gates: Mapping[str, float] | None = None,
    n_truncated: int = 0,
    failed_stages: Mapping[str, str] | None = None,
) -> str:
    """Return a run's note as Markdown of at most 8000 characters: verdict, failed stages, headline table, notes.

    Parameters
    ----------
    sentence : str
        The verdict, which is the first line.
    pooled, manifest, gates, n_truncated, failed_stages
        As in `headline_table`.
    """
    head = [escape_markdown(sentence)[:_PART_LIMIT], ""]
    for failure in failures(failed_stages):
        head += [f"**{escape_markdown(failure)[:_PART_LIMIT]}**", ""]
    header = _header(pooled)
    lines = ["| " + " | ".join(header) + " |", "|---|--:|--:|--:|:--|"]
    lines += [
        "| " + " | ".join(map(escape_markdown, _cells(row))) + " |" for row in headline_rows(pooled, manifest, gates)
    ]
    notes = [
        line for note in footnotes(pooled, gates=gates, n_truncated=n_truncated) for line in ("", escape_markdown(note))
    ]
    return "\n".join(head + lines + notes)
