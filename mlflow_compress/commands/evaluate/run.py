"""The evaluate stage: scores the variant on the same items as its baseline and computes every distance."""

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mlflow_compress.commands.command import Say, silent
from mlflow_compress.commands.evaluate import models
from mlflow_compress.commands.evaluate.baseline import (
    StoredBaseline,
    evaluation_of_sample,
    find_or_evaluate,
    item_keys,
    noise_sample,
)
from mlflow_compress.commands.evaluate.items import settings_of, suite_of, with_chat_template
from mlflow_compress.commands.evaluate.outputs import ModelOutputs, log_harness_metrics, run_model
from mlflow_compress.commands.evaluate.own_text import with_chains, with_traces
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.evaluate.result import Evaluation
from mlflow_compress.commands.shared import stored
from mlflow_compress.commands.shared.get_or_create import digest, resumable_workdir, store_of_command
from mlflow_compress.commands.shared.named_models import baseline_label, described
from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest
from mlflow_compress.compression.method import METHODS
from mlflow_compress.compression.probe import MAX_KL
from mlflow_compress.config import EMBEDDED, SEED, as_text
from mlflow_compress.config.groups import SamplingConfig
from mlflow_compress.decide.gates import gate_values
from mlflow_compress.engines.interface import AnyEngineModel, EngineModel, Loaded, Stored, Writer
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.items.suite import Suite
from mlflow_compress.kept import keeping
from mlflow_compress.metrics.core.account import Account, take_account
from mlflow_compress.metrics.core.metric_inputs import MetricInputs, MetricSettings, headline
from mlflow_compress.metrics.core.metric_registry import compute_all, unmet
from mlflow_compress.metrics.perplexity import PERPLEXITY_EXISTS
from mlflow_compress.metrics.thinking import ANSWERED_PROBLEMS, questions_table
from mlflow_compress.models.checkpoint_config import unused_weights
from mlflow_compress.records import MetricResult, RunRecords
from mlflow_compress.reporting.details import details, flips_table
from mlflow_compress.reporting.verdict import verdict, worst_slice
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.live_processes import scratch_folder
from mlflow_compress.tracking.run_names import ACCOUNT, FACTS, NOISE_RECORDS, RECORDS
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker

_ALL = "Leave it out, or set items=all"


def readable(
    store: Tracker, base: AnyEngineModel, suite: Suite, config: EvaluateConfig, *, write: bool = True
) -> Suite:
    """Return the suite in the baseline's chat template, with its own text (see `with_traces` and `with_chains`)."""
    folder = None if base.abilities.served else base.path
    rendered = with_chat_template(base.tokenizer, suite, config.inference.system_prompt or "", folder)
    suite = with_traces(store, base, rendered, config, write=write)
    return with_chains(store, base, suite, config, write=write)


def evaluate_baseline(config: EvaluateConfig, store: Tracker) -> StoredBaseline:
    """Return the baseline's evaluation: found in the store, or evaluated now."""
    with models.cores_shared_out(config.running, config.source):
        base = models.open_baseline(config)
        return find_or_evaluate(store, base, readable(store, base, suite_of(config), config), config)


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """A variant beside its baseline: what metrics read, and where it comes from."""

    inputs: MetricInputs
    baseline: StoredBaseline
    account: Account
    found_in: str | None  # The earlier run that has scored the variant


