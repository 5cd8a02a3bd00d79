"""The judge stage: both models answer the same instructions; how similar are the answers, and how good?"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mlflow_compress.config import JudgeConfig, JudgeSettings
from mlflow_compress.errors import ConfigError
from mlflow_compress.judges.encoder import EMBEDDED, embedded_folder, load_encoder
from mlflow_compress.judges.mt_bench import (
    OTHER_TEMPERATURE,
    TEMPERATURES,
    MtBenchConfig,
    MtBenchJudge,
    Skipped,
    judge_config_from_env,
)
from mlflow_compress.judges.similarity import answer_embeddings
from mlflow_compress.metrics.bertscore import authors_layer
from mlflow_compress.metrics.compute import compute_all, unmet
from mlflow_compress.metrics.evidence import AnswerEmbeddings, Evidence, MetricSettings
from mlflow_compress.records import Generations, Judgments, RunRecords
from mlflow_compress.scoring.generate import generate_two_turns
from mlflow_compress.scoring.loading import LoadedModel, check_same_tokenizer, resolve_folder
from mlflow_compress.scoring.sampling import GenerationConfig
from mlflow_compress.stages.baseline import identity
from mlflow_compress.stages.evaluate import load
from mlflow_compress.stages.inputs import instructions_of
from mlflow_compress.stages.once import digest, find_or_do
from mlflow_compress.stages.results import logged, results_json
from mlflow_compress.stages.unfinished import unfinished
from mlflow_compress.stages.variant import model_label, model_path, read_manifest
from mlflow_compress.tasks.instructions import Instruction
from mlflow_compress.tracking import names
from mlflow_compress.tracking.names import RECORDS
from mlflow_compress.tracking.store import TrackedRun, Tracker
from mlflow_compress.tracking.views import how_to_open

SAMPLES, SAMPLES_AGAIN = "samples", "samples_again"  # artifact folders beside RECORDS
MT_BENCH_TOKENS = 1024  # longest answer in MT-Bench
JUDGMENT_CACHE = Path(".mlflow_compress") / "judgments.jsonl"


@dataclass(frozen=True, kw_only=True)
class Answers:
    """A model's answers: both turns as MT-Bench asks for them, and k sampled first turns for ConSCompF."""

    graded: Generations
    samples: Generations


