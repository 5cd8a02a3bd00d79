"""Tools: whether a model calls the tools that it has, on prompts about the demo's small world."""

from mlflow_compress import demo
from mlflow_compress.errors import ConfigError
from mlflow_compress.items.families.tool_prompts import TOOLS, tools_task
from mlflow_compress.items.named_tasks import TASKS, NamedTask
from mlflow_compress.items.sources.conversations import Redaction, smallest_digests, tool_prompts_of
from mlflow_compress.items.task import Parts, TaskSettings

FILE = demo.DATA_DIR / "tools.jsonl"


def _build(settings: TaskSettings, shots: int | None) -> Parts:
    if shots is not None:
        raise ConfigError("Prompts with tools have no few-shot examples", got=f"tools@{shots}")
    prompts = smallest_digests(tool_prompts_of(FILE, Redaction()), settings.limit)
    return Parts(tasks=(tools_task(TOOLS, "tools", prompts),))


TASKS.register(TOOLS)(
    NamedTask(
        source="embedded",
        licence="Apache-2.0",
        items="300 prompts, of which 173 need a call",
        shots="",
        rule="the calls of the greedy answer are the right ones",
        definition=FILE.read_bytes,
        build=_build,
    )
)