def evaluate_variant(
    config: EvaluateConfig,
    suite: Suite,
    store: Tracker,
    run: TrackedRun,
    until_finished: ExitStack,
    say: Say = silent,
) -> _Compared:
    """Score the variant, or find its scores.

    The harness's own metrics are logged here, because they need the tasks. The folder of unfinished results stays until
    `until_finished` is closed, so that an interrupted run can resume.
    """
    base, variant = models.open_both(config, say)
    asked_twice = not variant.abilities.repeats
    if config.sampling.size is not None:
        if asked_twice:
            raise ConfigError("Items are drawn for models in a folder", got=f"items={config.sampling.items}", fix=_ALL)
        if not len(suite.items):
            raise ConfigError("The tasks have no items to draw from", got=f"items={config.sampling.items}", fix=_ALL)
    suite = readable(store, base, suite, config)
    baseline = find_or_evaluate(store, base, suite, config, before=partial(models.try_out, variant))
    if not variant.abilities.whole_distributions:  # a server would read long chains, and show no distance of them
        suite = replace(suite, tasks=tuple(replace(task, chains=None) for task in suite.tasks))

    def fingerprint_with(sampling: SamplingConfig) -> str:
        """Return the run's fingerprint. The id of the baseline's run identifies tasks, settings and states."""
        twice: dict[str, object] = {"asked_twice": config.evaluation.noise_items} if asked_twice else {}
        if sampling.size is not None:
            twice = {**sampling.logged, "seed": config.source.seed}
        return digest({"stage": "evaluate", **variant.identity, "baseline": baseline.run_id, **twice})

    fingerprint = fingerprint_with(config.sampling)
    evaluation = evaluation_of_sample(baseline.evaluation, config.sampling)
    run.set_tags({run_names.FINGERPRINT: fingerprint, run_names.EVALUATION: evaluation})
    run.log_params({"device": variant.device.type, "dtype": str(variant.dtype).removeprefix("torch.")})
    resume = until_finished.enter_context(resumable_workdir(store.uri, fingerprint))
    earlier = store.find("evaluate", **{run_names.FINGERPRINT: fingerprint})[:1]
    again: RunRecords | None = None
    if earlier:
        if variant.at_server is not None:
            variant.at_server.recognise(store.fetch_json(earlier[0].run_id, FACTS))
        if asked_twice and suite.is_scored:
            again = RunRecords.read(store.fetch(earlier[0].run_id, NOISE_RECORDS))
        records = RunRecords.read(store.fetch(earlier[0].run_id, RECORDS))
        outputs = ModelOutputs(records, int(earlier[0].metrics[run_names.TRUNCATED]))
    elif config.sampling.size is None:
        outputs, again = _score(config, suite, base, variant, baseline, resume)
    else:
        first = config.sampling.before_last
        scored = None if first is None else _scored_before(store, run, fingerprint_with(first))
        outputs = _score_drawn(config, suite, base, variant, baseline, resume, scored)

    if variant.at_server is not None:
        run.log_json(variant.at_server.server_identity(), FACTS)
    if config.sampling.size is None:
        log_harness_metrics(run, suite, outputs, baseline=baseline.records)
    else:  # the harness's code computes plain means, which are not those of items drawn with unequal probabilities
        run.log_values({run_names.TRUNCATED: outputs.n_truncated})
    inputs = MetricInputs(
        baseline=baseline.records,
        variant=outputs.records,
        noise=baseline.noise,
        engine=baseline.engine,
        asked_again=again,
        settings=MetricSettings(seed=config.source.seed, split_seed=config.source.seed),
    )
    if earlier:
        account = stored.read_account(store, earlier[0].run_id)
        account = replace(account, setting={**account.setting, **config.source.reason})
    else:
        account = _account_of(inputs, outputs, {**conditions(config, base, variant), **_drawn_with(suite)})
    run.log_json(account.to_dict(), ACCOUNT)
    run.log_values(account.values())
    return _Compared(inputs=inputs, baseline=baseline, account=account, found_in=earlier[0].run_id if earlier else None)


def _score(
    config: EvaluateConfig,
    suite: Suite,
    base: AnyEngineModel,
    variant: EngineModel[Loaded, Writer, Stored],
    baseline: StoredBaseline,
    resume: Path,
) -> tuple[ModelOutputs, RunRecords | None]:
    """Score a variant on all items; return also its second answers where it does not repeat itself."""
    models.recognised_in(resume, variant)
    states, loaded = states_for(baseline, base, variant), variant.load()
    sample = noise_sample(suite, config.evaluation.noise_items, seed=config.source.seed)
    again: RunRecords | None = None
    own = resume / "shown"  # the variant's first pass, where it is asked twice
    with variant.capture(own, loaded) if suite.is_scored and not variant.abilities.repeats else nullcontext() as shown:
        scorer = models.scorer_listing(variant, loaded, item_keys(sample))
        outputs = run_model(scorer, suite, capture=shown, baseline=states, resume=resume)
    if shown is not None:
        first_pass = variant.stored(own)
        second, first = variant.scorer(loaded, after=first_pass), variant.comparable_with(first_pass)
        again = run_model(second, sample, baseline=first, generations=False, resume=resume / NOISE_RECORDS).records
    models.require_unchanged(variant)
    return outputs, again


