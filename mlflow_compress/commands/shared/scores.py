"""Makes the scoreboard of runs: reads what the main runs of one evaluation hold."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from mlflow_compress.commands.shared.past_runs import made_once, results_of, timed_in
from mlflow_compress.config import SEED
from mlflow_compress.config.policy import MARGIN, Requirements
from mlflow_compress.decide.gates import CACHE, CACHE_RATIO
from mlflow_compress.decide.promotion import lacking_shares
from mlflow_compress.decide.scoreboard import Scoreboard, ScoredVariant, scoreboard
from mlflow_compress.decide.separation import ItemScores, item_scores
from mlflow_compress.errors import ConfigError
from mlflow_compress.metrics.core.account import UNSCORED_PCT
from mlflow_compress.metrics.core.metric_inputs import MetricInputs, headline
from mlflow_compress.metrics.core.metric_registry import METRICS
from mlflow_compress.metrics.core.requirements import EMBEDDINGS, ITEMS, PREDICTIONS
from mlflow_compress.records import RunRecords
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.evaluations import makes_of, names_of
from mlflow_compress.tracking.run_names import RECORDS
from mlflow_compress.tracking.store import RESOLVED
from mlflow_compress.tracking.tracker import Tracker

ANSWERS_RUN = "baseline_answers_run_id"  # tag of a judge run


@dataclass(frozen=True)
class AnswerSetting:
    """What a similarity of answers depends on, besides the models."""

    answers_run: str  # The run of the baseline's answers: one per instructions and settings of generation
    encoder_id: str  # Identity of the encoder
    encoder: str  # Its name


def finished_judge(children: Mapping[str, Any]) -> Any | None:
    """Return a variant's judge run, if it finished."""
    judge = children.get("judge")
    return judge if judge is not None and judge.info.status == "FINISHED" else None


def answer_setting(judge: Any) -> AnswerSetting | None:
    """Return the setting of a judge run; None if it embedded no answers."""
    params = judge.data.params
    name = params.get(f"{RESOLVED}encoder", params.get("encoder"))
    if not any(metric in judge.data.metrics for metric in _similarity_metrics()) or name is None:
        return None
    return AnswerSetting(judge.data.tags[ANSWERS_RUN], params["encoder_id"], name)


def unlike(settings: Mapping[str, AnswerSetting]) -> dict[str, str]:
    """Return the variants that cannot be compared with most of the others, and why, as the end of a sentence."""
    if not settings:
        return {}
    wanted = common(settings)
    differing = {}
    for name, own in settings.items():
        if own.answers_run != wanted.answers_run:
            differing[name] = "its answers are to other instructions, or were generated with other settings"
        elif own.encoder_id != wanted.encoder_id:
            differing[name] = f"its answers were embedded by {_named(own)}, those of the others by {_named(wanted)}"
    return differing


def common(settings: Mapping[str, AnswerSetting]) -> AnswerSetting:
    """Return the setting that most variants have; of several, the first."""
    return Counter(settings.values()).most_common(1)[0][0]


def _named(setting: AnswerSetting) -> str:
    return f"{setting.encoder} ({setting.encoder_id[:8]})"


def _similarity_metrics() -> frozenset[str]:
    """Return the names of the metrics that are computed from embedded answers."""
    return frozenset(key.name for _, metric in METRICS.items() if EMBEDDINGS in metric.requires for key in metric.keys)


_SIZES = ("size/bytes", "size/ratio", "size/bits_per_weight", CACHE, CACHE_RATIO)


