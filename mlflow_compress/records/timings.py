"""When each generated token was there, and the memory that this took: what the cost of serving is computed from."""

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


class ServingMemory(Records):
    """One row per process that served the model; `process` numbers them.

    Bytes are what the model takes above the imported libraries, on the accelerator too: `resident_bytes` after it has
    worked, `peak_bytes` at most, from loading to the last token.
    """

    NAME = "serving_memory"
    KEY = ("process",)
    SCHEMA = pa.schema(
        [
            pa.field("process", pa.int16()),
            pa.field("resident_bytes", pa.int64()),
            pa.field("peak_bytes", pa.int64()),
        ]
    )
