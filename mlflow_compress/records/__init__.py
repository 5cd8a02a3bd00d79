"""Item-level records: the data that flows from scoring to metrics, columnar in Arrow, Parquet on disk.

Single-model records (`Items`, `OptionScores`, `TokenScores`, `Generations`, `Judgments`) look the same for a
baseline and a variant. Distances (`OptionDistances`, `TokenDistances`) exist for a variant only and compare it, row by
row, with its baseline. `align` joins two tables on their key and refuses when the keys differ.
"""

from mlflow_compress.records.kinds import (
    Generations,
    Items,
    Judgments,
    OptionDistances,
    OptionScores,
    RunRecords,
    TokenDistances,
    TokenScores,
    columns_hash,
)
from mlflow_compress.records.table import Records, align
from mlflow_compress.records.values import MetricResult, Request

__all__ = [
    "Generations",
    "Items",
    "Judgments",
    "MetricResult",
    "OptionDistances",
    "OptionScores",
    "Records",
    "Request",
    "RunRecords",
    "TokenDistances",
    "TokenScores",
    "align",
    "columns_hash",
]
