"""The table of methods, for the terminal and for the documentation; generated from the registry."""

from __future__ import annotations

from mlflow_compress.compression.method import METHODS, Method

COLUMNS = ("method", "bits", "needs", "extra", "format", "runs in", "what it does")


def rows() -> list[tuple[str, ...]]:
    """Return one row per method with the columns of `COLUMNS`, sorted by name."""
    return [_row(method) for _, method in METHODS.items()]


def _row(method: Method) -> tuple[str, ...]:
    return (
        method.name,
        ", ".join(map(str, method.supported_bits)),
        "calibration" if method.needs_calibration else "",
        method.extra or "",
        method.format,
        ", ".join(method.runs_in),
        method.description,
    )


def as_markdown() -> str:
    """Return the table for the documentation, which `tools/write_methods_table.py` writes."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *((f"`{name}`", *rest) for name, *rest in rows())]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |").replace("|  |", "| |") for line in lines)
