"""Generation that is interrupted goes on where it was, and ends with the same texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mlflow_compress.errors import StoreError
from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.records import Generations
from mlflow_compress.scoring.generation import decoding
from mlflow_compress.scoring.generation.decoding import GenerationRow
from mlflow_compress.scoring.generation.generate import generate_two_turns, generate_until
from mlflow_compress.scoring.generation.sampling import GenerationConfig
from tests.unit.scoring_models import TEXT, load_random

WORDS = TEXT.split()
PROMPTS = [" ".join(WORDS[i : i + 2 + 3 * (i % 4)]) for i in range(7)]
SAMPLED = GenerationConfig(max_new_tokens=34, samples=2, seed=5, batch_rows=4)


@dataclass(frozen=True)
class Instruction:
    item_id: str
    category: str
    turns: tuple[str, ...]


INSTRUCTIONS = [Instruction(str(i), "writing", (PROMPTS[i], PROMPTS[i + 3])[: 1 + i % 2]) for i in range(3)]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads only wait for each other with models of this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_random("llama", path=tmp_path_factory.mktemp("llama"))


def greedy(loaded: LoadedModel, resume: Path | None) -> list[str]:
    """Answers of 5 to 40 tokens: the first stage finishes some of them."""
    return generate_until(loaded, PROMPTS, until=("e", "o"), max_new_tokens=40, batch_rows=2, resume=resume)


def two_turns(loaded: LoadedModel, resume: Path | None) -> Generations:
    return generate_two_turns(loaded, INSTRUCTIONS, SAMPLED, resume=resume)


class Batches:
    """Stands in for `decoding._grow`: notes the rows that are given to the model, and fails at one of its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._grow: Callable[..., None] = decoding._grow
        self.rows: list[GenerationRow] = []
        self.calls, self.fail_at = 0, -1
        monkeypatch.setattr(decoding, "_grow", self)

    def __call__(self, loaded: Any, batch: Sequence[GenerationRow], *rest: Any) -> None:
        if self.calls == self.fail_at:
            raise KeyboardInterrupt
        self.calls += 1
        self.rows += [row for row in batch if row not in self.rows]
        self._grow(loaded, batch, *rest)

    def begin(self, *, fail_at: int = -1) -> None:
        self.rows, self.calls, self.fail_at = [], 0, fail_at


def same(one: Any, other: Any) -> bool:
    return bool(one.table.equals(other.table)) if isinstance(one, Generations) else bool(one == other)


@pytest.mark.parametrize("work", [greedy, two_turns])
def test_whatever_the_moment_only_what_is_left_is_generated(
    work: Callable[..., Any], llama: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = Batches(monkeypatch)
    whole = work(llama, None)
    n_rows, n_calls = len(batches.rows), batches.calls
    assert n_calls >= 5
    some_left = 0
    for call in range(n_calls):
        folder = tmp_path / str(call)
        batches.begin(fail_at=call)
        with pytest.raises(KeyboardInterrupt):
            work(llama, folder)
        n_finished = sum(row.done for row in batches.rows)
        batches.begin()
        assert same(work(llama, folder), whole), call
        assert len(batches.rows) == n_rows - n_finished
        some_left += 0 < n_finished < n_rows
        batches.begin(fail_at=0)
        assert same(work(llama, folder), whole)  # nothing is left
    assert some_left >= 2


def test_what_was_not_written_is_generated_again(
    llama: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after SIGKILL, which leaves no time to write: what is on disk counts, to the last whole part."""
    whole = greedy(llama, tmp_path / "whole")
    part = tmp_path / "whole" / "part-00000.json"
    part.unlink()
    batches = Batches(monkeypatch)
    assert greedy(llama, tmp_path / "whole") == whole
    assert len(batches.rows) == len(PROMPTS) and part.is_file()


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
