"""The ConSCompF authors' implementation on given embeddings (shared/data/conscompf_oracle)."""

import json

import numpy as np
import pytest

from mlflow_compress.metrics.conscompf import consistency, similarity
from tests.shared_data import SHARED, needs_shared

ORACLE = SHARED / "data" / "conscompf_oracle"


@needs_shared
def test_both_weightings_and_every_instruction():
    data, expected = np.load(ORACLE / "embeddings.npz"), json.loads((ORACLE / "results.json").read_text())
    found = similarity(data["a"], data["b"])
    # Theirs are products of 384 terms in float32, each divided by two lengths, with independent roundings: sqrt(384) U
    # for a cosine (Higham and Mary 2019, theorem 2.4), and what is averaged or weighted by such is no farther off.
    bound = data["a"].shape[-1] ** 0.5 * 2.0**-24
    np.testing.assert_allclose(found.cosine, expected["similarity_per_instruction"], atol=bound)
    np.testing.assert_allclose(consistency(data["a"]), expected["consistency_a"], atol=bound)
    np.testing.assert_allclose(consistency(data["b"]), expected["consistency_b"], atol=bound)
    assert found.mean("unweighted") == pytest.approx(expected["similarity_mean"], abs=bound)
    assert found.mean("reference") == pytest.approx(expected["weighted_reference_mean"], abs=bound)
    assert found.mean() == pytest.approx(expected["weighted_equation4_mean"], abs=bound)
