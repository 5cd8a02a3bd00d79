"""The judge stage: both models answer the same instructions, and judges rate or compare the answers."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mlflow_compress.commands.command import Say, silent
from mlflow_compress.commands.evaluate.models import OneLoaded, cores_shared_out, engine_started, open_both, try_out
from mlflow_compress.commands.evaluate.result import AnswerEvaluation
from mlflow_compress.commands.judge.answers import SAMPLES_FOLDER, AnswerRuns, Answers, graded_tokens
from mlflow_compress.commands.judge.answers_artifact import write_answers
from mlflow_compress.commands.judge.judge_instructions import instructions_of
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.commands.shared.get_or_create import store_of_command
from mlflow_compress.commands.shared.named_models import baseline_label, described, folder_or_hub
from mlflow_compress.commands.shared.stored import log_results
from mlflow_compress.errors import ConfigError, JudgeError, TrackingError
from mlflow_compress.home import home
from mlflow_compress.items.sources.instructions import Instruction, is_logged
from mlflow_compress.judges import JUDGES, Judged, JudgeInputs, chosen_judges, open_judge
from mlflow_compress.judges.encoders import EMBEDDED_ENCODER, embedded_folder
from mlflow_compress.judges.judge_registry import AnswerVectors
from mlflow_compress.judges.session import prices_of, spending_of
from mlflow_compress.metrics.core import metric_inputs, metric_registry
from mlflow_compress.metrics.text import authors_layer
from mlflow_compress.models.source_model import resolve_folder
from mlflow_compress.records import AnswerFeedback, Embeddings, Generations, JudgedAnswer, Judgments, RunRecords
from mlflow_compress.reporting.answers_page import account_text
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.live_processes import scratch_folder
from mlflow_compress.tracking.run_names import ANSWERS_PAGE, RECORDS
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker
from mlflow_compress.transport.endpoint import check_address
from mlflow_compress.transport.spending import Spending


def judged_answers(
    instructions: Sequence[Instruction],
    answers: Mapping[str, Generations],
    judgments: Mapping[str, Judgments | None],
) -> list[JudgedAnswer]:
    """Return every answer that was judged, in the order of the instructions.

    `answers` and `judgments` are by "baseline" and "variant". A comparison of two answers stands with the variant's.
    """
    judged = []
    for who, generations in answers.items():
        feedback: dict[tuple[str, int], list[AnswerFeedback]] = defaultdict(list)
        given = judgments[who]
        for row in given.table.to_pylist() if given is not None else ():
            one = AnswerFeedback(
                name=row["task"],
                value=row["score"],
                reason=row["reason"],
                rationale=row["judgment"],
                source=row["judge"],
                details={"repeat": str(row["repeat"])},
            )
            feedback[row["item_id"], row["turn"]].append(one)
        first = generations.where(sample=0)
        columns = (first.table.column(name).to_pylist() for name in ("item_id", "turn", "text"))
        texts = {(item, turn): text for item, turn, text in zip(*columns, strict=True)}
        for item in instructions:
            messages: list[dict[str, str]] = []
            for turn, asked in enumerate(item.turns):
                messages.append({"role": "user", "content": asked})
                answer = texts[item.item_id, turn]
                if said := feedback.get((item.item_id, turn)):
                    tags = {"item_id": item.item_id, "turn": str(turn + 1), "category": item.category}
                    judged.append(
                        JudgedAnswer(model=who, messages=tuple(messages), answer=answer, tags=tags, feedback=said)
                    )
                messages.append({"role": "assistant", "content": answer})
    return judged


def _records(answers: Generations, judged: Mapping[str, Judged], who: str) -> RunRecords:
    """Return the answers of one model, and all that judges have found about it."""
    judgments = [one.judgments[who] for one in judged.values() if who in one.judgments]
    records = RunRecords(generations=answers, judgments=Judgments.concat(judgments) if judgments else None)
    for one in judged.values():
        if who in one.records:
            records = records.with_records(one.records[who])
    return records


def _vectors(judged: Mapping[str, Judged]) -> AnswerVectors | None:
    """Return the embedded answers; None if no judge computes embeddings. Similarity is computed from one set."""
    vectors = {name: one.vectors for name, one in judged.items() if one.vectors is not None}
    if len(vectors) > 1:
        raise ConfigError("Only one judge may give embeddings", got=", ".join(vectors), fix="Uninstall one of them")
    return next(iter(vectors.values()), None)


def _metric_settings(config: JudgeConfig) -> metric_inputs.MetricSettings:
    named = config.answers.bertscore_model
    if named is None:
        return metric_inputs.MetricSettings(seed=config.source.seed)
    with folder_or_hub("bertscore_model", named):  # the hub gives safetensors only
        folder = embedded_folder() if named == EMBEDDED_ENCODER else resolve_folder(named)
        model = str(folder), authors_layer(named, folder)
    return metric_inputs.MetricSettings(seed=config.source.seed, bertscore_model=model)


AskJudge = Callable[[JudgeInputs], Judged]


@dataclass(frozen=True, kw_only=True)
class _AnsweredInstructions:
    """The answers of both models, and the judges that can say something about them."""

    judges: Mapping[str, AskJudge]
    baseline: Answers
    again: Generations  # The baseline's own answers once more, with other draws
    variant: Answers
    greedy: Mapping[str, RunRecords]  # Of "baseline" and "variant"; empty where no judge needs them
    tags: Mapping[str, str]  # In which runs the answers are
    params: Mapping[str, object]  # How the variant was asked
    skipped: Sequence[str]  # What was left out, or found


def _answer(
    config: JudgeConfig,
    judges: Mapping[str, AskJudge],
    instructions: list[Instruction],
    store: Tracker,
    run: TrackedRun,
    say: Say,
) -> _AnsweredInstructions:
    """Generate the answers that no earlier run has."""
    base, compressed = open_both(config, say)
    runs = AnswerRuns(config, store, instructions, base, OneLoaded())
    baseline_run, baseline, again = runs.baseline(before=partial(try_out, compressed))
    greedily = [name for name in judges if JUDGES.get(name).greedy]
    greedy, decoded, skipped = dict[str, RunRecords](), None, list[str]()
    if not (base.abilities.whole_distributions and compressed.abilities.whole_distributions):
        judges = {name: opened for name, opened in judges.items() if name not in greedily}
        skipped += [f"{name}: a server shows no complete distributions" for name in greedily]
    elif greedily:
        decoded = runs.baseline_greedy()
    answers_run, fresh, variant = runs.variant(run, compressed)
    if decoded is not None:
        greedy = {"baseline": decoded[1], "variant": runs.variant_greedy(run, compressed, decoded)}
    runs.load.free()
    return _AnsweredInstructions(
        judges=judges,
        baseline=baseline,
        again=again,
        variant=variant,
        greedy=greedy,
        tags={"baseline_answers_run_id": baseline_run, "answers_run_id": answers_run},
        params={
            "judge_max_tokens": graded_tokens(config.answers, compressed.max_length),
            "device": compressed.device.type,
        },
        skipped=[*skipped, *([] if fresh else [f"answers: found in run {answers_run}"])],
    )


def _ask(
    answered: _AnsweredInstructions, instructions: list[Instruction], spending: Spending, run: TrackedRun, say: Say
) -> dict[str, Judged]:
    """Ask every judge. What was spent is logged too when one stops, or is stopped."""
    answers = JudgeInputs(
        instructions=instructions,
        graded={"baseline": answered.baseline.graded, "variant": answered.variant.graded},
        samples={"baseline": answered.baseline.samples, "again": answered.again, "variant": answered.variant.samples},
        spending=spending,
        say=say,
        greedy=answered.greedy,
    )
    try:
        return {name: asked(answers) for name, asked in answered.judges.items()}
    except JudgeError as error:
        raise JudgeError(_with_account(str(error), spending.values(), run)) from error
    finally:
        if spending.by_model:
            run.log_values(spending.values())


def _metric_inputs(
    config: JudgeConfig,
    answered: _AnsweredInstructions,
    judged: Mapping[str, Judged],
    instructions: list[Instruction],
    settings: metric_inputs.MetricSettings,
) -> metric_inputs.MetricInputs:
    embeddings = None
    if (vectors := _vectors(judged)) is not None:
        of_model = (vectors.vectors[who] for who in ("baseline", "variant", "again"))
        embeddings = metric_inputs.AnswerEmbeddings(vectors.task, vectors.item_ids, *of_model)
    return metric_inputs.MetricInputs(
        baseline=_records(answered.baseline.graded, judged, "baseline"),
        variant=_records(answered.variant.graded, judged, "variant"),
        embeddings=embeddings,
        samples=metric_inputs.AnswerSamples(
            baseline=answered.baseline.samples,
            variant=answered.variant.samples,
            questions={item.item_id: item.turns[0] for item in instructions},
            most_tokens=config.answers.max_new_tokens,
            baseline_again=answered.again,
            categories={item.item_id: item.category for item in instructions},
        ),
        settings=settings,
    )


def _account(judged: Mapping[str, Judged], spending: Spending) -> dict[str, float]:
    """Return the numbers of judgments over all judges, and what they cost."""
    account: dict[str, float] = defaultdict(int)
    for one in judged.values():
        for name, value in one.values.items():
            account[name] += value
    return account | spending.values() if "judge/judgments" in account else account


def _write(
    folder: Path, inputs: metric_inputs.MetricInputs, samples: Generations, vectors: AnswerVectors | None
) -> None:
    """Write the records of the stage, one sub-folder each."""
    inputs.subject.write(folder / RECORDS)
    samples.write(folder / SAMPLES_FOLDER)
    if inputs.baseline.judgments is not None:
        inputs.baseline.judgments.write(folder / run_names.BASELINE_GRADES)
    if vectors is not None:  # a folder of records per model, for the comparison of all variants of an experiment
        of_encoder = {"encoder": vectors.encoder, "encoder_id": vectors.encoder_id}
        for who, array in vectors.vectors.items():
            table = Embeddings.from_array(vectors.task, vectors.item_ids, array, **of_encoder)
            table.write(folder / run_names.EMBEDDING_FILES / who)


def _judge(
    config: JudgeConfig, variant_label: str, instructions: list[Instruction], store: Tracker, run: TrackedRun, say: Say
) -> AnswerEvaluation:
    """Generate the missing answers, ask every judge, and log and return what they have said."""
    # Judges open before any answer is generated, so that a missing requirement is reported at once.
    with folder_or_hub("encoder", config.answers.encoder):
        judges = {name: open_judge(name, config, home(store.uri)) for name in chosen_judges(config.answers.judges)}
    settings = _metric_settings(config)
    answered = _answer(config, judges, instructions, store, run, say)
    spending, estimates = spending_of(config.judging), list[str]()

    def tell(line: str) -> None:
        estimates.append(line)
        say(line)

    judged = _ask(answered, instructions, spending, run, tell)
    inputs = _metric_inputs(config, answered, judged, instructions, settings)
    account = _account(judged, spending)
    of_judges = {name: value for one in judged.values() for name, value in one.parameters.items()}
    run.log_params({**of_judges, **answered.params, **config.source.reason})
    if account:
        run.log_values(account)
    skipped = "; ".join([*(one.skipped for one in judged.values() if one.skipped), *answered.skipped])
    run.set_tags({**answered.tags, **({run_names.SKIPPED: skipped} if skipped else {})})

    shown = config.answers.show_logged or not is_logged(config.answers.instructions)
    label = baseline_label(config.source, config.served)
    graded = {"baseline": answered.baseline.graded, "variant": answered.variant.graded}
    with scratch_folder(store.uri) as folder:
        _write(folder, inputs, answered.variant.samples, _vectors(judged))
        if shown:
            title = f"{variant_label} against {label}"
            write_answers(folder / ANSWERS_PAGE, title, instructions, (graded["baseline"], graded["variant"]), inputs)
        for part in sorted(folder.iterdir()):
            run.log_folder(part, part.name)
    remarks = [*(remark for one in judged.values() for remark in one.remarks), *estimates, account_text(account)]
    if not shown:
        run.set_tags({run_names.HIDDEN: "true"})
    elif config.judging.judge_traces:
        said = {"baseline": inputs.baseline.judgments, "variant": inputs.subject.judgments}
        try:
            run.log_judged_answers(judged_answers(instructions, graded, said))
        except TrackingError as error:  # the note says so: the judgments are in the records in any case
            remarks.append(str(error).rstrip("."))
    results = metric_registry.compute_all(inputs)
    log_results(run, results)
    not_computed = metric_registry.unmet(inputs)
    run.log_json(not_computed, "not_computed.json")
    values = "; ".join(f"{name} {result.value:.4f}" for name, result in metric_inputs.headline(results).items())
    run.set_note("\n\n".join([values, *(f"{text}." for text in (*remarks, skipped) if text)]))
    if failed := " ".join(f"{name}: {one.failed}." for name, one in judged.items() if one.failed):
        raise JudgeError(_with_account(failed, account, run))
    return AnswerEvaluation(
        name=variant_label,
        results=tuple(results),
        not_computed=not_computed,
        records_folder=store.fetch(run.run_id, RECORDS),
        run=store.link(run.run_id),
        baseline=label,
        skipped=skipped,
        account=dict(account),
    )


def _with_account(text: str, values: Mapping[str, float], run: TrackedRun) -> str:
    """Return why the stage fails, with what it took until then."""
    return f"{text.rstrip('.')}. Account: {account_text(values)}; every reply is saved; run {run.run_id}"


def run_judge(config: JudgeConfig, store: Tracker | str | None = None, say: Say = silent) -> AnswerEvaluation:
    """Run the stage in its own run, and return the results. Wrong parameters are refused before a run is made.

    If too many judgments have no rating, or the money is spent, everything is logged before the error is raised.
    """
    check_address(config)
    prices_of(config.judging)
    manifest, instructions, label = (
        described(config.checkpoint, config.source, config.served),
        instructions_of(config),
        baseline_label(config.source, config.served),
    )
    chosen_judges(config.answers.judges)
    with (
        store_of_command(config, store) as opened,
        engine_started(config.running, config.source),
        cores_shared_out(config.running, config.source),
        opened.run(f"judge {label}", "judge", {run_names.BASE_MODEL: label}) as run,
    ):
        run.rename(f"judge {manifest.label} {label}")
        tags = {run_names.VARIANT: manifest.label, run_names.METHOD: manifest.method}
        run.set_tags({**tags, run_names.CHECKPOINT: config.checkpoint})
        judgment = _judge(config, manifest.label, instructions, opened, run, say)
    return judgment
