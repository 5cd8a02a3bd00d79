"""The judge stage: both models answer the same instructions, and judges rate or compare the answers."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mlflow_compress.config import JudgeConfig
from mlflow_compress.errors import ConfigError
from mlflow_compress.home import home
from mlflow_compress.items.sources.instructions import Instruction
from mlflow_compress.judges import JUDGES, Judged, JudgeInputs, chosen_judges
from mlflow_compress.judges.encoder import EMBEDDED, embedded_folder
from mlflow_compress.judges.mt_bench import OTHER_TEMPERATURE, TEMPERATURES
from mlflow_compress.kept import kept
from mlflow_compress.metrics.bertscore import authors_layer
from mlflow_compress.metrics.core.compute import compute_all, headline, unmet
from mlflow_compress.metrics.core.metric_inputs import AnswerEmbeddings, MetricInputs, MetricSettings
from mlflow_compress.models.identity import IdentifiedModel, check_same_tokenizer
from mlflow_compress.models.light_model import LightModel
from mlflow_compress.models.loading import LoadedModel, resolve_folder
from mlflow_compress.records import Generations, Judgments, RunRecords
from mlflow_compress.results import AnswerEvaluation
from mlflow_compress.scoring.generation.generate import generate_two_turns
from mlflow_compress.scoring.generation.sampling import GenerationConfig
from mlflow_compress.stages.evaluation.baseline import identity
from mlflow_compress.stages.evaluation.open_models import light, load
from mlflow_compress.stages.evaluation.result_files import logged, results_json
from mlflow_compress.stages.get_or_create import get_or_create_run
from mlflow_compress.stages.model_names import folder_or_hub, model_label, model_path, read_manifest
from mlflow_compress.stages.task_inputs import instructions_of
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.run_names import RECORDS
from mlflow_compress.tracking.store import OpenRun, Store
from mlflow_compress.tracking.tracker import Tracker

SAMPLES, SAMPLES_AGAIN = "samples", "samples_again"  # artifact folders next to RECORDS
MT_BENCH_TOKENS = 1024  # longest answer in MT-Bench, in tokens


@dataclass(frozen=True, kw_only=True)
class Answers:
    """A model's answers: both turns of each instruction for MT-Bench, and k samples of the first turn for ConSCompF."""

    graded: Generations
    samples: Generations


def _graded_tokens(config: JudgeConfig, loaded: IdentifiedModel) -> int:
    """Return the longest graded answer in tokens: 1024 as in MT-Bench, at most a quarter of the model's context."""
    if config.answers.judge_max_tokens == "auto":
        return min(MT_BENCH_TOKENS, loaded.max_length // 4)
    return int(config.answers.judge_max_tokens)


def _sample(
    loaded: LoadedModel, instructions: list[Instruction], config: JudgeConfig, seed: int, resume: Path
) -> Generations:
    """Return several sampled answers to every first turn, with ConSCompF's temperature, top-k and top-p."""
    drawn = GenerationConfig(
        max_new_tokens=config.answers.max_new_tokens, samples=config.answers.num_samples, seed=seed
    )
    return generate_two_turns(
        loaded, instructions, drawn, turns=1, system=config.inference.system_prompt or "", resume=resume
    )


def _answers(
    loaded: LoadedModel, instructions: list[Instruction], config: JudgeConfig, seed: int, resume: Path
) -> Answers:
    """Return a model's answers. `seed` is for the samples; the graded answers use `config.source.seed`."""
    graded = GenerationConfig(
        max_new_tokens=_graded_tokens(config, loaded),
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
        ),
        samples=_sample(loaded, instructions, config, seed, resume / SAMPLES),
    )


def _fingerprint(
    model: IdentifiedModel, template: object, instructions: list[Instruction], config: JudgeConfig
) -> dict[str, object]:
    """Return everything that a model's answers depend on."""
    return {
        **identity(model),
        "chat_template": template,
        "num_samples": config.answers.num_samples,
        "max_new_tokens": config.answers.max_new_tokens,
        "judge_max_tokens": config.answers.judge_max_tokens,
        "seed": config.source.seed,
        "system_prompt": config.inference.system_prompt,
        "instructions": [asdict(item) for item in instructions],
    }


