"""Greedy answers of both models, and the variant scored on the baseline's: done once, kept in runs of their own."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from mlflow_compress.config import JudgeConfig
from mlflow_compress.items.sources.instructions import Instruction
from mlflow_compress.kept import kept
from mlflow_compress.models.light_model import LightModel
from mlflow_compress.records import GreedyAnswers, GreedyDistances, GreedyScores, RunRecords
from mlflow_compress.scoring.baseline_store.state_store import StateStore
from mlflow_compress.scoring.baseline_store.state_writer import StateWriter
from mlflow_compress.scoring.baseline_store.store_manifest import MANIFEST
from mlflow_compress.scoring.engine import Scorer
from mlflow_compress.scoring.generation.generate import generate_answers
from mlflow_compress.scoring.generation.sampling import GenerationConfig
from mlflow_compress.stages.evaluation.baseline import STATES, identity
from mlflow_compress.stages.evaluation.open_models import OneLoaded, RunningModel
from mlflow_compress.stages.get_or_create import get_or_create_run
from mlflow_compress.stages.judging.answers import graded_tokens
from mlflow_compress.stages.model_names import model_label, read_manifest
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.run_names import RECORDS
from mlflow_compress.tracking.store import OpenRun, Store

TASK = "instructions"
_ANSWERS, _SCORED = "answers", "scored"  # folders of unfinished work


def _decoded(loaded: RunningModel, instructions: list[Instruction], config: JudgeConfig, resume: Path) -> GreedyAnswers:
    """Return the greedy answer to the first turn of every instruction."""
    greedy = GenerationConfig(
        max_new_tokens=graded_tokens(config, loaded), temperature=0.0, top_k=0, top_p=1.0, samples=1
    )
    system = config.inference.system_prompt or ""
    found = generate_answers(loaded, instructions, greedy, task=TASK, system=system, resume=resume / _ANSWERS)
    return GreedyAnswers(found.table)


def _fingerprint(
    model: LightModel, template: object, asked: list[Instruction], config: JudgeConfig
) -> dict[str, object]:
    """Return everything that greedy answers and their scores depend on."""
    return {
        **identity(model),
        "rounding": model.rounding,
        "chat_template": template,
        "judge_max_tokens": config.answers.judge_max_tokens,
        "system_prompt": config.inference.system_prompt,
        "instructions": [asdict(item) for item in asked],
    }


def baseline_greedy(
    store: Store, base: LightModel, instructions: list[Instruction], config: JudgeConfig, load: OneLoaded
) -> tuple[str, RunRecords]:
    """Get-or-create: return the run with the baseline's greedy answers, and its records.

    The run also holds the baseline's scores of its answers, and its states there, from which exact distances come.
    """

    def work(run: OpenRun, folder: Path, resume: Path) -> None:
        loaded = load(base)
        answers = _decoded(loaded, instructions, config, resume)
        states = resume / STATES
        (states / MANIFEST).unlink(missing_ok=True)  # of an interrupted run that is resumed
        with StateWriter(states, loaded) as writer:
            scores, _ = Scorer(loaded).score_corpus(TASK, answers, capture=writer, resume=resume / _SCORED)
        run.log_folder(states, STATES)
        RunRecords(greedy_answers=answers, greedy_scores=GreedyScores(scores.table)).write(folder / RECORDS)

    fingerprint = _fingerprint(base, base.tokenizer.chat_template, instructions, config)
    run_id, _ = get_or_create_run(store, "baseline-greedy", model_label(config.source.model), fingerprint, work)
    return run_id, kept(("greedy", run_id), lambda: RunRecords.read(store.fetch(run_id, RECORDS)))


def variant_greedy(
    store: Store,
    run: OpenRun,
    models: tuple[LightModel, LightModel],
    instructions: list[Instruction],
    config: JudgeConfig,
    load: OneLoaded,
    baseline: tuple[str, RunRecords],
) -> RunRecords:
    """Get-or-create: return the variant's greedy answers, and its scores of the baseline's, token by token.

    Both models use the baseline's chat template, as for the other answers. `baseline` is what `baseline_greedy` has
    returned.
    """
    base, variant = models
    baseline_run, written = baseline
    assert written.greedy_answers is not None
    theirs = written.greedy_answers

    def work(stored: OpenRun, folder: Path, resume: Path) -> None:
        loaded = replace(load(variant), tokenizer=base.tokenizer)
        answers = _decoded(loaded, instructions, config, resume)
        states = StateStore.open(store.fetch(baseline_run, STATES), baseline=base)
        scores, distances = Scorer(loaded).score_corpus(TASK, theirs, baseline=states, resume=resume / _SCORED)
        assert distances is not None
        RunRecords(
            greedy_answers=answers,
            greedy_scores=GreedyScores(scores.table),
            greedy_distances=GreedyDistances(distances.table),
        ).write(folder / RECORDS)

    asked = _fingerprint(variant, base.tokenizer.chat_template, instructions, config)
    label = f"{read_manifest(config.checkpoint).label} {model_label(config.source.model)}"
    fingerprint = {"stage": "greedy", **asked, "baseline": baseline_run}
    run_id, _ = get_or_create_run(store, "greedy", label, fingerprint, work, {run_names.PARENT: run.run_id})
    run.set_tags({run_names.BASELINE_GREEDY_RUN: baseline_run, "greedy_run_id": run_id})
    return RunRecords.read(store.fetch(run_id, RECORDS))