def _graded_tokens(config: JudgeSettings, loaded: LoadedModel) -> int:
    """Return the longest answer to be graded: MT-Bench's 1024, or a quarter of a shorter model's context."""
    if config.judge_max_tokens == "auto":
        return min(MT_BENCH_TOKENS, loaded.max_length // 4)
    if not config.judge_max_tokens.isdecimal() or int(config.judge_max_tokens) < 1:
        raise ConfigError(
            "Parameter 'judge_max_tokens' must be 'auto' or a positive whole number", got=config.judge_max_tokens
        )
    return int(config.judge_max_tokens)


def _sample(
    loaded: LoadedModel, instructions: list[Instruction], config: JudgeSettings, seed: int, resume: Path
) -> Generations:
    """Draw `config.samples` answers to every first turn, with ConSCompF's temperature, top-k and top-p."""
    drawn = GenerationConfig(max_new_tokens=config.max_new_tokens, samples=config.samples, seed=seed)
    return generate_two_turns(loaded, instructions, drawn, turns=1, system=config.system_prompt, resume=resume)


def _answers(
    loaded: LoadedModel, instructions: list[Instruction], config: JudgeSettings, seed: int, resume: Path
) -> Answers:
    """Let a model answer; `seed` is that of the sampled answers, the graded ones share `config.seed`."""
    graded = GenerationConfig(
        max_new_tokens=_graded_tokens(config, loaded),
        temperature=OTHER_TEMPERATURE,
        top_k=0,
        top_p=1.0,
        samples=1,
        seed=config.seed,
    )
    return Answers(
        graded=generate_two_turns(
            loaded,
            instructions,
            graded,
            temperatures=TEMPERATURES,
            system=config.system_prompt,
            resume=resume / RECORDS,
        ),
        samples=_sample(loaded, instructions, config, seed, resume / SAMPLES),
    )


def _fingerprint(loaded: LoadedModel, instructions: list[Instruction], config: JudgeSettings) -> dict[str, object]:
    """Return what a model's answers depend on."""
    decides = ("samples", "max_new_tokens", "judge_max_tokens", "seed", "system_prompt")
    return {
        **identity(loaded),
        "chat_template": loaded.tokenizer.chat_template,
        **{name: getattr(config, name) for name in decides},
        "instructions": [asdict(item) for item in instructions],
    }


def _baseline(
    tracker: Tracker, loaded: LoadedModel, instructions: list[Instruction], config: JudgeSettings
) -> tuple[str, Answers, Generations]:
    """Return the baseline's answers and its second sample (the floor of the similarity), generated once."""

    def work(run: TrackedRun, folder: Path, resume: Path) -> None:
        answers = _answers(loaded, instructions, config, config.seed, resume)
        RunRecords(generations=answers.graded).write(folder / RECORDS)
        answers.samples.write(folder / SAMPLES)
        again = _sample(loaded, instructions, config, config.seed + 1, resume / SAMPLES_AGAIN)
        again.write(folder / SAMPLES_AGAIN)

    fingerprint = _fingerprint(loaded, instructions, config)
    run_id, _ = find_or_do(tracker, "baseline-answers", model_label(config.model), fingerprint, work)
    graded = Generations.read(tracker.fetch(run_id, RECORDS))
    samples, again = (Generations.read(tracker.fetch(run_id, name)) for name in (SAMPLES, SAMPLES_AGAIN))
    return run_id, Answers(graded=graded, samples=samples), again


def _grades(
    config: JudgeSettings, instructions: list[Instruction], answers: dict[str, Generations]
) -> tuple[dict[str, Judgments], str | None]:
    """Return both models' MT-Bench grades, or none and the reason; grades already paid for are kept on disk."""
    settings = judge_config_from_env(
        os.environ, model=config.judge_model, base_url=config.judge_base_url, repeats=config.judge_repeats
    )
    if isinstance(settings, Skipped):
        return {}, settings.reason
    assert isinstance(settings, MtBenchConfig)
    judge = MtBenchJudge(settings, cache=JUDGMENT_CACHE)
    return {who: judge.judge(instructions, texts, label=f"judge {who}") for who, texts in answers.items()}, None


def _bertscore_model(name: str) -> tuple[str, int] | None:
    """Return folder and layer of BERTScore's model, or None where none is named; the hub gives safetensors only."""
    if not name:
        return None
    folder = embedded_folder() if name == EMBEDDED else resolve_folder(name)
    return str(folder), authors_layer(name, folder)


def judge(config: JudgeConfig, tracker: Tracker, run: TrackedRun, kept: ExitStack) -> Evidence:
    """Let the variant (and once the baseline) answer, embed, grade, and log what came of it.

    The variant's answers, which an interrupted run would resume from, stay until `kept` is closed.

    The variant's sampled answers have the seed of the baseline's second sample: with that of the first, both would
    share their random numbers and be more alike than two independent samples of one model are. An unchanged model thus
    scores exactly the floor.
    """
    instructions = instructions_of(config)
    encoder = load_encoder(config.encoder, device=config.device)
    settings = MetricSettings(seed=config.seed, bertscore_model=_bertscore_model(config.bertscore))
    base_model = load(model_path(config.model), config)
    variant_model = load(config.checkpoint, config)
    check_same_tokenizer(base_model, variant_model)
    # Both are asked in the baseline's chat template: tools often save a checkpoint without it.
    variant_model = replace(variant_model, tokenizer=base_model.tokenizer)
    baseline_run, ours, again = _baseline(tracker, base_model, instructions, config)
    mark = digest({"stage": "judge", "baseline": baseline_run, **_fingerprint(variant_model, instructions, config)})
    resume = kept.enter_context(unfinished(mark))
    theirs = _answers(variant_model, instructions, config, config.seed + 1, resume)
    vectors = answer_embeddings({"baseline": ours.samples, "again": again, "variant": theirs.samples}, encoder)
    grades, reason = _grades(config, instructions, {"baseline": ours.graded, "variant": theirs.graded})
    found = Evidence(
        baseline=RunRecords(generations=ours.graded, judgments=grades.get("baseline")),
        variant=RunRecords(generations=theirs.graded, judgments=grades.get("variant")),
        embeddings=AnswerEmbeddings(
            vectors.task,
            vectors.item_ids,
            vectors.vectors["baseline"],
            vectors.vectors["variant"],
            vectors.vectors["again"],
        ),
        settings=settings,
    )
    run.log_params({"encoder": encoder.name, "judge_model": config.judge_model if grades else "none"})
    run.set_tags({"baseline_answers_run_id": baseline_run})
    if reason:
        run.set_tags({names.SKIPPED: reason})
    with tempfile.TemporaryDirectory() as folder:
        found.subject.write(Path(folder))
        run.log_folder(Path(folder), RECORDS)
    with tempfile.TemporaryDirectory() as folder:
        theirs.samples.write(Path(folder))
        run.log_folder(Path(folder), SAMPLES)
    return found


def run_judge(config: JudgeConfig) -> str:
    """Run the stage under a run of its own and return what to tell the user.

    Raises
    ------
    MlflowCompressError
        A missing checkpoint, broken instructions, an encoder that does not load, a judge that cannot be reached.
    """
    tracker = Tracker()
    label = model_label(config.model)
    with tracker.run(f"judge {label}", "judge", {names.BASE_MODEL: label}) as run:
        manifest = read_manifest(config.checkpoint)
        run.rename(f"judge {manifest.label} {label}")
        run.set_tags(
            {names.VARIANT: manifest.label, names.METHOD: manifest.method, names.CHECKPOINT: config.checkpoint}
        )
        with ExitStack() as kept:
            found = judge(config, tracker, run, kept)
            results = compute_all(found)
            run.log_results(logged(results))
            run.log_json(results_json(results), "metrics.json")
        run.log_json(unmet(found), "not_computed.json")
        skipped = tracker.client.get_run(run.run_id).data.tags.get(names.SKIPPED)
        lines = [f"{r.name} {r.value:.4f}" for r in results if r.task is None and r.category is None]
        run.set_note("; ".join(lines) + (f"\n\n{skipped}." if skipped else ""))
    return "\n".join([*lines, *([skipped] if skipped else []), how_to_open(tracker, run.run_id)])
