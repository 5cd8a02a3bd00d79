"""Generation against a token-by-token loop without cache, padding or batches, on real small models."""

import logging
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlflow_compress.errors import CheckpointError, ConfigError
from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.scoring.generation import drawing
from mlflow_compress.scoring.generation.chat_format import chat_format
from mlflow_compress.scoring.generation.drawing import draw
from mlflow_compress.scoring.generation.generate import generate, generate_two_turns, generate_until
from mlflow_compress.scoring.generation.generation_rows import GenerationConfig, GenerationRow, uniforms
from tests.judging import Instruction
from tests.unit.scoring_models import GREEDY, TEXT, load_random

WORDS = TEXT.split()
PROMPTS = [" ".join(WORDS[i : i + 2 + 3 * (i % 4)]) for i in range(7)]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return load_random("llama")


def naive(loaded: LoadedModel, prompt: str, n: int, *, stop: set[int]) -> str:
    """The argmax of a full forward pass, n times."""
    ids = loaded.tokenizer(prompt)["input_ids"]
    start = len(ids)
    for _ in range(n):
        with torch.inference_mode():
            logits = loaded.model(torch.tensor([ids])).logits[0, -1]
        token = int(logits.argmax())
        if token in stop:
            break
        ids.append(token)
    return str(loaded.tokenizer.decode(ids[start:], skip_special_tokens=True))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_greedy_equals_the_naive_loop(name: str) -> None:
    loaded = load_random(name)
    # 36 tokens: one stage of 32, and a second one that goes on from the first; 4 prompts: two batches.
    config = GenerationConfig(max_new_tokens=36, batch_rows=3, **GREEDY)
    expected = [[naive(loaded, prompt, 36, stop={1})] for prompt in PROMPTS[:4]]
    assert generate(loaded, PROMPTS[:4], config) == expected


def test_greedy_equals_the_naive_loop_where_answers_end(demo: LoadedModel) -> None:
    prompts = ["<|user|>What is 2 + 3?<|end|>\n<|assistant|>", "<|user|>Tell me a story.<|end|>\n<|assistant|>"]
    found = generate(demo, prompts, GenerationConfig(max_new_tokens=70, **GREEDY))
    ends = set(demo.model.generation_config.eos_token_id)
    assert found == [[naive(demo, prompt, 70, stop=ends)] for prompt in prompts]
    assert len(found[0][0]) < len(found[1][0])


def test_other_prompts_in_the_batch_change_nothing(llama: LoadedModel) -> None:
    config = GenerationConfig(max_new_tokens=36, samples=2, seed=3)
    together = generate(llama, PROMPTS, config)
    alone = [generate(llama, [prompt], config)[0] for prompt in reversed(PROMPTS)][::-1]
    small = generate(llama, PROMPTS, GenerationConfig(max_new_tokens=36, samples=2, seed=3, batch_rows=2))
    assert together == alone == small


def test_seeds_and_samples(llama: LoadedModel) -> None:
    def drawn(seed: int, samples: int = 3) -> list[list[str]]:
        return generate(llama, PROMPTS[:3], GenerationConfig(max_new_tokens=12, samples=samples, seed=seed))

    first = drawn(1)
    assert [len(texts) for texts in first] == [3, 3, 3]
    assert drawn(1) == first
    assert drawn(2) != first
    assert [texts[:2] for texts in first] == drawn(1, samples=2)
    assert all(len(set(texts)) > 1 for texts in first)


def test_a_checkpoints_own_generation_settings_do_not_leak_in(llama: LoadedModel) -> None:
    config = GenerationConfig(max_new_tokens=12, **GREEDY)
    plain = generate(llama, PROMPTS, config)
    kept = llama.model.generation_config
    kept.repetition_penalty, kept.suppress_tokens = 5.0, list(range(2, 120))
    try:
        assert generate(llama, PROMPTS, config) == plain
        assert llama.model.generation_config is kept
    finally:
        kept.repetition_penalty, kept.suppress_tokens = None, None


def test_until_cuts_at_the_text_whatever_the_tokens(llama: LoadedModel) -> None:
    whole = [texts[0] for texts in generate(llama, PROMPTS, GenerationConfig(max_new_tokens=40, **GREEDY))]
    written = [text for text in whole if len(text) > 9]
    assert len(written) > 2
    parts = {text[5] for text in written} | {text[3:9] for text in written} | {"never written"}
    for until in sorted(part for part in parts if "\ufffd" not in part):  # the sign of half a character, not a text
        expected = [text.split(until)[0] for text in whole]
        assert generate_until(llama, PROMPTS, until=(until,), max_new_tokens=40) == expected


