"""When each generated token was there: what the speed of a model is computed from."""

from __future__ import annotations

import pyarrow as pa

from mlflow_compress.records.table import Records


class Timings(Records):
    """One row per generation step of one repeat; steps are numbered from 0, the first token.

    `batch` prompts of `prompt_tokens` tokens each were read and continued together. `seconds` is the time since they
    were handed over, at which all of them had the token of this step. `repeat` numbers the rounds: in each, baseline
    and variant were timed one after the other.
    """

    NAME = "timings"
    KEY = ("batch", "repeat", "step")
    SCHEMA = pa.schema(
        [
            pa.field("batch", pa.int16()),
            pa.field("repeat", pa.int16()),
            pa.field("step", pa.int32()),
            pa.field("prompt_tokens", pa.int32()),
            pa.field("seconds", pa.float64()),
        ]
    )
