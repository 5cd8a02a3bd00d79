"""What users get wrong first, in Python: one clear error each, before anything is loaded, written or stored."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import mlflow_compress as mc
from mlflow_compress.items import harness_tasks

ROW = {"id": "1", "category": "sums", "question": "1 + 1?", "choices": ["2", "3"], "answer": 0}
OPTIONS = {("options" if name == "choices" else name): value for name, value in ROW.items()}


class Network:
    """What a loaded model looks like."""

    def save_pretrained(self, folder: Path) -> None:
        raise AssertionError("nothing is saved")

    def state_dict(self) -> dict[str, object]:
        raise AssertionError("nothing is read")


class Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        raise AssertionError("nothing is saved")


Call = Callable[[], Any]
MISTAKES: dict[str, tuple[Call, tuple[str, ...]]] = {
    "a typo in a task": (lambda: mc.evaluate("f", tasks="demoo"), ("'demoo'", "Did you mean 'demo'")),
    "a part of the demo": (lambda: mc.evaluate("f", tasks="demo_choice"), ("'demo_choice'", "tasks=demo")),
    "no task": (lambda: mc.evaluate("f", tasks=[]), ("'tasks' names no task", "Give tasks=")),
    "an empty text of tasks": (lambda: mc.evaluate("f", tasks=" "), ("'tasks' names no task", "Give tasks=")),
    "an empty task between two": (lambda: mc.evaluate("f", tasks="demo,,demo"), ("'tasks' has an empty name",)),
    "no task by name": (lambda: mc.evaluate("f", tasks={}), ("'tasks' names no task", "Give it rows")),
    "a task without rows": (lambda: mc.evaluate("f", tasks={"a": []}), ("without rows", "'a'", "Give it rows")),
    "a frame without rows": (lambda: mc.evaluate("f", tasks=pd.DataFrame([])), ("without rows", "Give it rows")),
    "a generator of rows": (lambda: mc.evaluate("f", tasks=(r for r in [ROW])), ("only once", "tasks=list(...)")),
    "an iterator of tasks": (lambda: mc.evaluate("f", tasks=iter(["demo"])), ("only once", "tasks=list(...)")),
    "a row that is a text": (lambda: mc.evaluate("f", tasks=[ROW, "x"]), ("mixes rows", "a list of dictionaries")),
    "a set in a row": (lambda: mc.evaluate("f", tasks=[{**ROW, "choices": {"2"}}]), ("JSON cannot store", "set")),
    "another name of a column": (
        lambda: mc.evaluate("f", tasks=[OPTIONS]),
        ("tasks[0]:", "lettered: question+choices+answer", "'choices' for 'options'"),
    ),
    "a typo in a column": (
        lambda: mc.evaluate("f", tasks={"sums": [{k.replace("ques", "qes"): v for k, v in ROW.items()}]}),
        ("tasks['sums'][0]:", "'question' for 'qestion'"),
    ),
    "a wrong type in a row": (lambda: mc.evaluate("f", tasks=[ROW, {**ROW, "id": 2}]), ("tasks[1]: 'id'", "a text")),
    "an id twice": (lambda: mc.evaluate("f", tasks=[ROW, ROW]), ("tasks[1]:", "id is used twice")),
    "a letter outside": (lambda: mc.evaluate("f", tasks=[{**ROW, "answer": "D"}]), ("tasks[0]:", "A to B", "'D'")),
    "only examples": (lambda: mc.evaluate("f", tasks=[{**ROW, "split": "dev"}]), ("few-shot", "tasks[0]", "'test'")),
    "a path as a task's name": (lambda: mc.evaluate("f", tasks={"a/b": [ROW]}), ("cannot be a path", "a/b")),
    "tokenizer before model": (
        lambda: mc.evaluate((Tokenizer(), Network())),
        ("'checkpoint'", "Tokenizer, Network", "checkpoint=(model, tokenizer), in this order"),
    ),
    "a list, tokenizer first": (lambda: mc.evaluate("f", model=[Tokenizer(), Network()]), ("'model'", "in this order")),
    "a model alone": (lambda: mc.evaluate("f", model=Network()), ("Network", "Give model=(model, tokenizer)")),
    "a model and a name": (
        lambda: mc.evaluate("f", model=(Network(), "llama")),
        ("Network, str", "(model, tokenizer)"),
    ),
    "two models": (lambda: mc.evaluate("f", model=(Network(), Network())), ("Network, Network", "(model, tokenizer)")),
    "a model as tasks": (lambda: mc.evaluate("f", tasks=Network()), ("'tasks' must be text", "Got: 'Network'")),
    "a number as a store": (lambda: mc.evaluate("f", store=5), ("'store' must be a path", "int: 5")),
    "bytes as a store": (lambda: mc.compare("a", "b", store=b"x"), ("'store' must be a path", "bytes")),
    "a model as a run": (lambda: mc.report(Network()), ("'runs' must be a path, an id or a result", "Network")),
    "a word as bits": (lambda: mc.compress("demo", "rtn", bits="four"), ("'bits'", "'four'", "auto")),
    "a typo in a gate": (lambda: mc.promote(policy={"gate": []}), ("parameter 'policy'", "'gates'")),
    "a number in a policy": (lambda: mc.promote(policy={5: 1}), ("a key that is no text", "gates")),
    "a number as a policy": (lambda: mc.gate("f", policy=5), ("'policy'", "5")),
    "a reserved alias": (lambda: mc.promote(alias="latest"), ("alias is reserved",)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_clear_error_and_nothing_is_written(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    call, words = MISTAKES[mistake]
    with pytest.raises(mc.MlflowCompressError) as raised:
        call()
    message = str(raised.value)
    assert all(word in message for word in words), message
    assert "\n" not in message and "inputs" not in message and " object at " not in message, message
    assert list(tmp_path.iterdir()) == []


def test_a_typo_without_the_harness_names_the_task_and_looks_at_own_names_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(harness_tasks, "find_spec", lambda name: None)
    with pytest.raises(mc.MlflowCompressError, match=r"Task 'demoo' .* Did you mean 'demo'.*\[harness\]"):
        mc.evaluate("f", tasks="demoo")
    with pytest.raises(mc.MlflowCompressError, match=r"Task 'xyzzy' .*lm-evaluation-harness, run: pip install"):
        mc.evaluate("f", tasks="xyzzy")
