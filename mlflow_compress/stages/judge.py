"""The judge stage: both models answer the same instructions; how similar are the answers, and how good?"""

from __future__ import annotations

import gc
import os
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mlflow_compress.config import JudgeConfig, JudgeSettings
from mlflow_compress.home import home
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
from mlflow_compress.metrics.core.compute import compute_all, unmet
from mlflow_compress.metrics.core.metric_inputs import AnswerEmbeddings, MetricInputs, MetricSettings
from mlflow_compress.models.identity import IdentifiedModel, check_same_tokenizer
from mlflow_compress.models.light_model import LightModel
from mlflow_compress.models.loading import LoadedModel, resolve_folder
from mlflow_compress.records import Generations, Judgments, RunRecords
from mlflow_compress.scoring.generation.generate import generate_two_turns
from mlflow_compress.scoring.generation.sampling import GenerationConfig
from mlflow_compress.stages.evaluation.baseline import identity
from mlflow_compress.stages.evaluation.open_models import light, load
from mlflow_compress.stages.evaluation.result_files import logged, results_json
from mlflow_compress.stages.get_or_create import get_or_create_run
from mlflow_compress.stages.model_names import folder_or_hub, model_label, model_path, read_manifest
from mlflow_compress.stages.task_inputs import instructions_of
from mlflow_compress.tasks.sources.instructions import Instruction
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.run_names import RECORDS
from mlflow_compress.tracking.tracker import TrackedRun, Tracker
from mlflow_compress.tracking.views import how_to_open

SAMPLES, SAMPLES_AGAIN = "samples", "samples_again"  # artifact folders beside RECORDS
MT_BENCH_TOKENS = 1024  # longest answer in MT-Bench
JUDGMENTS = "judgments.jsonl"  # grades that were paid for, below `home`


@dataclass(frozen=True, kw_only=True)
class Answers:
    """A model's answers: both turns as MT-Bench asks for them, and k sampled first turns for ConSCompF."""

    graded: Generations
    samples: Generations


