"""Renders chat tasks: user messages become text in a model's chat template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa

from mlflow_compress.items.task import Task
from mlflow_compress.records import Items


def rendered(task: Task, prompt: Callable[[str], str]) -> Task:
    """Return a chat task with its messages rendered as text. Other tasks are returned unchanged.

    Parameters
    ----------
    task : Task
    prompt : callable (message) -> str
        Renders a user message in the chat template, up to the beginning of the answer. If the text ends in white space,
        the answers lose their leading space, as in LLM-Uncertainty-Bench ("[/INST] A", but "assistant\\nA"). Scoring
        then counts that white space as part of the answer, as lm-evaluation-harness does.
    """
    if not task.chat:
        return task
    messages = task.items.column("prompt").tolist()
    texts = {message: prompt(message) for message in {*messages, *(r.context for r in task.requests)}}
    requests = []
    for request in task.requests:
        text = texts[request.context]
        answer = request.continuation.removeprefix(" ") if text[-1:].isspace() else request.continuation
        requests.append(replace(request, context=text, continuation=answer))
    table, shown = task.items.table, pa.array([texts[message] for message in messages], type=pa.string())
    items = Items(table.set_column(table.schema.get_field_index("prompt"), "prompt", shown))
    return replace(task, items=items, requests=tuple(requests), chat=False)
