"""Item-level records: the tables that scoring writes and metrics read; Arrow in memory, Parquet on disk.

Records of one model (`Items`, `OptionScores`, `TokenScores`, `Generations`, `Judgments`) have the same form for a
baseline and for a variant. Distances (`OptionDistances`, `TokenDistances`) exist for a variant only, and compare it
with its baseline row by row. `align` joins two tables on their key, and raises an error where the keys differ.
"""

from mlflow_compress.records.kinds import (
    TOP_LADDER,
    Generations,
    GreedyAnswers,
    GreedyDistances,
    GreedyScores,
    Items,
    Judgments,
    OptionBounds,
    OptionDistances,
    OptionScores,
    RunRecords,
    SwapDistances,
    TokenAnswers,
    TokenDistances,
    TokenScores,
    Traces,
)
from mlflow_compress.records.table import Records, align
from mlflow_compress.records.values import MetricResult, Request

__all__ = [
    "TOP_LADDER",
    "Generations",
    "GreedyAnswers",
    "GreedyDistances",
    "GreedyScores",
    "Items",
    "Judgments",
    "MetricResult",
    "OptionBounds",
    "OptionDistances",
    "OptionScores",
    "Records",
    "Request",
    "RunRecords",
    "SwapDistances",
    "TokenAnswers",
    "TokenDistances",
    "TokenScores",
    "Traces",
    "align",
]
