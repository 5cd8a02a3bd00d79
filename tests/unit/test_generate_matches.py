"""Our decoding against transformers' `generate`, token for token, on models of every kind of cache."""

import copy
import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BloomConfig, DynamicCache, LlamaConfig, MambaConfig, MistralConfig, OPTConfig, Phi3Config
from transformers import GenerationConfig as Settings

from mlflow_compress.demo import MODEL_DIR
from mlflow_compress.errors import StoreError, UnsupportedError
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.records import Generations
from mlflow_compress.scoring.generation import decoding
from mlflow_compress.scoring.generation.decoding import (
    CachedBatch,
    GenerationJob,
    GrowingLayer,
    decode,
    reason_not_to_cache,
    shards,
)
from mlflow_compress.scoring.generation.generate import generate_two_turns, generate_until
from mlflow_compress.scoring.generation.generation_rows import GenerationConfig, GenerationRow, Speed, uniforms
from tests.judging import Instruction
from tests.unit.scoring_models import CONFIGS, GREEDY, TEXT, VOCAB, build_model, build_tokenizer, load_random

pytestmark = pytest.mark.usefixtures("one_thread")
SAMPLED = GenerationConfig(max_new_tokens=34, samples=2, seed=5, batch_rows=2)
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
WIDE: dict[str, Any] = {**SHAPE, "intermediate_size": 64, "num_attention_heads": 4, "max_position_embeddings": 160}
MODELS = {
    **CONFIGS,
    # Windows of 8 tokens: shorter than most prompts, and than every answer.
    "mistral": lambda: MistralConfig(**WIDE, num_key_value_heads=2, sliding_window=8),
    "gemma2": lambda: _sliding(CONFIGS["gemma2"]()),
    "opt": lambda: OPTConfig(**SHAPE, ffn_dim=64, num_attention_heads=4, max_position_embeddings=160),
    "phi3": lambda: Phi3Config(**WIDE, num_key_value_heads=2, original_max_position_embeddings=160),
    "phi3 longrope": lambda: Phi3Config(
        **WIDE,
        num_key_value_heads=2,
        original_max_position_embeddings=80,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 6,
            "long_factor": [2.0] * 6,
            "original_max_position_embeddings": 80,
        },
    ),
    "bloom": lambda: BloomConfig(**SHAPE, n_head=4),
    "mamba": lambda: MambaConfig(**SHAPE, state_size=8),
    "llama longrope": lambda: _scaled(
        CONFIGS["llama"](),
        rope_type="longrope",
        short_factor=[1.0] * 6,
        long_factor=[4.0 + n for n in range(6)],
        original_max_position_embeddings=80,
    ),
    # With `n_positions`, answers may be longer than what the embedding was made for.
    "dynamic": lambda: _scaled(
        LlamaConfig(**WIDE | {"max_position_embeddings": 80}, n_positions=160), rope_type="dynamic"
    ),
}
CACHED = ["llama", "qwen2", "gpt_neox", "gpt2", "gemma2", "mistral", "opt", "phi3"]
READ_AGAIN = {"bloom": "prepared", "mamba": "prepared"}
LENGTH_SCALED = ["phi3 longrope", "llama longrope", "dynamic"]  # beyond 80 tokens


def _sliding(config: Any) -> Any:
    config.sliding_window = 8
    return config


def _scaled(config: Any, **rope: Any) -> Any:
    config.rope_parameters = {"factor": 2.0, "rope_theta": 10000.0, **rope}
    return config


def loaded(name: str) -> LoadedModel:
    return LoadedModel(
        build_model(MODELS[name]()), build_tokenizer(), Path("nowhere"), torch.float32, torch.device("cpu")
    )


def prompts(seed: int, lengths: Sequence[int], vocab: int = VOCAB) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(2, vocab, size=n).tolist() for n in lengths]


def rows_of(every: Sequence[list[int]]) -> list[GenerationRow]:
    return [GenerationRow(list(prompt), 0.0, np.empty(0)) for prompt in every]


def decode_greedily(
    model: Any, rows: list[GenerationRow], n: int, batch_rows: int = 64, ends: Collection[int] = ()
) -> None:
    config = GenerationConfig(max_new_tokens=n, batch_rows=batch_rows, **GREEDY)
    decode(model, GenerationJob(rows=rows, config=config, end_tokens=ends))


def transformers_own(model: Any, every: Sequence[list[int]], n: int, ends: set[int]) -> list[list[int]]:
    """`generate` on all prompts in one left-padded batch; tokens up to the end token."""
    length = max(map(len, every))
    ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in every])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in every])
    settings = Settings(max_new_tokens=n, do_sample=False, eos_token_id=sorted(ends), pad_token_id=min(ends))
    with torch.inference_mode():
        new = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)[:, length:].tolist()
    return [row[: next((i for i, token in enumerate(row) if token in ends), n)] for row in new]


