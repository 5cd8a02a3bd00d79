"""The bound from two lists of most probable tokens: never above the exact divergence, and as it was defined."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_compress.engines.endpoint.endpoint_scorer import top_k_bound
from mlflow_compress.errors import DataError
from mlflow_compress.metrics import compute_all, headline, unmet
from mlflow_compress.records import OptionBounds
from tests import metric_records
from tests.metric_records import QUICK


def lists(p: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    best = np.argsort(-p, kind="stable")[:k]
    return best, np.log(p[best])


def exact(p: np.ndarray, q: np.ndarray) -> float:
    return float(np.sum(p * np.log(p / q)))


@given(seed=st.integers(0, 10**6), k=st.integers(1, 12), n=st.integers(2, 12), sharp=st.floats(0.01, 8.0))
@QUICK
def test_the_bound_never_exceeds_the_exact_divergence(seed: int, k: int, n: int, sharp: float) -> None:
    rng = np.random.default_rng(seed)
    p, q = (np.exp(x) / np.exp(x).sum() for x in sharp * rng.normal(size=(2, n)))
    found = top_k_bound(lists(p, k), lists(q, k))
    assert 0.0 <= found.kl <= exact(p, q) + 1e-12
    if k >= n:  # both lists hold everything: nothing is merged
        assert found.kl == pytest.approx(exact(p, q), rel=1e-9, abs=1e-12)
        assert found.kept_baseline == pytest.approx(1.0)


def test_the_bound_of_an_example_by_hand() -> None:
    # Baseline 0.5 0.3 0.1 0.1, variant 0.6 0.1 0.2 0.1. The two longest of each: {0, 1} and {0, 2}. Token 0 is in both.
    p, q = np.array([0.5, 0.3, 0.1, 0.1]), np.array([0.6, 0.1, 0.2, 0.1])
    found = top_k_bound(lists(p, 2), lists(q, 2))
    assert found.kl == pytest.approx(0.5 * np.log(0.5 / 0.6) + 0.5 * np.log(0.5 / 0.4))
    assert (found.kept_baseline, found.kept_variant, found.clipped) == (pytest.approx(0.5), pytest.approx(0.6), 0)


def test_a_rest_below_zero_is_counted_and_stays_a_finite_bound() -> None:
    ids = np.array([0, 1])
    rounded = np.log([0.7, 0.3000001])  # a server's float32: the sum is above 1
    found = top_k_bound((ids, np.log([0.5, 0.4])), (ids, rounded))
    assert found.clipped == 1
    # The baseline's rest of 0.1 meets no rest: it is merged into the variant's less probable token.
    assert found.kl == pytest.approx(0.5 * np.log(0.5 / 0.7) + 0.5 * np.log(0.5 / 0.3), rel=1e-5)


def test_lists_without_a_common_token_prove_nothing() -> None:
    found = top_k_bound((np.array([0]), np.log([0.9])), (np.array([1]), np.log([0.9])))
    assert (found.kl, found.kept_baseline) == (0.0, 0.0)


def bounds_of(k: int, kl: float, *, clipped: int = 0) -> OptionBounds:
    distances = metric_records.inputs(12).variant.option_distances
    n = len(distances)
    columns = {name: distances.column(name) for name in OptionBounds.KEY}
    return OptionBounds.from_columns(
        {
            **columns,
            "k": [k] * n,
            "kl": [kl] * n,
            "kept_baseline": [0.9] * n,
            "kept_variant": [0.8] * n,
            "clipped": [clipped] * n,
        }
    )


def test_the_metric_has_the_name_of_its_lists_and_leaves_the_exact_keys_out() -> None:
    inputs = metric_records.inputs(12)
    served = replace(inputs.variant, option_distances=None, option_bounds=bounds_of(20, 0.25, clipped=1))
    again = replace(inputs.noise, option_distances=None, option_bounds=bounds_of(20, 0.01))
    found = replace(inputs, variant=served, noise=again)
    results = headline(compute_all(found))
    assert results["distance/kl_top20"].value == pytest.approx(0.25)
    assert results["distance/top_kept_mass"].value == pytest.approx(0.9)
    assert results["distance/top_rests_clipped"].value == results["distance/kl_top20"].n
    assert "distance/kl_top5" not in results and "distance/kl_mean" not in results
    assert unmet(found)["divergence"] == "the variant run has no option_distances records"
    assert "distance/flips_pct" in results


def test_items_that_were_asked_without_lists_are_not_unscored() -> None:
    inputs = metric_records.inputs(12)
    whole = bounds_of(20, 0.25)
    task, first = whole.column("task")[0], whole.column("item_id")[0]
    sample = replace(inputs, variant=replace(inputs.variant, option_bounds=whole.where(task=[task], item_id=[first])))
    result = headline(compute_all(sample))["distance/kl_top20"]
    assert (result.value, result.n, result.n_unscored) == (0.25, 1, 0)
    assert headline(compute_all(sample))["distance/flips_pct"].n > 1


def test_bounds_from_lists_of_two_lengths_are_refused() -> None:
    inputs = metric_records.inputs(12)
    mixed = bounds_of(20, 0.25)
    k = mixed.column("k").copy()
    k[0] = 5
    columns = {name: mixed.column(name) for name in OptionBounds.SCHEMA.names}
    mixed = OptionBounds.from_columns({**columns, "k": k})
    with pytest.raises(DataError, match="several lengths"):
        compute_all(replace(inputs, variant=replace(inputs.variant, option_bounds=mixed)))
