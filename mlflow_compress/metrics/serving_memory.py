"""Memory: what a model takes at most while it serves, beside the baseline's."""

from __future__ import annotations

import pyarrow.compute as pc

from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, MetricKey, metric
from mlflow_compress.metrics.core.requirements import SERVING_MEMORY, VARIANT
from mlflow_compress.records import MetricResult
from mlflow_compress.records.kinds import ServingMemory

_MB = 2**20


RATIO = MetricKey(
    name="speed/memory_peak_ratio",
    direction="lower",
    unit="times",
    meaning="The variant's peak memory while serving over the baseline's in the same runtime.",
    label="Peak memory (to baseline)",
    gate_label="peak memory to the baseline's",
    leaderboard=True,
    by_category=False,
    unchanged=1.0,
    counted="measured",
    measured_once=True,
    on_request=True,
)
PEAK = MetricKey(
    name="speed/memory_peak_mb",
    direction="lower",
    unit="MB",
    meaning="Memory that the variant takes at most, from loading to the last token, without the imported libraries.",
    label="Peak memory, MB",
    headline=172,
    by_category=False,
    difference=RATIO.name,
    counted="measured",
    on_request=True,
)
PEAK_BASELINE = MetricKey(
    name="speed/memory_peak_mb_baseline",
    unit="MB",
    meaning="The baseline's.",
    by_category=False,
    counted="measured",
    on_request=True,
)


@METRICS.register("serving_memory")
@metric(
    keys=(PEAK, PEAK_BASELINE, RATIO),
    requires=(VARIANT, SERVING_MEMORY),
    source="Peak resident set size (Linux's VmHWM), and on an accelerator the peak that torch's allocator reports",
)
def serving_memory(inputs: MetricInputs) -> list[MetricResult]:
    """Peak memory of variant and baseline in MiB, and the variant's over the baseline's.

    Both models serve the same prompts in processes of their own. The largest of a model's processes counts. There is
    no interval: a peak is measured once.
    """
    ours, theirs = inputs.subject.serving_memory, inputs.baseline.serving_memory
    assert ours is not None and theirs is not None  # required
    variant, baseline = _peak(ours), _peak(theirs)
    n = len(ours)
    return [
        MetricResult(name=PEAK.name, value=variant / _MB, n=n),
        MetricResult(name=PEAK_BASELINE.name, value=baseline / _MB, n=n),
        MetricResult(name=RATIO.name, value=variant / baseline, n=n),
    ]


def _peak(found: ServingMemory) -> int:
    return int(pc.max(found.table.column("peak_bytes")).as_py())
