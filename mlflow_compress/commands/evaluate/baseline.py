"""The baseline, evaluated once: its records, a second run for the noise floor, and the states that variants need."""

import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mlflow_compress.commands.evaluate.items import PROMPT_SETTINGS, settings_of
from mlflow_compress.commands.evaluate.models import recognised_in, require_unchanged, scorer_listing
from mlflow_compress.commands.evaluate.outputs import BOTH, WINDOW, ModelOutputs, log_harness_metrics, run_model
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.shared import stored
from mlflow_compress.commands.shared.get_or_create import FINGERPRINT_FILE, digest, get_or_create_run
from mlflow_compress.commands.shared.named_models import baseline_label
from mlflow_compress.config.groups import SamplingConfig
from mlflow_compress.decide.item_sampling import DRAWING
from mlflow_compress.engines.interface import AnyEngineModel, EngineModel, Loaded, Stored, Writer
from mlflow_compress.items.suite import Suite
from mlflow_compress.items.task import Corpus, Task, TaskSettings, TraceCorpus, seeded
from mlflow_compress.kept import kept
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import compute_all
from mlflow_compress.models.identity import tokenizer_hash
from mlflow_compress.records import Chains, ItemKey, RunRecords, Traces, align
from mlflow_compress.scoring.plan.encoding import Encoder
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.run_names import ENGINE_RECORDS, FACTS, NOISE_RECORDS, RECORDS
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker

logger = logging.getLogger(__name__)

_FEWEST_WINDOWS = 2  # of a corpus, see `corpus.cut_windows`


def noise_sample(suite: Suite, n: int, *, seed: int) -> Suite:
    """Return the part of a suite that the noise run scores; the complete suite if `n` is 0.

    Per task: `n` items of a seeded draw over all categories, with every answer order. Per corpus: the first `n`
    windows, or answers of the baseline. Per task with documents or chains: the first `n`. None of these are drawn,
    because records name them by their position, and rounding does not depend on the position.
    """
    if n == 0:
        return suite
    tasks: list[Task] = []
    for task in suite.tasks:
        sampled, ids = replace(task, documents=task.documents[:n]), task.items.column("item_id").tolist()
        if task.chains is not None:
            sampled = replace(sampled, chains=Chains(task.chains.table.slice(0, n)))
        if len(ids) > n:
            drawn = set(seeded(TaskSettings(seed=seed), "noise", task.name).sample(ids, n))
            requests = tuple(request for request in task.requests if request.item_id in drawn)
            sampled = replace(sampled, items=task.items.where(item_id=drawn), requests=requests)
        tasks.append(sampled)
    corpora: list[Corpus | TraceCorpus] = []
    for corpus in suite.corpora:
        if isinstance(corpus, TraceCorpus):
            assert corpus.answers is not None
            corpora.append(replace(corpus, answers=Traces(corpus.answers.table.slice(0, n))))
        else:
            most = max(n, _FEWEST_WINDOWS) * WINDOW
            most = most if corpus.max_tokens is None else min(most, corpus.max_tokens)
            corpora.append(replace(corpus, max_tokens=most))
    return replace(suite, tasks=tuple(tasks), corpora=tuple(corpora))


def item_keys(suite: Suite) -> set[ItemKey]:
    """Return the items of a suite; of the noise run's sample, those whose lists a served model is asked for."""
    return set(zip(suite.items.column("task").tolist(), suite.items.column("item_id").tolist(), strict=True))


STATES = "states"  # artifact folder of a baseline run, next to RECORDS and NOISE
_TOKENS = "tokens.npz"  # file there: the requests' tokens, which every variant reads too


@dataclass(frozen=True, kw_only=True)
class StoredBaseline:
    """A stored baseline evaluation."""

    run_id: str
    # Evaluation id, 16 hexadecimal digits: a hash of baseline, tasks and settings. Runs that share it may be compared.
    evaluation: str
    records: RunRecords
    metadata: stored.EvalMetadata  # Stored next to the records
    noise: RunRecords  # Records of the second run, on a sample of the items
    # Records of its checkpoint under transformers, on the same sample, where another engine runs it
    engine: RunRecords | None
    states: Path | None  # Folder of the baseline's states, see `StateStore`; None where every answer is generated
    fresh: bool  # True if the baseline was evaluated now; False if the store had it


def _run_twice(
    model: EngineModel[Loaded, Writer, Stored], suite: Suite, config: EvaluateConfig, resume: Path
) -> tuple[ModelOutputs, RunRecords, RunRecords | None, Path | None]:
    """Return outputs, noise, engine and states, of which see `StoredBaseline`.

    Where every answer is generated, no token is scored. Then there are no states, and no noise floor.
    """
    loaded = model.load()
    sample = noise_sample(suite, config.evaluation.noise_items, seed=config.source.seed)
    if not suite.is_scored:
        outputs = run_model(model.scorer(loaded), suite, samplings=BOTH, resume=resume / RECORDS)
        return outputs, RunRecords(items=sample.items), None, None
    recognised_in(resume, model)
    states = resume / STATES
    with model.capture(states, loaded) as capture:
        first = scorer_listing(model, loaded, item_keys(sample))
        outputs = run_model(first, suite, capture=capture, samplings=BOTH, resume=resume / RECORDS)
    first_pass = model.stored(states)
    own = model.comparable_with(first_pass)
    second = model.scorer(loaded, after=first_pass)
    noise = run_model(second, sample, baseline=own, generations=False, resume=resume / NOISE_RECORDS).records
    engine = None
    if model.own_kernels is not None:
        here = model.own_kernels.in_this_process()
        scorer = here.scorer(here.load())
        engine = run_model(scorer, sample, baseline=own, generations=False, resume=resume / ENGINE_RECORDS).records
    return outputs, noise, engine, states


