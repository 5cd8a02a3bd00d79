"""Turns the harness's task objects into ours, with the same prompts and continuations."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from mlflow_compress import demo
from mlflow_compress.errors import ConfigError, DataError, MlflowCompressError, UnsupportedError
from mlflow_compress.item_families import shared_text
from mlflow_compress.items.harness_tasks import load_harness_tasks
from mlflow_compress.items.prompt_style import LETTERS
from mlflow_compress.items.task import (
    Answering,
    GroupAverages,
    HarnessMetric,
    Parts,
    Task,
    TaskSettings,
    group_of,
    item_row,
    limited,
)
from mlflow_compress.models.model_files import open_tokenizer, render_template
from mlflow_compress.records import Items, Request, RunRecords


@dataclass(frozen=True)
class _Document:
    """One document of a leaf task with its requests."""

    item_id: str
    doc: Any  # The harness's document
    instances: list[Any]  # The harness's requests, by option


@dataclass(frozen=True)
class _Leaf:
    """A leaf task with its documents."""

    name: str  # The harness's name for it
    records: str  # Task name in our records: the group's, if the group becomes one task; otherwise the leaf's own
    task: Any  # The harness's task
    documents: list[_Document]
    kind: str  # "options", "answer" or "rolling"


def render(tokenizer: Any, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """Return a conversation as text. Without a generation prompt, its last message is the beginning of the answer.

    Raises `CheckpointError`: the template fails, for example on a system prompt. (The harness would drop the system
    prompt.)
    """
    return render_template(
        tokenizer,
        chat_history,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=not add_generation_prompt,
    )


@lru_cache(maxsize=2)
def _tokenizer(model: str) -> Any:
    tokenizer = open_tokenizer(demo.MODELS.get(model, model))
    if not getattr(tokenizer, "chat_template", None):
        fix = "Give a model that has one, or apply_chat_template=false"
        raise ConfigError("The model's tokenizer has no chat template", got=model, fix=fix)
    return tokenizer


Responses = Mapping[str, list[Any]]  # by item id: one response per request, in the order of the document's instances


def _harness_metrics(
    name: str, leaves: Sequence[_Leaf], groups: Mapping[str, Any], records: RunRecords
) -> list[HarnessMetric]:
    """Return every metric of the leaf tasks and of their groups, averaged as the harness does.

    A document with an option longer than the model's context is left out and counted. (The harness's own backend raises
    an error there.)
    """
    metrics: list[HarnessMetric] = []
    for leaf in leaves:
        responses = _responses(name, leaf, records)
        scored = [document for document in leaf.documents if document.item_id in responses]
        if scored:
            values = {"sample_len": len(scored), **_aggregated(leaf.task, _values(leaf, scored, responses))}
            metrics += _listed(leaf.name, values, n_unscored=len(leaf.documents) - len(scored))
    return metrics + _group_averages(groups, metrics)


def _group_averages(groups: Mapping[str, Any], members: Sequence[HarnessMetric]) -> list[HarnessMetric]:
    """Return the metrics of groups from those of their scored members, averaged by the harness's code."""
    table: dict[str, dict[str, Any]] = {}
    unscored: dict[str, int] = {}
    for metric in members:
        table.setdefault(metric.part, {"sample_len": metric.n})[f"{metric.metric},{metric.filter}"] = metric.value
        unscored[metric.part] = metric.n_unscored
    metrics: list[HarnessMetric] = []
    for group in groups.values():
        names = [task.task_name for task in group.get_all_tasks() if task.task_name in table]
        if group.has_aggregation and names:
            metrics += _listed(group.name, group.aggregate(table), n_unscored=sum(unscored[name] for name in names))
    return metrics


def _listed(part: str, values: Mapping[str, Any], *, n_unscored: int) -> list[HarnessMetric]:
    """Return the metrics of one row of the harness's table of results, without its standard errors."""
    n = int(values["sample_len"])
    columns = ((*key.partition(","), value) for key, value in values.items())
    return [
        HarnessMetric(part=part, metric=metric, filter=kind, value=float(value), n=n, n_unscored=n_unscored)
        for metric, comma, kind, value in columns
        if comma and not metric.endswith("_stderr") and isinstance(value, int | float | np.number)
    ]