def score_runs(
    tracker: Tracker,
    run_ids: Sequence[str],
    *,
    others: Sequence[ScoredVariant] = (),
    names: Mapping[str, str] = MappingProxyType({}),
    margin: float = MARGIN,
) -> Scoreboard:
    """Return the scoreboard of main runs that share one evaluation, and of `others`, which have no run.

    A run that did not finish is a row with its error. `names` are of runs that are not called as their variant is.
    """
    runs = [tracker.run_of(run_id) for run_id in dict.fromkeys(run_ids)]
    for run in runs:
        if (stage := run.data.tags.get(run_names.STAGE)) != "main":
            raise ConfigError("Only main runs are compared", got=f"{run.info.run_id}, a run of stage {stage}")
    finished = [run for run in runs if _has_results(run)]
    evaluations = sorted({run.data.tags[run_names.EVALUATION] for run in finished})
    if len(evaluations) > 1:
        raise ConfigError(
            "The runs belong to several evaluations, which cannot be compared",
            allowed="runs of one baseline, evaluated on the same items with the same settings",
            got=", ".join(evaluations),
        )
    labels = [run.data.tags[run_names.BASE_MODEL] for run in runs]
    if not labels:
        raise ConfigError("There is no run to compare", allowed="one main run or more")
    again = {run.info.run_id: makes_of(run, finished) for run in finished}
    replicates = {make.info.run_id for makes in again.values() for make in makes}
    own = [run for run in finished if run.info.run_id not in replicates]
    shown = names_of(_checkpoint(run) for run in own)
    baselines: dict[str, RunRecords] = {}
    children = {str(run.info.run_id): tracker.children_of(run) for run in own}
    variants = [
        _finished(tracker, run, children[run.info.run_id], shown[_checkpoint(run)], again[run.info.run_id], baselines)
        for run in own
    ]
    variants += [_failed(run) for run in runs if not _has_results(run)]
    variants = [replace(v, name=names.get(str(v.run_id), v.name)) for v in variants]
    variants = _without_unlike_answers(children, variants)
    if all(variant.sizes.get(CACHE_RATIO, 1.0) == 1.0 for variant in variants):  # no column for what all share
        sizes = [{name: size for name, size in v.sizes.items() if name not in (CACHE, CACHE_RATIO)} for v in variants]
        variants = [replace(variant, sizes=own) for variant, own in zip(variants, sizes, strict=True)]
    return scoreboard(
        _with_own_names([*variants, *others]),
        baseline=labels[0],
        evaluation=evaluations[0] if evaluations else None,
        margin=margin,
    )


def _without_unlike_answers(
    children: Mapping[str, Mapping[str, Any]], variants: Sequence[ScoredVariant]
) -> list[ScoredVariant]:
    """Return the variants; a similarity that cannot be compared with most of the others' is left out, and says why."""
    settings = {}
    for variant in variants:
        if variant.status == "finished":
            judge = finished_judge(children[str(variant.run_id)])
            if judge is not None and (setting := answer_setting(judge)) is not None:
                settings[str(variant.run_id)] = setting
    apart, metrics = unlike(settings), _similarity_metrics()
    return [
        replace(
            v,
            results={name: result for name, result in v.results.items() if name not in metrics},
            left_out=f"its similarity is left out: {apart[str(v.run_id)]}",
        )
        if str(v.run_id) in apart
        else v
        for v in variants
    ]


def _has_results(run: Any) -> bool:
    """Return whether a main run holds an evaluation. A failed judge leaves it with one."""
    return run_names.EVALUATION in run.data.tags and run_names.CHECKPOINT_SHA256 in run.data.tags


def _checkpoint(run: Any) -> tuple[str, str]:
    return run.data.tags[run_names.VARIANT], run.data.tags[run_names.CHECKPOINT_SHA256]


def _with_own_names(variants: Sequence[ScoredVariant]) -> list[ScoredVariant]:
    """Return the variants under names that differ: a repeated one gets digits of its run's id, or a number."""
    seen: set[str] = set()
    named = []
    for number, variant in enumerate(variants):
        repeated = variant.name in seen
        name = f"{variant.name} ({variant.run_id[:8] if variant.run_id else number})" if repeated else variant.name
        seen.add(name)
        named.append(replace(variant, name=name))
    return named


def _failed(run: Any) -> ScoredVariant:
    tags = run.data.tags
    return ScoredVariant(
        name=tags[run_names.VARIANT],
        method=tags[run_names.METHOD],
        run_id=run.info.run_id,
        bits=_bits(run.data.params),
        status="failed",
        reason=tags.get(run_names.RUN_ERROR, f"the run is {run.info.status}"),
    )


def _finished(
    tracker: Tracker,
    run: Any,
    children: Mapping[str, Any],
    name: str,
    again: Sequence[Any],
    baselines: dict[str, RunRecords],
) -> ScoredVariant:
    evaluated = {str(make.info.run_id): tracker.children_of(make)["evaluate"] for make in again}
    finished = [children[stage] for stage in ("evaluate", "judge", "speed") if stage in children]
    results = results_of(tracker, (child for child in finished if child.info.status == "FINISHED"))
    metrics = run.data.metrics
    # The main run has no size of a cache that is the baseline's.
    made = {**metrics, **(children["quantize"].data.metrics if "quantize" in children else {})}
    runtime, not_timed = timed_in(children.get("speed"))
    seed = children["evaluate"].data.params.get("seed", str(SEED))
    return ScoredVariant(
        name=name,
        method=run.data.tags[run_names.METHOD],
        run_id=run.info.run_id,
        bits=_bits(run.data.params),
        reason=run.data.tags.get(run_names.RUN_ERROR, ""),
        results=headline(results),
        sizes={size: made[size] for size in _SIZES if size in made},
        seconds=stage_seconds(tracker, children, processor_seconds),
        items=_items(tracker, children["evaluate"], baselines),
        again={run_id: _items(tracker, evaluate, baselines) for run_id, evaluate in evaluated.items()},
        made_once=made_once(run),
        runtime=runtime,
        not_timed=not_timed,
        seed="" if seed == str(SEED) else seed,
        drawn=children["evaluate"].data.params.get("items", ""),
        lacking=tuple(lacking_shares(Requirements(), metrics)) if UNSCORED_PCT in metrics else (),
    )


