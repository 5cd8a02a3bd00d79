"""The sample of a suite that the baseline is scored on a second time, for the noise floor."""

from __future__ import annotations

from dataclasses import replace

from mlflow_compress.items.suite import Suite
from mlflow_compress.items.task import Corpus, Task, TaskSettings, seeded
from mlflow_compress.items.trace_corpus import TraceCorpus
from mlflow_compress.records import Traces
from mlflow_compress.stages.evaluation.run_model import WINDOW

_FEWEST_WINDOWS = 2  # of a corpus, see `corpus.cut_windows`


def noise_sample(suite: Suite, n: int, *, seed: int) -> Suite:
    """Return the part of a suite that the noise run scores; the complete suite if `n` is 0.

    Per task: `n` items of a seeded draw over all categories, with every answer order. Per corpus: the first `n`
    windows, or answers of the baseline. Per task with documents: the first `n` documents. None of these are drawn,
    because records name them by their position, and rounding does not depend on the position.

    Parameters
    ----------
    suite : Suite
    n : int
        Items per task, windows per corpus, documents per task.
    seed : int
        Seed of the draw. A task's draw does not depend on the other tasks.
    """
    if n == 0:
        return suite
    tasks = tuple(_sampled_task(task, n, seed) for task in suite.tasks)
    return replace(suite, tasks=tasks, corpora=tuple(_sampled_corpus(corpus, n) for corpus in suite.corpora))


def _sampled_task(task: Task, n: int, seed: int) -> Task:
    ids = task.items.column("item_id").tolist()
    if len(ids) > n:
        kept = set(seeded(TaskSettings(seed=seed), "noise", task.name).sample(ids, n))
        requests = tuple(request for request in task.requests if request.item_id in kept)
        task = replace(task, items=task.items.where(item_id=kept), requests=requests)
    return replace(task, documents=task.documents[:n])


def _sampled_corpus(corpus: Corpus | TraceCorpus, n: int) -> Corpus | TraceCorpus:
    if isinstance(corpus, TraceCorpus):
        assert corpus.answers is not None
        return replace(corpus, answers=Traces(corpus.answers.table.slice(0, n)))
    most = max(n, _FEWEST_WINDOWS) * WINDOW
    return replace(corpus, max_tokens=most if corpus.max_tokens is None else min(most, corpus.max_tokens))
