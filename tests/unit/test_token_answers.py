"""Answers as tokens: those of transformers' own greedy search, scored as they were written."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GenerationConfig as Settings

from mlflow_compress.errors import DataError
from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.records import TokenAnswers
from mlflow_compress.scoring.baseline_store import StateStore, StateWriter
from mlflow_compress.scoring.engine import Scorer
from mlflow_compress.scoring.generation.generate import generate_answers, reasoning_span
from mlflow_compress.scoring.generation.generation_rows import GenerationConfig
from tests.judging import Instruction
from tests.unit.scoring_models import GREEDY, build_tokenizer, load_random, rounding

ASKED = [
    Instruction("sum", "any", ("What is 2 + 3?",)),
    Instruction("story", "any", ("Tell me a story.", "And another one.")),
    Instruction("a", "any", ("Hi",)),
]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def answers(demo: LoadedModel) -> TokenAnswers:
    return generate_answers(demo, ASKED, GenerationConfig(max_new_tokens=40, **GREEDY), task="greedy")


def test_greedy_tokens_are_those_of_transformers(demo: LoadedModel, answers: TokenAnswers) -> None:
    ended = []
    for row in answers.table.to_pylist():
        ids = torch.tensor([row["prompt_tokens"]])
        # Only what ends an answer is kept of the checkpoint's settings, as in our own generation.
        ends = {demo.tokenizer.eos_token_id, *demo.tokenizer.encode("<|end|>", add_special_tokens=False)}
        settings = Settings(do_sample=False, max_new_tokens=40, eos_token_id=sorted(ends), pad_token_id=0)
        out = demo.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        assert row["tokens"] == out[0, ids.shape[1] :].tolist()
        ended.append(row["tokens"][-1] in ends)
    assert True in ended  # so the end token is among what was compared


def test_an_interrupted_generation_has_the_same_tokens(
    demo: LoadedModel, answers: TokenAnswers, tmp_path: Path
) -> None:
    config = GenerationConfig(max_new_tokens=40, **GREEDY)
    for _ in range(2):  # the second call reads every answer, and its end token, from the folder
        found = generate_answers(demo, ASKED, config, task="greedy", resume=tmp_path)
        assert found.table.equals(answers.table)


def test_samples_are_numbered_and_differ(demo: LoadedModel) -> None:
    found = generate_answers(demo, ASKED[1:2], GenerationConfig(max_new_tokens=12, samples=3), task="traces")
    assert found.windows() == ["story/0", "story/1", "story/2"]
    assert len({tuple(row["tokens"]) for row in found.table.to_pylist()}) > 1


def test_the_tokens_are_scored_as_they_were_written(demo: LoadedModel, answers: TokenAnswers) -> None:
    scores, distances = Scorer(demo).score_corpus("greedy", answers)
    assert distances is None
    assert len(scores) == sum(len(row["tokens"]) for row in answers.table.to_pylist())
    for row, window in zip(answers.table.to_pylist(), answers.windows(), strict=True):
        with torch.inference_mode():
            logits = demo.model(torch.tensor([row["prompt_tokens"] + row["tokens"]])).logits[0].double()
        start = len(row["prompt_tokens"])
        nll = -torch.log_softmax(logits, dim=-1)[range(start - 1, start - 1 + len(row["tokens"])), row["tokens"]]
        found = scores.where(item_id=window)
        assert found.column("position").tolist() == list(range(start, start + len(row["tokens"])))
        assert found.column("target").tolist() == row["tokens"]
        assert np.abs(found.column("nll") - nll.numpy()).max() <= 2 * rounding(demo)  # both passes are in float32
        assert found.column("argmax").tolist() == row["tokens"]  # what greedy decoding took


def test_the_baseline_against_itself_has_a_kl_of_exactly_zero(
    demo: LoadedModel, answers: TokenAnswers, tmp_path: Path
) -> None:
    with StateWriter(tmp_path, demo) as writer:
        Scorer(demo).score_corpus("greedy", answers, capture=writer)
    _, distances = Scorer(demo).score_corpus("greedy", answers, baseline=StateStore.open(tmp_path, baseline=demo))
    assert (distances.column("kl") == 0.0).all() and distances.column("same_top").all()


def test_an_answer_without_tokens_is_refused() -> None:
    row = {"task": "t", "item_id": "a", "sample": 0, "prompt_tokens": [1], "tokens": [], "text": ""}
    for rows in ([], [row]):
        with pytest.raises(DataError, match="without tokens"):
            Scorer(load_random("llama")).score_corpus("t", TokenAnswers.from_rows(rows))


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning"),
    [
        ("p", "<think>The river</think> flour", "The river</think>"),
        ("p <think>\n", "The river</think> flour", "The river</think>"),
        ("p", "The river</think> flour", "The river</think>"),
        ("p", "<think>The river runs", "The river runs"),  # cut off
        ("p <think>\n", "The river runs", "The river runs"),
        ("p <think>\n\n</think>\n", "flour", None),  # a template that turns the reasoning off
        ("p", "flour", None),
        ("p", "flour</think><think>", None),
    ],
)
def test_reasoning_is_found_by_its_tags(prompt: str, text: str, reasoning: str | None) -> None:
    tokenizer = build_tokenizer(adds_bos=False)
    tokens = tokenizer(text)["input_ids"]
    found = reasoning_span(tokenizer, prompt, tokens)
    assert (found and tokenizer.decode(tokens[slice(*found)])) == reasoning
