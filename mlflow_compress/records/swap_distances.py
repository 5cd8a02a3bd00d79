"""How far a model moves when some of its modules are replaced, token by token."""

from __future__ import annotations

import pyarrow as pa

from mlflow_compress.records.table import Records


class SwapDistances(Records):
    """One row per swap and scored token: the distance of the baseline with the swap from the baseline.

    `item_id` is the text (a window of the corpus `task`), `position` the predicted token's index in it. `kl` is
    KL(baseline || swapped) of its distribution in nats, over the whole vocabulary; `top` the most probable token after
    the swap, and `same_top` whether it is the baseline's.
    """

    NAME = "swap_distances"
    KEY = ("task", "swap", "item_id", "position")
    SCHEMA = pa.schema(
        [
            pa.field("task", pa.string()),
            pa.field("swap", pa.string()),
            pa.field("item_id", pa.string()),
            pa.field("position", pa.int32()),
            pa.field("kl", pa.float64()),
            pa.field("top", pa.int32()),
            pa.field("same_top", pa.bool_()),
        ]
    )
