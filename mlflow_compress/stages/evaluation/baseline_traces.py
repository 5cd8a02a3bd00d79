"""The baseline's own sampled answers: written once, kept in a run of their own, the same for every variant."""

from __future__ import annotations

import gc
from dataclasses import asdict, replace
from pathlib import Path

from mlflow_compress.config import EvaluateConfig
from mlflow_compress.items.suite import Suite
from mlflow_compress.items.trace_corpus import TraceCorpus
from mlflow_compress.kept import kept
from mlflow_compress.records import Traces
from mlflow_compress.scoring.generation.generate import generate_answers
from mlflow_compress.scoring.generation.sampling import GenerationConfig
from mlflow_compress.stages.evaluation.baseline import identity
from mlflow_compress.stages.evaluation.open_models import OpenModel, load
from mlflow_compress.stages.get_or_create import digest, get_or_create_run
from mlflow_compress.stages.model_names import baseline_label
from mlflow_compress.stages.task_inputs import trace_prompts
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.run_names import RECORDS
from mlflow_compress.tracking.store import OpenRun, Store

STAGE = "baseline-traces"
MOST_TOKENS = 512  # of an answer, unless the user says otherwise


def _settings(base: OpenModel, config: EvaluateConfig) -> GenerationConfig:
    """Return how traces are drawn: from the whole distribution, because KL is an average over it."""
    asked, most = config.traces, config.traces.trace_max_new_tokens
    return GenerationConfig(
        max_new_tokens=min(MOST_TOKENS, base.max_length // 4) if most == "auto" else int(most),
        temperature=asked.trace_temperature,
        top_k=0,
        top_p=1.0,
        samples=asked.trace_samples,
        seed=config.source.seed,
    )


def _written(store: Store, base: OpenModel, config: EvaluateConfig, *, write: bool) -> Traces | None:
    """Get-or-create: return the baseline's answers; None where they are not there and nothing may be written."""
    prompts, drawn, system = trace_prompts(config), _settings(base, config), config.inference.system_prompt or ""
    fingerprint = {
        **identity(base),
        "chat_template": base.tokenizer.chat_template,
        "system_prompt": config.inference.system_prompt,
        "sampling": asdict(drawn),
        "prompts": [asdict(prompt) for prompt in prompts],
    }
    if not write and not store.find(STAGE, **{run_names.FINGERPRINT: digest(fingerprint)}):
        return None

    def work(run: OpenRun, folder: Path, resume: Path) -> None:
        found = generate_answers(load(base), prompts, drawn, task=TraceCorpus().name, system=system, resume=resume)
        Traces(found.table).write(folder / RECORDS)

    run_id, fresh = get_or_create_run(store, STAGE, baseline_label(config), fingerprint, work)
    if fresh:
        gc.collect()  # otherwise the model is still in memory when it is loaded again to be scored
    return kept(("traces", run_id), lambda: Traces.read(store.fetch(run_id, RECORDS)))


def with_traces(store: Store, base: OpenModel, suite: Suite, config: EvaluateConfig, *, write: bool = True) -> Suite:
    """Return the suite with the baseline's own answers, where the tasks name them. Other suites are returned unchanged.

    Parameters
    ----------
    store : Store
        Where the answers are kept, and found again.
    base : LightModel
        The baseline.
    suite : Suite
    config : EvaluateConfig
    write : bool
        Whether answers that are not there are written now.
    """
    if not any(isinstance(corpus, TraceCorpus) for corpus in suite.corpora):
        return suite
    answers = _written(store, base, config, write=write)
    corpora = (replace(c, answers=answers) if isinstance(c, TraceCorpus) else c for c in suite.corpora)
    return replace(suite, corpora=tuple(corpora))