def _read_answers(store: Store, run_id: str) -> Answers:
    """Return the answers of a finished run."""
    graded, samples = (Generations.read(store.fetch(run_id, name)) for name in (RECORDS, SAMPLES))
    return Answers(graded=graded, samples=samples)


def _write_answers(answers: Answers, folder: Path) -> None:
    """Write answers into a folder, for `_read_answers`."""
    RunRecords(generations=answers.graded).write(folder / RECORDS)
    answers.samples.write(folder / SAMPLES)


def _baseline(
    store: Store, base: LightModel, instructions: list[Instruction], config: JudgeConfig
) -> tuple[str, Answers, Generations]:
    """Get-or-create: return the run with the baseline's answers, the answers, and a second sample (the noise floor)."""

    def work(run: OpenRun, folder: Path, resume: Path) -> None:
        loaded = load(base)
        _write_answers(_answers(loaded, instructions, config, config.source.seed, resume), folder)
        again = _sample(loaded, instructions, config, config.source.seed + 1, resume / SAMPLES_AGAIN)
        again.write(folder / SAMPLES_AGAIN)

    fingerprint = _fingerprint(base, base.tokenizer.chat_template, instructions, config)
    run_id, fresh = get_or_create_run(store, "baseline-answers", model_label(config.source.model), fingerprint, work)
    if fresh:
        gc.collect()  # otherwise the baseline is still in memory when the variant is loaded
    answers = kept(("answers", run_id), lambda: _read_answers(store, run_id))
    return run_id, answers, kept(("again", run_id), lambda: Generations.read(store.fetch(run_id, SAMPLES_AGAIN)))