def _judge_answers(leaf: _Leaf, answers: Mapping[str, str]) -> dict[str, bool | None]:
    """Return which answers are correct by the task's first filter and exact-match metric; None if it has neither."""
    scored = [document for document in leaf.documents if document.item_id in answers]
    responses = {item_id: [text] for item_id, text in answers.items()}
    by_filter = _values(leaf, scored, responses)
    first = next(iter(by_filter))
    right: dict[str, bool | None] = {}
    for document, values in zip(scored, by_filter[first], strict=True):
        value = values.get("exact_match", next(iter(values.values()), None))
        right[document.item_id] = (
            bool(value) if isinstance(value, int | float | np.number) and value in (0, 1) else None
        )
    return right


def _responses(name: str, leaf: _Leaf, records: RunRecords) -> Responses:
    """Return the responses of every document whose requests were all scored."""
    if leaf.kind == "answer":
        rows = records.generations.where(task=name, turn=0, sample=0).table.to_pylist() if records.generations else []
        return {row["item_id"]: [row["text"]] for row in rows if row["text"] is not None}
    if leaf.kind == "rolling":
        # Summed over the windows of each document, which are named "<number>.<part>".
        if records.token_scores is None:
            return {}
        table = records.token_scores.where(task=name)
        if not len(table):
            return {}
        number = np.asarray([int(item.split(".")[0]) for item in table.column("item_id")])
        sums = -np.bincount(number, weights=table.column("nll"), minlength=len(leaf.documents))
        return {document.item_id: [float(total)] for document, total in zip(leaf.documents, sums, strict=True)}
    if records.option_scores is None:
        return {}
    columns = ("task", "item_id", "option", "loglik", "greedy")
    wanted = records.option_scores.where(task=[name, f"{name}.unconditional"], permutation=0).table
    scores = {
        (task, item, option): (loglik, greedy)
        for task, item, option, loglik, greedy in zip(*(wanted.column(c).to_pylist() for c in columns), strict=True)
        if loglik is not None
    }
    keys = {document.item_id: _keys(name, leaf, document) for document in leaf.documents}
    return {item: [scores[key] for key in its] for item, its in keys.items() if all(key in scores for key in its)}


def _keys(name: str, leaf: _Leaf, document: _Document) -> list[tuple[str, str, int]]:
    count = len(document.instances)
    if leaf.task.OUTPUT_TYPE == "multiple_choice":
        count = min(count, len(leaf.task.doc_to_choice(document.doc)))
    return [
        (name, document.item_id, i.idx) if i.idx < count else (f"{name}.unconditional", document.item_id, i.idx - count)
        for i in document.instances
    ]


@contextmanager
def _harness_errors(action: str) -> Iterator[None]:
    try:
        yield
    except MlflowCompressError:
        raise
    except Exception as error:  # a task definition is code of its own and may raise anything
        raise DataError(f"lm-evaluation-harness cannot {action}: {error!r}") from error


def _values(leaf: _Leaf, scored: Sequence[_Document], responses: Responses) -> dict[str, list[Mapping[str, Any]]]:
    """Return the task's metrics per filter and document, from its filters and its `process_results`."""
    instances = []
    for document in scored:
        for instance, response in zip(document.instances, responses[document.item_id], strict=True):
            instance.resps = [response]
            instance.filtered_resps = {}
            instances.append(instance)
    leaf.task._instances = instances
    with _harness_errors(f"compute the metrics of task {leaf.name!r}"):
        leaf.task.apply_filters()
        return {
            kind: [
                leaf.task.process_results(document.doc, [i.filtered_resps[kind] for i in document.instances])
                for document in scored
            ]
            for kind in instances[0].filtered_resps
        }


