"""Items that are scored, but have no single right option: only their task's own metrics judge them.

No question file makes them; tasks of lm-evaluation-harness do.
"""

from __future__ import annotations

from mlflow_compress.item_families import ITEM_FAMILIES, ItemFamily

ITEM_FAMILIES.register("ungraded")(ItemFamily())
