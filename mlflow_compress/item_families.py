"""What the items of every task family are: declared by the family's file, read by metrics, which import no tasks."""

from __future__ import annotations

from dataclasses import dataclass

from mlflow_compress.registry import Registry


@dataclass(frozen=True, kw_only=True)
class ItemFamily:
    """Properties that all items of a family share; the column `family` of `Items` holds the family's name."""

    chooses: bool = False  # The item has options to choose from, and `gold` is the index of the right one
    graded: bool = False  # An answer is right or wrong, so that the items have an accuracy and can flip
    # Its items are pooled into the headline values. Where an evaluation has no such item, all graded ones are.
    headline: bool = False
    by_category: bool = False  # Results are given for every category too
    # The item is scored under every order of its options: only the metric `all_orders` reads its option scores
    every_order: bool = False


ITEM_FAMILIES: Registry[ItemFamily] = Registry(
    "item family", "mlflow_compress.items.families", group="mlflow_compress.tasks", of=ItemFamily
)