def _aggregated(task: Any, by_filter: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the value per "metric,filter", aggregated as in `lm_eval.evaluator`; by default the mean."""
    values_by_name: dict[str, Any] = {}
    for kind, rows in by_filter.items():
        columns: dict[str, list[Any]] = defaultdict(list)
        for row in rows:
            for metric, value in row.items():
                columns[metric].append(value)
        for metric, values in columns.items():
            aggregate = task.aggregation().get(metric, lambda v: sum(v) / len(v))
            values_by_name[f"{metric},{kind}"] = aggregate(values)
    return values_by_name


_UNCONDITIONAL = ".unconditional"  # suffix of the task of options without context, whose scores some tasks subtract

_DEFAULT_TOKENS = 256  # longest answer if the task does not set it, as in the harness's Hugging Face backend


def build(name: str, *, shots: int | None, settings: TaskSettings, folders: tuple[str, ...] = ()) -> Parts:
    """Return the tasks of a name of lm-evaluation-harness.

    A group that the harness averages over its items (mmlu) becomes one task with a category per member. Of any other
    group or tag, every member becomes a task, and the group's averages are computed from theirs.
    """
    loaded, groups = load_harness_tasks(name, shots=shots, data_dir=settings.data_dir, folders=folders)
    group = groups.get(name)
    is_one_task = (
        group is not None and group.has_aggregation and all(m.weight_by_size for m in group.aggregate_metric_list)
    )
    leaves = [_leaf(leaf, task, settings, name if is_one_task else leaf) for leaf, task in loaded.items()]
    shapes = {(_family(leaf), _rule(leaf)) for leaf in leaves}
    if is_one_task and (len(shapes) > 1 or leaves[0].kind != "options"):
        for place, leaf in enumerate(leaves):  # each is a task of its own, whose items need no prefix
            alone = [replace(one, item_id=one.item_id.rsplit(":", 1)[1]) for one in leaf.documents]
            leaves[place] = replace(leaf, records=leaf.name, documents=alone)
        is_one_task = False
    if is_one_task:
        return Parts(tasks=tuple(_tasks(name, leaves, groups)))
    tasks = tuple(task for leaf in leaves for task in _tasks(leaf.name, [leaf], {}))
    averaged = any(group.has_aggregation for group in groups.values())
    averages = (GroupAverages(name=name, average=partial(_group_averages, groups)),) if averaged else ()
    return Parts(tasks=tasks, averages=averages)


def _leaf(name: str, task: Any, settings: TaskSettings, records: str) -> _Leaf:
    """Return a leaf task with its sampled documents, whose prompts the harness builds."""
    prefix = "" if records == name else f"{name}:"
    in_context: dict[str, Any] = {}
    in_request: dict[str, Any] = {}
    if settings.apply_chat_template:
        in_request = {"apply_chat_template": True, "chat_template": partial(render, _tokenizer(settings.model))}
        in_context = {
            **in_request,
            "system_instruction": settings.system_prompt or None,
            "fewshot_as_multiturn": settings.fewshot_as_multiturn,
        }
    with _harness_errors(f"build the prompts of task {name!r}"):
        docs = dict(task.doc_iterator(rank=0, limit=None, world_size=1))
        documents = []
        for number in limited(name, list(docs), settings, lambda number: name):
            doc = docs[number]
            # Old tasks, written as classes, do not accept the argument `gen_prefix`.
            prefixed = {"gen_prefix": text} if (text := task.doc_to_prefix(doc)) else {}
            context = task.fewshot_context(
                doc, num_fewshot=task.get_config("num_fewshot") or 0, **prefixed, **in_context
            )
            made = task.construct_requests(doc=doc, ctx=context, metadata=(name, number, 1), **in_request)
            instances = sorted(made if isinstance(made, list) else [made], key=lambda instance: instance.idx)
            documents.append(_Document(f"{prefix}{number}", doc, instances))
    if not documents:
        raise DataError(f"Task {name!r} has no documents")
    kinds = {instance.request_type for document in documents for instance in document.instances}
    known = {"loglikelihood": "options", "generate_until": "answer", "loglikelihood_rolling": "rolling"}
    if len(kinds) != 1 or not kinds <= known.keys():
        raise UnsupportedError(f"Task {name!r} has requests that cannot be scored", allowed=known, got=sorted(kinds))
    return _Leaf(name, records, task, documents, known[kinds.pop()])


def _choices(leaf: _Leaf, document: _Document) -> list[str]:
    if leaf.task.OUTPUT_TYPE == "multiple_choice":
        return [str(choice) for choice in leaf.task.doc_to_choice(document.doc)]
    return [instance.args[1].lstrip() for instance in document.instances]


def _gold(leaf: _Leaf, document: _Document, choices: Sequence[str]) -> int | None:
    task = leaf.task
    gold = task.doc_to_text(document.doc) if getattr(task, "multiple_input", 0) else task.doc_to_target(document.doc)
    if isinstance(gold, list):
        gold = gold[0] if len(gold) == 1 else None
    if isinstance(gold, str):
        gold = choices.index(gold) if gold in choices else None
    return gold if isinstance(gold, int) and 0 <= gold < len(choices) else None


def _family(leaf: _Leaf) -> str:
    """Return the item family of a leaf task; all of its documents have the same."""
    if leaf.kind == "rolling":
        return "rolling"
    if leaf.kind == "answer":
        return "exact"
    if leaf.task.OUTPUT_TYPE == "loglikelihood" and all(len(d.instances) == 1 for d in leaf.documents):
        return "last_word"
    choices = [_choices(leaf, d) for d in leaf.documents]
    if any(len(c) < 2 or _gold(leaf, d, c) is None for c, d in zip(choices, leaf.documents, strict=True)):
        return "ungraded"
    return "lettered" if all(c == list(LETTERS[: len(c)]) for c in choices) else "cloze"


def _rule(leaf: _Leaf) -> str:
    """Return the prediction rule: length-normalised if the task reports acc_norm, as in the papers."""
    rules = {"last_word": "greedy", "exact": "exact_match"}
    if "acc_norm" in leaf.task.aggregation():
        rules["cloze"] = "loglik_per_char"
    return rules.get(_family(leaf), "loglik")


def _tasks(name: str, leaves: Sequence[_Leaf], groups: Mapping[str, Any]) -> list[Task]:
    """Return the tasks of one or several leaf tasks: the task itself, and its options without context if needed."""
    first = leaves[0]
    family, rule = _family(first), _rule(first)
    items: list[dict[str, Any]] = []
    requests: list[Request] = []
    for leaf in leaves:
        for document in leaf.documents:
            own_items, own_requests = _rows(name, family, rule, leaf, document)
            items += own_items
            requests += own_requests
    answering, documents = None, ()
    if first.kind == "answer":
        until, length = generation_settings(first.documents[0].instances[0].args[1], first.name)
        answering = Answering(until=until, max_new_tokens=length, judge=partial(_judge_answers, first))
    elif first.kind == "rolling":
        documents = tuple(document.instances[0].args[0] for document in first.documents)
        items = []
    tasks = [
        Task(
            name=name,
            family=family,
            items=Items.from_rows([item for item in items if item["task"] == name]),
            requests=tuple(request for request in requests if request.task == name),
            answering=answering,
            documents=documents,
            harness_metrics=partial(_harness_metrics, name, tuple(leaves), groups),
        )
    ]
    if extra := tuple(request for request in requests if request.task != name):
        alone = Items.from_rows([item for item in items if item["task"] != name])
        tasks.append(Task(name=name + _UNCONDITIONAL, family="ungraded", items=alone, requests=extra))
    return tasks


def _rows(
    name: str, family: str, rule: str, leaf: _Leaf, document: _Document
) -> tuple[list[dict[str, Any]], list[Request]]:
    """Return the items and requests of a document, those of the task of options without context included."""
    contexts = list(dict.fromkeys(str(instance.args[0]) for instance in document.instances))
    question, group = leaf.task.doc_to_text(document.doc), group_of(shared_text(document.doc))
    question = question if isinstance(question, str) else contexts[0]
    row = {"id": document.item_id, "category": leaf.name if leaf.records != leaf.name else None, "group_id": group}
    item = item_row(name, family, rule, row, question=question, prompt="\n".join(contexts))
    if leaf.kind != "options":
        return [item], []
    choices = _choices(leaf, document)
    gold = 0 if family == "last_word" else _gold(leaf, document, choices)
    items = [{**item, "options": choices, "gold": None if family == "ungraded" else gold}]
    if len(document.instances) > len(choices):
        alone = {**item, "task": name + _UNCONDITIONAL, "family": "ungraded", "rule": "loglik", "prompt": ""}
        items.append({**alone, "options": choices})
    requests = []
    for instance in document.instances:
        conditional = instance.idx < len(choices)
        option = instance.idx if conditional else instance.idx - len(choices)
        task = name if conditional else name + _UNCONDITIONAL
        context, continuation = instance.args[:2]
        requests.append(Request.of(task, document.item_id, context, continuation, choices[option], option))
    return items, requests


def generation_settings(arguments: Mapping[str, Any], task: str | None) -> tuple[tuple[str, ...], int]:
    """Return the stop sequences and the longest answer in tokens, from the settings of a harness request."""
    if arguments.get("do_sample") and float(arguments.get("temperature", 1.0) or 0.0) > 0:
        raise UnsupportedError(f"Task {task!r} samples its answers", allowed="greedy decoding")
    until = arguments.get("until") or ()
    lengths = (arguments.get(key) for key in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"))
    ends = (until,) if isinstance(until, str) else tuple(end for end in until if end)
    return ends, int(next((length for length in lengths if length is not None), _DEFAULT_TOKENS))
