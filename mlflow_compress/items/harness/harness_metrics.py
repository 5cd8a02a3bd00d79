"""The metrics of lm-evaluation-harness, computed by its own code from our records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlflow_compress.errors import DataError
from mlflow_compress.items.harness.leaf import Document, Leaf
from mlflow_compress.items.task import HarnessMetric
from mlflow_compress.records import RunRecords

Responses = Mapping[str, list[Any]]  # by item id: one response per request, in the order of the document's instances


def harness_metrics(
    name: str, leaves: Sequence[Leaf], groups: Mapping[str, Any], records: RunRecords
) -> list[HarnessMetric]:
    """Return every metric of the leaf tasks and of their groups, averaged as the harness does.

    Parameters
    ----------
    name : str
        Task name in the records.
    leaves : sequence of Leaf
        The harness's leaf tasks of this task.
    groups : mapping of str to object
        The harness's groups; empty for a single task.
    records : RunRecords
        Records of one model. A document with an option longer than the model's context is left out and counted. (The
        harness's own backend raises an error there.)
    """
    found: list[HarnessMetric] = []
    for leaf in leaves:
        responses = _responses(name, leaf, records)
        scored = [document for document in leaf.documents if document.item_id in responses]
        if scored:
            values = {"sample_len": len(scored), **_aggregated(leaf.task, _values(leaf, scored, responses))}
            found += _listed(leaf.name, values, n_unscored=len(leaf.documents) - len(scored))
    return found + group_averages(groups, found)


def group_averages(groups: Mapping[str, Any], members: Sequence[HarnessMetric]) -> list[HarnessMetric]:
    """Return the metrics of groups from those of their members, averaged over items or members by the harness's code.

    Members without any scored item are left out.
    """
    table: dict[str, dict[str, Any]] = {}
    unscored: dict[str, int] = {}
    for metric in members:
        table.setdefault(metric.part, {"sample_len": metric.n})[f"{metric.metric},{metric.filter}"] = metric.value
        unscored[metric.part] = metric.n_unscored
    found: list[HarnessMetric] = []
    for group in groups.values():
        names = [task.task_name for task in group.get_all_tasks() if task.task_name in table]
        if group.has_aggregation and names:
            found += _listed(group.name, group.aggregate(table), n_unscored=sum(unscored[name] for name in names))
    return found


def _listed(part: str, values: Mapping[str, Any], *, n_unscored: int) -> list[HarnessMetric]:
    """Return the metrics of one row of the harness's table of results, without its standard errors."""
    found = []
    for key, value in values.items():
        metric, comma, kind = key.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, int | float | np.number):
            n = int(values["sample_len"])
            found.append(
                HarnessMetric(part=part, metric=metric, filter=kind, value=float(value), n=n, n_unscored=n_unscored)
            )
    return found


def judge(leaf: Leaf, answers: Mapping[str, str]) -> dict[str, bool | None]:
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


def _responses(name: str, leaf: Leaf, records: RunRecords) -> Responses:
    """Return the responses of every document whose requests were all scored."""
    if leaf.kind == "answer":
        rows = records.generations.where(task=name, turn=0, sample=0).table.to_pylist() if records.generations else []
        return {row["item_id"]: [row["text"]] for row in rows if row["text"] is not None}
    if leaf.kind == "rolling":
        return _rolling(name, leaf, records)
    if records.option_scores is None:
        return {}
    columns = ("task", "item_id", "option", "loglik", "greedy")
    wanted = records.option_scores.where(task=[name, f"{name}.unconditional"], permutation=0).table
    scores = {
        (task, item, option): (loglik, greedy)
        for task, item, option, loglik, greedy in zip(*(wanted.column(c).to_pylist() for c in columns), strict=True)
        if loglik is not None
    }
    found: dict[str, list[Any]] = {}
    for document in leaf.documents:
        keys = _keys(name, leaf, document)
        if all(key in scores for key in keys):
            found[document.item_id] = [scores[key] for key in keys]
    return found


def _keys(name: str, leaf: Leaf, document: Document) -> list[tuple[str, str, int]]:
    count = len(document.instances)
    if leaf.task.OUTPUT_TYPE == "multiple_choice":
        count = min(count, len(leaf.task.doc_to_choice(document.doc)))
    return [
        (name, document.item_id, i.idx) if i.idx < count else (f"{name}.unconditional", document.item_id, i.idx - count)
        for i in document.instances
    ]


def _rolling(name: str, leaf: Leaf, records: RunRecords) -> Responses:
    """Return the log-likelihood of every document, summed over its windows, which are named "<number>.<part>"."""
    if records.token_scores is None:
        return {}
    table = records.token_scores.where(task=name)
    if not len(table):
        return {}
    number = np.asarray([int(item.split(".")[0]) for item in table.column("item_id")])
    sums = -np.bincount(number, weights=table.column("nll"), minlength=len(leaf.documents))
    return {document.item_id: [float(total)] for document, total in zip(leaf.documents, sums, strict=True)}


def _values(leaf: Leaf, scored: Sequence[Document], responses: Responses) -> dict[str, list[Mapping[str, Any]]]:
    """Return the task's metrics per filter and document, from its filters and its `process_results`."""
    instances = []
    for document in scored:
        for instance, response in zip(document.instances, responses[document.item_id], strict=True):
            instance.resps = [response]
            instance.filtered_resps = {}
            instances.append(instance)
    leaf.task._instances = instances
    try:
        leaf.task.apply_filters()
        return {
            kind: [
                leaf.task.process_results(document.doc, [i.filtered_resps[kind] for i in document.instances])
                for document in scored
            ]
            for kind in instances[0].filtered_resps
        }
    except Exception as error:  # a task definition is code of its own and may raise anything
        raise DataError(f"lm-evaluation-harness cannot compute the metrics of task {leaf.name!r}: {error!r}") from error


def _aggregated(task: Any, by_filter: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the value per "metric,filter", aggregated as in `lm_eval.evaluator`; by default the mean."""
    found: dict[str, Any] = {}
    for kind, rows in by_filter.items():
        columns: dict[str, list[Any]] = defaultdict(list)
        for row in rows:
            for metric, value in row.items():
                columns[metric].append(value)
        for metric, values in columns.items():
            aggregate = task.aggregation().get(metric, lambda v: sum(v) / len(v))
            found[f"{metric},{kind}"] = aggregate(values)
    return found
