"""Screens a sweep: variants are scored before they are written, all while the baseline's layers are read once.

For methods that make a layer from that layer alone, and models that do not fit. What the policy fails is not made, and
where one checkpoint is wanted, only the smallest that passes.
"""

import gc
import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlflow_compress.commands.evaluate.items import suite_of
from mlflow_compress.commands.evaluate.models import open_baseline
from mlflow_compress.commands.evaluate.outputs import run_model
from mlflow_compress.commands.evaluate.run import evaluate_baseline, readable, states_for
from mlflow_compress.commands.shared.get_or_create import get_or_create_run
from mlflow_compress.commands.shared.named_models import baseline_label
from mlflow_compress.commands.sweep.plan import Prepared, PreparedVariant
from mlflow_compress.compression.method import METHODS
from mlflow_compress.compression.one_layer import LayerMaker
from mlflow_compress.compression.pipeline import require_supported
from mlflow_compress.config.policy import Policy
from mlflow_compress.decide.gates import FLIPS, KL
from mlflow_compress.decide.promotion import GateReading, PolicyAnswer, gate_numbers, gates_of, policy_answer
from mlflow_compress.errors import UnsupportedError
from mlflow_compress.metrics.core.metric_inputs import MetricInputs, MetricSettings, headline
from mlflow_compress.metrics.core.metric_registry import compute_all
from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.models.offloading import is_offloaded
from mlflow_compress.models.source_model import SourceModel
from mlflow_compress.scoring.engine import ScoringConfig, scorers_of_forms
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker

SCREEN_STAGE = "screen"
_NUMBERS = "screened.json"  # artifact: what gates read of each variant, by its key


def _is_made_by_layer(variant: PreparedVariant, source: SourceModel) -> bool:
    settings = variant.asked.settings
    if settings is None:
        return False
    method = METHODS.get(variant.asked.method)
    if not (method.from_disk and method.linear_only) or method.needs_calibration:
        return False
    with suppress(UnsupportedError):  # it fails when it is made
        require_supported(method, settings, source)
        return True
    return False


def screened(
    prepared: Prepared, policy: Policy, file: str | None, tracker: Tracker, say: Callable[[str], None]
) -> dict[str, PolicyAnswer]:
    """Return what the policy answers by the scores of each variant that can be screened. `file` is where it is from."""
    variants = [variant for variant in prepared.variants if _is_made_by_layer(variant, prepared.source)]
    if not variants:
        say("Nothing is screened: no method of this sweep compresses layer by layer without data")
        return {}
    gates = gates_of(policy, file)
    answers = {}
    numbers = _numbers(prepared, variants, gates.readings, tracker)
    for variant in variants:
        known = numbers[variant.key]
        checks = [check for gate in gates.gates for check in gate.checks(known["values"])]
        answers[variant.name] = policy_answer(checks, known["items"])
        say(f"Screened: {variant.name} {answers[variant.name].text()}")
    return answers


def left_unmade(answers: Mapping[str, PolicyAnswer], sizes: Mapping[str, float] | None) -> dict[str, str]:
    """Return the screened variants that are not made, and why: those that the policy fails.

    With `sizes`, the bytes of the checkpoints, only the smallest of those that pass is made; where none passes, all
    that are open.
    """
    fail = {
        name: f"It would fail the policy: {answer.why}" for name, answer in answers.items() if answer.word == "fails"
    }
    passing = [name for name, answer in answers.items() if answer.word == "passes"]
    if sizes is None or not passing:
        return fail
    winner = min(passing, key=lambda name: sizes[name])
    others = {
        name: f"{winner} passes as well, and is no larger"
        if answer.word == "passes"
        else f"The policy leaves it open ({answer.why}), and {winner} passes"
        for name, answer in answers.items()
        if name not in (winner, *fail)
    }
    return fail | others


def _numbers(
    prepared: Prepared, variants: list[PreparedVariant], readings: Collection[GateReading], tracker: Tracker
) -> Mapping[str, Mapping[str, Any]]:
    """Return what gates read of each variant, by its key, from an earlier run that has the same or from a new one."""
    config = variants[0].asked.config.evaluate_config()
    baseline = evaluate_baseline(config, tracker)
    base = open_baseline(config)

    def work(run: TrackedRun, folder: Path, resume: Path) -> None:
        suite = readable(tracker, base, suite_of(config), config)
        loaded = base.load()
        assert isinstance(loaded, LoadedModel)
        if not is_offloaded(loaded.model):
            raise UnsupportedError(
                "Screening is only for models that do not fit into memory",
                got=f"max_memory={config.source.max_memory}",
                fix="Leave save out",
            )
        with tempfile.TemporaryDirectory(dir=config.source.offload_dir) as scratch:
            maker = LayerMaker(loaded, prepared.source, Path(scratch))
            forms = [maker.forms(v.asked.method, v.asked.settings) for v in variants if v.asked.settings is not None]
            scorers = scorers_of_forms(loaded, forms, ScoringConfig())
            settings = MetricSettings(seed=config.source.seed, split_seed=config.source.seed)
            found = {}
            for variant, scorer in zip(variants, scorers, strict=True):
                states = states_for(baseline, base, base)
                outputs = run_model(scorer, suite, baseline=states, generations=False, resume=resume)
                scored = MetricInputs(
                    baseline=replace(baseline.records, generations=None),
                    variant=outputs.records,
                    noise=baseline.noise,
                    settings=settings,
                )
                results = compute_all(scored)
                pooled = headline(results)
                compared = pooled.get(FLIPS, pooled.get(KL))
                items = None if compared is None else compared.n
                found[variant.key] = {"items": items, "values": gate_numbers(results, readings)}
        run.log_json(found, _NUMBERS)

    fingerprint = {
        "baseline": baseline.run_id,
        "variants": [variant.key for variant in variants],
        "readings": sorted(reading.name for reading in readings),
    }
    run_id, fresh = get_or_create_run(
        tracker, SCREEN_STAGE, baseline_label(config.source, config.served), fingerprint, work
    )
    if fresh:
        gc.collect()  # modules have reference cycles: without this, the model is in memory while variants are made
    numbers: Mapping[str, Mapping[str, Any]] = tracker.fetch_json(run_id, _NUMBERS)
    return numbers
