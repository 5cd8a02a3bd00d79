"""Tasks whose prompts are a user's messages, as a model reads them: the step for which the tokenizer is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa

from mlflow_compress.items.task import Task
from mlflow_compress.records import Items


def rendered(task: Task, prompt: Callable[[str], str]) -> Task:
    """Return a chat task with its messages as a model reads them; any other task as it is.

    Parameters
    ----------
    task : Task
    prompt : callable (message) -> str
        The chat template's text from the user's message up to where the answer begins. Where it ends with white space
        the answers lose their leading blank, as in LLM-Uncertainty-Bench ("[/INST] A", but "assistant\\nA"); scoring
        then counts that white space to the answer, as lm-evaluation-harness does.
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
