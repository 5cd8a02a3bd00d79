"""The judge stage: both models answer the same instructions, and judges rate or compare the answers."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mlflow_compress.commands.evaluate.models import (
    OneLoaded,
    cores_shared_out,
    engine_started,
    open_baseline,
    open_variant,
)
from mlflow_compress.commands.evaluate.result import AnswerEvaluation
from mlflow_compress.commands.judge.answers import SAMPLES, AnswerRuns, graded_tokens
from mlflow_compress.commands.judge.answers_artifact import log_answers
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.commands.shared.get_or_create import store_of_command
from mlflow_compress.commands.shared.inputs import (
    ServedVariant,
    baseline_label,
    described,
    folder_or_hub,
    instructions_of,
)
from mlflow_compress.commands.shared.stored import logged, results_json
from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest
from mlflow_compress.errors import ConfigError, JudgeError, TrackingError
from mlflow_compress.home import home
from mlflow_compress.items.sources.instructions import Instruction, is_logged
from mlflow_compress.judges import JUDGES, Judged, JudgeInputs, chosen_judges, open_judge
from mlflow_compress.judges.encoders import EMBEDDED, embedded_folder
from mlflow_compress.judges.judge_registry import AnswerVectors
from mlflow_compress.judges.session import prices_of, spending_of
from mlflow_compress.metrics.bertscore import authors_layer
from mlflow_compress.metrics.core import metric_inputs, metric_registry
from mlflow_compress.models.identity import check_same_tokenizer
from mlflow_compress.models.source_model import resolve_folder
from mlflow_compress.records import AnswerFeedback, Embeddings, Generations, JudgedAnswer, Judgments, RunRecords
from mlflow_compress.reporting.answers_page import account_text
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.live_processes import scratch_folder
from mlflow_compress.tracking.run_names import RECORDS
from mlflow_compress.tracking.store import OpenRun, Store
from mlflow_compress.transport.endpoint import check_address


def judged_answers(
    instructions: Sequence[Instruction],
    answers: Mapping[str, Generations],
    judgments: Mapping[str, Judgments | None],
) -> list[JudgedAnswer]:
    """Return every answer that was judged, in the order of the instructions.

    `answers` and `judgments` are by "baseline" and "variant". A comparison of two answers stands with the variant's.
    """
    found = []
    for who, generations in answers.items():
        feedback = _by_answer(judgments[who])
        first = generations.where(sample=0)
        columns = (first.table.column(name).to_pylist() for name in ("item_id", "turn", "text"))
        texts = {(item, turn): text for item, turn, text in zip(*columns, strict=True)}
        for item in instructions:
            messages: list[dict[str, str]] = []
            for turn, asked in enumerate(item.turns):
                messages.append({"role": "user", "content": asked})
                answer = texts[item.item_id, turn]
                if given := feedback.get((item.item_id, turn)):
                    tags = {"item_id": item.item_id, "turn": str(turn + 1), "category": item.category}
                    found.append(
                        JudgedAnswer(model=who, messages=tuple(messages), answer=answer, tags=tags, feedback=given)
                    )
                messages.append({"role": "assistant", "content": answer})
    return found


def _by_answer(judgments: Judgments | None) -> dict[tuple[str, int], list[AnswerFeedback]]:
    found: dict[tuple[str, int], list[AnswerFeedback]] = {}
    for row in judgments.table.to_pylist() if judgments is not None else ():
        one = AnswerFeedback(
            name=row["task"],
            value=row["score"],
            reason=row["reason"],
            rationale=row["judgment"],
            source=row["judge"],
            details={"repeat": str(row["repeat"])},
        )
        found.setdefault((row["item_id"], row["turn"]), []).append(one)
    return found


def _records(answers: Generations, judged: Mapping[str, Judged], who: str) -> RunRecords:
    """Return the answers of one model, and all that judges have found about it."""
    judgments = [one.judgments[who] for one in judged.values() if who in one.judgments]
    found = RunRecords(generations=answers, judgments=Judgments.concat(judgments) if judgments else None)
    for one in judged.values():
        if who in one.records:
            found = found.with_records(one.records[who])
    return found


def _vectors(judged: Mapping[str, Judged]) -> AnswerVectors | None:
    """Return the embedded answers; None if no judge computes embeddings. Similarity is computed from one set."""
    vectors = {name: one.vectors for name, one in judged.items() if one.vectors is not None}
    if len(vectors) > 1:
        raise ConfigError("Only one judge may give embeddings", got=", ".join(vectors), fix="Uninstall one of them")
    return next(iter(vectors.values()), None)


def _embeddings(given: AnswerVectors | None) -> metric_inputs.AnswerEmbeddings | None:
    if given is None:
        return None
    by_model = given.vectors
    return metric_inputs.AnswerEmbeddings(
        given.task, given.item_ids, by_model["baseline"], by_model["variant"], by_model["again"]
    )


def _write_embeddings(given: AnswerVectors, folder: Path) -> None:
    """Write one folder of records per model, for the comparison of all variants of an experiment."""
    for who, vectors in given.vectors.items():
        Embeddings.from_array(
            given.task, given.item_ids, vectors, encoder=given.encoder, encoder_id=given.encoder_id
        ).write(folder / who)


def _bertscore_model(name: str | None) -> tuple[str, int] | None:
    """Return folder and layer of BERTScore's model; None if none is named. The hub gives safetensors only."""
    if name is None:
        return None
    folder = embedded_folder() if name == EMBEDDED else resolve_folder(name)
    return str(folder), authors_layer(name, folder)


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """What a run's metrics are computed from, what was skipped, what its note adds, and why it fails at its end.

    `account` has the numbers of judgments, calls and tokens, and the cost.
    """

    inputs: metric_inputs.MetricInputs
    skipped: str
    remarks: tuple[str, ...]
    failed: str | None
    account: Mapping[str, float]


