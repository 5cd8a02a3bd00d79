"""Suites: the tasks and corpora that `-P tasks=` names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from mlflow_compress.config import EMBEDDED
from mlflow_compress.errors import ConfigError, DataError, MlflowCompressError, raise_together
from mlflow_compress.items.families.tool_prompts import TOOLS, with_calls
from mlflow_compress.items.named.demo import DEMO_PARTS
from mlflow_compress.items.named_tasks import TASKS, NamedTask
from mlflow_compress.items.prompt_style import styles_of
from mlflow_compress.items.sources.data_dir import check_data_dir
from mlflow_compress.items.sources.question_files import check_file, file_task_name, load_file
from mlflow_compress.items.task import (
    Corpus,
    GroupAverages,
    HarnessMetric,
    Parts,
    Task,
    TaskSettings,
    TraceCorpus,
    check_tasks,
)
from mlflow_compress.records import Items, Request, RunRecords, Traces
from mlflow_compress.tool_calls import CallForm


def _rendered(
    task: Task,
    prompt: Callable[..., str],
    conversation: Callable[[str], str],
    with_tools: Callable[[Mapping[str, Any]], str],
    call_form: Callable[[], CallForm],
) -> Task:
    """Return a chat task with its messages rendered as text. Other tasks are returned unchanged.

    `prompt` renders a user message in the chat template, up to the beginning of the answer (with `enable_thinking`,
    where the task says whether its model thinks), `conversation` several messages, after which an answer follows as it
    was logged, `with_tools` messages and tools, whose calls have the `call_form`. If the text ends in white space, the
    answers lose their leading space, as in LLM-Uncertainty-Bench ("[/INST] A", but "assistant\\nA"). Scoring then
    counts that white space as part of the answer, as lm-evaluation-harness does.
    """
    if task.calls:
        return with_calls(task, with_tools, call_form())
    if not task.chat and not task.conversations:
        return task
    prompt = conversation if task.conversations else prompt
    messages = task.items.column("prompt").tolist()
    thinking = None if task.answering is None else task.answering.thinking
    told = {} if thinking is None else {"enable_thinking": thinking}
    texts = {message: prompt(message, **told) for message in {*messages, *(r.context for r in task.requests)}}
    requests = []
    for request in task.requests:
        text = texts[request.context]
        spaced = text[-1:].isspace() and not task.conversations
        answer = request.continuation.removeprefix(" ") if spaced else request.continuation
        requests.append(replace(request, context=text, continuation=answer))
    table, shown = task.items.table, pa.array([texts[message] for message in messages], type=pa.string())
    items = Items(table.set_column(table.schema.get_field_index("prompt"), "prompt", shown))
    return replace(task, items=items, requests=tuple(requests), chat=False, conversations=False)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """All tasks and corpora of one evaluation."""

    tasks: tuple[Task, ...]
    corpora: tuple[Corpus | TraceCorpus, ...]
    averages: tuple[GroupAverages, ...] = ()

    @property
    def items(self) -> Items:
        return Items.concat([task.items for task in self.tasks])

    @property
    def requests(self) -> list[Request]:
        if any(task.chat or task.conversations or task.calls for task in self.tasks):
            raise ValueError("chat messages must be rendered before a model reads them")
        return [request for task in self.tasks for request in task.requests]

    @property
    def traces(self) -> Traces | None:
        """The baseline's own answers; None where the tasks do not name them."""
        return next((c.answers for c in self.corpora if isinstance(c, TraceCorpus)), None)

    @property
    def is_scored(self) -> bool:
        """Whether any token is scored; False where every answer is generated."""
        return bool(self.corpora) or any(t.requests or t.documents or t.chains is not None for t in self.tasks)

    def rendered(self, *render: Any) -> "Suite":
        return replace(self, tasks=tuple(_rendered(task, *render) for task in self.tasks))

    @cached_property
    def hashes(self) -> dict[str, str]:
        """The SHA-256 of every task's and corpus's content, by name."""
        tasks = {task.name: task.content_hash() for task in self.tasks}
        return tasks | {corpus.name: corpus.content_hash() for corpus in self.corpora}

    def harness_metrics(self, records: RunRecords) -> list[HarnessMetric]:
        """Return the metrics that lm-evaluation-harness's code computes from these records; groups last."""
        metrics = [m for task in self.tasks if task.harness_metrics is not None for m in task.harness_metrics(records)]
        return metrics + [metric for group in self.averages for metric in group.average(metrics)]


def _named(part: str, settings: TaskSettings) -> Parts:
    """Return the tasks of a name: a named task or group of this package, or a name of lm-evaluation-harness."""
    name, at, number = part.partition("@")
    if at and not number.isdecimal():
        raise ConfigError("The number of few-shot examples is not a whole number", allowed="NAME@5", got=part)
    shots = int(number) if at else None
    if name not in TASKS.names():
        from mlflow_compress.items.harness_build import build

        return build(name, shots=shots, settings=settings)
    known = TASKS.get(name)
    if known.read is not None:
        raise ConfigError(f"The task {name!r} reads a file", allowed=f"{name}:FILE.jsonl", got=part)
    if known.build is not None:
        if shots is not None and not known.shots:
            raise ConfigError(f"The task {name!r} has no few-shot examples", got=part)
        with TASKS.blaming(name):
            parts = known.build(settings, shots)
        check_tasks(parts.tasks if isinstance(parts, Parts) else parts, TASKS.origin(name))
        return replace(parts, tasks=tuple(_with_named_grader(name, task) for task in parts.tasks))
    if shots is not None:
        raise ConfigError("A group's members have their own few-shot examples", got=part)
    # Where data sets are missing, one error lists all of them.
    joined: list[Parts] = []
    errors: list[DataError] = []
    for member in known.members:
        try:
            joined.append(_named(member, settings))
        except DataError as error:
            errors.append(error)
    raise_together(errors)
    return Parts.join(joined)


