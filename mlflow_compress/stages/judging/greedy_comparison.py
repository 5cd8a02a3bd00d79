"""Greedy answers of both models, and the variant scored on the baseline's: done once, kept in runs of their own."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from mlflow_compress.config import JudgeConfig
from mlflow_compress.items.sources.instructions import Instruction
from mlflow_compress.kept import kept
from mlflow_compress.models.identity import IdentifiedModel
from mlflow_compress.models.light_model import LightModel
from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.models.memory_alignment import rounding_identity
from mlflow_compress.records import GreedyAnswers, GreedyDistances, GreedyScores, RunRecords
from mlflow_compress.scoring.baseline_store.state_store import StateStore
from mlflow_compress.scoring.baseline_store.state_writer import StateWriter
from mlflow_compress.scoring.baseline_store.store_manifest import MANIFEST
from mlflow_compress.scoring.engine import Scorer
from mlflow_compress.scoring.generation.generate import generate_answers
from mlflow_compress.scoring.generation.sampling import GenerationConfig
from mlflow_compress.stages.evaluation.baseline import STATES, identity
from mlflow_compress.stages.evaluation.open_models import load
from mlflow_compress.stages.get_or_create import get_or_create_run
from mlflow_compress.stages.judging.answers import graded_tokens
from mlflow_compress.stages.model_names import model_label, read_manifest
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.run_names import RECORDS
from mlflow_compress.tracking.store import OpenRun, Store

TASK = "instructions"
_ANSWERS, _SCORED = "answers", "scored"  # folders of unfinished work


def _decoded(loaded: LoadedModel, instructions: list[Instruction], config: JudgeConfig, resume: Path) -> GreedyAnswers:
    """Return the greedy answer to the first turn of every instruction."""
    greedy = GenerationConfig(
        max_new_tokens=graded_tokens(config, loaded), temperature=0.0, top_k=0, top_p=1.0, samples=1
    )
    system = config.inference.system_prompt or ""
    found = generate_answers(loaded, instructions, greedy, task=TASK, system=system, resume=resume / _ANSWERS)
    return GreedyAnswers(found.table)


def _fingerprint(
    model: IdentifiedModel, template: object, asked: list[Instruction], config: JudgeConfig
) -> dict[str, object]:
    """Return everything that greedy answers and their scores depend on."""
    return {
        **identity(model),
        "rounding": rounding_identity(model.device),
        "chat_template": template,
        "judge_max_tokens": config.answers.judge_max_tokens,
        "system_prompt": config.inference.system_prompt,
        "instructions": [asdict(item) for item in asked],
    }


def _baseline(store: Store, base: LightModel, instructions: list[Instruction], config: JudgeConfig) -> str:
    """Get-or-create: return the run with the baseline's greedy answers, its scores of them and its states there."""

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
    label = model_label(config.source.model)
    run_id, fresh = get_or_create_run(store, "baseline-greedy", label, fingerprint, work)
    if fresh:
        gc.collect()  # otherwise the baseline is still in memory when the variant is loaded
    return run_id


def compare_greedily(
    store: Store,
    run: OpenRun,
    models: tuple[LightModel, LightModel],
    instructions: list[Instruction],
    config: JudgeConfig,
) -> Mapping[str, RunRecords]:
    """Return the records of "baseline" and "variant": greedy answers, and scores on those of the baseline.

    What was done before is found in the store. Both models use the baseline's chat template, as for the other answers.
    The variant is scored on the baseline's answers token by token (teacher forcing), with exact distances from the
    baseline's states.
    """
    base, variant = models
    baseline_run = _baseline(store, base, instructions, config)
    baseline = kept(("greedy", baseline_run), lambda: RunRecords.read(store.fetch(baseline_run, RECORDS)))

    def work(stored: OpenRun, folder: Path, resume: Path) -> None:
        loaded = replace(load(variant), tokenizer=base.tokenizer)
        answers = _decoded(loaded, instructions, config, resume)
        assert baseline.greedy_answers is not None
        states = StateStore.open(store.fetch(baseline_run, STATES), baseline=base)
        scores, distances = Scorer(loaded).score_corpus(
            TASK, baseline.greedy_answers, baseline=states, resume=resume / _SCORED
        )
        assert distances is not None
        RunRecords(
            greedy_answers=answers,
            greedy_scores=GreedyScores(scores.table),
            greedy_distances=GreedyDistances(distances.table),
        ).write(folder / RECORDS)

    asked = _fingerprint(variant, base.tokenizer.chat_template, instructions, config)
    label = f"{read_manifest(config.checkpoint).label} {model_label(config.source.model)}"
    fingerprint = {**asked, "baseline": baseline_run}
    run_id, _ = get_or_create_run(store, "greedy", label, fingerprint, work, {run_names.PARENT: run.run_id})
    run.set_tags({run_names.BASELINE_GREEDY_RUN: baseline_run, "greedy_run_id": run_id})
    return {"baseline": baseline, "variant": RunRecords.read(store.fetch(run_id, RECORDS))}
