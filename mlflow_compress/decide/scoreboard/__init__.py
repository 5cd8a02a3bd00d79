"""The scoreboard: the variants of one evaluation side by side, and which of them can be told apart."""

from mlflow_compress.decide.scoreboard.board import Scoreboard, ScoreRow, scoreboard
from mlflow_compress.decide.scoreboard.pareto import pareto_front
from mlflow_compress.decide.scoreboard.score_columns import Cell, ScoreColumn
from mlflow_compress.decide.scoreboard.score_warnings import ScoreWarning
from mlflow_compress.decide.scoreboard.scored_variant import ItemScores, ScoredVariant, item_scores
from mlflow_compress.decide.scoreboard.separation import Difference, Separation
from mlflow_compress.decide.scoreboard.variant_correlation import VariantCorrelation

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
