"""Encoders: models that pool in their own way, and a real endpoint on this machine that serves real vectors."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.errors import AlignmentError, CheckpointError, ConfigError, DataError, JudgeError
from mlflow_compress.judges import JudgeInputs, encoders, open_judge
from mlflow_compress.judges.judge_registry import declared_settings
from mlflow_compress.judges.similarity import answer_embeddings
from mlflow_compress.metrics.conscompf import similarity
from mlflow_compress.records import Generations
from mlflow_compress.transport.replies import Embedded, NoReply, read_embeddings
from tests.judge_server import Answer, JudgeServer, Raw, judge_server
from tests.metric_records import generations_of
from tests.unit.scoring_models import U, rounding_of, rounding_of_vectors

KEY = "sk-encoder-0123456789"
MODEL = "all-MiniLM-L6-v2"


@pytest.fixture(scope="module")
def encoder() -> encoders.SentenceEncoder:
    return encoders.load_encoder("embedded", device="cpu")


@pytest.fixture
def keyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENCODER_API_KEY", KEY)


def response(vectors: np.ndarray[Any, Any], model: str = MODEL) -> dict[str, Any]:
    """Return vectors as OpenAI's endpoint does, but in reverse order: the index says which is which."""
    data = [{"object": "embedding", "index": i, "embedding": v.tolist()} for i, v in enumerate(vectors)]
    return {"object": "list", "data": data[::-1], "model": model, "usage": {"prompt_tokens": 7, "total_tokens": 7}}


def minilm(encoder: encoders.SentenceEncoder) -> Callable[[int, dict[str, Any]], Answer]:
    """Return a script that embeds what is asked, and refuses an empty text as endpoints do."""

    def script(number: int, body: dict[str, Any]) -> Answer:
        if "" in body["input"]:
            return 400, {"error": {"message": "input cannot be an empty string"}}
        return 200, response(encoder.encode(body["input"]))

    return script


@contextmanager
def served(script: Callable[[int, dict[str, Any]], Answer], folder: Path) -> Iterator[tuple[JudgeServer, Any]]:
    """Serve, and give a function that opens the encoder as the stage does."""
    with judge_server(script) as server:

        def opened(**more: Any) -> encoders.EndpointEncoder:
            given = {"encoder": MODEL, "encoder_base_url": server.base_url, "judge_concurrency": 4, **more}
            return encoders.open_endpoint_encoder(
                declared_settings(encoders.EncoderSettings, JudgeConfig(**given)), folder
            )

        yield server, opened


def answers(*texts: str) -> Generations:
    """Return two answers to each instruction."""
    rows = [{"item_id": f"i{i // 2}", "sample": i % 2, "text": text} for i, text in enumerate(texts)]
    return Generations.from_rows([{"task": "t", "turn": 0, "prompt": "", "n_tokens": 1, **row} for row in rows])


SAMPLES = {
    "baseline": answers("The cat sleeps.", "A cat is asleep.", "Bread needs flour.", ""),
    "again": answers("The cat is sleeping.", "The cat sleeps.", "Flour makes bread.", "Bake it."),
    "variant": answers("Trains are late.", "The cat sleeps.", "Bread needs water.", "Bread, bread, bread."),
}


