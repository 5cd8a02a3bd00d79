"""What the items of every task family are: declared by the family's file, read by metrics, which import no tasks."""

from collections.abc import Mapping
from dataclasses import dataclass

from mlflow_compress.registry import Registry

# Fields of data sets' documents with a text that several questions are about, the most telling first.
_SHARED_TEXTS = ("passage", "article", "story", "document", "paragraph", "context")


@dataclass(frozen=True, kw_only=True)
class ItemFamily:
    """Properties that all items of a family share; the column `family` of `Items` holds the family's name."""

    chooses: bool = False  # The item has options to choose from, and `gold` is the index of the right one
    graded: bool = False  # An answer is right or wrong, so that the items have an accuracy and can flip
    # Its items are pooled into the headline values. Where an evaluation has no such item, all graded ones are.
    headline: bool = False
    by_category: bool = False  # Results are given for every category too
    # The option is an answer that an application has logged, neither right nor wrong; no page shows its texts
    logged: bool = False
    # The item has tools: `options` is the mark of a call, `answers` the tools and, if known, the right calls in JSON
    calls: bool = False
    # The item is scored under every order of its options: only the metric `all_orders` reads its option scores
    every_order: bool = False
    again: bool = False  # The question stands in another task too, and is asked again in another form


def shared_text(document: Mapping[str, object]) -> str | None:
    """Return the text of a data set's document that several of its questions share; None where it has none."""
    return next((text for name in _SHARED_TEXTS if isinstance(text := document.get(name), str) and text.strip()), None)


ITEM_FAMILIES: Registry[ItemFamily] = Registry(
    "item family", "mlflow_compress.items.families", group="mlflow_compress.tasks", of=ItemFamily
)