def _score_drawn(
    config: EvaluateConfig,
    suite: Suite,
    base: AnyEngineModel,
    variant: AnyEngineModel,
    baseline: StoredBaseline,
    resume: Path,
    scored: RunRecords | None,
) -> ModelOutputs:
    """Score a variant on items that are drawn, those of `scored` excepted."""
    models.recognised_in(resume, variant)
    states = states_for(baseline, base, variant)
    scorer = variant.scorer(variant.load())
    blocks = models.BlockScorer(suite=suite, scorer=lambda: scorer, states=states, folder=resume, every_order=True)
    outputs = models.run_sampled(blocks, baseline.records, config, scored)
    models.require_unchanged(variant)
    return outputs


def _account_of(inputs: MetricInputs, outputs: ModelOutputs, setting: dict[str, str]) -> Account:
    if inputs.asked_again is not None and inputs.asked_again.items is not None:
        setting["asked twice"] = f"{len(inputs.asked_again.items):,} items (noise floor)"
    if (bounds := outputs.records.option_bounds) is not None:
        setting["lists of most probable tokens of"] = f"{len({(t, i) for t, i, *_ in bounds.key_rows()}):,} items"
    return take_account(
        inputs,
        cut=outputs.shortened.cut,
        too_long=outputs.shortened.too_long,
        asked_again=outputs.asked_again,
        setting=setting,
    )


def _scored_before(store: Tracker, run: TrackedRun, fingerprint: str) -> RunRecords | None:
    """Return the records of a finished run on fewer items, and note it; None where it has shortened prompts, or none.

    Which items were shortened is not in the records.
    """
    for earlier in store.find("evaluate", **{run_names.FINGERPRINT: fingerprint})[:1]:
        if not (earlier.metrics[run_names.TRUNCATED] or stored.read_account(store, earlier.run_id).unscored):
            run.set_tags({run_names.SCORED_BEFORE: earlier.run_id})
            return RunRecords.read(store.fetch(earlier.run_id, RECORDS))
    return None


def conditions(config: EvaluateConfig, base: AnyEngineModel, variant: AnyEngineModel) -> dict[str, str]:
    """Return under what conditions a variant is compared."""
    rounding = variant.rounding
    unused = [] if base.abilities.served else unused_weights(base.path)
    known = {
        "baseline": baseline_label(config.source, config.served),
        **config.source.reason,
        "engine": "endpoint" if variant.abilities.served else config.running.engine,
        "dtype": str(variant.dtype).removeprefix("torch."),
        "threads": rounding.get("threads", ""),
        "processor": " ".join(rounding[name] for name in ("processor", "instructions") if name in rounding),
        "seed": "" if config.source.seed == SEED else f"{config.source.seed} (given)",
        "not loaded from the baseline's folder:": ", ".join(unused),
    }
    return {name: value for name, value in known.items() if value}


def _drawn_with(suite: Suite) -> dict[str, str]:
    """Return how the answers of problems were drawn, by what is said of each."""
    answered = (task.answering for task in suite.tasks)
    asked = [one for one in answered if one is not None and one.thinking is not None]
    if not asked:
        return {}
    said = {
        f"{one.samples} per question at temperature {one.sampling.temperature:g}, top_k {one.sampling.top_k}, "
        f"top_p {one.sampling.top_p:g}, at most {one.max_new_tokens:,} tokens, "
        f"thinking {'on' if one.thinking else 'off'}"
        for one in asked
    }
    return {"answers to problems": "; ".join(sorted(said))}


def require_cache_applied(manifest: CheckpointManifest, records: RunRecords) -> None:
    """Refuse a rounded cache of keys and values that has moved no distribution: the engine did not round."""
    if not METHODS.get(manifest.method).rounds_cache:
        return
    tables = (records.option_distances, records.token_distances, records.greedy_distances)
    moved = [float(table.column("kl").max()) for table in tables if table is not None and len(table)]
    if moved and max(moved) <= MAX_KL:
        raise UnsupportedError(
            f"The cache of {manifest.label} is not applied: no token's distribution differs from the baseline's",
            allowed=f"a KL above {MAX_KL:g} nats at one token at least",
            got=f"at most {max(moved):.1g} nats",
            fix="Use an engine that rounds the cache, or texts that are longer than residual and token_group",
        )


def states_for(
    baseline: StoredBaseline, base: AnyEngineModel, variant: EngineModel[Loaded, Writer, Stored]
) -> Stored | None:
    """Return the baseline's stored pass as the variant is compared with it: see `EngineModel.comparable_with`."""
    return None if baseline.states is None else variant.comparable_with(base.stored(baseline.states))


