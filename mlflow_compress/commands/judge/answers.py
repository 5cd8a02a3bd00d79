"""Answers of both models to the same instructions: generated once, kept in runs of their own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlflow_compress.commands.evaluate.baseline import STATES
from mlflow_compress.commands.evaluate.models import OneLoaded, open_baseline
from mlflow_compress.commands.judge.judge_instructions import instructions_of
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.commands.shared.get_or_create import get_or_create_run
from mlflow_compress.commands.shared.named_models import baseline_label, described, model_label, read_manifest
from mlflow_compress.config import AnswerConfig
from mlflow_compress.engines.interface import AnyEngineModel
from mlflow_compress.items.sources.instructions import Instruction, fingerprint_of
from mlflow_compress.judges import JUDGES, chosen_judges
from mlflow_compress.judges.mt_bench import OTHER_TEMPERATURE, TEMPERATURES
from mlflow_compress.kept import kept
from mlflow_compress.models.identity import rendering_hash
from mlflow_compress.records import Generations, GreedyAnswers, GreedyDistances, GreedyScores, RunRecords
from mlflow_compress.scoring.generation.generate import generate_answers, generate_two_turns
from mlflow_compress.scoring.generation.generation_rows import GenerationConfig, Speed
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.run_names import RECORDS
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker

SAMPLES_FOLDER, _SAMPLES_AGAIN = "samples", "samples_again"  # artifact folders next to RECORDS
_MT_BENCH_TOKENS = 1024  # longest answer in MT-Bench, in tokens
_TASK = "instructions"
_ANSWERS, _SCORED = "answers", "scored"  # folders of unfinished work


@dataclass(frozen=True, kw_only=True)
class Answers:
    """A model's answers: both turns of each instruction for MT-Bench, and k samples of the first turn for ConSCompF."""

    graded: Generations
    samples: Generations


