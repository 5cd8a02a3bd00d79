"""The similarity of all models: by hand, against the authors' results, and which variants are left out of it."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_compress.commands.shared.scores import AnswerSetting, answer_setting, unlike
from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.metrics.conscompf import model_similarity, similarity, similarity_matrix
from mlflow_compress.records import Embeddings
from mlflow_compress.reporting.figures import draw_similarity
from mlflow_compress.reporting.page.variants_page import content_values, render_page
from mlflow_compress.reporting.scoreboard_text import similarity_csv
from tests.page_contents import HOSTILE, page_content
from tests.roundoff import of_sum
from tests.shared_data import PUBLISHED

EAST, NORTH, WEST = [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]


def test_the_matrix_by_hand():
    # One instruction, two answers. Model a says east twice: c = 1. Model b says east and north: c = 0.
    # Their means are (1, 0) and (0.5, 0.5): y = 1/sqrt(2). Equation 4 with c = (1 + 0)/2: 1 - 0.5 (1 - 1/sqrt(2)).
    a, b, c = np.array([[EAST, EAST]]), np.array([[EAST, NORTH]]), np.array([[WEST, WEST]])
    matrix = similarity_matrix([a, b, c])
    ab = 1 - 0.5 * (1 - 1 / np.sqrt(2))
    # c is opposite to a (y = -1, c = 1), and to b y = -1/sqrt(2) with c = 0.5.
    bc = 1 - 0.5 * (1 + 1 / np.sqrt(2))
    np.testing.assert_allclose(matrix, [[1, ab, -1], [ab, 1, bc], [-1, bc, 1]], atol=of_sum(16))


def test_projected_are_the_centred_rows_of_the_matrix():
    rng = np.random.default_rng(1)
    models = {str(i): rng.normal(size=(6, 3, 8)) + i * np.eye(8)[0] for i in range(5)}
    found = model_similarity(models)
    centred = found.values - found.values.mean(axis=0)
    # Principal components by the covariance's eigenvectors, another way than ours.
    eigenvalues, vectors = np.linalg.eigh(centred.T @ centred)
    for place in (0, 1):
        scores = centred @ vectors[:, -1 - place]
        np.testing.assert_allclose(np.abs(found.coordinates[:, place]), np.abs(scores), atol=1e-9)
        assert found.shares[place] == pytest.approx(eigenvalues[-1 - place] / eigenvalues.sum())
    assert (found.n_instructions, found.n_samples) == (6, 3)


@given(st.integers(0, 2**32 - 1), st.integers(2, 5))
def test_a_matrix_is_symmetric_bounded_and_follows_the_order_of_the_models(seed: int, m: int):
    rng = np.random.default_rng(seed)
    # Answers that agree more than they contradict each other; otherwise the consistency is negative, and equation 4
    # has no bound.
    models = [rng.uniform(0.01, 1, size=(3, 2, 4)) for _ in range(m)]
    matrix = similarity_matrix(models)
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_array_equal(np.diag(matrix), 1.0)
    rounding = of_sum(64)  # 3 instructions of 2 answers of 4 numbers, and 24 operations beside
    assert (matrix <= 1 + rounding).all()
    order = rng.permutation(m)
    np.testing.assert_allclose(
        similarity_matrix([models[i] for i in order]), matrix[np.ix_(order, order)], atol=rounding
    )
    assert matrix[0, 1] == pytest.approx(similarity(models[0], models[1]).mean())


def test_models_that_are_all_alike_have_no_place_and_what_is_no_comparison_is_refused():
    same = np.ones((2, 2, 3))
    found = model_similarity({"a": same, "b": same, "c": same})
    assert found.shares is None
    np.testing.assert_allclose(found.values, 1.0)
    with pytest.raises(DataError, match="at least two"):
        model_similarity({"a": np.ones((1, 2, 3))})
    with pytest.raises(AlignmentError, match="numbers of instructions"):
        model_similarity({"a": np.ones((1, 2, 3)), "b": np.ones((2, 2, 3))})


def test_the_matrix_holds_the_authors_results():
    data, expected = np.load(PUBLISHED / "conscompf.npz"), json.loads((PUBLISHED / "conscompf.json").read_text())
    names = {"unweighted": "similarity_mean", "reference": "weighted_reference_mean"}
    for weighting, name in {**names, "equation4": "weighted_equation4_mean"}.items():
        matrix = similarity_matrix([data["a"], data["b"]], weighting)  # type: ignore[arg-type]
        np.testing.assert_allclose(matrix, [[1, expected[name]], [expected[name], 1]], atol=1e-6)


def test_embeddings_are_read_back_in_the_order_of_their_ids(tmp_path: Path):
    vectors = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    records = Embeddings.from_array("t", ("q2", "q1"), vectors, encoder="e", encoder_id="id")
    records.write(tmp_path)
    ids, found = Embeddings.read(tmp_path).by_instruction()
    assert ids == ("q1", "q2") and found.dtype == np.float32
    np.testing.assert_array_equal(found, vectors[::-1])
    with pytest.raises(DataError, match="not complete"):
        Embeddings(records.table.slice(1)).by_instruction()
    with pytest.raises(DataError, match="not complete"):
        Embeddings.concat([records, records]).by_instruction()


MINE, OTHER = AnswerSetting("run1", "a" * 16, "MiniLM"), AnswerSetting("run1", "b" * 16, "bge")


def test_settings_are_read_from_judge_runs_and_unlike_encoders_and_answers_left_out_by_name():
    assert unlike({}) == {} == unlike({"x": MINE, "y": MINE})
    found = unlike({"x": OTHER, "y": MINE, "z": MINE, "w": replace(MINE, answers_run="run2")})
    assert found["x"] == "its answers were embedded by bge (bbbbbbbb), those of the others by MiniLM (aaaaaaaa)"
    assert found["w"].startswith("its answers are to other instructions") and set(found) == {"x", "w"}

    def run(metrics: dict[str, float], **params: str) -> Any:
        data = SimpleNamespace(params=params, metrics=metrics, tags={"baseline_answers_run_id": "run1"})
        return SimpleNamespace(data=data)

    params = {"encoder": "embedded", "resolved/encoder": "MiniLM", "encoder_id": "a" * 16}
    assert answer_setting(run({"judge/similarity": 0.9}, **params)) == MINE
    assert answer_setting(run({"judge/mt_bench": 5.0}, **params)) is None


def test_the_table_of_all_models_and_their_figures(tmp_path: Path):
    found = page_content().similarity
    rows = list(csv.reader(io.StringIO(similarity_csv(found))))
    assert rows[0] == ["model", *found.names, "component_1", "component_2"] and len(rows) == 5
    assert float(rows[1][4]) == found.values[0, 3] < float(rows[1][3]) < 1
    assert [figure.path.name for figure in draw_similarity(found, tmp_path)] == [
        "answer_similarity.png",
        "answer_map.png",
    ]
    many = {f"m{i}": np.random.default_rng(i).normal(size=(2, 2, 3)) for i in range(14)}
    assert len(draw_similarity(model_similarity(many), tmp_path)) == 2
    alike = model_similarity({"a": np.ones((1, 2, 2)), "b": np.ones((1, 2, 2))})
    assert [figure.title for figure in draw_similarity(alike, tmp_path)] == ["All models answer alike"]


def test_the_page_shows_every_pair_and_who_is_left_out():
    content = page_content(HOSTILE)
    page = render_page(content)
    assert 'id="alike-map"' in page and "other is left out: of &lt;/script&gt;" in page and HOSTILE not in page
    values = content_values(content)["answer_similarity"]
    assert values["models"] == ("baseline", "baseline, second sample", "near", "far")
    assert 'id="alike"' not in render_page(replace(content, similarity=None))
