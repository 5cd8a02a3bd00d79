"""Instructions, answers and the MT-Bench judge as the judge stage opens it, for tests."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.judges import Judged, JudgeInputs
from mlflow_compress.judges import open_judge as opened
from mlflow_compress.judges.session import spending_of
from mlflow_compress.records import Generations
from tests.judge_server import judge_server

KEY = "sk-test-0123456789-secret"


@dataclass(frozen=True)
class Instruction:
    item_id: str
    category: str
    turns: tuple[str, ...]
    reference: tuple[str, ...] = ()


WRITING = Instruction("w", "writing", ("Write about a dog.", "Now about a cat."))
MATH = Instruction("m", "math", ("What is 2 + 2?", "Add 3."), ("4", "7"))


def instructions(n: int) -> list[Instruction]:
    """Return n instructions of two turns."""
    return [Instruction(f"w{i}", "writing", (f"Write {i}.", "Again.")) for i in range(n)]


def answers(*items: Instruction, by: str = "answer") -> Generations:
    rows = [
        {"item_id": item.item_id, "turn": turn, "text": f"{by} {turn} to {item.item_id}"}
        for item in items
        for turn in range(len(item.turns))
    ]
    return Generations.from_rows([{"task": "t", "sample": 0, "prompt": "", "n_tokens": 4, **row} for row in rows])


def open_judge(base_url: str, folder: Path, name: str = "mt_bench", **settings: Any) -> Any:
    """Open a judge that asks an endpoint, with the key of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", KEY)
        return opened(name, JudgeConfig(judge_base_url=base_url, **settings), folder)


def grade(
    base_url: str,
    folder: Path,
    *items: Instruction,
    given: Mapping[str, Generations] | None = None,
    name: str = "mt_bench",
    **settings: Any,
) -> Judged:
    """Return what the judge makes of the answers; `given` defaults to one model's answers to all items."""
    said: list[str] = []
    judge = open_judge(base_url, folder, name, **settings)
    inputs = JudgeInputs(
        instructions=items,
        graded=given or {"variant": answers(*items)},
        samples={},
        spending=spending_of(JudgeConfig(**settings).judging),
        say=said.append,
    )
    found: Judged = judge(inputs)
    assert said and all(KEY not in line for line in said)
    # As the stage logs them.
    return replace(found, values={**found.values, **inputs.spending.values()})


def graded(script: Any, folder: Path, *items: Instruction, **settings: Any) -> tuple[Judged, Any]:
    """Grade at an endpoint that answers by `script`; return also the endpoint, which knows what it was asked."""
    with judge_server(script) as server:
        return grade(server.base_url, folder, *items, **settings), server