def ends_of(model: Any, every: Sequence[list[int]], n: int) -> set[int]:
    """Frequent tokens of the answers: as end tokens, they end answers in different places."""
    counted = np.bincount([t for tokens in transformers_own(model, every, n, {1}) for t in tokens], minlength=VOCAB)
    return {1, *counted.argsort()[::-1][:3].tolist()}


@pytest.mark.parametrize("name", CACHED)
def test_greedy_tokens_are_those_of_generate(name: str) -> None:
    """Lengths of 1 to 60 tokens: nearly everything is padding; 16 rows in batches of 4, so that rows enter and leave."""
    model = loaded(name)
    assert reason_not_to_cache(model.model) is None
    every = prompts(1, [1, 2, 60, 7, 3, 3, 31, 9, 2, 12, 5, 1, 22, 4, 8, 3])
    ends = ends_of(model.model, every, 40)
    expected = transformers_own(model.model, every, 40, ends)
    assert len({len(tokens) for tokens in expected}) > 4
    for batch_rows in (4, 64):
        rows = rows_of(every)
        decode_greedily(model, rows, 40, batch_rows, ends)
        assert [row.tokens for row in rows] == expected


@pytest.mark.parametrize("name", READ_AGAIN)
def test_other_models_are_decoded_by_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(name)
    assert READ_AGAIN[name] in (reason_not_to_cache(model.model) or "")
    every = prompts(1, [9, 9, 9, 9, 9])  # Mamba's own states are not the same behind padding
    ends = ends_of(model.model, every, 40)
    rows = rows_of(every)
    monkeypatch.setattr(decoding, "_with_cache", None)
    decode_greedily(model, rows, 40, 3, ends)
    assert [row.tokens for row in rows] == transformers_own(model.model, every, 40, ends)


@pytest.mark.parametrize("name", LENGTH_SCALED)
def test_answers_that_outgrow_their_frequencies_are_those_of_one_prompt_alone(name: str) -> None:
    """Prompts on both sides of 80 tokens, and answers across it, each against `generate` on a fresh copy."""
    fresh = build_model(MODELS[name]())
    every = prompts(3, [60, 80, 81, 60, 79, 100, 12])
    expected = [transformers_own(copy.deepcopy(fresh), [prompt], 24, {1})[0] for prompt in every]
    model = LoadedModel(fresh, build_tokenizer(), Path("nowhere"), torch.float32, torch.device("cpu"))
    for batch_rows in (2, 64):
        rows = rows_of(every)
        decode_greedily(model, rows, 24, batch_rows, {1})
        assert [row.tokens for row in rows] == expected


