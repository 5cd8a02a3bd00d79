"""Exact metrics: records or arrays in, results out; numpy and scipy only, no model, no I/O, no tracking.

A new metric is one new file with a function under `@metric(name, ...)`; `compute_all` finds it.
"""

from mlflow_compress.metrics.core.estimates import Mean as Mean
from mlflow_compress.metrics.core.estimates import Number as Number
from mlflow_compress.metrics.core.estimates import PairedDifference as PairedDifference
from mlflow_compress.metrics.core.estimates import Proportion as Proportion
from mlflow_compress.metrics.core.estimates import by_subset as by_subset
from mlflow_compress.metrics.core.estimates import pooled as pooled
from mlflow_compress.metrics.core.metric_inputs import AnswerEmbeddings as AnswerEmbeddings
from mlflow_compress.metrics.core.metric_inputs import AnswerSamples as AnswerSamples
from mlflow_compress.metrics.core.metric_inputs import MetricInputs as MetricInputs
from mlflow_compress.metrics.core.metric_inputs import MetricSettings as MetricSettings
from mlflow_compress.metrics.core.metric_inputs import headline as headline
from mlflow_compress.metrics.core.metric_registry import METRICS as METRICS
from mlflow_compress.metrics.core.metric_registry import Metric as Metric
from mlflow_compress.metrics.core.metric_registry import MetricKey as MetricKey
from mlflow_compress.metrics.core.metric_registry import all_keys as all_keys
from mlflow_compress.metrics.core.metric_registry import compute_all as compute_all
from mlflow_compress.metrics.core.metric_registry import key as key
from mlflow_compress.metrics.core.metric_registry import metric as metric
from mlflow_compress.metrics.core.metric_registry import unmet as unmet
