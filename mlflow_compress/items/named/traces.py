"""The baseline's own answers: written once by the baseline, and then scored like any corpus."""

from __future__ import annotations

from mlflow_compress.errors import ConfigError
from mlflow_compress.items.named_tasks import TASKS, NamedTask
from mlflow_compress.items.task import TRACES, Parts, TaskSettings, TraceCorpus


def _build(settings: TaskSettings, shots: int | None) -> Parts:
    if shots is not None:
        raise ConfigError("A corpus has no few-shot examples", got=f"{TRACES}@{shots}")
    return Parts(corpora=(TraceCorpus(),))


TASKS.register(TRACES)(
    NamedTask(
        source="written by the baseline",
        licence="the baseline's",
        items="sampled answers to trace_instructions",
        shots="",
        rule="perplexity and KL, one window per answer",
        definition="sampled answers to the first turn of instructions, every token behind the prompt".encode,
        build=_build,
    )
)