def test_short_answers_of_such_models_are_decoded_with_our_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 41 tokens reads at most 41 + 40 - 1 = 80 tokens, one of 42 may read 81."""
    model = loaded("phi3 longrope")
    seen: list[list[int]] = []
    grow = decoding._grow

    def noting(loaded: LoadedModel, batch: Sequence[GenerationRow], *rest: Any) -> None:
        seen.append([len(row.prompt) for row in batch])
        grow(loaded, batch, *rest)

    monkeypatch.setattr(decoding, "_grow", noting)
    decode_greedily(model, rows_of(prompts(3, [41, 9, 42, 42, 43])), 40)
    assert seen == [[42, 42], [43]]


def test_greedy_tokens_of_the_demo_are_those_of_generate() -> None:
    demo = load_model(LoadConfig(path=str(MODEL_DIR), device="cpu"))
    asked = ["What is 2 + 3?", "Tell me a story about a dog.", "Write.", "Who lives in the old mill by the river?"]
    texts = [f"<|user|>{text}<|end|>\n<|assistant|>" for text in asked] + ["The", "Once upon a time there was a"]
    every = [demo.tokenizer(text)["input_ids"] for text in texts]
    rows = rows_of(every)
    decode_greedily(demo, rows, 70, 4)
    ends = {*demo.model.generation_config.eos_token_id, demo.tokenizer.eos_token_id}
    expected = transformers_own(demo.model, every, 70, ends)
    assert [row.tokens for row in rows] == expected
    assert len({len(tokens) for tokens in expected}) > 2


def test_samples_of_a_prompt_share_its_reading_and_nothing_is_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    forward = CachedBatch._forward

    def noting(batch: CachedBatch, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        if ids.shape[1] > 1:
            read.append(ids.numel())
        return forward(batch, ids, *rest)

    monkeypatch.setattr(CachedBatch, "_forward", noting)
    model, every = loaded("llama"), prompts(2, [6] * 9)
    config = GenerationConfig(max_new_tokens=24, samples=4, batch_rows=8)
    rows = [
        GenerationRow(list(prompt), 0.7, uniforms(3, str(prompt), sample, 24))
        for prompt in every
        for sample in range(4)
    ]
    decode(model, GenerationJob(rows=rows, config=config, end_tokens=ends_of(model.model, every, 24)))
    assert len({len(row.tokens) for row in rows}) > 3
    assert sum(read) == 9 * 6  # each token of each prompt once
    assert len(read) > 5  # rows entered running batches


@pytest.mark.parametrize("on_gpu", [True, False])
def test_where_memory_runs_out_half_as_many_go_on_from_what_they_have(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, every = loaded("llama"), prompts(2, [6, 9, 4, 7, 5])
    at_once, most = [], [5, 2, 1]
    forward = CachedBatch._forward

    def forward_or_fail(batch: CachedBatch, ids: torch.Tensor, lengths: list[int], *rest: Any) -> torch.Tensor:
        at_once.append(len(ids))
        if max(lengths) > {5: 14, 2: 20, 1: 99}[most[0]]:
            most.pop(0)
            words = "CUDA out of memory" if on_gpu else "DefaultCPUAllocator: can't allocate memory"
            raise (torch.OutOfMemoryError if on_gpu else RuntimeError)(words)
        return forward(batch, ids, lengths, *rest)

    expected, rows = rows_of(every), rows_of(every)
    decode_greedily(model, expected, 24)
    monkeypatch.setattr(CachedBatch, "_forward", forward_or_fail)
    decode_greedily(model, rows, 24)
    assert [row.tokens for row in rows] == [row.tokens for row in expected]
    assert most == [1] and sorted(set(at_once)) == [1, 2, 5]


def test_where_one_answer_does_not_fit_this_is_said_and_models_without_our_cache_go_on_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, every, grow = loaded("llama"), prompts(2, [6, 9, 4, 7, 5]), decoding._grow
    expected, rows = rows_of(every), rows_of(every)
    decode_greedily(model, expected, 40)
    most = 2

    def grow_or_fail(loaded: Any, batch: Sequence[GenerationRow], *rest: Any) -> None:
        if len(batch) > most and batch[0].tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        grow(loaded, batch, *rest)

    monkeypatch.setattr(decoding, "reason_not_to_cache", lambda _: "a test")
    monkeypatch.setattr(decoding, "_grow", grow_or_fail)
    decode_greedily(model, rows, 40)
    assert [row.tokens for row in rows] == [row.tokens for row in expected]
    most = 0
    with pytest.raises(UnsupportedError, match="ran out on one answer of 41 tokens"):
        decode_greedily(model, rows_of(every), 40)


def test_shards_keep_the_rows_of_a_prompt_together() -> None:
    every = prompts(4, [5, 3, 5, 8, 2])
    rows = [row for prompt in every for row in rows_of([prompt] * 3)]
    config = GenerationConfig(max_new_tokens=4, batch_rows=4, temperature=1.0)
    found = shards(rows, config)
    assert sorted(map(id, rows)) == sorted(id(row) for shard in found for row in shard)
    assert [len(shard) for shard in found] == [6, 6, 3]
    assert all(len({tuple(row.prompt) for row in shard}) == len(shard) // 3 for shard in found)
    # More samples than a batch holds are parted.
    assert [len(shard) for shard in shards(rows_of([every[0]] * 11), config)] == [8, 3]
    assert shards(rows[::-1], config) != found and [len(s) for s in shards(rows[::-1], config)] == [6, 6, 3]


def test_a_growing_layer_holds_what_a_dynamic_one_holds() -> None:
    theirs, ours = DynamicCache(config=CONFIGS["llama"]()).layers[0], GrowingLayer()
    generator = torch.Generator().manual_seed(0)
    for n_tokens in (5, *[1] * 80, 3):
        new = torch.randn(2, 3, 2, n_tokens, 4, generator=generator)
        for one, other in zip(theirs.update(new[0], new[1]), ours.update(new[0], new[1]), strict=True):
            assert torch.equal(one, other)
        assert ours.get_seq_length() == theirs.get_seq_length()


def test_nothing_to_generate_is_no_error_and_finished_rows_stay() -> None:
    decode_greedily(loaded("llama"), [], 4)
    rows = rows_of(prompts(5, [3, 4]))
    done = [dataclasses.replace(row, tokens=[7], text="kept", done=True) for row in rows]
    decode_greedily(loaded("llama"), done, 4)
    assert [(row.tokens, row.text) for row in done] == [([7], "kept")] * 2


WORDS = TEXT.split()
PROMPTS = [" ".join(WORDS[i : i + 2 + 3 * (i % 4)]) for i in range(7)]


INSTRUCTIONS = [Instruction(str(i), "writing", (PROMPTS[i], PROMPTS[i + 3])[: 1 + i % 2]) for i in range(3)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_random("llama", path=tmp_path_factory.mktemp("llama"))


def greedy(loaded: LoadedModel, resume: Path | None) -> list[str]:
    """Answers of 5 to 40 tokens, in two shards."""
    return generate_until(loaded, PROMPTS, until=("e", "o"), max_new_tokens=40, batch_rows=2, resume=resume)


def two_turns(loaded: LoadedModel, resume: Path | None) -> Generations:
    return generate_two_turns(loaded, INSTRUCTIONS, SAMPLED, resume=resume)


@dataclass(frozen=True)
class Pass:
    """A forward pass: what went in and came out."""

    ids: torch.Tensor
    lengths: list[int]
    logits: torch.Tensor

    def equals(self, other: "Pass") -> bool:
        return self.lengths == other.lengths and all(
            torch.equal(one, two) for one, two in ((self.ids, other.ids), (self.logits, other.logits))
        )


class Passes:
    """Stands in for `CachedBatch._forward`: notes every forward pass, and fails at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._forward = CachedBatch._forward
        self.seen: list[Pass] = []
        self.fail_at = -1
        monkeypatch.setattr(CachedBatch, "_forward", lambda batch, *inputs: self(batch, *inputs))

    def __call__(self, batch: CachedBatch, ids: torch.Tensor, lengths: list[int], *rest: Any) -> torch.Tensor:
        if len(self.seen) == self.fail_at:
            raise KeyboardInterrupt
        logits = self._forward(batch, ids, lengths, *rest)
        self.seen.append(Pass(ids, lengths, logits))
        return logits

    def begin(self, *, fail_at: int = -1) -> None:
        self.seen, self.fail_at = [], fail_at