@pytest.mark.usefixtures("keyed")
def test_an_endpoint_with_the_same_model_gives_the_same_similarity(
    tmp_path: Path, encoder: encoders.SentenceEncoder
) -> None:
    inputs = JudgeInputs(instructions=(), graded={}, samples=SAMPLES)
    local = open_judge("similarity", JudgeConfig(device="cpu"), tmp_path)(inputs)
    with judge_server(minilm(encoder)) as server:
        config = JudgeConfig(encoder=MODEL, encoder_base_url=server.base_url)
        remote = open_judge("similarity", config, tmp_path)(inputs)
        again = open_judge("similarity", config, tmp_path)(inputs)
    error = 2 * rounding_of_vectors(encoder)  # both are rounded
    for who, there in remote.vectors.vectors.items():
        np.testing.assert_allclose(there, local.vectors.vectors[who], rtol=0, atol=error)
    for who in ("variant", "again"):
        for weighting in ("equation4", "reference", "unweighted"):
            ours = similarity(local.vectors.vectors["baseline"], local.vectors.vectors[who]).mean(weighting)
            theirs = similarity(remote.vectors.vectors["baseline"], remote.vectors.vectors[who]).mean(weighting)
            # A cosine moves by both vectors' errors; so does a consistency, which "reference" divides by a range of 0.1.
            assert theirs == pytest.approx(ours, abs=2 * 384**0.5 * error * (1 + 2 / 0.1))
            assert ours < 0.999
    assert remote.parameters["encoder"] == f"{MODEL} at {server.base_url}"
    assert remote.vectors.encoder_id != local.vectors.encoder_id == encoder.identity
    # Ten distinct texts, a call for each model; the second judge pays nothing, and has the same vectors.
    assert {body["path"] for body in server.bodies} == {"/v1/embeddings"}
    assert [len(body["input"]) for body in server.bodies] == [4, 3, 3]
    assert remote.values == {"judge/encoder_calls": 3.0, "judge/encoder_tokens": 21.0} and again.values == {}
    assert again.vectors.encoder_id == remote.vectors.encoder_id
    np.testing.assert_array_equal(again.vectors.vectors["variant"], remote.vectors.vectors["variant"])
    assert set(server.keys) == {KEY}
    assert all(KEY.encode() not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.usefixtures("keyed")
def test_failed_calls_are_retried_and_what_came_is_kept(tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(100)]
    broken = True

    def script(number: int, body: dict[str, Any]) -> Answer:
        if number == 0:
            return Raw(b"busy", 429, {"Retry-After": "0.01"})
        if "text 70" in body["input"] and broken:
            return 500, {"error": {"message": f"overloaded, says {KEY}"}}
        return 200, response(np.array([[float(t.split()[1]) + 1, 1.0] for t in body["input"]]))

    with served(script, tmp_path) as (server, opened):
        with pytest.raises(JudgeError, match=r"1 of 4 calls for embeddings failed.*HTTP 500") as failed:
            opened(judge_max_retries=2).encode(texts)
        assert KEY not in str(failed.value)
        kept, broken = len(server.bodies), False
        vectors = opened().encode(texts)
    assert [len(body["input"]) for body in server.bodies[kept:]] == [32]  # only the part that failed
    np.testing.assert_array_equal(vectors[:, 0], np.arange(1, 101))


@pytest.mark.usefixtures("keyed")
def test_a_failed_encoder_costs_the_run_nothing_that_other_judges_said(tmp_path: Path) -> None:
    with judge_server(lambda *_: (400, {"error": {"message": "too long"}})) as server:
        config = JudgeConfig(encoder=MODEL, encoder_base_url=server.base_url)
        judged = open_judge("similarity", config, tmp_path)(JudgeInputs(instructions=(), graded={}, samples=SAMPLES))
    assert judged.vectors is None and judged.failed == judged.skipped and "too long" in str(judged.failed)


@pytest.mark.usefixtures("keyed")
def test_an_endpoint_that_changes_its_model_is_noticed(tmp_path: Path) -> None:
    def script(number: int, body: dict[str, Any]) -> Answer:
        return 200, response(np.ones((len(body["input"]), 2)), model=f"{MODEL}-v{number}")

    with served(script, tmp_path) as (_, opened):
        one = opened()
        one.encode(["a"])
        with pytest.raises(JudgeError, match="changed between two calls"):
            one.encode(["a", "b"])


GOOD = response(np.eye(2))
BROKEN = [
    "",
    "<html>",
    json.dumps(GOOD)[:-9],
    "[]",
    json.dumps({"data": None}),
    json.dumps({**GOOD, "data": GOOD["data"][:1]}),
    json.dumps({**GOOD, "data": [*GOOD["data"][:1]] * 2}),
    json.dumps({**GOOD, "data": [{"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [1.0, 2.0]}]}),
    json.dumps({**GOOD, "data": [{"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [float("nan")]}]}),
    json.dumps({**GOOD, "data": [{"index": 0, "embedding": []}, {"index": 1, "embedding": []}]}),
    json.dumps({**GOOD, "data": [{"index": 0, "embedding": "AAAA"}, {"index": 1, "embedding": "AAAA"}]}),
    json.dumps({**GOOD, "data": [{"index": 0, "embedding": [1e300]}, {"index": 1, "embedding": [1.0]}]}),
    json.dumps({**GOOD, "data": [{"index": 0, "embedding": [10**400]}, {"index": 1, "embedding": [1.0]}]}),
]


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("body", BROKEN)
def test_a_response_without_exactly_these_vectors_is_none(body: str) -> None:
    assert isinstance(read_embeddings(body, MODEL, 2), NoReply)


def test_vectors_are_in_the_order_of_their_index() -> None:
    found = read_embeddings(json.dumps(GOOD), "asked", 2)
    assert isinstance(found, Embedded) and found.model == MODEL and found.usage is not None
    np.testing.assert_array_equal(found.vectors, np.eye(2))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"encoder_base_url": "http://127.0.0.1:1/v1"}, "needs the name of a model"),
        ({"encoder": MODEL, "encoder_base_url": "http://127.0.0.1:99999/v1"}, "from 1 to 65535"),
        ({"encoder": MODEL, "encoder_base_url": "http://me:secret@127.0.0.1:99999/v1"}, "from 1 to 65535"),
        ({"encoder": MODEL, "encoder_base_url": "ftp://host"}, "not an address"),
    ],
)
@pytest.mark.usefixtures("keyed")
def test_settings_that_name_no_endpoint_are_refused(given: dict[str, Any], wanted: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=wanted) as refused:
        encoders.open_endpoint_encoder(declared_settings(encoders.EncoderSettings, JudgeConfig(**given)), tmp_path)
    assert "secret" not in str(refused.value)


def test_no_other_endpoints_key_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-judge")
    monkeypatch.delenv("ENCODER_API_KEY", raising=False)
    config = JudgeConfig(encoder=MODEL, encoder_base_url="http://127.0.0.1:1/v1")
    with pytest.raises(ConfigError, match="Set ENCODER_API_KEY"):
        encoders.open_endpoint_encoder(declared_settings(encoders.EncoderSettings, config), tmp_path)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Return a copy of the embedded encoder's folder."""
    folder = tmp_path / "encoder"
    shutil.copytree(encoders.embedded_folder(), folder)
    return folder


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def test_pooling_normalisation_and_prompt_are_those_of_the_models_files(
    copied: Path, encoder: encoders.SentenceEncoder
) -> None:
    assert encoders.load_encoder(str(copied), device="cpu").identity == encoder.identity
    modules = json.loads((copied / "modules.json").read_text())
    write(copied / "modules.json", modules[:2])  # without normalisation
    pooling = json.loads((copied / "1_Pooling" / "config.json").read_text())
    pooling |= {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    write(copied / "1_Pooling" / "config.json", pooling)
    write(
        copied / "config_sentence_transformers.json",
        {"prompts": {"passage": "passage: "}, "default_prompt_name": "passage"},
    )
    changed = encoders.load_encoder(str(copied), device="cpu")
    assert changed.identity != encoder.identity
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(copied)("passage: The cat sleeps.", return_tensors="pt")
    model = AutoModel.from_pretrained(copied)
    with torch.inference_mode():
        first = model(**tokens).last_hidden_state[0, 0].numpy()
    [found] = changed.encode(["The cat sleeps."])
    error = rounding_of(model, tokens["input_ids"], read=lambda x: x.last_hidden_state[0, 0])
    np.testing.assert_allclose(found, first, rtol=0, atol=2 * error)  # both are rounded
    assert abs(np.linalg.norm(found) - 1) > 0.1


def test_folders_that_run_code_are_pickled_or_say_no_pooling_are_refused(copied: Path) -> None:
    modules = json.loads((copied / "modules.json").read_text())
    write(copied / "modules.json", [*modules, {"idx": 3, "name": "3", "path": "", "type": "os.system"}])
    with pytest.raises(CheckpointError, match=r"os\.system is code of its own"):
        encoders.load_encoder(str(copied))
    write(copied / "modules.json", {"type": "x"})
    with pytest.raises(CheckpointError, match="no list of modules"):
        encoders.load_encoder(str(copied))
    (copied / "modules.json").write_text('[{"type": "a", "type": "b"}]')
    with pytest.raises(CheckpointError, match="twice"):
        encoders.load_encoder(str(copied))
    (copied / "modules.json").unlink()
    with pytest.raises(CheckpointError, match=r"no modules\.json"):
        encoders.load_encoder(str(copied))
    write(copied / "modules.json", modules)
    (copied / "2_Dense").mkdir()
    (copied / "2_Dense" / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(CheckpointError, match="is pickled"):
        encoders.load_encoder(str(copied))


@pytest.fixture(scope="module")
def embedded() -> encoders.SentenceEncoder:
    return encoders.load_encoder("embedded", device="cpu")


def generations(answers: dict[str, list[str]], *, turn: int = 0, task: str = "t") -> Generations:
    return generations_of(answers, task=task, turn=turn)


def test_paraphrases_are_nearer_than_other_sentences(embedded: encoders.SentenceEncoder) -> None:
    pairs = [
        ("The cat sleeps on the sofa.", "A cat is sleeping on the couch.", "The stock market fell on Monday."),
        ("How do I bake bread?", "What is the way to make bread at home?", "The train to the coast is late."),
        ("He repaired his old bicycle.", "He fixed his old bike.", "The moon has no atmosphere."),
    ]
    for first, paraphrase, other in pairs:
        a, b, c = embedded.encode([first, paraphrase, other])
        assert a @ b > 0.6 > 0.3 > a @ c


def test_vectors_have_unit_length_and_repeat(embedded: encoders.SentenceEncoder) -> None:
    texts = ["A short text.", "", "A somewhat longer text about nothing in particular.", "A short text."]
    vectors = embedded.encode(texts)
    assert vectors.shape == (4, embedded.dimension) == (4, 384)
    assert vectors.dtype == np.float32
    squares = (vectors.astype(np.float64) ** 2).sum(axis=1)
    np.testing.assert_allclose(
        squares, 1.0, atol=384 * 2 * U
    )  # float32 has summed 384 squares, and divided by the root
    np.testing.assert_array_equal(vectors, embedded.encode(texts))
    np.testing.assert_array_equal(vectors[0], vectors[3])
    assert embedded.encode([]).shape == (0, 384)
    assert embedded.name == "all-MiniLM-L6-v2 (embedded)"


def test_vectors_of_the_same_texts_are_found_again_without_the_model(
    embedded: encoders.SentenceEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["One.", "Two.", "One."]
    vectors = encoders.load_encoder("embedded", device="cpu", vectors=tmp_path).encode(texts)
    np.testing.assert_array_equal(vectors, embedded.encode(texts))
    again = encoders.load_encoder("embedded", device="cpu", vectors=tmp_path)
    np.testing.assert_array_equal(again.encode(texts), vectors)
    assert "model" not in vars(again)  # it was not loaded
    other = again.encode(["Two.", "One.", "One."])  # other texts, in another order, are encoded
    error = 2 * rounding_of_vectors(embedded)  # both are rounded
    np.testing.assert_allclose(other, vectors[[1, 0, 2]], rtol=0, atol=error)
    monkeypatch.setattr("torch.get_num_threads", lambda: 99)  # as on a machine that may round otherwise
    again.encode(texts)
    assert len(list(tmp_path.iterdir())) == 3


def test_answers_become_arrays_in_the_order_of_items_and_samples_of_the_asked_turn(
    embedded: encoders.SentenceEncoder,
) -> None:
    baseline = generations({"q2": ["one", "two"], "q1": ["three", "four"]})
    variant = generations({"q1": ["three", "five"], "q2": ["two", "one"]})
    shuffled = Generations(variant.table.take([3, 0, 2, 1]))
    found = answer_embeddings({"baseline": baseline, "variant": shuffled}, embedded)
    assert (found.task, found.item_ids, found.encoder) == ("t", ("q2", "q1"), embedded.name)
    ours, theirs = found.vectors["baseline"], found.vectors["variant"]
    assert ours.shape == theirs.shape == (2, 2, 384)
    np.testing.assert_array_equal(ours[0], theirs[0][::-1])  # the same two texts in the other order
    np.testing.assert_array_equal(ours[1, 0], theirs[1, 0])
    assert not np.array_equal(ours[1, 1], theirs[1, 1])
    error = 2 * rounding_of_vectors(embedded)  # both are rounded
    np.testing.assert_allclose(ours[1, 1], embedded.encode(["four"])[0], rtol=0, atol=error)
    both = Generations.concat([generations({"q": ["second"]}, turn=1), generations({"q": ["first"]})])
    first = answer_embeddings({"m": both}, embedded).vectors["m"][0, 0]
    np.testing.assert_allclose(first, embedded.encode(["first"])[0], rtol=0, atol=error)


def test_answers_that_do_not_fit_together_are_refused(embedded: encoders.SentenceEncoder) -> None:
    two = generations({"q1": ["a", "b"], "q2": ["c", "d"]})
    with pytest.raises(AlignmentError, match="q2"):
        answer_embeddings({"baseline": two, "variant": generations({"q1": ["a", "b"]})}, embedded)
    with pytest.raises(DataError, match="same number of samples"):
        answer_embeddings({"baseline": two, "variant": generations({"q1": ["a"], "q2": ["b"]})}, embedded)
    with pytest.raises(DataError, match="one task"):
        answer_embeddings({"baseline": two, "variant": generations({"q1": ["a", "b"]}, task="u")}, embedded)
    with pytest.raises(DataError, match="one task"):
        answer_embeddings({"baseline": generations({"q1": ["a", "b"]}, turn=1)}, embedded)
    with pytest.raises(DataError, match="No answers"):
        answer_embeddings({}, embedded)


def test_a_missing_encoder_is_an_error_and_changed_weights_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        encoders.load_encoder(str(tmp_path), device="cpu")
    with pytest.raises(ConfigError):
        encoders.load_encoder(" ")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    right = "9b8a40b9f24e3df6eb8d5b9a6b9c0cd6c0e8f1b3b0ad8cbf8bdc2b8c5a0a7d11"
    with pytest.raises(CheckpointError, match="not the expected file"):
        encoders.check_files(tmp_path, {"model.safetensors": right})
    with pytest.raises(CheckpointError, match="missing"):
        encoders.check_files(tmp_path, {"tokenizer.json": right})
