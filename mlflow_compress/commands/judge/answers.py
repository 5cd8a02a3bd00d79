"""Answers of both models to the same instructions: generated once, kept in runs of their own."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlflow_compress.commands.evaluate.baseline import STATES
from mlflow_compress.commands.evaluate.models import OneLoaded, open_baseline
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.commands.shared import inputs
from mlflow_compress.commands.shared.get_or_create import get_or_create_run
from mlflow_compress.engines.interface import EngineModel
from mlflow_compress.items.sources.instructions import Instruction, fingerprint_of
from mlflow_compress.judges import JUDGES, chosen_judges
from mlflow_compress.judges.mt_bench import OTHER_TEMPERATURE, TEMPERATURES
from mlflow_compress.kept import kept
from mlflow_compress.models.identity import IdentifiedModel
from mlflow_compress.records import Generations, GreedyAnswers, GreedyDistances, GreedyScores, RunRecords
from mlflow_compress.scoring.generation.generate import generate_answers, generate_two_turns
from mlflow_compress.scoring.generation.generation_rows import GenerationConfig, Speed
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.run_names import RECORDS
from mlflow_compress.tracking.store import OpenRun, Store

SAMPLES, SAMPLES_AGAIN = "samples", "samples_again"  # artifact folders next to RECORDS
MT_BENCH_TOKENS = 1024  # longest answer in MT-Bench, in tokens


@dataclass(frozen=True, kw_only=True)
class Answers:
    """A model's answers: both turns of each instruction for MT-Bench, and k samples of the first turn for ConSCompF."""

    graded: Generations
    samples: Generations