def graded_tokens(asked: AnswerConfig, max_length: int) -> int:
    """Return the longest graded answer in tokens: 1024 as in MT-Bench, at most a quarter of the model's context."""
    most = asked.judge_max_tokens
    return min(_MT_BENCH_TOKENS, max_length // 4) if most == "auto" else int(most)


@dataclass(frozen=True)
class AnswerRuns:
    """Gets or creates the runs with the answers of the baseline and of its variants to the same instructions.

    All models use the baseline's chat template, because tools often save a checkpoint without it.
    """

    config: JudgeConfig
    store: Tracker
    instructions: list[Instruction]
    base: AnyEngineModel
    load: OneLoaded

    @property
    def _system(self) -> str:
        return self.config.inference.system_prompt or ""

    def _write(self, run: TrackedRun, loaded: Any, folder: Path, resume: Path, samples: Mapping[str, int]) -> None:
        """Write a model's answers, graded ones and `samples` with these seeds, and log how fast they were generated."""
        speed = Speed()
        graded = GenerationConfig(
            max_new_tokens=graded_tokens(self.config.answers, loaded.max_length),
            temperature=OTHER_TEMPERATURE,
            top_k=0,
            top_p=1.0,
            samples=1,
            seed=self.config.source.seed,
        )
        answers = generate_two_turns(
            loaded,
            self.instructions,
            graded,
            temperatures=TEMPERATURES,
            system=self._system,
            resume=resume / RECORDS,
            speed=speed,
        )
        RunRecords(generations=answers).write(folder / RECORDS)
        asked = self.config.answers
        for name, seed in samples.items():  # of every first turn, with ConSCompF's temperature, top-k and top-p
            drawn = GenerationConfig(max_new_tokens=asked.max_new_tokens, samples=asked.num_samples, seed=seed)
            sampled = generate_two_turns(
                loaded, self.instructions, drawn, turns=1, system=self._system, resume=resume / name, speed=speed
            )
            sampled.write(folder / name)
        if speed.tokens_per_second is not None:
            run.log_values({"speed/answer_tokens_per_second": speed.tokens_per_second})

    def _read(self, run_id: str) -> Answers:
        graded, samples = (Generations.read(self.store.fetch(run_id, name)) for name in (RECORDS, SAMPLES_FOLDER))
        return Answers(graded=graded, samples=samples)

    def _asked(self, model: AnyEngineModel, **more: object) -> dict[str, object]:
        """Return what a model's answers depend on."""
        return {
            **model.identity,
            "chat_template": rendering_hash(self.base.tokenizer),
            "judge_max_tokens": self.config.answers.judge_max_tokens,
            "system_prompt": self.config.inference.system_prompt,
            "instructions": fingerprint_of(self.instructions, self.config.answers.instructions),
            **more,
        }

    def _sampling(self, model: AnyEngineModel) -> dict[str, object]:
        """Return what graded and sampled answers depend on besides."""
        asked = self.config.answers
        settings = {"num_samples": asked.num_samples, "max_new_tokens": asked.max_new_tokens}
        return {**model.answer_identity, **settings, "seed": self.config.source.seed}

    def baseline(self, before: Callable[[], None] = lambda: None) -> tuple[str, Answers, Generations]:
        """Return the run with the baseline's answers, the answers, and a second sample (the noise floor)."""
        seed = self.config.source.seed

        def work(run: TrackedRun, folder: Path, resume: Path) -> None:
            self._write(run, self.load(self.base), folder, resume, {SAMPLES_FOLDER: seed, _SAMPLES_AGAIN: seed + 1})

        fingerprint = self._asked(self.base, **self._sampling(self.base))
        label = baseline_label(self.config.source, self.config.served)
        run_id, _ = get_or_create_run(self.store, "baseline-answers", label, fingerprint, work, before=before)
        answers = kept(("answers", run_id), lambda: self._read(run_id))
        again = kept(("again", run_id), lambda: Generations.read(self.store.fetch(run_id, _SAMPLES_AGAIN)))
        return run_id, answers, again

    def variant(self, run: TrackedRun, variant: AnyEngineModel) -> tuple[str, bool, Answers]:
        """Return the run with the variant's answers, whether it is new, and the answers.

        It finishes before the grading begins: the next judge run finds the answers where a judge fails. The samples
        have the seed of the baseline's second sample: with that of the first one, both would be more alike than two
        independent samples. An unchanged model has exactly the noise floor.
        """

        def work(stored: TrackedRun, folder: Path, resume: Path) -> None:
            loaded = replace(self.load(variant), tokenizer=self.base.tokenizer)
            self._write(stored, loaded, folder, resume, {SAMPLES_FOLDER: self.config.source.seed + 1})

        asked = self.config
        made = described(asked.checkpoint, asked.source, asked.served)
        label = f"{made.label} {baseline_label(asked.source, asked.served)}"
        fingerprint = self._asked(variant, stage="judge", **self._sampling(variant))
        below = {run_names.PARENT: run.run_id}
        run_id, fresh = get_or_create_run(self.store, "answers", label, fingerprint, work, below)
        return run_id, fresh, self._read(run_id)

    def _decoded(self, loaded: Any, resume: Path) -> GreedyAnswers:
        """Return the greedy answer to the first turn of every instruction."""
        most = graded_tokens(self.config.answers, loaded.max_length)
        greedy = GenerationConfig(max_new_tokens=most, temperature=0.0, top_k=0, top_p=1.0, samples=1)
        generations = generate_answers(
            loaded, self.instructions, greedy, task=_TASK, system=self._system, resume=resume / _ANSWERS
        )
        return GreedyAnswers(generations.table)

    def baseline_greedy(self) -> tuple[str, RunRecords]:
        """Return the run with the baseline's greedy answers, and its records.

        The run also holds the baseline's scores of its answers, and its states there, from which exact distances come.
        """
        base = self.base

        def work(run: TrackedRun, folder: Path, resume: Path) -> None:
            loaded = self.load(base)
            answers = self._decoded(loaded, resume)
            states = resume / STATES
            with base.capture(states, loaded) as writer:
                scores, _ = base.scorer(loaded).score_corpus(_TASK, answers, capture=writer, resume=resume / _SCORED)
            run.log_folder(states, STATES)
            RunRecords(greedy_answers=answers, greedy_scores=GreedyScores(scores.table)).write(folder / RECORDS)

        label, fingerprint = model_label(self.config.source.model), self._asked(base, rounding=base.rounding)
        run_id, _ = get_or_create_run(self.store, "baseline-greedy", label, fingerprint, work)
        return run_id, kept(("greedy", run_id), lambda: RunRecords.read(self.store.fetch(run_id, RECORDS)))

    def variant_greedy(self, run: TrackedRun, variant: AnyEngineModel, baseline: tuple[str, RunRecords]) -> RunRecords:
        """Return the variant's greedy answers, and its scores of those of `baseline_greedy`, token by token."""
        baseline_run, written = baseline
        assert written.greedy_answers is not None
        theirs = written.greedy_answers

        def work(stored: TrackedRun, folder: Path, resume: Path) -> None:
            loaded = replace(self.load(variant), tokenizer=self.base.tokenizer)
            answers = self._decoded(loaded, resume)
            states = variant.comparable_with(self.base.stored(self.store.fetch(baseline_run, STATES)))
            scorer = variant.scorer(loaded)
            scores, distances = scorer.score_corpus(_TASK, theirs, baseline=states, resume=resume / _SCORED)
            assert distances is not None
            RunRecords(
                greedy_answers=answers,
                greedy_scores=GreedyScores(scores.table),
                greedy_distances=GreedyDistances(distances.table),
            ).write(folder / RECORDS)

        variant_label = read_manifest(self.config.checkpoint, verify=False).label
        label = f"{variant_label} {model_label(self.config.source.model)}"
        fingerprint = self._asked(variant, rounding=variant.rounding, stage="greedy", baseline=baseline_run)
        run_id, _ = get_or_create_run(self.store, "greedy", label, fingerprint, work, {run_names.PARENT: run.run_id})
        run.set_tags({run_names.BASELINE_GREEDY_RUN: baseline_run, "greedy_run_id": run_id})
        return RunRecords.read(self.store.fetch(run_id, RECORDS))


def answer_baseline(config: JudgeConfig, store: Tracker) -> None:
    """Let the baseline answer the instructions, unless the store has its answers."""
    runs = AnswerRuns(config, store, instructions_of(config), open_baseline(config), OneLoaded())
    runs.baseline()
    if any(JUDGES.get(name).greedy for name in chosen_judges(config.answers.judges)):
        runs.baseline_greedy()
    runs.load.free()
