"""The drops published in "Changing Answer Order Can Decrease MMLU Accuracy" recompute from (accuracy, metric)."""

import pytest

from mlflow_compress.metrics.order import drop_pct

# METRICS.md section 10: (accuracy, metric, published drop in percent).
PUBLISHED = [(80.3, 75.3, 6.2), (51.7, 38.0, 26.5)]


@pytest.mark.parametrize(("accuracy", "metric", "drop"), PUBLISHED)
def test_published_drops(accuracy, metric, drop):
    assert round(float(drop_pct(accuracy, metric)), 1) == drop