def log_evaluation(
    store: Tracker,
    run: TrackedRun,
    inputs: MetricInputs,
    results: Sequence[MetricResult],
    metadata: stored.EvalMetadata,
) -> None:
    """Log metrics (pooled and per task), details, flips table, records, and the reason for each missing metric."""
    pooled = headline(results)
    stored.log_results(run, results)
    compared = pooled.get("distance/flips_pct", pooled.get("distance/kl_mean"))
    run.log_values({**gate_values(pooled), run_names.N_ITEMS: compared.n if compared is not None else 0})
    run.log_json(details(inputs, results), "details.json")
    run.log_json(flips_table(inputs), "flips.json")
    if inputs.missing(*ANSWERED_PROBLEMS) is None:
        run.log_json(questions_table(inputs), "problems.json")
    if skipped := unmet(inputs):
        run.log_json(skipped, "not_computed.json")
    with scratch_folder(store.uri) as folder:
        inputs.subject.write(folder / RECORDS)
        stored.write_metadata(folder / RECORDS, metadata)
        if inputs.asked_again is not None:
            inputs.asked_again.write(folder / NOISE_RECORDS)
        for part in sorted(folder.iterdir()):
            run.log_folder(part, part.name)


def run_evaluate(config: EvaluateConfig, store: Tracker | str | None = None, say: Say = silent) -> Evaluation:
    """Run the stage in its own run, and return the evaluation. Wrong parameters are refused before a run is made."""
    variant, suite, label = (
        described(config.checkpoint, config.source, config.served),
        suite_of(config),
        baseline_label(config.source, config.served),
    )
    text = as_text(config)  # as `mlflow run` logs them, so that no parameter is logged twice
    with (
        store_of_command(config, store) as opened,
        ExitStack() as until_finished,
        keeping(),  # the requests' tokens: of the baseline and of the variant they are the same
        models.engine_started(config.running, config.source),
        models.cores_shared_out(config.running, config.source),
        opened.run(f"evaluate {label}", "evaluate", {run_names.BASE_MODEL: label}) as run,
    ):
        run.rename(f"evaluate {variant.label} {label}")
        tags = {run_names.VARIANT: variant.label, run_names.METHOD: variant.method}
        run.set_tags({**tags, run_names.CHECKPOINT: config.checkpoint})
        run.log_params(
            {
                "model": config.source.model,
                **config.source.reason,
                "tasks": EMBEDDED if config.evaluation.tasks == "auto" else config.evaluation.tasks,
                "noise_items": config.evaluation.noise_items,
                **config.sampling.logged,
                **{name: text[name] for name in settings_of(config)},
            }
        )
        compared = evaluate_variant(config, suite, opened, run, until_finished, say)
        inputs, baseline, account = compared.inputs, compared.baseline, compared.account
        if isinstance(variant, CheckpointManifest):
            require_cache_applied(variant, inputs.subject)
        if reason := PERPLEXITY_EXISTS.missing(inputs):
            say(f"No perplexity: {reason}")

        results = compute_all(inputs)
        log_evaluation(opened, run, inputs, results, baseline.metadata)
        sentence = verdict(
            variant.label,
            headline(results),
            size_ratio=variant.size_ratio,
            sparsity=variant.sparsity,
            cache_ratio=variant.cache_ratio,
            account=account,
            slices=worst_slice(results),
        )
        source = "evaluated now" if baseline.fresh else "found in the store"
        run.set_tags({run_names.VERDICT: sentence, run_names.BASELINE_RUN: baseline.run_id, "baseline": source})
        if compared.found_in is not None:
            run.set_tags({run_names.SKIPPED: f"evaluation: found in run {compared.found_in}"})
        run.set_note(f"{sentence}\n\n{account.sentence}")
    return Evaluation(
        name=variant.label,
        account=account,
        results=tuple(results),
        not_computed=unmet(inputs),
        records_folder=opened.fetch(run.run_id, RECORDS),
        run=opened.link(run.run_id),
        baseline=label,
        verdict=sentence,
        manifest=variant if isinstance(variant, CheckpointManifest) else None,
        baseline_records_folder=opened.fetch(baseline.run_id, RECORDS),
        baseline_run_id=baseline.run_id,
        evaluation_id=evaluation_of_sample(baseline.evaluation, config.sampling),
        baseline_found=not baseline.fresh,
        variant_found_in=compared.found_in,
    )