def judge(
    config: JudgeConfig, instructions: list[Instruction], store: Store, run: OpenRun, say: Callable[[str], None]
) -> _Outcome:
    """Generate the missing answers, ask every judge, and log what they have said."""
    # Judges open before any answer is generated, so that a missing requirement is reported at once.
    with folder_or_hub("encoder", config.answers.encoder):
        judges = {name: open_judge(name, config, home(store.uri)) for name in chosen_judges(config.answers.judges)}
    with folder_or_hub("bertscore_model", config.answers.bertscore_model or ""):
        bertscore_model = _bertscore_model(config.answers.bertscore_model)
    settings = metric_inputs.MetricSettings(seed=config.source.seed, bertscore_model=bertscore_model)
    base = open_baseline(config)
    models = base, open_variant(config, base)
    for model in models:
        if about := model.about():
            say(about)
    check_same_tokenizer(*models)
    runs, greedy = AnswerRuns(config, store, instructions, base, OneLoaded()), {}
    baseline_run, baseline, again = runs.baseline(before=models[1].try_out)
    greedily = [name for name in judges if JUDGES.get(name).greedy]
    decoded, left_out = None, ""
    if not all(model.abilities.whole_distributions for model in models):
        judges = {name: opened for name, opened in judges.items() if name not in greedily}
        left_out = ", ".join(f"{name}: a server shows no whole distributions" for name in greedily)
    elif greedily:
        decoded = runs.baseline_greedy()
    answers_run, fresh, variant = runs.variant(run, models[1])
    if decoded is not None:
        greedy = {"baseline": decoded[1], "variant": runs.variant_greedy(run, models[1], decoded)}
    runs.load.free()
    spending = spending_of(config.judging)
    estimates: list[str] = []

    def tell(line: str) -> None:
        estimates.append(line)
        say(line)

    answers = JudgeInputs(
        instructions=instructions,
        graded={"baseline": baseline.graded, "variant": variant.graded},
        samples={"baseline": baseline.samples, "again": again, "variant": variant.samples},
        spending=spending,
        say=tell,
        greedy=greedy,
    )
    try:
        judged = {name: opened(answers) for name, opened in judges.items()}
    except JudgeError as error:
        raise JudgeError(_with_account(str(error), spending.values(), run)) from error
    finally:  # what was spent is logged too when a judge stops, or is stopped
        if spending.by_model:
            run.log_values(spending.values())
    vectors = _vectors(judged)
    inputs = metric_inputs.MetricInputs(
        baseline=_records(baseline.graded, judged, "baseline"),
        variant=_records(variant.graded, judged, "variant"),
        embeddings=_embeddings(vectors),
        samples=metric_inputs.AnswerSamples(
            baseline=baseline.samples,
            variant=variant.samples,
            questions={item.item_id: item.turns[0] for item in instructions},
            most_tokens=config.answers.max_new_tokens,
            baseline_again=again,
            categories={item.item_id: item.category for item in instructions},
        ),
        settings=settings,
    )
    run.log_params(
        {
            **{name: value for one in judged.values() for name, value in one.parameters.items()},
            "judge_max_tokens": graded_tokens(config, models[1]),
            "device": models[1].device.type,
        }
    )
    account = _sums(one.values for one in judged.values())
    if "judge/judgments" in account:
        account = {**account, **spending.values()}
    if account:
        run.log_values(account)
    run.set_tags({"baseline_answers_run_id": baseline_run, "answers_run_id": answers_run})
    reasons = [one.skipped for one in judged.values() if one.skipped]
    skipped = "; ".join(
        [*reasons, *([left_out] if left_out else []), *([] if fresh else [f"answers: found in run {answers_run}"])]
    )
    if skipped:
        run.set_tags({run_names.SKIPPED: skipped})

    def log(name: str, write: Callable[[Path], object]) -> None:
        with scratch_folder(store.uri) as folder:
            write(folder)
            run.log_folder(folder, name)

    log(RECORDS, inputs.subject.write)
    if inputs.baseline.judgments is not None:
        log(run_names.BASELINE_GRADES, inputs.baseline.judgments.write)
    shown = config.answers.show_logged or not is_logged(config.answers.instructions)
    title = f"{described(config).label} against {baseline_label(config)}"
    if not shown:
        run.set_tags({run_names.HIDDEN: "true"})
    else:
        log_answers(run, store.uri, title, instructions, (baseline.graded, variant.graded), inputs)
    log(SAMPLES, variant.samples.write)
    if vectors is not None:
        log(run_names.EMBEDDINGS, partial(_write_embeddings, vectors))
    remarks = [*(remark for one in judged.values() for remark in one.remarks), *estimates, account_text(account)]
    if config.judging.judge_traces and shown:
        remarks.append(_show(run, instructions, answers, inputs))
    return _Outcome(
        inputs=inputs,
        skipped=skipped,
        remarks=tuple(remarks),
        account=account,
        failed=" ".join(f"{name}: {one.failed}." for name, one in judged.items() if one.failed) or None,
    )