def _asked(model: AnyEngineModel, suite: Suite, config: EvaluateConfig) -> dict[str, object]:
    """Return what decides whether two evaluations can be compared: baseline, settings and tasks."""
    deciding = {name: value for name, value in settings_of(config).items() if name not in PROMPT_SETTINGS}
    if not model.abilities.whole_distributions:  # lists of tokens are asked for in the noise floor's sample alone
        deciding["listed_items"] = config.evaluation.noise_items
    return {**model.identity, **deciding, "tasks": suite.hashes}


def evaluation_id(model: AnyEngineModel, suite: Suite, config: EvaluateConfig) -> str:
    """Return the evaluation id: a hash of baseline, tasks and settings. Runs that share it may be compared."""
    return digest(_asked(model, suite, config))[:16]


def evaluation_of_sample(evaluation: str, sampling: SamplingConfig) -> str:
    """Return the evaluation id of variants that are scored on drawn items: they are not compared with others.

    Further rounds of some of them are no other evaluation: their first items are those of the others.
    """
    if sampling.size is None:
        return evaluation
    first = sampling
    while (before := first.before_last) is not None:
        first = before
    return digest({"evaluation": evaluation, "drawing": DRAWING, **first.logged})[:16]


def find_or_evaluate(
    store: Tracker,
    model: AnyEngineModel,
    suite: Suite,
    config: EvaluateConfig,
    before: Callable[[], None] = lambda: None,
) -> StoredBaseline:
    """Return the stored baseline with this fingerprint, or evaluate it in a new run, after `before`.

    The model has been unloaded when this returns. The second run has another batch composition: its distance to
    the first run is the noise floor of every distance.
    """
    asked = _asked(model, suite, config)
    evaluation = digest(asked)[:16]  # as `evaluation_id`, which would read every prompt again

    def work(run: TrackedRun, folder: Path, resume: Path) -> None:
        run.set_tags({run_names.EVALUATION: evaluation})
        run.log_params({**model.identity, **settings_of(config), "noise_items": config.evaluation.noise_items})
        if model.at_server is not None:
            run.log_json(model.at_server.server_identity(), FACTS)
        outputs, noise, engine, states = _run_twice(model, suite, config, resume)
        require_unchanged(model)
        if states is not None:
            if model.abilities.whole_distributions:
                Encoder(model.tokenizer, model.max_length).write(suite.requests, states / _TOKENS)
            run.log_folder(states, STATES)
        outputs.records.write(folder / RECORDS)
        # What two evaluations must share to be comparable, in addition to their items.
        metadata = {
            "tokenizer": tokenizer_hash(model.tokenizer),
            "num_fewshot": config.evaluation.num_fewshot,
            "shuffle_fewshot": config.evaluation.shuffle_fewshot,
            "tasks": suite.hashes,
        }
        stored.write_metadata(folder / RECORDS, metadata)
        noise.write(folder / NOISE_RECORDS)
        if engine is not None:
            engine.write(folder / ENGINE_RECORDS)
        stored.log_results(run, compute_all(MetricInputs(baseline=outputs.records, noise=noise, engine=engine)))
        log_harness_metrics(run, suite, outputs)

    # The number of threads and the processor change the last bits of a result. With others, the baseline is evaluated
    # again under the same evaluation id.
    fingerprint = {**asked, "noise_items": config.evaluation.noise_items, "rounding": model.rounding}
    run_id, fresh = get_or_create_run(
        store, "baseline", baseline_label(config.source, config.served), fingerprint, work, before=before
    )
    if fresh:
        gc.collect()  # modules have reference cycles: without this, two models are in memory when the variant loads
        _warn_of_rounding(store, run_id, evaluation, model.rounding)
    elif model.at_server is not None:
        model.at_server.recognise(store.fetch_json(run_id, FACTS))
    folder = store.fetch(run_id, RECORDS)
    states = store.fetch(run_id, STATES) if suite.is_scored else None
    if states is not None and model.abilities.whole_distributions:
        Encoder(model.tokenizer, model.max_length).remember(suite.requests, states / _TOKENS)
    compared = model.abilities.own_kernels and suite.is_scored
    return StoredBaseline(
        run_id=run_id,
        evaluation=evaluation,
        records=kept(("records", run_id), lambda: RunRecords.read(folder)),
        metadata=stored.read_metadata(folder),
        noise=kept(("noise", run_id), lambda: RunRecords.read(store.fetch(run_id, NOISE_RECORDS))),
        engine=RunRecords.read(store.fetch(run_id, ENGINE_RECORDS)) if compared else None,
        states=states,
        fresh=fresh,
    )


def _warn_of_rounding(store: Tracker, run_id: str, evaluation: str, now: Mapping[str, str]) -> None:
    """Say why a baseline that the store had was evaluated again, and how far its second scores are from the first."""
    before = [run for run in store.find("baseline", **{run_names.EVALUATION: evaluation}) if run.run_id != run_id]
    if not before:
        return
    then = store.fetch_json(before[0].run_id, FINGERPRINT_FILE)["rounding"]
    changed = [
        f"{name} {then.get(name)} -> {now.get(name)}" for name in {**then, **now} if then.get(name) != now.get(name)
    ]
    new, old = (RunRecords.read(store.fetch(one, RECORDS)).option_scores for one in (run_id, before[0].run_id))
    if not changed or new is None or old is None:
        return
    far = float(np.nanmax(np.abs(new.column("loglik") - old.column("loglik")[align(new, old)]), initial=0))
    logger.warning(
        "The baseline of run %s was computed otherwise (%s), so it was evaluated again: "
        "the log-probabilities of its options differ by at most %.1e nats",
        before[0].run_id[:8],
        ", ".join(changed),
        far,
    )