def _with_named_grader(name: str, task: Task) -> Task:
    if task.answering is None or (judge := task.answering.judge) is None:
        return task

    def grade(answers: Mapping[str, str]) -> Mapping[str, Any]:
        with TASKS.blaming(name):
            correct: object = judge(answers)
        if not isinstance(correct, Mapping):
            raise ConfigError(f"The {TASKS.origin(name)} grades with a {type(correct).__name__}", allowed="a mapping")
        return correct

    return replace(task, answering=replace(task.answering, judge=grade))


def _parts(spec: str, model: str) -> list[str]:
    if spec == "auto" and model != EMBEDDED:
        raise ConfigError("Parameter 'tasks' has a default for the demo model only", fix="Give tasks=NAMES or files")
    return [EMBEDDED] if spec == "auto" else task_parts(spec)


def task_parts(spec: str) -> list[str]:
    """Return the parts of `tasks`. What follows a name that takes an argument may have commas: long:4k,16k."""
    parts: list[str] = []
    for part in map(str.strip, spec.split(",")):
        last = _behind_name(parts[-1]) if parts else None
        if last is not None and last[0].argument is not None and "?" not in last[1] and part[:1].isdecimal():
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return parts


def _behind_name(part: str) -> tuple[NamedTask, str] | None:
    """Return the task of a part of `tasks`, and the file or argument behind its name; None where there is none."""
    name, colon, behind = part.partition(":")
    if not colon or name not in TASKS.names():
        return None
    task = TASKS.get(name)
    return None if task.read is None and task.argument is None else (task, behind)


def is_task_file(part: str | Path) -> bool:
    """Return whether a part of `tasks` is a file, not a name, nor a name followed by a file."""
    return Path(part).suffix in (".jsonl", ".txt") and _behind_name(str(part)) is None


def _load(part: str, settings: TaskSettings) -> Parts:
    if (named := _behind_name(part)) is not None:
        task, behind = named
        if task.argument is not None:
            return task.argument(behind)(settings)
        assert task.read is not None
        return task.read(Path(behind), file_task_name(Path(behind)), settings)
    return load_file(Path(part), settings) if is_task_file(part) else _named(part, settings)


def check_tasks_named(spec: str, *, model: str) -> None:
    """Refuse unknown names and wrong files, all of them in one error. No harness, torch or data set is loaded."""
    errors: list[MlflowCompressError] = []
    for part in _parts(spec, model):
        try:
            if not spec.strip():
                allowed = "task names and files (.jsonl, .txt); in Python rows of items too"
                raise ConfigError("Parameter 'tasks' names no task", allowed=allowed, fix="Give tasks=NAMES or files")
            if not part:
                raise ConfigError("Parameter 'tasks' has an empty name", got=spec)
            if (named := _behind_name(part)) is not None and named[0].argument is not None:
                named[0].argument(named[1])
            elif named is not None:
                _load(part, TaskSettings())
            elif is_task_file(part):
                check_file(Path(part))
            elif (name := part.partition("@")[0]) in TASKS.names():
                TASKS.get(name).require_packages(name)
            elif name in DEMO_PARTS:
                raise ConfigError("This is only a part of a task", got=name, fix=f"Give tasks={EMBEDDED}, all of it")
            else:
                from mlflow_compress.items.harness_tasks import check_is_mentioned

                check_is_mentioned(name)
        except (ConfigError, DataError) as error:
            errors.append(error)
    raise_together(errors)


def asks_with_tools(spec: str, *, model: str) -> bool:
    """Return whether a model has tools in one of the tasks that `spec` names."""
    parts = _parts(spec, model)
    read = [_load(p, TaskSettings()) for p in parts if (named := _behind_name(p)) is not None and named[0].read]
    return TOOLS in parts or any(task.calls for loaded in read for task in loaded.tasks)


def has_questions(spec: str, *, model: str) -> bool:
    """Return whether not all of the tasks that `spec` names are corpora. A corpus has no shots."""
    parts = [part for part in _parts(spec, model) if not part.endswith(".txt")]
    known = [TASKS.get(part) for part in parts if part in TASKS.names()]
    return len(known) < len(parts) or any(task.shots or task.members for task in known)


def load_suite(spec: str, *, model: str, settings: TaskSettings) -> Suite:
    """Return the suite that `spec` names, read and checked before any model is loaded.

    'auto' is the demo's tasks, for the demo only. A name is one of `TASKS`, or a task, group or tag of
    lm-evaluation-harness; @SHOTS after it sets the number of few-shot examples. A *.jsonl file holds items (its fields
    decide the family), a *.txt file a corpus. NAME:FILE is a file that a named task reads.
    """
    check_data_dir(settings.data_dir)
    styles_of(settings.prompt_style)  # refuses a wrong name, even if no task uses the style
    parts = Parts.join([_load(part, settings) for part in _parts(spec, model)])
    names = [part.name for part in (*parts.tasks, *parts.corpora)]
    if twice := sorted({name for name in names if names.count(name) > 1}):  # records name their task
        raise ConfigError("Two tasks have the same name", got=twice, fix="Rename one of the files, or leave one out")
    return Suite(tasks=parts.tasks, corpora=parts.corpora, averages=parts.averages)
