"""The scoreboard: the variants of one evaluation side by side, and which of them can be told apart."""

from mlflow_compress.decide.scoreboard.board import Scoreboard, ScoreRow, ScoreWarning, pareto_front, scoreboard
from mlflow_compress.decide.scoreboard.scored_variant import Cell, ItemScores, ScoreColumn, ScoredVariant, item_scores
from mlflow_compress.decide.scoreboard.separation import Difference, Separation, VariantCorrelation

__all__ = [
    "Cell",
    "Difference",
    "ItemScores",
    "ScoreColumn",
    "ScoreRow",
    "ScoreWarning",
    "Scoreboard",
    "ScoredVariant",
    "Separation",
    "VariantCorrelation",
    "item_scores",
    "pareto_front",
    "scoreboard",
]
