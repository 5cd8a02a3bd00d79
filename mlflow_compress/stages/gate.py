"""The gate: evaluates a checkpoint in random blocks of items until the policy's verdict is sure."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from mlflow_compress.config import GateConfig, as_text
from mlflow_compress.config.policy import Policy, read_policy
from mlflow_compress.decide.item_checks import ItemPolicy, check_places, item_policy
from mlflow_compress.decide.promotion import NO_KL_OF_SERVED
from mlflow_compress.errors import ConfigError
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.stats.sequential import random_order
from mlflow_compress.models.identity import check_same_tokenizer
from mlflow_compress.records import RunRecords
from mlflow_compress.results import GateVerdict
from mlflow_compress.scoring.endpoint.endpoint_scorer import EndpointScorer
from mlflow_compress.scoring.endpoint.served_model import ServedModel
from mlflow_compress.scoring.engine import Scorer
from mlflow_compress.stages.evaluate import readable, states_for
from mlflow_compress.stages.evaluation.baseline import Baseline, find_or_evaluate, identity, scorer_of
from mlflow_compress.stages.evaluation.open_models import OpenModel, load, open_baseline, open_variant
from mlflow_compress.stages.evaluation.served import recognised_in
from mlflow_compress.stages.gating.final_verdict import at_once, is_sure, verdict_of_gate
from mlflow_compress.stages.gating.item_blocks import BlockScorer, Keys, blocks, joined, joined_records, restricted
from mlflow_compress.stages.gating.progress_of_checks import ChecksSoFar, needed_items
from mlflow_compress.stages.gating.timing import TimedForGate, timed_for_gate
from mlflow_compress.stages.gating.verdict_files import verdict_markdown, write_verdict
from mlflow_compress.stages.get_or_create import digest
from mlflow_compress.stages.model_names import Made, ServedVariant, baseline_label, described
from mlflow_compress.stages.resumable_workdir import resumable_workdir
from mlflow_compress.stages.task_inputs import suite_of
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.run_names import RECORDS
from mlflow_compress.tracking.shared_store.live_processes import scratch_folder
from mlflow_compress.tracking.store import OpenRun, Store
from mlflow_compress.tracking.tracker import Tracker

Progress = Callable[[str], None]


def run_gate(config: GateConfig, store: Store | None = None, progress: Progress = lambda line: None) -> GateVerdict:
    """Evaluate a checkpoint until every gate is decided or one has failed, and return the verdict.

    The baseline is found in the store, or evaluated as a whole. The variant is scored in blocks, on the items that the
    policy reads, in the original order of their options. A gate that was interrupted goes on with the block that it was
    at. Wrong parameters are refused before a run is made; a task that the policy names and the evaluation lacks, after.

    Raises
    ------
    ConfigError
        The policy cannot be decided item by item, or is about no item.
    MlflowCompressError
        A missing or changed checkpoint, tokenizers that differ, broken tasks, a store that cannot be written.
    """
    policy = read_policy(config.policy).overridden(
        min_decode_speedup=config.min_decode_speedup, max_memory_ratio=config.max_memory_ratio
    )
    wanted = item_policy(policy)
    evaluation = config.evaluate_config
    made, suite = described(evaluation), suite_of(evaluation)
    _check_served(made, policy)
    store = store if store is not None else Tracker(config.experiment)
    label = baseline_label(evaluation)
    base = open_baseline(evaluation)
    variant = open_variant(evaluation, base)
    for model in (base, variant):
        if isinstance(model, ServedModel):
            progress("\n".join(model.can.lines(model.name)))
    check_same_tokenizer(base, variant)
    tags = {run_names.BASE_MODEL: label, run_names.VARIANT: made.label, run_names.METHOD: made.method}
    with store.run(f"gate {made.label} {label}", "gate", {**tags, run_names.POLICY: policy.sha256}) as run:
        run.log_params({**as_text(config), "policy_sha256": policy.sha256})
        suite = readable(store, base, suite, evaluation)
        baseline = find_or_evaluate(store, base, suite, evaluation)
        run.set_tags({run_names.EVALUATION: baseline.evaluation, run_names.BASELINE_RUN: baseline.run_id})
        inputs = MetricInputs(baseline=baseline.records)
        families = inputs.headline_families
        check_places(wanted.checks, inputs.view, families)
        if not set(families) & set(inputs.view.scored):
            wanted = _without_kl(wanted)
        keys = needed_items(wanted.checks, inputs, families)
        order = [keys[row] for row in random_order(keys, seed=config.source.seed)] if keys else []
        _check_counts(policy, order)
        timed = timed_for_gate(config.speed_config, policy, store)
        states = states_for(baseline, base, variant)
        # Other sizes of blocks are other work; another policy may be about other items.
        fingerprint = digest(
            {"stage": "gate", **identity(variant), "baseline": baseline.run_id, "order": order, "block": config.block}
        )
        with resumable_workdir(store.uri, fingerprint) as folder:
            if isinstance(variant, ServedModel):
                recognised_in(folder, variant)
            scorer = BlockScorer(suite=suite, scorer=_loaded_once(variant), states=states, folder=folder)
            so_far, records = _look(config, policy, wanted, families, baseline, scorer, order, made, timed, progress)
            link = store.link(run.run_id)
            found = verdict_of_gate(
                config, policy, wanted, so_far, records, baseline, made, timed, len(order), label, link
            )
            with scratch_folder(store.uri) as scratch:
                records.write(scratch)
                run.log_folder(scratch, RECORDS)
        _log(store, run, found)
    if config.output is not None:
        write_verdict(found, Path(config.output))
    return found


def _check_served(made: Made, policy: Policy) -> None:
    """Refuse a policy that a served model cannot be judged by, before anything is asked of its server."""
    if not isinstance(made, ServedVariant):
        return
    if policy.kl is not None:
        raise ConfigError("The policy has a gate that a served model cannot pass", fix=NO_KL_OF_SERVED)
    if of_size := [gate.metric for gate in policy.gates if gate.metric.startswith("size/")]:
        raise ConfigError(
            "The policy has a gate on size, and the size of a served model is not known",
            got=of_size[0],
            fix="Leave it out",
        )


def _loaded_once(variant: OpenModel) -> Callable[[], Scorer | EndpointScorer]:
    """Return a function that loads the model when it is first called; a served one is loaded already."""
    return cache(lambda: scorer_of(load(variant)))


def _without_kl(policy: ItemPolicy) -> ItemPolicy:
    """Return the policy for generated answers: the gate on KL does not apply, and passes at once."""
    of_kl = frozenset(check.gate for check in policy.checks if check.metric.startswith("distance/kl_"))
    kept = tuple(check for check in policy.checks if check.gate not in of_kl)
    return ItemPolicy(gates=policy.gates, checks=kept, at_once=policy.at_once | of_kl)


def _check_counts(policy: Policy, order: Keys) -> None:
    """Refuse a policy that requires more items than the evaluation has."""
    for task, fewest in [(None, policy.require.items), *policy.require.items_by_task.items()]:
        n = sum(task in (None, name) for name, _ in order)
        if n < fewest:
            raise ConfigError(
                f"The policy requires more items{f' of {task}' if task else ''} than the gate looks at",
                allowed=f"at most {n}",
                got=fewest,
            )


def _look(
    config: GateConfig,
    policy: Policy,
    wanted: ItemPolicy,
    families: tuple[str, ...],
    baseline: Baseline,
    scorer: BlockScorer,
    order: Keys,
    made: Made,
    timed: TimedForGate,
    progress: Progress,
) -> tuple[ChecksSoFar, RunRecords]:
    """Look at block after block until the verdict is sure; return what is known, and the variant's records."""
    so_far = ChecksSoFar(policy=wanted, headline=families, error=config.error)
    parts: list[RunRecords] = []
    if at_once(wanted, made, timed, "fail"):
        return so_far, RunRecords()
    for number, keys in blocks(order, config.block):
        records, _ = scorer.records(number, keys)
        parts.append(records)
        so_far.look(MetricInputs(baseline=restricted(baseline.records, joined(keys)), variant=records), keys)
        gates = [gate for gate in range(len(wanted.gates)) if gate not in wanted.at_once]
        decided = sum(so_far.of_gate(gate) != "undecided" for gate in gates)
        progress(f"{so_far.n_items} of {len(order)} items: {decided} of {len(gates)} gates decided")
        if is_sure(policy, wanted, so_far, order):
            break
    return so_far, joined_records(parts)


def _log(store: Store, run: OpenRun, found: GateVerdict) -> None:
    """Log the verdict on its run."""
    run.log_values(
        {"gate/passed": float(found.passed), "items/used": found.items_used, "items/available": found.items_available}
    )
    with scratch_folder(store.uri) as scratch:
        write_verdict(found, scratch)
        for path in sorted(scratch.iterdir()):
            run.log_file(path)
    run.set_tags({run_names.VERDICT: found.verdict, "passed": str(found.passed).lower()})
    run.set_note(verdict_markdown(found))
