"""Repairs a variant that a policy refuses: the fewest extra bytes, for some groups of layers, with which it passes."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np

from mlflow_compress.commands.command import Say, silent
from mlflow_compress.commands.evaluate.models import engine_started
from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.commands.quantize.run import variant_name
from mlflow_compress.commands.search.measured_costs import SwapCosts, format_groups, read_search_text
from mlflow_compress.commands.search.parameters import SearchConfig
from mlflow_compress.commands.search.result import Repair, RepairTrial
from mlflow_compress.commands.search.run import Made, layers_of, make_all, stored_sizes
from mlflow_compress.commands.shared.get_or_create import digest, resumable_workdir, unfinished_until_ended
from mlflow_compress.commands.shared.inputs import (
    SERVED_METHOD,
    folder_or_hub,
    method_settings,
    model_label,
    model_path,
    read_manifest,
    suite_of,
)
from mlflow_compress.commands.shared.past_runs import candidates_of
from mlflow_compress.commands.sweep.make_variant import parent_run
from mlflow_compress.commands.sweep.parameters import SweepConfig
from mlflow_compress.commands.sweep.plan import Combination, prepare_sweep
from mlflow_compress.compression.checkpoint_manifest import MANIFEST_FILE, CheckpointManifest
from mlflow_compress.compression.gguf_model import ForTensors
from mlflow_compress.compression.layers import ForLayers
from mlflow_compress.compression.method import METHODS, CalibratedConfig, method_config
from mlflow_compress.compression.methods.gguf import Gguf
from mlflow_compress.compression.methods.mixed import RECIPE_FILE
from mlflow_compress.compression.mixed_recipe import KEPT, MIXED, MixedRecipe
from mlflow_compress.compression.pipeline import reload_helper
from mlflow_compress.compression.servers import check_target
from mlflow_compress.config import as_text, parse
from mlflow_compress.config.declarations import AUTO
from mlflow_compress.config.policy import Policy, policy_yaml, read_policy
from mlflow_compress.decide.cost_table import Allocation, CostTable, StoredSizes, closest_within, smallest_within
from mlflow_compress.decide.gates import DivergenceGate, Gate
from mlflow_compress.decide.promotion import CandidateOutcome, PolicyGates, decide, gates_of, ranking_of
from mlflow_compress.errors import CheckpointError, ConfigError, UnsupportedError
from mlflow_compress.home import home, out_folder
from mlflow_compress.items.contamination import check_contamination
from mlflow_compress.kept import keeping
from mlflow_compress.metrics.stats.arrays import Float
from mlflow_compress.models.source_model import SourceModel
from mlflow_compress.models.source_model import resolve as resolve_source
from mlflow_compress.models.stored_weights import bytes_of_layers, read_headers
from mlflow_compress.reporting.search_tables import rows_csv
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.evaluations import evaluations
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker, tracking_uri

MORE_BITS = 8
AS_IT_WAS = "as it was"  # column of the prices: the format of the refused variant


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The variant that is repaired, as its main run has left it."""

    run: Any  # MLflow's
    main: MainConfig  # The parameters of its main job, with those that were given for the repair
    manifest: CheckpointManifest
    folder: str  # Its checkpoint
    source: SourceModel
    recipe: MixedRecipe  # The format of every layer

    @property
    def label(self) -> str:
        return self.manifest.label

    @property
    def raised(self) -> dict[str, Any] | None:
        """Method and settings of the 8 bits that its layers can get; None where they have as many already.

        They are those of its own method. A method of llm-compressor that has no 8 bits shares its checkpoint with
        `rtn`, one scale per row, which every layer can have; K-quants share their GGUF file with Q8_0.
        """
        used = Counter(name for name in self.recipe.layers.values() if name != KEPT)
        settings = [self.recipe.formats[name] for name, _ in used.most_common()]
        first, method = settings[0], METHODS.get(settings[0]["method"])
        if min(one.get("bits", MORE_BITS) for one in settings) >= MORE_BITS:
            return None
        if MORE_BITS in method.supported_bits and "bits" in first:
            return {**first, "bits": MORE_BITS}
        if isinstance(method, ForLayers) and not method.rescales:
            return {"method": "rtn", **method_config("rtn", bits=MORE_BITS, group_size="channel").settings()}
        if isinstance(method, ForTensors):
            native = bool(first.get("native", False))
            return {"method": Gguf.name, **method_config(Gguf.name, bits=MORE_BITS, native=native).settings()}
        return None

    def variant(self, settings: Mapping[str, Any]) -> Combination:
        """Return the main job of a method with settings, which is evaluated as the refused variant was."""
        values = {name: value for name, value in settings.items() if name not in ("method", "bits", "group_size")}
        calibrated = {
            name: value for name, value in self.manifest.settings.items() if name in CalibratedConfig.model_fields
        }
        config = self.main.with_values(
            method=settings["method"],
            bits=str(settings.get("bits", AUTO)),
            group_size=str(settings.get("group_size", AUTO)),
            calibration_samples=calibrated.get("calibration_samples", 1),  # 1 where no format reads them
            calibration_length=calibrated.get("calibration_length", self.main.compression.calibration_length),
            method_args={
                **{name: str(value) for name, value in values.items()},
                **({"seed": str(calibrated["seed"])} if "seed" in calibrated and _calibrates(settings) else {}),
            },
        )
        return Combination(
            name=variant_name(config.quantize_config), config=config, settings=method_settings(config.quantize_config)
        )