def test_a_long_prompt_loses_its_beginning_and_says_so(llama: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    long = " ".join(WORDS * 4)
    ids = llama.tokenizer(long)["input_ids"]
    assert len(ids) > llama.max_length
    with caplog.at_level(logging.WARNING):
        found = generate(llama, [long, "The river"], GenerationConfig(max_new_tokens=20, **GREEDY))
    assert "1 of 2 prompts are longer than 140 tokens" in caplog.text
    rest = ids[-140:]
    for _ in range(20):
        with torch.inference_mode():
            rest.append(int(llama.model(torch.tensor([rest])).logits[0, -1].argmax()))
    assert found[0] == [llama.tokenizer.decode(rest[140:], skip_special_tokens=True)]
    with pytest.raises(ConfigError, match="no room"):
        generate(llama, ["The"], GenerationConfig(max_new_tokens=160, **GREEDY))


def test_the_second_turn_sees_the_first_answer(demo: LoadedModel) -> None:
    items = [
        Instruction("a", "math", ("What is 2 + 3?", "Now add 4 to the result.")),
        Instruction("b", "writing", ("Write a short story about a dog.", "Now one about a cat.")),
    ]
    config = GenerationConfig(max_new_tokens=24, samples=2, seed=5)
    found = generate_two_turns(demo, items, config, temperatures={"math": 0.0})
    rows = {row[1:]: record for row, record in zip(found.key_rows(), found.table.to_pylist(), strict=True)}
    assert set(rows) == {(item, turn, sample) for item in "ab" for turn in (0, 1) for sample in (0, 1)}
    for item in items:
        for sample in (0, 1):
            first, second = rows[item.item_id, 0, sample], rows[item.item_id, 1, sample]
            opening = f"<|user|>{item.turns[0]}<|end|>\n<|assistant|>"
            assert first["prompt"] == opening
            assert first["text"]
            assert second["prompt"] == f"{opening}{first['text']}<|end|>\n<|user|>{item.turns[1]}<|end|>\n<|assistant|>"
            assert 0 < first["n_tokens"] <= 24
            assert "<|end|>" not in first["text"]
    assert rows["a", 0, 0]["text"] == rows["a", 0, 1]["text"]  # greedy by its category
    assert rows["b", 0, 0]["text"] != rows["b", 0, 1]["text"]
    only = generate_two_turns(demo, items, config, temperatures={"math": 0.0}, turns=1)
    assert only.table.equals(found.where(turn=0).table)


def test_one_turn_may_stand_beside_two_and_a_system_prompt_before_both(demo: LoadedModel) -> None:
    items = [Instruction("a", "x", ("Who?",)), Instruction("b", "x", ("What is 2 + 3?", "And 4?"))]
    found = generate_two_turns(demo, items, GenerationConfig(max_new_tokens=4, **GREEDY), system="Be short.")
    assert [row[1:3] for row in found.key_rows()] == [("a", 0), ("b", 0), ("b", 1)]
    assert all(text.startswith("<|system|>Be short.<|end|>\n<|user|>") for text in found.column("prompt"))
    assert chat_format(load_random("llama").tokenizer).prompt(["Who?"], system="Be short.") == (
        "System: Be short.\nUser: Who?\nAssistant:"
    )
    demo.tokenizer.chat_template, kept = "{{ messages[-1]['content'] }}", demo.tokenizer.chat_template
    try:
        with pytest.raises(CheckpointError, match="omits the system prompt"):
            chat_format(demo.tokenizer).prompt(["Who?"], system="Be short.")
    finally:
        demo.tokenizer.chat_template = kept


def test_without_a_chat_template_turns_are_labelled_and_it_is_logged(
    llama: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    item = Instruction("a", "writing", ("Who counts?", "And then?"))
    with caplog.at_level(logging.WARNING):
        found = generate_two_turns(llama, [item], GenerationConfig(max_new_tokens=10, **GREEDY))
    assert "no chat template" in caplog.text
    first, second = found.table.to_pylist()
    assert first["prompt"] == "User: Who counts?\nAssistant:"
    assert second["prompt"] == f"User: Who counts?\nAssistant: {first['text']}\nUser: And then?\nAssistant:"


def test_the_chat_format_finds_how_an_answer_ends(demo: LoadedModel, llama: LoadedModel) -> None:
    assert chat_format(demo.tokenizer).end_tokens == {demo.tokenizer.convert_tokens_to_ids("<|end|>")}
    assert chat_format(llama.tokenizer).until == ("\nUser:",)
    broken = load_random("llama").tokenizer
    broken.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(CheckpointError, match="no system role"):
        chat_format(broken)
    broken.chat_template = "{% for m in messages %}{{ m['role'] }}{% endfor %}"
    with pytest.raises(CheckpointError, match="drops or repeats"):
        chat_format(broken)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"samples": 0},
        {"batch_rows": 0},
        {"temperature": 0.0, "samples": 2},
    ],
)
def test_bad_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        GenerationConfig(**wrong)


