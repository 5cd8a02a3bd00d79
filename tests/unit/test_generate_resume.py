"""Generation that is interrupted goes on where it was, and ends with the same texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mlflow_compress.errors import StoreError
from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.records import Generations
from mlflow_compress.scoring.generation.decoding import CachedBatch
from mlflow_compress.scoring.generation.generate import generate_two_turns, generate_until
from mlflow_compress.scoring.generation.generation_rows import GenerationConfig, Speed
from tests.judging import Instruction
from tests.unit.scoring_models import TEXT, load_random

WORDS = TEXT.split()
PROMPTS = [" ".join(WORDS[i : i + 2 + 3 * (i % 4)]) for i in range(7)]
pytestmark = pytest.mark.usefixtures("one_thread")
SAMPLED = GenerationConfig(max_new_tokens=34, samples=2, seed=5, batch_rows=2)


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

    def equals(self, other: Pass) -> bool:
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
