"""Items with tools: the model decides whether it calls one, and its calls are graded.

- `tools`: prompts with the right calls.
- `logged_tools`: what an application has asked; its own calls are neither right nor wrong.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlflow_compress.item_families import ITEM_FAMILIES, ItemFamily
from mlflow_compress.items.sources.conversations import ToolPrompt
from mlflow_compress.items.task import Answering, Task, item_row
from mlflow_compress.records import Items, Request
from mlflow_compress.tool_calls import Call, CallForm, read_calls, same_calls

TOOLS = "tools"  # The embedded task
_SAMPLES = 4  # drawn answers per prompt and sampling
_MOST_TOKENS = 256

ITEM_FAMILIES.register("tools")(ItemFamily(graded=True, calls=True))
ITEM_FAMILIES.register("logged_tools")(ItemFamily(logged=True, calls=True, by_category=True))


def tools_task(name: str, family: str, prompts: Sequence[ToolPrompt]) -> Task:
    """Return the task of some prompts. `with_calls` makes it one that a model can read."""
    several = {one.conversation for one in prompts}
    rows = [
        item_row(
            name,
            family,
            "calls",
            {
                "id": one.answer_id,
                "category": one.category,
                "group_id": one.conversation if len(several) < len(prompts) else None,
            },
            question=one.question,
            prompt=json.dumps({"messages": one.messages, "tools": one.tools}, ensure_ascii=False),
            answers=[json.dumps(part, ensure_ascii=False) for part in (one.tools, one.calls) if part is not None],
        )
        for one in prompts
    ]
    answering = Answering(until=(), max_new_tokens=_MOST_TOKENS, samples=_SAMPLES)
    return Task(name=name, family=family, items=Items.from_rows(rows), answering=answering, calls=True)


def with_calls(task: Task, prompt: Callable[[Mapping[str, Any]], str], form: CallForm) -> Task:
    """Return a task of prompts with tools as text, scored at the token where a call would begin.

    `prompt` renders messages and tools up to the beginning of the answer, and `form` is how the template writes calls.
    """
    rows = task.items.table.to_pylist()
    for row in rows:
        row.update(prompt=prompt(json.loads(row["prompt"])), options=[form.mark])
    requests = tuple(Request.of(task.name, row["item_id"], row["prompt"], form.first, form.first) for row in rows)
    graded = ITEM_FAMILIES.get(task.family).graded
    known = {row["item_id"]: [json.loads(part) for part in row["answers"]] for row in rows}

    def grade(answers: Mapping[str, str]) -> dict[str, bool | None]:
        correct: dict[str, bool | None] = {}
        for item, text in answers.items():
            tools, calls = known[item]
            right = [Call(call["name"], call["arguments"]) for call in calls]
            correct[item] = same_calls(read_calls(text, form.mark), right, tools)
        return correct

    assert task.answering is not None
    answering = replace(task.answering, end_tokens=form.end_tokens, judge=grade if graded else None)
    return replace(task, items=Items.from_rows(rows), requests=requests, answering=answering, calls=False)
