"""Runs a sweep: every variant, one after the other in this process or side by side on workers, and a scoreboard."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from mlflow_compress.commands.command import silent
from mlflow_compress.commands.evaluate.models import engine_started
from mlflow_compress.commands.evaluate.run import evaluate_baseline
from mlflow_compress.commands.judge.answers import answer_baseline
from mlflow_compress.commands.report.run import SCOREBOARD, page_content
from mlflow_compress.commands.shared.get_or_create import digest, unfinished_until_ended
from mlflow_compress.commands.shared.scores import score_runs
from mlflow_compress.commands.sweep.make_variant import MadeVariant, make_variant, parent_run
from mlflow_compress.commands.sweep.on_workers import Note, VariantWorker, make_on_workers
from mlflow_compress.commands.sweep.parameters import SweepConfig
from mlflow_compress.commands.sweep.plan import (
    Prepared,
    PreparedVariant,
    combinations,
    plan_of,
    prepare_sweep,
)
from mlflow_compress.commands.sweep.result import State, Sweep, SweepPlan, SweepProgress, VariantProgress
from mlflow_compress.commands.sweep.screen import left_unmade, screened
from mlflow_compress.compression.pipeline import reload_helper
from mlflow_compress.config import as_text
from mlflow_compress.config.declarations import AUTO
from mlflow_compress.config.policy import Policy, read_policy
from mlflow_compress.decide.promotion import gates_of
from mlflow_compress.decide.scoreboard import ScoredVariant, more_items
from mlflow_compress.engines.ray.workers import Workers
from mlflow_compress.errors import ConfigError, SweepError, UnsupportedError
from mlflow_compress.home import out_folder
from mlflow_compress.kept import keeping
from mlflow_compress.models.placement import BALANCED
from mlflow_compress.reporting.figures import draw_scoreboard, draw_similarity
from mlflow_compress.reporting.page.variants_page import choice_and_reason, render_page
from mlflow_compress.reporting.scoreboard_text import (
    finding,
    scoreboard_columns,
    scoreboard_csv,
    scoreboard_markdown,
    scoreboard_text,
    similarity_csv,
)
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.live_processes import scratch_folder
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Snapshot, Tracker, tracking_uri


def publish_sweep(
    tracker: Tracker, run: TrackedRun, plan: SweepPlan, runs: Mapping[str, str], policy: Policy, policy_file: str | None
) -> Sweep:
    """Log everything that people read of a sweep on its run, and return it. For the policy see `page_content`."""
    others = [
        ScoredVariant(name=name, method=name.partition(" ")[0], status="unsupported", reason=reason)
        for name, reason in plan.left_out.items()
    ]
    names = {run_id: name for name, run_id in runs.items()}
    store = Snapshot(tracker, runs.values())
    board = score_runs(store, list(runs.values()), others=others, names=names, margin=policy.margin)
    run.log_json(board.to_dict(), SCOREBOARD)
    run.log_text(scoreboard_markdown(board), "scoreboard.md")
    run.log_text(scoreboard_csv(board), "scoreboard.csv")
    run.log_table(scoreboard_columns(board), "scoreboard_table.json")
    run.log_json(plan.to_dict(), "plan.json")
    content = page_content(store, board, policy, policy_file) if board.finished else None
    alike = content.similarity if content is not None else None
    with scratch_folder(tracker.uri) as folder:
        draw_scoreboard(board, folder)
        if alike is not None:
            draw_similarity(alike, folder)
            run.log_text(similarity_csv(alike), "answer_similarity.csv")
        run.log_folder(folder, "figures")
    choice = page = ""

    if content is not None:
        run.log_text(render_page(content), "report.html")
        choice = choice_and_reason(content)
        page = f"{run.artifacts_at}/report.html"
    sentence = finding(board)
    status, incomplete = Counter(row.status for row in board.rows), sum(1 for row in board.finished if row.reason)
    replicates = sum(len(row.luck.runs) for row in board.rows if row.luck is not None)
    run.log_values(
        {
            "sweep/variants": len(plan.variants),
            "sweep/finished": status["finished"] - incomplete + replicates,
            "sweep/found": len(plan.variants) - len(plan.to_do),
            "sweep/failed": status["failed"] + incomplete,
            "sweep/unsupported": status["unsupported"],
            "sweep/warnings": len(board.warnings),
        }
    )
    run.set_tags({run_names.VERDICT: sentence})
    run.set_note(scoreboard_markdown(board))
    return Sweep(
        scoreboard=board,
        plan=plan,
        finding=sentence,
        text=scoreboard_text(board),
        choice=choice,
        page=page,
        run=tracker.link(run.run_id),
    )


Tell = Callable[[SweepProgress], None]


def run_sweep(config: SweepConfig, tell: Tell = silent) -> Sweep | SweepPlan:
    """Compress, evaluate and judge every variant, and return the scoreboard; for a dry run, return the plan only."""
    if config.save != "all" and (config.source.device != BALANCED or config.running.engine != "local"):
        raise ConfigError(
            "Variants are scored before they are written only if the model does not fit into memory",
            allowed="device=balanced and engine=local, or save=all",
            got=f"save={config.save}, device={config.source.device}, engine={config.running.engine}",
        )
    policy = read_policy(config.policy)
    gates_of(policy, config.policy)  # one that cannot be used is refused before anything is made
    chosen, left_out = combinations(config)
    folder = str(out_folder(config.variants.output_dir, tracking_uri()))
    chosen = [replace(one, config=one.config.with_values(output_dir=folder)) for one in chosen]
    noted = nullcontext() if config.dry_run else unfinished_until_ended(config)
    with noted, keeping(), engine_started(config.running, config.source, VariantWorker) as workers:
        tracker = Tracker(config.experiment)
        prepared = prepare_sweep(config, chosen, tracker)
        plan = plan_of(config, prepared, left_out, tracker)
        if config.dry_run:
            return plan
        tell(SweepProgress(line=plan.as_text()))
        name = f"sweep of {len(prepared.variants)} {plan.baseline}"
        key = digest({"variants": sorted(variant.key for variant in prepared.variants), "left_out": plan.left_out})
        tags = {run_names.BASE_MODEL: plan.baseline, run_names.EVALUATION: prepared.evaluation}

        with parent_run(tracker, name, key, tags) as run:
            run.log_params(as_text(config))
            if config.save != "all":
                found = screened(prepared, policy, config.policy, tracker, lambda line: tell(SweepProgress(line=line)))
                sizes = {one.name: plan.size_of(one) for one in plan.variants}
                not_made = left_unmade(found, sizes if config.save == "winner" else None)
                kept = tuple(variant for variant in prepared.variants if variant.name not in not_made)
                if not kept:
                    raise UnsupportedError(
                        "The policy fails every variant of this sweep",
                        got="; ".join(f"{variant}: {why}" for variant, why in not_made.items()),
                        fix="Name other methods or more bits, or give another policy",
                    )
                made = tuple(one for one in plan.variants if one.name not in not_made)
                prepared = replace(prepared, variants=kept)
                plan = replace(plan, variants=made, left_out={**plan.left_out, **not_made})
            runs = make_variants(tracker, run, prepared, tell, workers)
            if config.sampling.items.partition(":")[0] == AUTO:
                runs = _with_more_items(tracker, run, prepared, runs, policy, tell, workers)
            sweep = publish_sweep(tracker, run, plan, runs, policy, config.policy)
            if sweep.failed:
                reasons = "; ".join(f"{name}: {reason}" for name, reason in sweep.failed.items())
                raise SweepError(
                    f"{len(sweep.failed)} of {len(prepared.variants)} variants failed: {reasons}",
                    published=sweep,
                    fix="The others are published. Repeat the command to make the missing ones",
                )
    return sweep


_FURTHER = 3  # at most so many times items are added; the last time, all


def _with_more_items(
    tracker: Tracker,
    run: TrackedRun,
    prepared: Prepared,
    runs: Mapping[str, str],
    policy: Policy,
    tell: Tell,
    workers: Workers | None,
) -> dict[str, str]:
    """Score more items of variants that are close to each other and that all items may tell apart; return all runs."""
    runs, variants = dict(runs), {variant.name: variant for variant in prepared.variants}
    for time in range(_FURTHER):
        store = Snapshot(tracker, runs.values())
        names = {run_id: name for name, run_id in runs.items()}
        board = score_runs(store, list(runs.values()), names=names, margin=policy.margin)
        wanted = more_items(board, policy)
        for name, (n, other) in wanted.items():
            n = n if time + 1 < _FURTHER else board.drawn_from or n
            tell(SweepProgress(line=f"{name} gets more items, {n:,} in all: it may be told apart from {other}"))
            asked = variants[name].asked
            config = asked.config.with_values(items=f"{asked.config.sampling.items}+{n}")
            variants[name] = replace(variants[name], asked=replace(asked, config=config))
        if not wanted:
            break
        some = replace(prepared, variants=tuple(variants[name] for name in wanted))
        runs |= make_variants(tracker, run, some, tell, workers)
    return runs


def make_variants(
    tracker: Tracker, run: TrackedRun, prepared: Prepared, tell: Tell, workers: Workers | None = None
) -> dict[str, str]:
    """Make the baseline and the variants, or find them; return each main run, finished or failed, by variant."""
    variants = prepared.variants
    progress = {variant.key: VariantProgress(name=variant.name) for variant in variants}

    def note(variant: PreparedVariant, state: State, doing: str) -> None:
        progress[variant.key] = VariantProgress(name=variant.name, state=state, doing=doing)
        number = list(progress).index(variant.key) + 1
        line = f"[{number}/{len(progress)}] {variant.name}: {doing}"
        tell(SweepProgress(line=line, variants=tuple(progress.values())))

    config = variants[0].asked.config
    evaluate_baseline(config.evaluate_config(), tracker)
    if workers is None:
        with reload_helper():
            made = _one_by_one(tracker, run.run_id, variants, note)
    else:
        if config.judge:
            answer_baseline(config.judge_config(), tracker)
        made = make_on_workers(tracker, run.run_id, variants, workers, note)
    return {variant.name: one.run_id for variant, one in zip(variants, made, strict=True)}


def _one_by_one(tracker: Tracker, parent: str, variants: Sequence[PreparedVariant], note: Note) -> list[MadeVariant]:
    """Make every variant in this process. One that another process makes now is left for the end."""
    made: dict[str, MadeVariant] = {}
    for wait in (False, True):
        for variant in variants:
            if variant.key in made:
                continue
            one = make_variant(tracker, variant, parent, partial(note, variant, "runs"), wait=wait)
            if one is not None:
                made[variant.key] = one
                note(variant, one.state, one.said)
    return [made[variant.key] for variant in variants]