def same(one: Any, other: Any) -> bool:
    return bool(one.table.equals(other.table)) if isinstance(one, Generations) else bool(one == other)


@pytest.mark.parametrize("work", [greedy, two_turns])
def test_whatever_the_moment_only_whole_shards_are_kept_and_the_rest_is_computed_bit_for_bit_as_without_interruption(
    work: Callable[..., Any], llama: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Passes(monkeypatch)
    whole = work(llama, None)
    every = passes.seen
    begins = set()
    for moment in range(3, len(every), 12):
        folder = tmp_path / str(moment)
        passes.begin(fail_at=moment)
        with pytest.raises(KeyboardInterrupt):
            work(llama, folder)
        passes.begin()
        assert same(work(llama, folder), whole), moment
        begin = len(every) - len(passes.seen)
        assert begin <= moment
        assert all(one.equals(two) for one, two in zip(passes.seen, every[begin:], strict=True)), moment
        begins.add(begin)
        passes.begin(fail_at=0)
        assert same(work(llama, folder), whole)  # nothing is left
    assert len(begins) == (2 if work is greedy else 3)  # one for each shard


def test_what_was_not_written_is_generated_again(
    llama: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after SIGKILL, which leaves no time to write: what is on disk counts, to the last whole part."""
    passes = Passes(monkeypatch)
    whole = greedy(llama, tmp_path / "whole")
    n_passes = len(passes.seen)
    part = tmp_path / "whole" / "part-00000.json"
    part.unlink()
    passes.begin()
    assert greedy(llama, tmp_path / "whole") == whole
    assert len(passes.seen) == n_passes and part.is_file()


def test_the_speed_is_that_of_what_was_generated_now(llama: LoadedModel, tmp_path: Path) -> None:
    first, second = Speed(), Speed()
    found = generate_two_turns(llama, INSTRUCTIONS, SAMPLED, resume=tmp_path, speed=first)
    assert first.n_tokens == sum(found.column("n_tokens")) > 0
    assert first.tokens_per_second == first.n_tokens / first.seconds > 0
    generate_two_turns(llama, INSTRUCTIONS, SAMPLED, resume=tmp_path, speed=second)
    assert second.n_tokens == 0 and second.tokens_per_second is None


def test_answers_of_another_generation_are_refused(llama: LoadedModel, tmp_path: Path) -> None:
    two_turns(llama, tmp_path)
    for config, differs in (
        (dataclasses.replace(SAMPLED, seed=6), "prompts, settings"),
        (dataclasses.replace(SAMPLED, top_k=3), "settings"),
    ):
        with pytest.raises(StoreError, match=f"with other {differs}"):
            generate_two_turns(llama, INSTRUCTIONS, config, resume=tmp_path)
    other = load_random("llama", seed=2, path=tmp_path / "other")
    with pytest.raises(StoreError, match="with other weights"):
        two_turns(other, tmp_path)