def _calibrates(settings: Mapping[str, Any]) -> bool:
    return METHODS.get(settings["method"]).needs_calibration


def find_refused(tracker: Tracker, config: SearchConfig, given: Mapping[str, Any], gates: PolicyGates) -> Refused:
    """Return the variant of a main run; one that cannot be repaired is refused, with the reason."""
    run = tracker.run_of(str(config.space.repair))
    tags, run_id = run.data.tags, run.info.run_id
    if tags.get(run_names.STAGE) != "main" or run.info.status != "FINISHED":
        raise ConfigError(
            "Only the variant of a finished main run can be repaired",
            allowed="a run that main, sweep or search has left for a variant",
            got=f"{run_id}, a run of {tags.get(run_names.STAGE, 'something else')} that is {run.info.status}",
        )
    if run.info.experiment_id != tracker.experiment_id:
        name = tracker.client.get_experiment(run.info.experiment_id).name
        raise ConfigError("This run is in another experiment", got=run_id, fix=f"Give experiment={name}")
    if tags[run_names.METHOD] == SERVED_METHOD:
        raise UnsupportedError(
            "A served model has no layers here that could get another format",
            got=tags[run_names.VARIANT],
            fix="Repair the main run of the checkpoint that the server has loaded",
        )
    if run_names.REPLICATE_OF in tags:
        raise ConfigError(
            "A replicate stands for the luck of its variant, and cannot be repaired",
            got=run_id,
            fix="Give the run of the variant itself",
        )
    folder = tags[run_names.CHECKPOINT]
    if not (Path(folder) / MANIFEST_FILE).is_file():
        raise CheckpointError(
            "The checkpoint of this run is not there any more",
            got=folder,
            fix="Make it again, with the command that made it",
        )
    manifest = read_manifest(folder)
    stored = parse(MainConfig, tracker.fetch_json(run_id, run_names.PARAMETERS))
    shared = {name: value for name, value in given.items() if name in stored.values()}
    asked = {reading.metric.partition("/")[0] for reading in gates.readings}
    main = stored.with_values(
        **{
            **shared,
            "experiment": config.experiment,
            "output_dir": str(out_folder(given.get("output_dir", stored.compression.output_dir), tracking_uri())),
            "checkpoint": None,
            "resume": None,
            # What the policy does not read is not measured again.
            "judge": stored.judge and (gates.asks_stages or "judge" in asked),
            "speed": stored.speed and gates.asks_speed,
        }
    )
    path = model_path(main.source.model)
    with folder_or_hub("model", path):
        source = resolve_source(path, trust_remote_code=main.source.trust_remote_code)
    recipe = _recipe_of(manifest, folder, source)
    return Refused(run=run, main=main, manifest=manifest, folder=folder, source=source, recipe=recipe)