def _with_account(text: str, values: Mapping[str, float], run: OpenRun) -> str:
    """Return why the stage fails, with what it took until then."""
    return f"{text.rstrip('.')}. Account: {account_text(values)}; every reply is kept; run {run.run_id}"


def _show(
    run: OpenRun, instructions: list[Instruction], answers: JudgeInputs, inputs: metric_inputs.MetricInputs
) -> str:
    """Show the judgments as traces; return what the note says if that failed. They are in the records in any case."""
    said = {"baseline": inputs.baseline.judgments, "variant": inputs.subject.judgments}
    try:
        run.log_judged_answers(judged_answers(instructions, answers.graded, said))
    except TrackingError as error:
        return str(error).rstrip(".")
    return ""


def _sums(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the values of all judges; those of one name are added up."""
    total: Counter[str] = Counter()
    for part in parts:
        for name, value in part.items():
            total[name] += value  # type: ignore[assignment]
    return dict(total)


def run_judge(
    config: JudgeConfig, store: Store | None = None, say: Callable[[str], None] = lambda line: None
) -> AnswerEvaluation:
    """Run the stage in its own run, and return the results. Wrong parameters are refused before a run is made.

    `say` shows a line to the user: what the judgments will cost. If too many judgments have no rating, or the money is
    spent, everything is logged before the error is raised.
    """
    check_address(config)
    prices_of(config.judging)
    manifest, instructions = described(config), instructions_of(config)
    chosen_judges(config.answers.judges)
    with store_of_command(config, store) as opened:
        return _judge(config, manifest, instructions, opened, say)


def _judge(
    config: JudgeConfig,
    manifest: CheckpointManifest | ServedVariant,
    instructions: list[Instruction],
    store: Store,
    say: Callable[[str], None],
) -> AnswerEvaluation:
    label = baseline_label(config)
    with (
        engine_started(config.running, config.source),
        cores_shared_out(config.running, config.source),
        store.run(f"judge {label}", "judge", {run_names.BASE_MODEL: label}) as run,
    ):
        run.rename(f"judge {manifest.label} {label}")
        run.set_tags(
            {
                run_names.VARIANT: manifest.label,
                run_names.METHOD: manifest.method,
                run_names.CHECKPOINT: config.checkpoint,
            }
        )
        outcome = judge(config, instructions, store, run, say)
        inputs, skipped = outcome.inputs, outcome.skipped
        results = metric_registry.compute_all(inputs)
        run.log_results(logged(results))
        run.log_json(results_json(results), "metrics.json")
        run.log_json(metric_registry.unmet(inputs), "not_computed.json")
        values = "; ".join(f"{name} {result.value:.4f}" for name, result in metric_inputs.headline(results).items())
        run.set_note("\n\n".join([values, *(f"{text}." for text in (*outcome.remarks, skipped) if text)]))
        if outcome.failed:
            raise JudgeError(_with_account(outcome.failed, outcome.account, run))
    return AnswerEvaluation(
        name=manifest.label,
        results=tuple(results),
        not_computed=metric_registry.unmet(inputs),
        records_folder=store.fetch(run.run_id, RECORDS),
        run=store.link(run.run_id),
        baseline=label,
        skipped=skipped,
        account=outcome.account,
    )
