"""Chat logs of one's own: KL on the answers that an application has logged, and calls where it had tools."""

import json
from collections.abc import Sequence
from pathlib import Path

from mlflow_compress.items.families.tool_prompts import tools_task
from mlflow_compress.items.named_tasks import TASKS, NamedTask
from mlflow_compress.items.sources import conversations
from mlflow_compress.items.task import Parts, Task, TaskSettings, item_row
from mlflow_compress.records import Items, Request


def _read(file: Path, name: str, settings: TaskSettings) -> Parts:
    """Return the task of logged answers in a file, each the one option of an item, and that of lines with `tools`."""
    redact = conversations.Redaction.of(settings.redact)
    tasks = []
    if answers := conversations.smallest_digests(conversations.answers_of(file, redact), settings.limit):
        tasks.append(_answers_task(name, answers))
    if prompts := conversations.smallest_digests(conversations.tool_prompts_of(file, redact), settings.limit):
        tasks.append(tools_task(f"{name}_tools" if answers else name, "logged_tools", prompts))
    return Parts(tasks=tuple(tasks))


def _answers_task(name: str, answers: Sequence[conversations.LoggedAnswer]) -> Task:
    rows, requests = [], []
    several = {one.conversation for one in answers}
    for one in answers:
        prompt = json.dumps(one.messages, ensure_ascii=False)
        group = one.conversation if len(several) < len(answers) else None
        row = {"id": one.answer_id, "category": one.category, "group_id": group}
        asked = next(message["content"] for message in reversed(one.messages) if message["role"] == "user")
        rows.append(item_row(name, "logged", "loglik", row, question=asked, prompt=prompt, options=[one.answer]))
        requests.append(Request.of(name, one.answer_id, prompt, one.answer, one.answer))
    return Task(name=name, family="logged", items=Items.from_rows(rows), requests=tuple(requests), conversations=True)


TASKS.register("openai")(
    NamedTask(
        source="a file: `openai:FILE.jsonl`",
        licence="the user's",
        items="every answer in the file's conversations",
        shots="",
        rule="KL and calls of tools, no right or wrong",
        definition=(
            "text answers of an assistant, after the messages before them in the chat template; prompts with tools"
        ).encode,
        read=_read,
    )
)