def _recipe_of(manifest: CheckpointManifest, folder: str, source: SourceModel) -> MixedRecipe:
    if manifest.method == MIXED:
        recipe = MixedRecipe.read(Path(folder) / RECIPE_FILE)
        if recipe.cache:
            raise UnsupportedError(
                "A variant whose cache is rounded cannot be repaired",
                got=manifest.label,
                fix="Take the cache out of its recipe, and repair that; or search with cache_formats",
            )
        return recipe
    own = {name: value for name, value in manifest.settings.items() if name not in CalibratedConfig.model_fields}
    bits = dict.fromkeys(source.linear, own.get("bits"))
    if fixed := METHODS.get(manifest.method).for_single_layers:  # a K-quant's file has several types
        tensors = read_headers(Path(folder))
        bits = {layer: int(tensors[f"{layer}.weight"].dtype[1]) for layer in source.linear}  # "Q4_K"
        own |= fixed
    layers = {layer: manifest.method if n is None else f"{manifest.method}:{n}" for layer, n in bits.items()}
    formats = {
        layers[layer]: {"method": manifest.method, **own, **({} if n is None else {"bits": n})}
        for layer, n in bits.items()
    }
    return MixedRecipe(formats=formats, layers=layers)


def require_repairable(refused: Refused) -> None:
    """Raise an error, before any work, where its method cannot share a checkpoint with the raised layers."""
    source, first = refused.source, next(iter(refused.source.linear))
    recipe = raised_recipe(refused, [[first]], (1,), list(_columns(refused)))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "check.json"
        recipe.write(path)
        settings: Any = method_config(MIXED, recipe=str(path))
        try:
            METHODS.get(MIXED).check(settings, source)
            check_target(refused.main.compression.target, METHODS.get(MIXED), settings, source)
        except UnsupportedError as error:
            raise UnsupportedError(f"{refused.label} cannot be repaired: {str(error).rstrip('.')}") from error


def _columns(refused: Refused) -> dict[str, str]:
    """Return the columns of the prices, with the name that a recipe has for each."""
    raised = refused.raised
    more = {} if raised is None else {f"at {MORE_BITS} bits": f"{raised['method']}:{MORE_BITS}"}
    return {AS_IT_WAS: AS_IT_WAS, **more, "as in the baseline": KEPT}


