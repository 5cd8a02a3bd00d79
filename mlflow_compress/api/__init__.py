"""The Python front door: `import mlflow_compress as mc`.

Every function takes the parameters of the command of the same name (`mlflow-compress evaluate --help`), as keyword
arguments, and returns a typed result with `to_pandas()`, `to_arrow()`, `to_dict()` and a table in notebooks.

`store` says where runs are kept. Without it that is MLflow's tracking store (`MLFLOW_TRACKING_URI`); with a folder's
path it is that folder, and nothing is written to MLflow. Either way a baseline is evaluated once and found again.
"""

from mlflow_compress.api.decisions import gate, history, promote, rollback
from mlflow_compress.api.diagnosing import diagnose
from mlflow_compress.api.human import blind, ratings
from mlflow_compress.api.lookup import compare, load, methods, plan, tasks
from mlflow_compress.api.many_variants import report, search, sweep
from mlflow_compress.api.one_variant import compress, evaluate, judge, run, speed
from mlflow_compress.api.unfinished_work import resume

__all__ = [
    "blind",
    "compare",
    "compress",
    "diagnose",
    "evaluate",
    "gate",
    "history",
    "judge",
    "load",
    "methods",
    "plan",
    "promote",
    "ratings",
    "report",
    "resume",
    "rollback",
    "run",
    "search",
    "speed",
    "sweep",
    "tasks",
]