def _variant(
    store: Store,
    run: OpenRun,
    models: tuple[LightModel, LightModel],
    instructions: list[Instruction],
    config: JudgeConfig,
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
        loaded = replace(load(variant), tokenizer=base.tokenizer)
        _write_answers(_answers(loaded, instructions, config, config.source.seed + 1, resume), folder)

    asked = _fingerprint(variant, base.tokenizer.chat_template, instructions, config)
    label = f"{read_manifest(config.checkpoint).label} {model_label(config.source.model)}"
    below = {run_names.PARENT: run.run_id}
    run_id, fresh = get_or_create_run(store, "answers", label, {"stage": "judge", **asked}, work, below)
    return run_id, fresh, _read_answers(store, run_id)


def _open_judges(config: JudgeConfig, folder: Path) -> dict[str, Callable[[JudgeInputs], Judged]]:
    """Open every judge before any answer is generated, so that a missing requirement is reported at once."""
    with folder_or_hub("encoder", config.answers.encoder):
        return {name: JUDGES.get(name).open(config, folder) for name in chosen_judges(config.answers.judges)}


def _judgments(judged: Mapping[str, Judged], who: str) -> Judgments | None:
    """Return all judges' ratings of one model's answers; None if no judge gives ratings."""
    found = [one.judgments[who] for one in judged.values() if who in one.judgments]
    return Judgments.concat(found) if found else None


def _embeddings(judged: Mapping[str, Judged]) -> AnswerEmbeddings | None:
    """Return the embeddings that the similarity metrics compare; None if no judge computes embeddings.

    Raises
    ------
    ConfigError
        Two judges give embeddings. A similarity is computed from one set of embeddings.
    """
    vectors = {name: one.vectors for name, one in judged.items() if one.vectors is not None}
    if len(vectors) > 1:
        raise ConfigError("Only one judge may give embeddings", got=", ".join(vectors), fix="Uninstall one of them")
    if not vectors:
        return None
    [given] = vectors.values()
    by_model = given.vectors
    return AnswerEmbeddings(given.task, given.item_ids, by_model["baseline"], by_model["variant"], by_model["again"])


def _bertscore_model(name: str | None) -> tuple[str, int] | None:
    """Return folder and layer of BERTScore's model; None if none is named. The hub gives safetensors only."""
    if name is None:
        return None
    folder = embedded_folder() if name == EMBEDDED else resolve_folder(name)
    return str(folder), authors_layer(name, folder)


def judge(config: JudgeConfig, instructions: list[Instruction], store: Store, run: OpenRun) -> tuple[MetricInputs, str]:
    """Generate the missing answers and ask every judge. Return the records for the metrics, and what was skipped."""
    judges = _open_judges(config, home(store.uri))
    with folder_or_hub("bertscore_model", config.answers.bertscore_model or ""):
        bertscore_model = _bertscore_model(config.answers.bertscore_model)
    settings = MetricSettings(seed=config.source.seed, bertscore_model=bertscore_model)
    with folder_or_hub("model", model_path(config.source.model)):
        base = light(model_path(config.source.model), config.source, config.inference)
    models = base, light(str(config.checkpoint), config.source, config.inference)
    check_same_tokenizer(*models)
    baseline_run, baseline, again = _baseline(store, models[0], instructions, config)
    answers_run, fresh, variant = _variant(store, run, models, instructions, config)
    answers = JudgeInputs(
        instructions=instructions,
        graded={"baseline": baseline.graded, "variant": variant.graded},
        samples={"baseline": baseline.samples, "again": again, "variant": variant.samples},
    )
    judged = {name: opened(answers) for name, opened in judges.items()}
    inputs = MetricInputs(
        baseline=RunRecords(generations=baseline.graded, judgments=_judgments(judged, "baseline")),
        variant=RunRecords(generations=variant.graded, judgments=_judgments(judged, "variant")),
        embeddings=_embeddings(judged),
        settings=settings,
    )
    run.log_params(
        {
            **{name: value for one in judged.values() for name, value in one.parameters.items()},
            "judge_max_tokens": _graded_tokens(config, models[1]),
            "device": models[1].device.type,
        }
    )
    run.set_tags({"baseline_answers_run_id": baseline_run, "answers_run_id": answers_run})
    reasons = [one.skipped for one in judged.values() if one.skipped]
    skipped = "; ".join([*reasons, *([] if fresh else [f"answers: found in run {answers_run}"])])
    if skipped:
        run.set_tags({run_names.SKIPPED: skipped})
    with tempfile.TemporaryDirectory() as folder:
        inputs.subject.write(Path(folder))
        run.log_folder(Path(folder), RECORDS)
    if inputs.baseline.judgments is not None:
        with tempfile.TemporaryDirectory() as folder:
            inputs.baseline.judgments.write(Path(folder))
            run.log_folder(Path(folder), run_names.BASELINE_GRADES)
    with tempfile.TemporaryDirectory() as folder:
        variant.samples.write(Path(folder))
        run.log_folder(Path(folder), SAMPLES)
    return inputs, skipped


def run_judge(config: JudgeConfig, store: Store | None = None) -> AnswerEvaluation:
    """Run the stage in its own run, and return the results. Wrong parameters are refused before a run is made.

    Raises
    ------
    MlflowCompressError
        A missing checkpoint, broken instructions, an encoder that does not load, a judge that cannot be reached.
    """
    manifest, instructions = read_manifest(config.checkpoint), instructions_of(config)
    chosen_judges(config.answers.judges)
    store = store if store is not None else Tracker(config.experiment)
    label = model_label(config.source.model)
    with store.run(f"judge {label}", "judge", {run_names.BASE_MODEL: label}) as run:
        run.rename(f"judge {manifest.label} {label}")
        run.set_tags(
            {
                run_names.VARIANT: manifest.label,
                run_names.METHOD: manifest.method,
                run_names.CHECKPOINT: config.checkpoint,
            }
        )
        inputs, skipped = judge(config, instructions, store, run)
        results = compute_all(inputs)
        run.log_results(logged(results))
        run.log_json(results_json(results), "metrics.json")
        run.log_json(unmet(inputs), "not_computed.json")
        values = "; ".join(f"{name} {result.value:.4f}" for name, result in headline(results).items())
        run.set_note(values + (f"\n\n{skipped}." if skipped else ""))
    return AnswerEvaluation(
        name=manifest.label,
        results=tuple(results),
        not_computed=unmet(inputs),
        records_folder=store.fetch(run.run_id, RECORDS),
        run=store.link(run.run_id),
        baseline=label,
        skipped=skipped,
    )
