"""What the commands find, as typed values: tables for notebooks and pandas, plain dictionaries for everything else."""

from mlflow_compress.results.comparison import Comparison
from mlflow_compress.results.compressed import CompressedModel
from mlflow_compress.results.cost_plan import CostPlan, StageCost
from mlflow_compress.results.deciding.alias_moves import AliasHistory, Rollback, Tenure
from mlflow_compress.results.deciding.gate_verdict import GateRow, GateVerdict
from mlflow_compress.results.deciding.promotion_result import Promotion
from mlflow_compress.results.diagnosis import Diagnosis
from mlflow_compress.results.evaluation import AnswerEvaluation, Evaluation
from mlflow_compress.results.human_ratings import BlindSheet, HumanRatings
from mlflow_compress.results.listing import Listing
from mlflow_compress.results.many.search_result import CostEstimate, GroupCost, Search, SearchedVariant
from mlflow_compress.results.many.sweep_plan import PlannedVariant, SweepPlan
from mlflow_compress.results.many.sweep_result import Sweep, SweepProgress, VariantProgress
from mlflow_compress.results.many.variants_report import VariantsReport
from mlflow_compress.results.resumed import Resumed, ResumedCommand
from mlflow_compress.results.speed_measurement import SpeedMeasurement
from mlflow_compress.results.variant_run import VariantRun
from mlflow_compress.tracking.store import RunLink

__all__ = [
    "AliasHistory",
    "AnswerEvaluation",
    "BlindSheet",
    "Comparison",
    "CompressedModel",
    "CostEstimate",
    "CostPlan",
    "Diagnosis",
    "Evaluation",
    "GateRow",
    "GateVerdict",
    "GroupCost",
    "HumanRatings",
    "Listing",
    "PlannedVariant",
    "Promotion",
    "Resumed",
    "ResumedCommand",
    "Rollback",
    "RunLink",
    "Search",
    "SearchedVariant",
    "SpeedMeasurement",
    "StageCost",
    "Sweep",
    "SweepPlan",
    "SweepProgress",
    "Tenure",
    "VariantProgress",
    "VariantRun",
    "VariantsReport",
]