def graded_tokens(config: JudgeConfig, loaded: IdentifiedModel) -> int:
    """Return the longest graded answer in tokens: 1024 as in MT-Bench, at most a quarter of the model's context."""
    if config.answers.judge_max_tokens == "auto":
        return min(MT_BENCH_TOKENS, loaded.max_length // 4)
    return int(config.answers.judge_max_tokens)


def _sample(
    loaded: Any,
    instructions: list[Instruction],
    config: JudgeConfig,
    seed: int,
    resume: Path,
    speed: Speed,
) -> Generations:
    """Return several sampled answers to every first turn, with ConSCompF's temperature, top-k and top-p."""
    drawn = GenerationConfig(
        max_new_tokens=config.answers.max_new_tokens, samples=config.answers.num_samples, seed=seed
    )
    return generate_two_turns(
        loaded, instructions, drawn, turns=1, system=config.inference.system_prompt or "", resume=resume, speed=speed
    )


def _answers(
    loaded: Any,
    instructions: list[Instruction],
    config: JudgeConfig,
    seed: int,
    resume: Path,
    speed: Speed,
) -> Answers:
    """Return a model's answers. `seed` is for the samples; the graded answers use `config.source.seed`."""
    graded = GenerationConfig(
        max_new_tokens=graded_tokens(config, loaded),
        temperature=OTHER_TEMPERATURE,
        top_k=0,
        top_p=1.0,
        samples=1,
        seed=config.source.seed,
    )
    return Answers(
        graded=generate_two_turns(
            loaded,
            instructions,
            graded,
            temperatures=TEMPERATURES,
            system=config.inference.system_prompt or "",
            resume=resume / RECORDS,
            speed=speed,
        ),
        samples=_sample(loaded, instructions, config, seed, resume / SAMPLES, speed),
    )


def _log_speed(run: OpenRun, speed: Speed) -> None:
    """Log the tokens a second of the answers that this run has generated itself."""
    if speed.tokens_per_second is not None:
        run.log_values({"speed/answer_tokens_per_second": speed.tokens_per_second})


def _fingerprint(
    model: EngineModel, template: object, instructions: list[Instruction], config: JudgeConfig
) -> dict[str, object]:
    return {
        **model.identity,
        **model.answer_identity,
        "chat_template": template,
        "num_samples": config.answers.num_samples,
        "max_new_tokens": config.answers.max_new_tokens,
        "judge_max_tokens": config.answers.judge_max_tokens,
        "seed": config.source.seed,
        "system_prompt": config.inference.system_prompt,
        "instructions": fingerprint_of(instructions, config.answers.instructions),
    }


def _read_answers(store: Store, run_id: str) -> Answers:
    graded, samples = (Generations.read(store.fetch(run_id, name)) for name in (RECORDS, SAMPLES))
    return Answers(graded=graded, samples=samples)


def _write_answers(answers: Answers, folder: Path) -> None:
    RunRecords(generations=answers.graded).write(folder / RECORDS)
    answers.samples.write(folder / SAMPLES)


def baseline_answers(
    store: Store,
    base: EngineModel,
    instructions: list[Instruction],
    config: JudgeConfig,
    load: OneLoaded,
    before: Callable[[], None] = lambda: None,
) -> tuple[str, Answers, Generations]:
    """Get-or-create: return the run with the baseline's answers, the answers, and a second sample (the noise floor).

    `before` is called before they are written.
    """

    def work(run: OpenRun, folder: Path, resume: Path) -> None:
        loaded, speed = load(base), Speed()
        _write_answers(_answers(loaded, instructions, config, config.source.seed, resume, speed), folder)
        again = _sample(loaded, instructions, config, config.source.seed + 1, resume / SAMPLES_AGAIN, speed)
        again.write(folder / SAMPLES_AGAIN)
        _log_speed(run, speed)

    fingerprint = _fingerprint(base, base.tokenizer.chat_template, instructions, config)
    run_id, _ = get_or_create_run(
        store, "baseline-answers", inputs.baseline_label(config), fingerprint, work, before=before
    )
    answers = kept(("answers", run_id), lambda: _read_answers(store, run_id))
    return run_id, answers, kept(("again", run_id), lambda: Generations.read(store.fetch(run_id, SAMPLES_AGAIN)))


def variant_answers(
    store: Store,
    run: OpenRun,
    models: tuple[EngineModel, EngineModel],
    instructions: list[Instruction],
    config: JudgeConfig,
    load: OneLoaded,
) -> tuple[str, bool, Answers]:
    """Get-or-create: return the run with the variant's answers, whether it is new, and the answers.

    The answers have their own run below the judge's run. It finishes before the grading begins. So the answers are kept
    when a judge fails, and the next judge run reuses them.

    Both models use the baseline's chat template, because tools often save a checkpoint without it. The samples have the
    seed of the baseline's second sample. With the seed of the first one, variant and baseline would share their random
    numbers, and be more alike than two independent samples of one model. With this seed, an unchanged model has exactly
    the similarity of the noise floor.
    """
    base, variant = models

    def work(stored: OpenRun, folder: Path, resume: Path) -> None:
        loaded, speed = replace(load(variant), tokenizer=base.tokenizer), Speed()
        _write_answers(_answers(loaded, instructions, config, config.source.seed + 1, resume, speed), folder)
        _log_speed(stored, speed)

    asked = _fingerprint(variant, base.tokenizer.chat_template, instructions, config)
    label = f"{inputs.described(config).label} {inputs.baseline_label(config)}"
    below = {run_names.PARENT: run.run_id}
    run_id, fresh = get_or_create_run(store, "answers", label, {"stage": "judge", **asked}, work, below)
    return run_id, fresh, _read_answers(store, run_id)


TASK = "instructions"
_ANSWERS, _SCORED = "answers", "scored"  # folders of unfinished work


def _decoded(loaded: Any, instructions: list[Instruction], config: JudgeConfig, resume: Path) -> GreedyAnswers:
    """Return the greedy answer to the first turn of every instruction."""
    greedy = GenerationConfig(
        max_new_tokens=graded_tokens(config, loaded), temperature=0.0, top_k=0, top_p=1.0, samples=1
    )
    system = config.inference.system_prompt or ""
    found = generate_answers(loaded, instructions, greedy, task=TASK, system=system, resume=resume / _ANSWERS)
    return GreedyAnswers(found.table)


def _greedy_fingerprint(
    model: EngineModel, template: object, asked: list[Instruction], config: JudgeConfig
) -> dict[str, object]:
    return {
        **model.identity,
        "rounding": model.rounding,
        "chat_template": template,
        "judge_max_tokens": config.answers.judge_max_tokens,
        "system_prompt": config.inference.system_prompt,
        "instructions": fingerprint_of(asked, config.answers.instructions),
    }


def baseline_greedy(
    store: Store, base: EngineModel, instructions: list[Instruction], config: JudgeConfig, load: OneLoaded
) -> tuple[str, RunRecords]:
    """Get-or-create: return the run with the baseline's greedy answers, and its records.

    The run also holds the baseline's scores of its answers, and its states there, from which exact distances come.
    """

    def work(run: OpenRun, folder: Path, resume: Path) -> None:
        loaded = load(base)
        answers = _decoded(loaded, instructions, config, resume)
        states = resume / STATES
        with base.capture(states, loaded) as writer:
            scores, _ = base.scorer(loaded).score_corpus(TASK, answers, capture=writer, resume=resume / _SCORED)
        run.log_folder(states, STATES)
        RunRecords(greedy_answers=answers, greedy_scores=GreedyScores(scores.table)).write(folder / RECORDS)

    fingerprint = _greedy_fingerprint(base, base.tokenizer.chat_template, instructions, config)
    run_id, _ = get_or_create_run(store, "baseline-greedy", inputs.model_label(config.source.model), fingerprint, work)
    return run_id, kept(("greedy", run_id), lambda: RunRecords.read(store.fetch(run_id, RECORDS)))


def variant_greedy(
    store: Store,
    run: OpenRun,
    models: tuple[EngineModel, EngineModel],
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
        states = variant.comparable_with(base.stored(store.fetch(baseline_run, STATES)))
        scorer = variant.scorer(loaded)
        scores, distances = scorer.score_corpus(TASK, theirs, baseline=states, resume=resume / _SCORED)
        assert distances is not None
        RunRecords(
            greedy_answers=answers,
            greedy_scores=GreedyScores(scores.table),
            greedy_distances=GreedyDistances(distances.table),
        ).write(folder / RECORDS)

    asked = _greedy_fingerprint(variant, base.tokenizer.chat_template, instructions, config)
    label = f"{inputs.read_manifest(config.checkpoint).label} {inputs.model_label(config.source.model)}"
    fingerprint = {"stage": "greedy", **asked, "baseline": baseline_run}
    run_id, _ = get_or_create_run(store, "greedy", label, fingerprint, work, {run_names.PARENT: run.run_id})
    run.set_tags({run_names.BASELINE_GREEDY_RUN: baseline_run, "greedy_run_id": run_id})
    return RunRecords.read(store.fetch(run_id, RECORDS))


def answer_baseline(config: JudgeConfig, store: Store) -> None:
    """Let the baseline answer the instructions, unless the store has its answers."""
    base, instructions = open_baseline(config), inputs.instructions_of(config)
    load = OneLoaded()
    baseline_answers(store, base, instructions, config, load)
    if any(JUDGES.get(name).greedy for name in chosen_judges(config.answers.judges)):
        baseline_greedy(store, base, instructions, config, load)
    load.free()