def _items(tracker: Tracker, evaluate: Any, baselines: dict[str, RunRecords]) -> ItemScores | None:
    """Return what the variant scored on each item; None where the evaluation has corpora only."""
    baseline = evaluate.data.tags[run_names.BASELINE_RUN]
    if baseline not in baselines:  # all variants share it
        baselines[baseline] = RunRecords.read(tracker.fetch(baseline, RECORDS), of_items=True)
    variant = RunRecords.read(tracker.fetch(evaluate.info.run_id, RECORDS), of_items=True)
    inputs = MetricInputs(baseline=baselines[baseline], variant=variant)
    return None if inputs.missing(ITEMS, PREDICTIONS) else item_scores(inputs)


def _bits(params: Mapping[str, str]) -> float | None:
    """Return the bits that were asked for; None where the method has no such setting."""
    text = params.get(f"{RESOLVED}bits", params.get("bits", ""))
    return float(text) if text.replace(".", "", 1).isdigit() else None


_COMPRESSION = "speed/compress_seconds"


def wall_seconds(run: Any) -> float:
    """Return how long a run took; of a checkpoint that was found, how long it took to make it."""
    if _COMPRESSION in run.data.metrics:
        return float(run.data.metrics[_COMPRESSION])
    return float(run.info.end_time - run.info.start_time) / 1000


def processor_seconds(run: Any) -> float | None:
    """Return the processor seconds of a run; None where none were noted."""
    noted: float | None = run.data.metrics.get(run_names.PROCESSOR)
    return noted


def stage_seconds(tracker: Tracker, children: Mapping[str, Any], of: Callable[[Any], float | None]) -> dict[str, float]:
    """Return what each stage costs for this variant, whichever run did the work; nothing where a part is not known.

    What was found again costs what it took when it was computed. The baseline's part is no cost of a variant. `of`
    returns the cost of one run.
    """
    finished = {stage: run for stage, run in children.items() if run.info.status == "FINISHED"}
    parts: dict[str, list[float | None]] = {}
    if "quantize" in children and _COMPRESSION in children["quantize"].data.metrics:
        parts["quantize"] = [of(children["quantize"])]
    if "evaluate" in finished:
        tags = finished["evaluate"].data.tags
        computed = finished["evaluate"]
        if run_names.SKIPPED in tags:
            computed = tracker.find_finished("evaluate", **{run_names.FINGERPRINT: tags[run_names.FINGERPRINT]})[-1]
        parts["evaluate"] = _without(tracker, computed, run_names.BASELINE_RUN, of)
        while (before := computed.data.tags.get(run_names.SCORED_BEFORE)) is not None:
            computed = tracker.run_of(before)
            parts["evaluate"] += _without(tracker, computed, run_names.BASELINE_RUN, of)
    if "judge" in finished:
        parts["judge"] = _without(tracker, finished["judge"], ANSWERS_RUN, of)
        answers = tracker.run_of(finished["judge"].data.tags["answers_run_id"])
        if answers.data.tags.get(run_names.PARENT) != finished["judge"].info.run_id:
            parts["judge"].append(of(answers))
    if any(cost is None for costs in parts.values() for cost in costs):
        return {}
    return {stage: sum(cost or 0.0 for cost in costs) for stage, costs in parts.items()}


def _without(tracker: Tracker, run: Any, tag: str, of: Callable[[Any], float | None]) -> list[float | None]:
    """Return the cost of a run, and minus that of the baseline, whose run `tag` names, if it was computed inside."""
    other = tracker.run_of(run.data.tags[tag])
    inside = run.info.start_time <= other.info.start_time and other.info.end_time <= run.info.end_time
    baseline = of(other) if inside else 0.0
    return [of(run), None if baseline is None else -baseline]