def _graded_tokens(config: JudgeSettings, loaded: IdentifiedModel) -> int:
    """Return the longest answer to be graded: MT-Bench's 1024, or a quarter of a shorter model's context."""
    if config.judge_max_tokens == "auto":
        return min(MT_BENCH_TOKENS, loaded.max_length // 4)
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


def _fingerprint(
    model: IdentifiedModel, template: object, instructions: list[Instruction], config: JudgeSettings
) -> dict[str, object]:
    """Return what a model's answers depend on."""
    decides = ("samples", "max_new_tokens", "judge_max_tokens", "seed", "system_prompt")
    return {
        **identity(model),
        "chat_template": template,
        **{name: getattr(config, name) for name in decides},
        "instructions": [asdict(item) for item in instructions],
    }


def _read_answers(tracker: Tracker, run_id: str) -> Answers:
    """Return the answers that a finished run has stored."""
    graded, samples = (Generations.read(tracker.fetch(run_id, name)) for name in (RECORDS, SAMPLES))
    return Answers(graded=graded, samples=samples)


def _write_answers(answers: Answers, folder: Path) -> None:
    """Write what `_read_answers` reads."""
    RunRecords(generations=answers.graded).write(folder / RECORDS)
    answers.samples.write(folder / SAMPLES)


def _baseline(
    tracker: Tracker, base: LightModel, instructions: list[Instruction], config: JudgeSettings
) -> tuple[str, Answers, Generations]:
    """Return the baseline's answers and its second sample (the floor of the similarity), generated once."""

    def work(run: TrackedRun, folder: Path, resume: Path) -> None:
        loaded = load(base)
        _write_answers(_answers(loaded, instructions, config, config.seed, resume), folder)
        again = _sample(loaded, instructions, config, config.seed + 1, resume / SAMPLES_AGAIN)
        again.write(folder / SAMPLES_AGAIN)

    fingerprint = _fingerprint(base, base.tokenizer.chat_template, instructions, config)
    run_id, fresh = get_or_create_run(tracker, "baseline-answers", model_label(config.model), fingerprint, work)
    if fresh:
        gc.collect()  # or the baseline would still be in memory when the variant is loaded
    return run_id, _read_answers(tracker, run_id), Generations.read(tracker.fetch(run_id, SAMPLES_AGAIN))


def _variant(
    tracker: Tracker,
    run: TrackedRun,
    models: tuple[LightModel, LightModel],
    instructions: list[Instruction],
    config: JudgeConfig,
) -> tuple[str, bool, Answers]:
    """Return the variant's answers with the id of the run that holds them, and whether they were generated now.

    They have a run of their own below that of the judge, which is finished before the grading begins: when a judge
    fails, the answers are there, and the next judge run finds them.

    Both models are asked in the baseline's chat template: tools often save a checkpoint without it. The sampled answers
    have the seed of the baseline's second sample: with that of the first, both would share their random numbers and be
    more alike than two independent samples of one model are. An unchanged model thus scores exactly the floor.
    """
    base, variant = models

    def work(stored: TrackedRun, folder: Path, resume: Path) -> None:
        loaded = replace(load(variant), tokenizer=base.tokenizer)
        _write_answers(_answers(loaded, instructions, config, config.seed + 1, resume), folder)

    asked = _fingerprint(variant, base.tokenizer.chat_template, instructions, config)
    label = f"{read_manifest(config.checkpoint).label} {model_label(config.model)}"
    below = {run_names.PARENT: run.run_id}
    run_id, fresh = get_or_create_run(tracker, "answers", label, {"stage": "judge", **asked}, work, below)
    return run_id, fresh, _read_answers(tracker, run_id)


def _grades(
    config: JudgeSettings, instructions: list[Instruction], answers: dict[str, Generations], cache: Path
) -> tuple[dict[str, Judgments], str | None]:
    """Return both models' MT-Bench grades, or none and the reason; grades already paid for are kept on disk."""
    settings = judge_config_from_env(
        os.environ, model=config.judge_model, base_url=config.judge_base_url, repeats=config.judge_repeats
    )
    if isinstance(settings, Skipped):
        return {}, settings.reason
    assert isinstance(settings, MtBenchConfig)
    judge = MtBenchJudge(settings, cache=cache)
    return {who: judge.judge(instructions, texts, label=f"judge {who}") for who, texts in answers.items()}, None


def _bertscore_model(name: str) -> tuple[str, int] | None:
    """Return folder and layer of BERTScore's model, or None where none is named; the hub gives safetensors only."""
    if not name:
        return None
    folder = embedded_folder() if name == EMBEDDED else resolve_folder(name)
    return str(folder), authors_layer(name, folder)


def judge(config: JudgeConfig, instructions: list[Instruction], tracker: Tracker, run: TrackedRun) -> MetricInputs:
    """Let the variant (and once the baseline) answer, embed, grade, and log what came of it."""
    with folder_or_hub("encoder", config.encoder):
        encoder = load_encoder(config.encoder, device=config.device)
    with folder_or_hub("bertscore", config.bertscore):
        settings = MetricSettings(seed=config.seed, bertscore_model=_bertscore_model(config.bertscore))
    with folder_or_hub("model", model_path(config.model)):
        base = light(model_path(config.model), config)
    models = base, light(config.checkpoint, config)
    check_same_tokenizer(*models)
    baseline_run, ours, again = _baseline(tracker, models[0], instructions, config)
    answers_run, fresh, theirs = _variant(tracker, run, models, instructions, config)
    vectors = answer_embeddings({"baseline": ours.samples, "again": again, "variant": theirs.samples}, encoder)
    answers = {"baseline": ours.graded, "variant": theirs.graded}
    grades, reason = _grades(config, instructions, answers, home(tracker.uri) / JUDGMENTS)
    found = MetricInputs(
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
    run.log_params(
        {
            "encoder": encoder.name,
            "judge_model": config.judge_model if grades else "none",
            "judge_max_tokens": _graded_tokens(config, models[1]),
            "device": models[1].device.type,
        }
    )
    run.set_tags({"baseline_answers_run_id": baseline_run, "answers_run_id": answers_run})
    skipped = [*([reason] if reason else []), *([] if fresh else [f"answers: found in run {answers_run}"])]
    if skipped:
        run.set_tags({run_names.SKIPPED: "; ".join(skipped)})
    with tempfile.TemporaryDirectory() as folder:
        found.subject.write(Path(folder))
        run.log_folder(Path(folder), RECORDS)
    with tempfile.TemporaryDirectory() as folder:
        theirs.samples.write(Path(folder))
        run.log_folder(Path(folder), SAMPLES)
    return found


def run_judge(config: JudgeConfig) -> str:
    """Run the stage under a run of its own and return what to tell the user; what is refused leaves no run behind.

    Raises
    ------
    MlflowCompressError
        A missing checkpoint, broken instructions, an encoder that does not load, a judge that cannot be reached.
    """
    manifest, instructions = read_manifest(config.checkpoint), instructions_of(config)
    tracker = Tracker()
    label = model_label(config.model)
    with tracker.run(f"judge {label}", "judge", {run_names.BASE_MODEL: label}) as run:
        run.rename(f"judge {manifest.label} {label}")
        run.set_tags(
            {
                run_names.VARIANT: manifest.label,
                run_names.METHOD: manifest.method,
                run_names.CHECKPOINT: config.checkpoint,
            }
        )
        found = judge(config, instructions, tracker, run)
        results = compute_all(found)
        run.log_results(logged(results))
        run.log_json(results_json(results), "metrics.json")
        run.log_json(unmet(found), "not_computed.json")
        skipped = tracker.client.get_run(run.run_id).data.tags.get(run_names.SKIPPED)
        lines = [f"{r.name} {r.value:.4f}" for r in results if r.task is None and r.category is None]
        run.set_note("; ".join(lines) + (f"\n\n{skipped}." if skipped else ""))
    return "\n".join([*lines, *([skipped] if skipped else []), how_to_open(tracker, run.run_id)])