def raised_recipe(
    refused: Refused, layers: Sequence[Sequence[str]], choice: Sequence[int], columns: Sequence[str]
) -> MixedRecipe:
    """Return the variant's recipe with the groups of a choice raised; `columns` are those of the prices."""
    names, raised = _columns(refused), refused.raised
    chosen = dict(refused.recipe.layers)
    for group, column in zip(layers, choice, strict=True):
        if (name := names[columns[column]]) != AS_IT_WAS:
            chosen |= dict.fromkeys(group, name)
    described = {**refused.recipe.formats, **({f"{raised['method']}:{MORE_BITS}": raised} if raised else {})}
    used = set(chosen.values())
    return MixedRecipe(
        formats={name: settings for name, settings in described.items() if name in used},
        layers={name: chosen[name] for name in refused.source.linear},
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """A variant that was made and evaluated."""

    choice: tuple[int, ...]  # The column of each group; all 0 for the refused variant
    n_bytes: int  # Of its layers
    made: Made
    kl: Float  # On the search's text, shape (n_windows,)
    outcome: CandidateOutcome  # What the policy says
    predicted: float | None = None

    @property
    def passed(self) -> bool:
        return self.outcome.passed


def wanted_kl(
    failing: tuple[Mapping[str, float], float],
    passing: tuple[Mapping[str, float], float],
    gates: Iterable[Gate | DivergenceGate],
) -> float | None:
    """Return the KL at which the gates that fail would just be kept; None where no gate tells.

    Each side is the metrics of a variant, and its KL on the search's text. What a gate reads is interpolated linearly
    in the square root of the KL, which is in proportion to the change of the logits where that is small.
    """
    (fails, high), (passes, low) = failing, passing
    found = []
    for gate in gates:
        for one in gate.reads(fails) if isinstance(gate, DivergenceGate) else (gate,):
            bad, good = fails.get(one.metric), passes.get(one.metric)
            if bad is None or good is None or bad == good:
                continue
            share = (one.bound - good) / (bad - good)
            if 0 <= share < 1:
                found.append((low**0.5 + share * (high**0.5 - low**0.5)) ** 2)
    return min(found) if found else None


def next_choice(table: CostTable, *, above: int, below: int, wanted: float | None) -> Allocation | None:
    """Return the next mixture to try, with more bytes than `above` and fewer than `below`; None where there is none.

    It is the smallest one whose predicted KL is the wanted one. Where that has too few or too many bytes, it is the
    closest one in the middle.
    """
    sizes = table.sizes.layers
    if wanted is not None:
        limit = wanted - float(table.start.mean())
        if limit >= float(table.costs.min(axis=1).sum()):
            allocation = smallest_within(table.costs, sizes, max_cost=limit)
            if above < allocation.n_bytes < below:
                return allocation
    allocation = closest_within(table.costs, sizes, max_bytes=(above + below) // 2)
    return allocation if above < allocation.n_bytes < below else None


def run_repair(config: SearchConfig, say: Say = silent) -> Repair:
    """Find the fewest extra bytes with which the policy passes a variant that it refuses; return all that was tried.

    First all layers get 8 bits: where that does not pass, no mixture of the two can be expected to. Between this and
    the refused variant, mixtures are made and evaluated: each is the choice of the integer programme, by prices that
    are measured around a checkpoint, for the KL at which the gates would just be kept. The smallest that passes is the
    repaired variant. What an earlier run of the store holds is found.
    """
    given = config.given_for_repair()
    policy = read_policy(config.space.policy)
    gates = gates_of(policy, config.space.policy)
    with unfinished_until_ended(config), keeping():
        tracker = Tracker(config.experiment)
        refused = find_refused(tracker, config, given, gates)
        label, judge = model_label(refused.main.source.model), _Judge(tracker, refused, policy, gates)
        outcome = judge.outcomes([refused.run])[0]
        if outcome.passed:
            return _result(tracker, refused, policy, config, outcome, run_id=refused.run.info.run_id)
        require_repairable(refused)
        searched = _search_config(config, refused)
        with engine_started(refused.main.running, refused.main.source):
            text = read_search_text(searched, refused.source, _calibration_samples(refused))
            suite = suite_of(refused.main.evaluate_config())
            check_contamination(text.texts, suite.tasks, suite.corpora)
            rounds = [config.space.search_rounds, config.space.search_tolerance]
            key = digest({"repair": refused.run.info.run_id, "policy": policy.sha256, "search": [text.sha256, *rounds]})
            tags = {
                run_names.BASE_MODEL: label,
                run_names.EVALUATION: refused.run.data.tags[run_names.EVALUATION],
                run_names.POLICY: policy.sha256,
            }
            with (
                parent_run(tracker, f"repair {refused.label} {label}", key, tags, stage="search") as run,
                reload_helper(),
                resumable_workdir(tracker.uri, key) as resume,
            ):
                run.log_params({**as_text(searched), **{name: as_text(config)[name] for name in given}})
                work = _Repair(
                    tracker=tracker,
                    run=run,
                    config=searched,
                    refused=refused,
                    judge=judge,
                    policy=policy,
                    say=say,
                    costs=lambda groups: SwapCosts(config=searched, text=text, resume=resume, groups=groups),
                )
                return work.result(outcome)


def _calibration_samples(refused: Refused) -> int:
    return int(refused.manifest.settings.get("calibration_samples", 0))


def _search_config(config: SearchConfig, refused: Refused) -> SearchConfig:
    """Return the parameters of a search on the refused variant's model, text and device."""
    space = config.space
    return refused.main.of_stage(
        SearchConfig,
        experiment=config.experiment,
        repair=refused.run.info.run_id,
        policy=space.policy,
        search_text=space.search_text,
        search_windows=space.search_windows,
        search_rounds=space.search_rounds,
        search_tolerance=space.search_tolerance,
        calibration_length=refused.manifest.settings.get(
            "calibration_length", refused.main.compression.calibration_length
        ),
    )


@dataclass(frozen=True)
class _Judge:
    """What the policy says of variants beside all others of their evaluation, as a promotion would."""

    tracker: Tracker
    refused: Refused
    policy: Policy
    gates: PolicyGates

    def outcomes(self, runs: Sequence[Any]) -> list[CandidateOutcome]:
        label = model_label(self.refused.main.source.model)
        evaluation = self.refused.run.data.tags[run_names.EVALUATION]
        [group] = [one for one in evaluations(self.tracker, label) if one.id == evaluation]
        candidates = candidates_of(self.tracker, group.variants, label, {}, self.gates)
        score, ranked_by = ranking_of(self.policy.objective)
        decision = decide(candidates, self.gates.gates, rules=self.gates.rules, score=score, ranked_by=ranked_by)
        by_run = {outcome.candidate.run_id: outcome for outcome in decision.outcomes}
        # A checkpoint that was evaluated again competes once, by its newest run.
        newest = {one.checkpoint: one.run.info.run_id for one in group.variants}
        checkpoints = [
            (run.data.tags[run_names.VARIANT], run.data.tags.get(run_names.CHECKPOINT_SHA256, "unknown"))
            for run in runs
        ]
        return [by_run[newest[checkpoint]] for checkpoint in checkpoints]


@dataclass(frozen=True, kw_only=True)
class _Repair:
    """The part of a repair that needs its run."""

    tracker: Tracker
    run: TrackedRun
    config: SearchConfig
    refused: Refused
    judge: _Judge
    policy: Policy
    say: Say
    costs: Any  # From groups to `SwapCosts`
    trials: list[Trial] = field(default_factory=list)

    def result(self, outcome: CandidateOutcome) -> Repair:
        refused, columns = self.refused, _columns(self.refused)
        raised = refused.raised
        folders: dict[str, str | None] = {AS_IT_WAS: refused.folder}
        ceiling: Made | None = None
        if raised is not None:
            self.say(f"[repair] all layers at {MORE_BITS} bits: the most that a mixture can become")
            ceiling = self._make(refused.variant(raised))
            folders |= {f"at {MORE_BITS} bits": ceiling.folder}
        folders |= {"as in the baseline": None}
        assert list(folders) == list(columns)
        methods = {
            METHODS.get(one["method"]) for one in [*refused.recipe.formats.values(), *([raised] if raised else [])]
        }
        rescaled = any(isinstance(method, ForLayers) and method.rescales for method in methods)
        made = [folder for folder in folders.values() if folder is not None]
        groups = format_groups(self.config, refused.source, made, rescaled=rescaled)
        costs: SwapCosts = self.costs(groups)
        sizes = stored_sizes(refused.source, groups, folders)
        zeros = (0,) * len(groups)
        first = Made(run_id=refused.run.info.run_id, folder=refused.folder, name=refused.label)
        self.trials.append(self._trial(zeros, first, costs, outcome))
        if ceiling is not None:
            self.trials.append(self._trial((1,) * len(groups), ceiling, costs))
        table = self._prices(sizes, costs, self.trials[0], folders)
        if ceiling is None:  # the closest mixture: all but one group are the baseline's
            closest = closest_within(table.costs, sizes.layers, max_bytes=sizes.base - 1)
            self.trials.append(self._mixture(closest, table, costs, folders))
        if self.trials[-1].passed:
            self._narrow(table, costs, folders)
        return self._end(sizes)

    def _narrow(self, table: CostTable, costs: SwapCosts, folders: Mapping[str, str | None]) -> None:
        """Try mixtures between the largest variant that fails and the smallest that passes."""
        space, gates = self.config.space, self.judge.gates.gates
        for number in range(space.search_rounds + 1):
            passing = min((one for one in self.trials if one.passed), key=lambda one: one.n_bytes, default=None)
            if passing is None:  # together with so many others none passes any more
                return
            failing = max(
                (one for one in self.trials if not one.passed and one.n_bytes < passing.n_bytes),
                key=lambda one: one.n_bytes,
            )
            sides = [(one.outcome.candidate.metrics, float(one.kl.mean())) for one in (failing, passing)]
            wanted = wanted_kl(sides[0], sides[1], gates)
            allocation = next_choice(table, above=failing.n_bytes, below=passing.n_bytes, wanted=wanted)
            if allocation is None or allocation.choice in {one.choice for one in self.trials}:
                return
            trial = self._mixture(allocation, table, costs, folders)
            self.trials.append(trial)
            assert trial.predicted is not None
            measured = float(trial.kl.mean())
            missed = abs(trial.predicted - measured) > space.search_tolerance * measured
            if missed and number < space.search_rounds:
                self.say("[repair] measures the prices again, within this mixture")
                table = self._prices(table.sizes, costs, trial, folders)

    def _prices(
        self, sizes: StoredSizes, costs: SwapCosts, trial: Trial, folders: Mapping[str, str | None]
    ) -> CostTable:
        """Return what each group adds to the KL of a variant in each format, the others as they are in it."""
        self.say(f"[repair] measures the prices of {len(sizes.groups)} groups within {trial.made.name}")
        folder = trial.made.folder
        added = [
            np.zeros((len(sizes.groups), len(trial.kl))) if other == folder else costs.around(folder, other) - trial.kl
            for other in folders.values()
        ]
        return CostTable(sizes=sizes, start=trial.kl, added=np.stack(added, axis=1))

    def _mixture(
        self, allocation: Allocation, table: CostTable, costs: SwapCosts, folders: Mapping[str, str | None]
    ) -> Trial:
        refused = self.refused
        layers = layers_of(costs.groups, refused.source)
        recipe = raised_recipe(refused, layers, allocation.choice, list(folders))
        number = sum(column != 0 for column in allocation.choice)
        stem = refused.label.removeprefix(f"{MIXED}-")
        name = hashlib.sha256(recipe.text.encode()).hexdigest()[:12]
        path = home(self.tracker.uri) / "recipes" / name / f"{stem}-raised-{number}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        recipe.write(path)
        self.say(f"[repair] makes a mixture with {number} of {len(layers)} groups raised")
        made = self._make(refused.variant({"method": MIXED, "recipe": str(path)}))
        trial = self._trial(allocation.choice, made, costs)
        return replace(trial, predicted=table.predicted(allocation.choice))

    def _make(self, variant: Combination) -> Made:
        sweep = self.refused.main.of_stage(SweepConfig, experiment=self.config.experiment, bits=AUTO, group_size=AUTO)
        prepared = prepare_sweep(sweep, [variant], self.tracker)
        wanted = self.refused.run.data.tags[run_names.EVALUATION]
        if prepared.evaluation != wanted:
            raise ConfigError(
                "The run to repair was measured with other software, data or settings than there are now",
                allowed=f"evaluation {prepared.evaluation[:16]}",
                got=wanted[:16],
                fix="Run its main job again, and repair that run",
            )
        [made] = make_all(self.tracker, self.run, prepared, self.say).values()
        return made

    def _trial(
        self, choice: tuple[int, ...], made: Made, costs: SwapCosts, outcome: CandidateOutcome | None = None
    ) -> Trial:
        outcome = outcome or self.judge.outcomes([self.tracker.run_of(made.run_id)])[0]
        passes = "passes" if outcome.passed else f"does not pass: {'; '.join(outcome.failed)}"
        self.say(f"[repair] {made.name} {passes}")
        return Trial(
            choice=choice,
            n_bytes=bytes_of_layers(read_headers(Path(made.folder)), self.refused.source.linear),
            made=made,
            kl=costs.whole(made.folder),
            outcome=outcome,
        )

    def _end(self, sizes: StoredSizes) -> Repair:
        # More variants share one error: what passed in its round may not pass among all.
        runs = [self.tracker.run_of(one.made.run_id) for one in self.trials]
        trials = [
            replace(one, outcome=outcome) for one, outcome in zip(self.trials, self.judge.outcomes(runs), strict=True)
        ]
        passing = [one for one in trials if one.passed]
        best = min(passing, key=lambda one: one.n_bytes, default=None)
        rows = [_row(one, sizes, best, self.refused) for one in sorted(trials, key=lambda one: one.n_bytes)]
        changed = {} if best is None else _changed(best, sizes)
        recipe = None if best is None else Path(best.made.folder) / RECIPE_FILE
        found = _result(
            self.tracker,
            self.refused,
            self.policy,
            self.config,
            trials[0].outcome,
            run_id=self.run.run_id,
            trials=tuple(rows),
            changed=changed,
            recipe=str(recipe) if recipe is not None and recipe.is_file() else None,
        )
        self._log(found)
        return found

    def _log(self, found: Repair) -> None:
        run = self.run
        run.log_json(found.to_dict(), "repair.json")
        run.log_text(rows_csv(list(found.to_rows())), "repair.csv")
        run.log_text(policy_yaml(self.policy), "policy.yaml")
        if found.recipe is not None:
            run.log_file(Path(found.recipe))
        price = {} if found.extra_bytes is None else {"search/extra_bytes": float(found.extra_bytes)}
        run.log_values({"search/variants": len(found.trials), **price})
        run.set_tags({run_names.VERDICT: found.summary})
        run.set_note(found.markdown())


def _changed(trial: Trial, sizes: StoredSizes) -> dict[str, str]:
    """Return what became of each group that was raised."""
    pairs = zip(sizes.groups, trial.choice, strict=True)
    return {group: sizes.formats[column] for group, column in pairs if column != 0}


def _row(trial: Trial, sizes: StoredSizes, best: Trial | None, refused: Refused) -> RepairTrial:
    manifest, role = read_manifest(trial.made.folder, verify=False), _role(trial, best)
    metrics = trial.outcome.candidate.metrics
    return RepairTrial(
        name=trial.made.name,
        role=role,
        raised=sum(column != 0 for column in trial.choice),
        bits_per_weight=manifest.bits_per_weight,
        size_bytes=manifest.size_bytes,
        extra_bytes=manifest.size_bytes - refused.manifest.size_bytes,
        kl=metrics.get("distance/kl_mean"),
        flips_pct=metrics.get("distance/flips_pct"),
        search_kl=float(trial.kl.mean()),
        predicted_kl=trial.predicted,
        passed=trial.passed,
        reasons=trial.outcome.reasons,
        failed=trial.outcome.failed,
        run_id=trial.made.run_id,
    )


def _role(trial: Trial, best: Trial | None) -> Literal["refused", "repaired", "tried"]:
    if not any(trial.choice):
        return "refused"
    return "repaired" if best is not None and trial.made.run_id == best.made.run_id else "tried"


def _result(
    tracker: Tracker,
    refused: Refused,
    policy: Policy,
    config: SearchConfig,
    outcome: CandidateOutcome,
    *,
    run_id: str,
    **more: Any,
) -> Repair:
    return Repair(
        name=refused.label,
        baseline=model_label(refused.main.source.model),
        model=refused.main.source.model,
        repaired_run=refused.run.info.run_id,
        passed=outcome.passed,
        reasons=outcome.failed or outcome.reasons,
        policy=config.space.policy,
        policy_sha256=policy.sha256,
        raised_to=None if refused.raised is None else f"{MORE_BITS} bits",
        run=tracker.link(run_id),
        **more,
    )