def test_uniforms_belong_to_seed_prompt_and_sample() -> None:
    base = uniforms(1, "prompt", 0, 1000)
    assert (base[:10] == uniforms(1, "prompt", 0, 10)).all()
    for other in (uniforms(2, "prompt", 0, 1000), uniforms(1, "prompt!", 0, 1000), uniforms(1, "prompt", 1, 1000)):
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.15
    assert 0.0 <= base.min() < 0.02
    assert 0.98 < base.max() < 1.0


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (0, 0.97), (0, 0.5), (40, 1.0), (40, 0.9)])
def test_draws_from_a_large_vocabulary_need_no_complete_sort(
    top_k: int, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 8 or 16 sorted candidates at first, and with all: the same tokens, of the head and of the tail."""
    n = 400
    logits = torch.randn(n, 300, generator=torch.Generator().manual_seed(0)) * 2
    u, temperature = torch.from_numpy(uniforms(1, "", 0, n)), torch.full((n,), 0.7)
    temperature[::7] = 0.0
    found = []
    for head in (8, 16, 300):
        monkeypatch.setattr(drawing, "_HEAD", head)
        found.append(draw(logits, u, temperature, top_k=top_k, top_p=top_p))
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[2])
    ranks = (logits > logits.gather(1, found[0][:, None])).sum(dim=1)
    assert ranks.max() >= 8 and (ranks < 8).any()
    assert (ranks[::7] == 0).all()


def test_draws_follow_the_truncated_distribution() -> None:
    logits = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3]))
    n = 20_000
    u = torch.from_numpy(uniforms(0, "", 0, n))

    def shares(temperature: float, top_k: int, top_p: float) -> list[float]:
        chosen = draw(logits.expand(n, -1), u, torch.full((n,), temperature), top_k=top_k, top_p=top_p)
        return (torch.bincount(chosen, minlength=4) / n).tolist()

    # 4 standard errors of a share of 0.5 over 20,000 draws: 0.014.
    assert shares(1.0, 0, 1.0) == pytest.approx([0.1, 0.4, 0.2, 0.3], abs=0.015)
    assert shares(1.0, 2, 1.0) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.015)
    assert shares(1.0, 0, 0.65) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.015)  # 0.4 < 0.65 <= 0.7
    assert shares(1.0, 0, 0.75) == pytest.approx([0, 4 / 9, 2 / 9, 3 / 9], abs=0.015)
    assert shares(0.5, 0, 1.0) == pytest.approx([1 / 30, 16 / 30, 4 / 30, 9 / 30], abs=0.015)  # squares
    assert shares(0.0, 0, 1.0) == [0, 1, 0, 0]


@settings(max_examples=60)
@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=12),
    u=st.floats(0.0, 1.0, exclude_max=True),
    temperature=st.floats(0.0, 3.0, width=32),
    top_k=st.integers(0, 15),
    top_p=st.floats(0.01, 1.0),
)
@example([0.0, 0.0, 0.0, 0.0, 0.0, -1.401298464324817e-45, 0.0], 0.0, 2.0, 1, 1.0)  # divided by 2 it is 0 too
def test_a_draw_is_always_a_token_that_may_be_drawn(
    logits: list[float], u: float, temperature: float, top_k: int, top_p: float
) -> None:
    temperature = 0.0 if temperature < 0.05 else temperature
    token = int(
        draw(
            torch.tensor([logits]),
            torch.tensor([u], dtype=torch.float64),
            torch.tensor([temperature], dtype=torch.float32),
            top_k=top_k,
            top_p=top_p,
        )
    )
    better = sum(value > logits[token] for value in logits)
    assert better < (top_k or len(logits))
    if temperature == 0.0:
        assert better == 0


def test_a_row_takes_over_everything_that_was_generated_elsewhere() -> None:
    row = GenerationRow([1, 2], 0.5, np.zeros(2))
    answer = GenerationRow(row.prompt, row.temperature, row.u, tokens=[3], text="x", done=True, end=[4])
    row.take(answer)
    for field in fields(GenerationRow):
        assert getattr(row, field.name) is getattr(answer, field.name), field.name
