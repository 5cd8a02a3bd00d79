"""Items that are scored, but have no single correct option. Only the harness's own metrics grade them.

They come from tasks of lm-evaluation-harness, not from question files.
"""

from __future__ import annotations

from mlflow_compress.item_families import ITEM_FAMILIES, ItemFamily

ITEM_FAMILIES.register("ungraded")(ItemFamily())
