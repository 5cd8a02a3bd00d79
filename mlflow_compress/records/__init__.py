"""Item-level records: the tables that scoring writes and metrics read; Arrow in memory, Parquet on disk.

Records of one model (`Items`, `OptionScores`, `TokenScores`, `Generations`, `Judgments`) have the same form for a
baseline and for a variant. Distances (`OptionDistances`, `TokenDistances`) exist for a variant only, and compare it
with its baseline row by row. `align` joins two tables on their key, and raises an error where the keys differ.
"""

from mlflow_compress.records.kinds import TOP_LADDER as TOP_LADDER
from mlflow_compress.records.kinds import Draws as Draws
from mlflow_compress.records.kinds import Generations as Generations
from mlflow_compress.records.kinds import GreedyAnswers as GreedyAnswers
from mlflow_compress.records.kinds import GreedyDistances as GreedyDistances
from mlflow_compress.records.kinds import GreedyScores as GreedyScores
from mlflow_compress.records.kinds import Instruction as Instruction
from mlflow_compress.records.kinds import ItemKey as ItemKey
from mlflow_compress.records.kinds import Items as Items
from mlflow_compress.records.kinds import Judgments as Judgments
from mlflow_compress.records.kinds import MetricResult as MetricResult
from mlflow_compress.records.kinds import OptionBounds as OptionBounds
from mlflow_compress.records.kinds import OptionDistances as OptionDistances
from mlflow_compress.records.kinds import OptionScores as OptionScores
from mlflow_compress.records.kinds import Request as Request
from mlflow_compress.records.kinds import RunRecords as RunRecords
from mlflow_compress.records.kinds import SwapDistances as SwapDistances
from mlflow_compress.records.kinds import TokenAnswers as TokenAnswers
from mlflow_compress.records.kinds import TokenDistances as TokenDistances
from mlflow_compress.records.kinds import TokenScores as TokenScores
from mlflow_compress.records.kinds import Traces as Traces
from mlflow_compress.records.table import Records as Records
from mlflow_compress.records.table import align as align
