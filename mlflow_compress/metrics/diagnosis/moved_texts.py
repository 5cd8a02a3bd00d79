"""The texts that moved most, and the token at which the most probable token first changes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlflow_compress.metrics.diagnosis.swap_table import SwapTable

MOST_TEXTS = 20


@dataclass(frozen=True, kw_only=True)
class MovedText:
    """One text of a corpus.

    Attributes
    ----------
    task, item_id : str
        Corpus, and the text's id in it.
    kl : float
        Mean KL per token in nats.
    n : int
        Scored tokens.
    changed : int
        Tokens at which the most probable token is another.
    first_change : int or None
        Index in the text of the first of them; None where there is none.
    baseline_top, variant_top : int or None
        The most probable tokens there.
    """

    task: str
    item_id: str
    kl: float
    n: int
    changed: int
    first_change: int | None = None
    baseline_top: int | None = None
    variant_top: int | None = None


def moved_texts(table: SwapTable, swap: str, no_swap: str, most: int = MOST_TEXTS) -> list[MovedText]:
    """Return the texts with the highest mean KL of a swap, highest first; at a tie in the order of the records."""
    kl, same = table.of_swap(swap), table.same_top[table.swaps.index(swap)]
    top, base = (table.top[table.swaps.index(name)] for name in (swap, no_swap))
    found = []
    for code, (task, item_id) in enumerate(table.texts):
        rows = np.flatnonzero(table.text == code)
        rows = rows[np.argsort(table.position[rows], kind="stable")]
        other = rows[~same[rows]]
        about = {"task": task, "item_id": item_id, "kl": float(kl[rows].mean()), "n": len(rows), "changed": len(other)}
        if len(other):
            row = other[0]
            about |= {
                "first_change": int(table.position[row]),
                "baseline_top": int(base[row]),
                "variant_top": int(top[row]),
            }
        found.append(MovedText(**about))  # type: ignore[arg-type]
    return sorted(found, key=lambda text: -text.kl)[:most]


@dataclass(frozen=True, kw_only=True)
class ShownText:
    """A text that moved, with the words around the token at which the most probable token first changes.

    Attributes
    ----------
    moved : MovedText
    begins : str
        How the text begins.
    context : str or None
        What comes right before that token; None where nothing changes.
    actual, baseline, variant : str or None
        The token that the text has there, and the most probable ones of both models.
    """

    moved: MovedText
    begins: str
    context: str | None = None
    actual: str | None = None
    baseline: str | None = None
    variant: str | None = None
