"""The embedded sentence encoder, for real, and the arrays made with it."""

from pathlib import Path

import numpy as np
import pytest

from mlflow_compress.errors import AlignmentError, CheckpointError, ConfigError, DataError
from mlflow_compress.judges.encoders import (
    RememberingEncoder,
    SentenceEncoder,
    check_files,
    load_encoder,
)
from mlflow_compress.judges.similarity import answer_embeddings
from mlflow_compress.records import Generations
from tests.unit.scoring_models import U, rounding_of_vectors


@pytest.fixture(scope="module")
def encoder() -> SentenceEncoder:
    return load_encoder("embedded", device="cpu")


def generations(answers: dict[str, list[str]], *, turn: int = 0, task: str = "t") -> Generations:
    rows = [
        {"task": task, "item_id": item, "turn": turn, "sample": sample, "prompt": "", "text": text, "n_tokens": 1}
        for item, texts in answers.items()
        for sample, text in enumerate(texts)
    ]
    return Generations.from_rows(rows)


def test_paraphrases_are_nearer_than_other_sentences(encoder: SentenceEncoder) -> None:
    pairs = [
        ("The cat sleeps on the sofa.", "A cat is sleeping on the couch.", "The stock market fell on Monday."),
        ("How do I bake bread?", "What is the way to make bread at home?", "The train to the coast is late."),
        ("He repaired his old bicycle.", "He fixed his old bike.", "The moon has no atmosphere."),
    ]
    for first, paraphrase, other in pairs:
        a, b, c = encoder.encode([first, paraphrase, other])
        assert a @ b > 0.6 > 0.3 > a @ c


def test_vectors_have_unit_length_and_repeat(encoder: SentenceEncoder) -> None:
    texts = ["A short text.", "", "A somewhat longer text about nothing in particular.", "A short text."]
    vectors = encoder.encode(texts)
    assert vectors.shape == (4, encoder.dimension) == (4, 384)
    assert vectors.dtype == np.float32
    squares = (vectors.astype(np.float64) ** 2).sum(axis=1)
    np.testing.assert_allclose(
        squares, 1.0, atol=384 * 2 * U
    )  # float32 has summed 384 squares, and divided by the root
    np.testing.assert_array_equal(vectors, encoder.encode(texts))
    np.testing.assert_array_equal(vectors[0], vectors[3])
    assert encoder.encode([]).shape == (0, 384)
    assert encoder.name == "all-MiniLM-L6-v2 (embedded)"


def test_vectors_of_the_same_texts_are_found_again_without_the_model(
    encoder: SentenceEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["One.", "Two.", "One."]
    vectors = RememberingEncoder(encoder, tmp_path).encode(texts)
    np.testing.assert_array_equal(vectors, encoder.encode(texts))
    again = RememberingEncoder(load_encoder("embedded", device="cpu"), tmp_path)
    np.testing.assert_array_equal(again.encode(texts), vectors)
    assert "model" not in vars(again.encoder)  # it was not loaded
    other = again.encode(["Two.", "One.", "One."])  # other texts, in another order, are encoded
    error = 2 * rounding_of_vectors(encoder)  # both are rounded
    np.testing.assert_allclose(other, vectors[[1, 0, 2]], rtol=0, atol=error)
    monkeypatch.setattr("torch.get_num_threads", lambda: 99)  # as on a machine that may round otherwise
    again.encode(texts)
    assert len(list(tmp_path.iterdir())) == 3


def test_answers_become_arrays_in_the_order_of_items_and_samples(encoder: SentenceEncoder) -> None:
    baseline = generations({"q2": ["one", "two"], "q1": ["three", "four"]})
    variant = generations({"q1": ["three", "five"], "q2": ["two", "one"]})
    shuffled = Generations(variant.table.take([3, 0, 2, 1]))
    found = answer_embeddings({"baseline": baseline, "variant": shuffled}, encoder)
    assert (found.task, found.item_ids, found.encoder) == ("t", ("q2", "q1"), encoder.name)
    ours, theirs = found.vectors["baseline"], found.vectors["variant"]
    assert ours.shape == theirs.shape == (2, 2, 384)
    np.testing.assert_array_equal(ours[0], theirs[0][::-1])  # the same two texts in the other order
    np.testing.assert_array_equal(ours[1, 0], theirs[1, 0])
    assert not np.array_equal(ours[1, 1], theirs[1, 1])
    error = 2 * rounding_of_vectors(encoder)  # both are rounded
    np.testing.assert_allclose(ours[1, 1], encoder.encode(["four"])[0], rtol=0, atol=error)


def test_only_the_asked_turn_is_embedded(encoder: SentenceEncoder) -> None:
    both = Generations.concat([generations({"q": ["first"]}), generations({"q": ["second"]}, turn=1)])
    first, second = (answer_embeddings({"m": both}, encoder, turn=turn).vectors["m"][0, 0] for turn in (0, 1))
    error = 2 * rounding_of_vectors(encoder)  # both are rounded
    np.testing.assert_allclose(first, encoder.encode(["first"])[0], rtol=0, atol=error)
    np.testing.assert_allclose(second, encoder.encode(["second"])[0], rtol=0, atol=error)


def test_answers_that_do_not_fit_together_are_refused(encoder: SentenceEncoder) -> None:
    two = generations({"q1": ["a", "b"], "q2": ["c", "d"]})
    with pytest.raises(AlignmentError, match="q2"):
        answer_embeddings({"baseline": two, "variant": generations({"q1": ["a", "b"]})}, encoder)
    with pytest.raises(DataError, match="same number of samples"):
        answer_embeddings({"baseline": two, "variant": generations({"q1": ["a"], "q2": ["b"]})}, encoder)
    with pytest.raises(DataError, match="one task"):
        answer_embeddings({"baseline": two, "variant": generations({"q1": ["a", "b"]}, task="u")}, encoder)
    with pytest.raises(DataError, match="one task"):
        answer_embeddings({"baseline": two}, encoder, turn=1)
    with pytest.raises(DataError, match="No answers"):
        answer_embeddings({}, encoder)


def test_changed_weights_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    right = "9b8a40b9f24e3df6eb8d5b9a6b9c0cd6c0e8f1b3b0ad8cbf8bdc2b8c5a0a7d11"
    with pytest.raises(CheckpointError, match="not the expected file"):
        check_files(tmp_path, {"model.safetensors": right})
    with pytest.raises(CheckpointError, match="missing"):
        check_files(tmp_path, {"tokenizer.json": right})


def test_an_encoder_that_is_not_there_is_an_error_not_another_encoder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_encoder(str(tmp_path), device="cpu")
    with pytest.raises(ConfigError):
        load_encoder(" ")
