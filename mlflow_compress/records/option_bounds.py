"""What lists of most probable tokens say about the distance of two models."""

from __future__ import annotations

import pyarrow as pa

from mlflow_compress.records.table import Records

TOP_LADDER = (100, 20, 5)
"""Lengths of lists for which there is a bound; the longest that both models have is used."""


class OptionBounds(Records):
    """What two servers' lists of most probable tokens say about the distance, averaged over an option's tokens.

    The key is that of `OptionScores`. `k` is the length of both lists. `kl` is the KL divergence in nats after all
    tokens that are not in both lists were merged into one: at most the exact one. `kept_baseline` and `kept_variant`
    are the mass of the tokens in both lists. `clipped` counts rests that were negative by rounding.
    """

    NAME = "option_bounds"
    KEY = ("task", "item_id", "permutation", "option")
    SCHEMA = pa.schema(
        [
            pa.field("task", pa.string()),
            pa.field("item_id", pa.string()),
            pa.field("permutation", pa.int16()),
            pa.field("option", pa.int16()),
            pa.field("k", pa.int32()),
            pa.field("kl", pa.float64()),
            pa.field("kept_baseline", pa.float64()),
            pa.field("kept_variant", pa.float64()),
            pa.field("clipped", pa.int32()),
        ]
    )
