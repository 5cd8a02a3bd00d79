"""The embedded tasks: five files about the demo model's small world."""

from dataclasses import replace
from pathlib import Path

from mlflow_compress import demo
from mlflow_compress.config import EMBEDDED
from mlflow_compress.errors import ConfigError
from mlflow_compress.items.families.tool_prompts import TOOLS, tools_task
from mlflow_compress.items.named_tasks import TASKS, NamedTask
from mlflow_compress.items.sources.conversations import Redaction, smallest_digests, tool_prompts_of
from mlflow_compress.items.sources.question_files import load_file
from mlflow_compress.items.task import Corpus, Parts, TaskSettings

DEMO_FILES = ("choice.jsonl", "cloze.jsonl", "lastword.jsonl", "exact.jsonl", "corpus.txt")
DEMO_PARTS = tuple(f"{EMBEDDED}_{Path(name).stem}" for name in DEMO_FILES)  # their names in records


def _build(settings: TaskSettings, shots: int | None) -> Parts:
    if shots is not None:
        raise ConfigError(
            "The demo's shots are set for all of its files", got=f"demo@{shots}", fix="Give num_fewshot=N"
        )
    parts = Parts.join(
        [
            load_file(demo.DATA_DIR / file, settings, name=part)
            for file, part in zip(DEMO_FILES, DEMO_PARTS, strict=True)
        ]
    )
    # Every paragraph of the corpus is a text of its own.
    corpora = [Corpus.of(c.name, c.text.split("\n\n"), between="\n\n") for c in parts.corpora if isinstance(c, Corpus)]
    return replace(parts, corpora=tuple(corpora))


TASKS.register(EMBEDDED)(
    NamedTask(
        source="embedded",
        licence="Apache-2.0",
        items="1,320 lettered (each also with the options E and F), 300 cloze, 300 last words, 152 exact, a corpus",
        shots="`-P num_fewshot=` (5)",
        rule="by family",
        definition=lambda: b"".join((demo.DATA_DIR / name).read_bytes() for name in DEMO_FILES),
        build=_build,
    )
)


_TOOLS_FILE = demo.DATA_DIR / "tools.jsonl"


def _build_tools(settings: TaskSettings, shots: int | None) -> Parts:
    prompts = smallest_digests(tool_prompts_of(_TOOLS_FILE, Redaction()), settings.limit)
    return Parts(tasks=(tools_task(TOOLS, "tools", prompts),))


TASKS.register(TOOLS)(
    NamedTask(
        source="embedded",
        licence="Apache-2.0",
        items="300 prompts, of which 173 need a call",
        shots="",
        rule="the calls of the greedy answer are the right ones",
        definition=_TOOLS_FILE.read_bytes,
        build=_build_tools,
    )
)


_THINKING = "thinking"
_THINKING_FILE = demo.DATA_DIR / "thinking.jsonl"
_MOST_TOKENS = 256  # the longest thought of the training text has 150


def _build_thinking(settings: TaskSettings, shots: int | None) -> Parts:
    if settings.thinking_max_new_tokens == "auto":
        settings = replace(settings, thinking_max_new_tokens=_MOST_TOKENS)
    return load_file(_THINKING_FILE, settings, name=_THINKING)


TASKS.register(_THINKING)(
    NamedTask(
        source="embedded",
        licence="Apache-2.0",
        items="100 sums of three numbers",
        shots="",
        rule="the number behind the thought is the sum",
        definition=_THINKING_FILE.read_bytes,
        build=_build_thinking,
    )
)
