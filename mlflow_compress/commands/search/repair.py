"""Repairs a variant that a policy refuses: the fewest extra bytes, of weights and caches, with which it passes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from mlflow_compress.commands.command import Say, silent
from mlflow_compress.commands.evaluate.items import suite_of
from mlflow_compress.commands.evaluate.models import engine_started
from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.commands.search.choice import cache_bytes, combination_of, with_caches
from mlflow_compress.commands.search.measured_costs import SwapCosts, cache_groups, format_groups, read_search_text
from mlflow_compress.commands.search.parameters import SearchConfig
from mlflow_compress.commands.search.result import Repair, RepairTrial
from mlflow_compress.commands.search.run import FinishedMain, layers_of, make_all, stored_sizes
from mlflow_compress.commands.shared.get_or_create import digest, resumable_workdir, unfinished_until_ended
from mlflow_compress.commands.shared.named_models import (
    SERVED_METHOD,
    folder_or_hub,
    model_label,
    model_path,
    read_manifest,
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
from mlflow_compress.compression.methods.kv_cache import KvCache, quantized_cache
from mlflow_compress.compression.methods.mixed import RECIPE_FILE
from mlflow_compress.compression.mixed_recipe import KEPT, MIXED, MixedRecipe
from mlflow_compress.compression.pipeline import reload_helper
from mlflow_compress.compression.servers import check_target
from mlflow_compress.config import as_text, parse
from mlflow_compress.config.declarations import AUTO
from mlflow_compress.config.policy import Policy, policy_yaml, read_policy
from mlflow_compress.decide.cost_table import Allocation, CostTable, StoredSizes, closest_within
from mlflow_compress.decide.gates import CACHE, CACHE_RATIO, Gate
from mlflow_compress.decide.promotion import CandidateOutcome, PolicyGates, gates_of
from mlflow_compress.errors import CheckpointError, ConfigError, UnsupportedError
from mlflow_compress.home import home, out_folder
from mlflow_compress.items.contamination import check_contamination
from mlflow_compress.kept import keeping
from mlflow_compress.metrics.stats.arrays import Float
from mlflow_compress.models.architectures.quantized_cache import QuantizedCache
from mlflow_compress.models.source_model import SourceModel
from mlflow_compress.models.source_model import resolve as resolve_source
from mlflow_compress.models.stored_weights import read_headers
from mlflow_compress.models.weight_groups import WeightGroup
from mlflow_compress.reporting.search_tables import rows_csv
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.evaluations import evaluations
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker, tracking_uri

_MORE_BITS = 8
# Columns of the costs: the format of the refused variant, more bits, the baseline
_AS_IT_WAS, _RAISED, _AS_BASELINE = "as it was", f"at {_MORE_BITS} bits", "as in the baseline"


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The variant that is repaired, as its main run has left it."""

    run: Any  # MLflow's
    main: MainConfig  # The parameters of its main job, with those that were given for the repair
    manifest: CheckpointManifest
    folder: str  # Its checkpoint
    source: SourceModel
    recipe: MixedRecipe  # The format of every layer
    bounds_cache: bool = False  # Whether the policy bounds the size of its cache, which then stays as it is

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
        if not used:
            return None
        settings = [self.recipe.formats[name] for name, _ in used.most_common()]
        first, method = settings[0], METHODS.get(settings[0]["method"])
        if min(one.get("bits", _MORE_BITS) for one in settings) >= _MORE_BITS:
            return None
        if _MORE_BITS in method.supported_bits and "bits" in first:
            return {**first, "bits": _MORE_BITS}
        if isinstance(method, ForLayers) and not method.rescales:
            return {"method": "rtn", **method_config("rtn", bits=_MORE_BITS, group_size="channel").settings()}
        if isinstance(method, ForTensors):
            native = bool(first.get("native", False))
            return {"method": Gguf.name, **method_config(Gguf.name, bits=_MORE_BITS, native=native).settings()}
        return None

    @property
    def caches(self) -> dict[int, dict[str, dict[str, Any] | None]]:
        """What the cache of each layer that is rounded can be, by column: settings of `kv-cache`, or the baseline's."""
        caches: dict[int, dict[str, dict[str, Any] | None]] = {}
        for layer, settings in sorted((int(layer), one) for layer, one in self.recipe.cache.items()):
            caches[layer] = {_AS_IT_WAS: settings}
            if self.bounds_cache:
                continue
            bits = method_config(KvCache.name, **settings).settings()
            few = [name for name in ("key_bits", "value_bits") if bits[name] in range(_MORE_BITS)]
            caches[layer] |= {_RAISED: {**settings, **dict.fromkeys(few, _MORE_BITS)}} if few else {}
            caches[layer][_AS_BASELINE] = None
        return caches

    @property
    def columns(self) -> list[str]:
        """The columns of the costs: what some group of layers, or some cache, can be."""
        of_weights = [_AS_IT_WAS, *([] if self.raised is None else [_RAISED]), _AS_BASELINE]
        return list(dict.fromkeys((*of_weights, *(name for one in self.caches.values() for name in one))))

    @property
    def quantized(self) -> list[dict[str, QuantizedCache | None]]:
        """What the settings of `caches` describe, layer by layer."""

        def described(settings: Mapping[str, Any] | None) -> QuantizedCache | None:
            config: Any = None if settings is None else method_config(KvCache.name, **settings)
            return None if config is None else quantized_cache(config, self.source)

        return [{name: described(one) for name, one in options.items()} for options in self.caches.values()]

    def variant(self, settings: Mapping[str, Any]) -> Combination:
        """Return the main job of a method with settings, which is evaluated as the refused variant was."""
        values = {name: value for name, value in settings.items() if name not in ("method", "bits", "group_size")}
        known = self.manifest.settings
        calibrated = {name: value for name, value in known.items() if name in CalibratedConfig.model_fields}
        seeded = "seed" in calibrated and METHODS.get(settings["method"]).needs_calibration
        config = self.main.with_values(
            method=settings["method"],
            bits=str(settings.get("bits", AUTO)),
            group_size=str(settings.get("group_size", AUTO)),
            calibration_samples=calibrated.get("calibration_samples", 1),  # 1 where no format reads them
            calibration_length=calibrated.get("calibration_length", self.main.compression.calibration_length),
            method_args={
                **{name: str(value) for name, value in values.items()},
                **({"seed": str(calibrated["seed"])} if seeded else {}),
            },
        )
        return combination_of(config)


def _find_refused(tracker: Tracker, config: SearchConfig, given: Mapping[str, Any], gates: PolicyGates) -> Refused:
    """Return the variant of a main run; one that cannot be repaired is refused, with the reason."""
    run = tracker.run_of(str(config.space.repair))
    tags, run_id = run.data.tags, run.info.run_id
    if tags.get(run_names.STAGE) != "main" or run.info.status != "FINISHED":
        raise ConfigError(
            "Only the variant of a finished main run can be repaired",
            allowed="a variant's run, made by main, sweep or search",
            got=f"{run_id}, a run of {tags.get(run_names.STAGE, 'something else')} that is {run.info.status}",
        )
    if run.info.experiment_id != tracker.experiment_id:
        name = tracker.client.get_experiment(run.info.experiment_id).name
        raise ConfigError("This run is in another experiment", got=run_id, fix=f"Give experiment={name}")
    if tags[run_names.METHOD] == SERVED_METHOD:
        raise UnsupportedError(
            "The layers of a served model are not on this machine, so they cannot get another format",
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
            "The checkpoint of this run no longer exists",
            got=folder,
            fix="Repeat the command that made it",
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
    if config.space.cache_tokens != AUTO and not recipe.cache:
        raise ConfigError(
            "cache_tokens is for rounded caches, and this variant has none",
            got=f"{manifest.label}, cache_tokens={config.space.cache_tokens}",
            fix="Leave it out",
        )
    return Refused(
        run=run,
        main=main,
        manifest=manifest,
        folder=folder,
        source=source,
        recipe=recipe,
        bounds_cache=any(isinstance(gate, Gate) and gate.metric in (CACHE, CACHE_RATIO) for gate in gates.gates),
    )


def _recipe_of(manifest: CheckpointManifest, folder: str, source: SourceModel) -> MixedRecipe:
    if manifest.method == MIXED:
        return MixedRecipe.read(Path(folder) / RECIPE_FILE)
    if manifest.method == KvCache.name:
        cache = {str(layer): manifest.settings for layer in range(source.layers)}
        return MixedRecipe(formats={}, layers=dict.fromkeys(source.linear, KEPT), cache=cache)
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
    recipe = raised_recipe(refused, [[first]], (1, *[0] * len(refused.caches)))
    with TemporaryDirectory() as folder:
        settings: Any = method_config(MIXED, recipe=str(recipe.written(Path(folder), "check")))
        try:
            METHODS.get(MIXED).check(settings, source)
            check_target(refused.main.compression.target, METHODS.get(MIXED), settings, source)
        except UnsupportedError as error:
            raise UnsupportedError(f"{refused.label} cannot be repaired: {str(error).rstrip('.')}") from error


def raised_recipe(refused: Refused, layers: Sequence[Sequence[str]], choice: Sequence[int]) -> MixedRecipe:
    """Return the variant's recipe with what a choice raises: groups of layers, and behind them rounded caches."""
    raised, columns = refused.raised, [refused.columns[column] for column in choice]
    more = f"{raised['method']}:{_MORE_BITS}" if raised else KEPT
    chosen = dict(refused.recipe.layers)
    for group, column in zip(layers, columns, strict=False):
        if column != _AS_IT_WAS:
            chosen |= dict.fromkeys(group, more if column == _RAISED else KEPT)
    rounded = zip(refused.caches.items(), columns[len(layers) :], strict=True)
    caches = {str(layer): options[column] for (layer, options), column in rounded}
    described = {**refused.recipe.formats, **({more: raised} if raised else {})}
    used = set(chosen.values())
    return MixedRecipe(
        formats={name: settings for name, settings in described.items() if name in used},
        layers={name: chosen[name] for name in refused.source.linear},
        cache={layer: settings for layer, settings in caches.items() if settings is not None},
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Trial:
    """A variant that was made and evaluated."""

    choice: tuple[int, ...]  # The column of each group and cache; all 0 for the refused variant
    n_bytes: int  # Of its layers, and of its cache where that was rounded
    made: FinishedMain
    kl: Float  # On the search's text, shape (n_windows,)
    outcome: CandidateOutcome  # What the policy says
    predicted: float | None = None

    @property
    def passed(self) -> bool:
        return self.outcome.passed


def run_repair(config: SearchConfig, say: Say = silent) -> Repair:
    """Find the fewest extra bytes with which the policy passes a variant that it refuses; return all that was tried.

    It is a search whose budget is the policy's. First all layers get 8 bits: where that does not pass, no mixture of
    the two can be expected to. Between this and the refused variant the budget is halved: each time the
    closest mixture within it, by the costs of a search, is made and evaluated. The smallest that passes is the repaired
    variant. What an earlier run of the store holds is found.

    Where the cache is rounded too, each layer's can get more bits, or be as in the baseline, for the bytes of
    `cache_tokens`; the variant with 8 bits in all layers has a plain one.
    """
    given = config.given_for_repair()
    policy = read_policy(config.space.policy)
    gates = gates_of(policy, config.space.policy)
    with unfinished_until_ended(config), keeping():
        tracker = Tracker(config.experiment)
        refused = _find_refused(tracker, config, given, gates)
        label = model_label(refused.main.source.model)
        [outcome] = _outcomes(tracker, refused, gates, [refused.run.info.run_id])
        found = Repair(
            name=refused.label,
            baseline=label,
            model=refused.main.source.model,
            repaired_run=refused.run.info.run_id,
            passed=outcome.passed,
            reasons=outcome.failed or outcome.reasons,
            policy=config.space.policy,
            policy_sha256=policy.sha256,
            run=tracker.link(refused.run.info.run_id),
        )
        if outcome.passed:
            return found
        require_repairable(refused)
        searched = _search_config(config, refused)
        caches = [cache_bytes(searched, refused.source, options) for options in refused.quantized]
        attention = tuple(one for one in cache_groups(refused.source) if one.layer in refused.caches) if caches else ()

        with engine_started(refused.main.running, refused.main.source):
            used = int(refused.manifest.settings.get("calibration_samples", 0))
            text = read_search_text(searched, refused.source, used)
            suite = suite_of(refused.main.evaluate_config())
            check_contamination(text.texts, suite.tasks, suite.corpora)
            search = [text.sha256, config.space.search_rounds, *([searched.space.cache_tokens] if caches else [])]
            key = digest({"repair": refused.run.info.run_id, "policy": policy.sha256, "search": search})
            evaluation = refused.run.data.tags[run_names.EVALUATION]
            tags = {run_names.BASE_MODEL: label, run_names.EVALUATION: evaluation, run_names.POLICY: policy.sha256}
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
                    gates=gates,
                    policy=policy,
                    say=say,
                    caches=caches,
                    costs=lambda groups: SwapCosts(
                        config=searched, text=text, resume=resume, groups=groups, caches=attention
                    ),
                )
                return work.result(replace(found, run=tracker.link(run.run_id)), outcome)


def _search_config(config: SearchConfig, refused: Refused) -> SearchConfig:
    """Return the parameters of a search on the refused variant's model, text and device."""
    space, main = config.space, refused.main
    shared = ("policy", "search_text", "search_windows", "search_rounds")
    return main.of_stage(
        SearchConfig,
        experiment=config.experiment,
        repair=refused.run.info.run_id,
        cache_tokens=refused.source.max_length if refused.caches and space.cache_tokens == AUTO else space.cache_tokens,
        calibration_length=refused.manifest.settings.get("calibration_length", main.compression.calibration_length),
        **{name: getattr(space, name) for name in shared},
    )


def _outcomes(tracker: Tracker, refused: Refused, gates: PolicyGates, run_ids: Sequence[str]) -> list[CandidateOutcome]:
    """Return what the policy says of variants beside all others of their evaluation, as a promotion would."""
    label = model_label(refused.main.source.model)
    evaluation = refused.run.data.tags[run_names.EVALUATION]
    [group] = [one for one in evaluations(tracker, label) if one.id == evaluation]
    candidates = candidates_of(tracker, group.variants, label, {}, gates)
    by_run = {outcome.candidate.run_id: outcome for outcome in gates.decide(candidates).outcomes}
    # A checkpoint that was evaluated again competes once, by its newest run.
    newest = {one.checkpoint: one.run.info.run_id for one in group.variants}
    tags = [tracker.run_of(run_id).data.tags for run_id in run_ids]
    checkpoints = [(one[run_names.VARIANT], one.get(run_names.CHECKPOINT_SHA256, "unknown")) for one in tags]
    return [by_run[newest[checkpoint]] for checkpoint in checkpoints]


@dataclass(frozen=True, kw_only=True)
class _Repair:
    """The part of a repair that needs its run."""

    tracker: Tracker
    run: TrackedRun
    config: SearchConfig
    refused: Refused
    gates: PolicyGates
    policy: Policy
    say: Say
    caches: Sequence[Mapping[str, int]]  # By rounded layer: what `cache_bytes` returns of the columns that it can have
    costs: Callable[[tuple[WeightGroup, ...]], SwapCosts]
    trials: list[_Trial] = field(default_factory=list)

    def result(self, found: Repair, outcome: CandidateOutcome) -> Repair:
        refused, raised = self.refused, self.refused.raised
        folders: dict[str, str | None] = {_AS_IT_WAS: refused.folder}
        ceiling: FinishedMain | None = None
        if raised is not None:
            self.say(f"[repair] all layers at {_MORE_BITS} bits: the largest possible mixture")
            ceiling = self._make(refused.variant(raised))
            folders |= {_RAISED: ceiling.folder}
        folders |= {_AS_BASELINE: None}
        methods = {one["method"] for one in [*refused.recipe.formats.values(), *([raised] if raised else [])]}
        rescaled = any(getattr(METHODS.get(name), "rescales", False) for name in methods)
        groups: tuple[WeightGroup, ...] = ()  # none where all weights are the baseline's already
        if any(name != KEPT for name in refused.recipe.layers.values()):
            made = [folder for folder in folders.values() if folder is not None]
            groups = format_groups(self.config, refused.source, made, rescaled=rescaled)
        costs = self.costs(groups)
        sizes = stored_sizes(refused.source, groups, folders)
        sizes = with_caches(sizes, dict(zip((one.name for one in costs.caches), self.caches, strict=True)))
        self.say(f"[repair] measures the costs of {len(sizes.groups)} groups")
        table = costs.table(sizes, folders, refused.quantized)
        last = 0 if refused.bounds_cache else sizes.formats.index(_AS_BASELINE)
        largest = table.allocated((1,) * len(groups) + (last,) * len(self.caches))
        if ceiling is None:  # the closest mixture: all but one group are the baseline's
            largest = closest_within(table.costs, sizes.layers, max_bytes=sizes.base - 1)
        first = FinishedMain(run_id=refused.run.info.run_id, folder=refused.folder, name=refused.label)
        self.trials.append(self._trial(table.allocated((0,) * len(sizes.groups)), first, costs, outcome))
        if ceiling is not None and not (self.caches and refused.bounds_cache):  # its cache is the baseline's
            self.trials.append(self._trial(largest, ceiling, costs))
        elif any(largest.choice):
            self.trials.append(self._mixture(largest, table, costs))
        if self.trials[-1].passed:
            self._narrow(table, costs)
        return self._end(found, sizes)

    def _narrow(self, table: CostTable, costs: SwapCosts) -> None:
        """Halve the bytes between the largest variant that fails and the smallest that passes."""
        for _ in range(self.config.space.search_rounds + 1):
            passing = [one.n_bytes for one in self.trials if one.passed]
            if not passing:  # together with so many others none passes any more
                return
            failing = max(one.n_bytes for one in self.trials if not one.passed and one.n_bytes < min(passing))
            allocation = closest_within(table.costs, table.sizes.layers, max_bytes=(failing + min(passing)) // 2)
            if allocation.n_bytes <= failing:
                return
            self.trials.append(self._mixture(allocation, table, costs))

    def _mixture(self, allocation: Allocation, table: CostTable, costs: SwapCosts) -> _Trial:
        refused = self.refused
        recipe = raised_recipe(refused, layers_of(costs.groups, refused.source), allocation.choice)
        number = int(np.count_nonzero(allocation.choice))
        before = sum(np.count_nonzero(trial.choice) == number for trial in self.trials)
        again = "" if before == 0 else chr(ord("a") + before)  # "raised-3", "raised-3b"
        stem = refused.label.removeprefix(f"{MIXED}-")
        path = recipe.written(home(self.tracker.uri) / "recipes", f"{stem}-raised-{number}{again}")
        self.say(f"[repair] makes a mixture with {number} of {len(allocation.choice)} groups raised")
        made = self._make(refused.variant({"method": MIXED, "recipe": str(path)}))
        # Costs of single groups need not add up: the variant that was made last says by how much their sum is off.
        last = self.trials[-1]
        alone = table.predicted(last.choice)
        scale = float(last.kl.mean()) / alone if alone else 1.0
        return replace(self._trial(allocation, made, costs), predicted=scale * table.predicted(allocation.choice))

    def _make(self, variant: Combination) -> FinishedMain:
        sweep = self.refused.main.of_stage(SweepConfig, experiment=self.config.experiment, bits=AUTO, group_size=AUTO)
        prepared = prepare_sweep(sweep, [variant], self.tracker)
        wanted = self.refused.run.data.tags[run_names.EVALUATION]
        if prepared.evaluation != wanted:
            raise ConfigError(
                "The run to repair was measured with software, data or settings that differ from the present ones",
                allowed=f"evaluation {prepared.evaluation[:16]}",
                got=wanted[:16],
                fix="Run its main job again, and repair that run",
            )
        [made] = make_all(self.tracker, self.run, prepared, self.say).values()
        return made

    def _trial(
        self, allocation: Allocation, made: FinishedMain, costs: SwapCosts, outcome: CandidateOutcome | None = None
    ) -> _Trial:
        if outcome is None:
            [outcome] = _outcomes(self.tracker, self.refused, self.gates, [made.run_id])
        passes = "passes" if outcome.passed else f"does not pass: {'; '.join(outcome.failed)}"
        self.say(f"[repair] {made.name} {passes}")
        kl = costs.whole(made.folder)
        return _Trial(choice=allocation.choice, n_bytes=allocation.n_bytes, made=made, kl=kl, outcome=outcome)

    def _end(self, found: Repair, sizes: StoredSizes) -> Repair:
        # More variants share one error: what passed in its round may not pass among all.
        outcomes = _outcomes(self.tracker, self.refused, self.gates, [one.made.run_id for one in self.trials])
        trials = [replace(one, outcome=outcome) for one, outcome in zip(self.trials, outcomes, strict=True)]
        passing = [one for one in trials if one.passed]
        best = min(passing, key=lambda one: one.n_bytes, default=None)
        tokens = int(self.config.space.cache_tokens) if self.caches else None
        rows = [_row(one, best, self.refused, tokens) for one in sorted(trials, key=lambda one: one.n_bytes)]
        changed = {}
        if best is not None:
            pairs = zip(sizes.chosen(best.choice).items(), best.choice, strict=True)
            changed = {group: name for (group, name), column in pairs if column != 0}
        recipe = None if best is None else Path(best.made.folder) / RECIPE_FILE
        repair = replace(
            found,
            passed=trials[0].passed,
            reasons=trials[0].outcome.failed or trials[0].outcome.reasons,
            trials=tuple(rows),
            cache_tokens=tokens,
            changed=changed,
            recipe=str(recipe) if recipe is not None and recipe.is_file() else None,
        )
        self._log(repair)
        return repair

    def _log(self, repair: Repair) -> None:
        run = self.run
        run.log_json(repair.to_dict(), "repair.json")
        run.log_text(rows_csv(list(repair.to_rows())), "repair.csv")
        run.log_text(policy_yaml(self.policy), "policy.yaml")
        if repair.recipe is not None:
            run.log_file(Path(repair.recipe))
        price = {} if repair.extra_bytes is None else {"search/extra_bytes": float(repair.extra_bytes)}
        run.log_values({"search/variants": len(repair.trials), **price})
        run.set_tags({run_names.VERDICT: repair.summary})
        run.set_note(repair.markdown())


def _row(trial: _Trial, best: _Trial | None, refused: Refused, tokens: int | None) -> RepairTrial:
    manifest = read_manifest(trial.made.folder, verify=False)
    repaired = best is not None and trial.made.run_id == best.made.run_id
    metrics, n_groups = trial.outcome.candidate.metrics, len(trial.choice) - len(refused.caches)
    cache, before = (
        None if tokens is None else math.ceil(tokens * (one.cache_bytes_per_token or 0.0))
        for one in (manifest, refused.manifest)
    )
    return RepairTrial(
        name=trial.made.name,
        role="refused" if not any(trial.choice) else "repaired" if repaired else "tried",
        raised=sum(column != 0 for column in trial.choice[:n_groups]),
        raised_caches=sum(column != 0 for column in trial.choice[n_groups:]),
        bits_per_weight=manifest.bits_per_weight,
        size_bytes=manifest.size_bytes,
        cache_bytes=cache,
        extra_bytes=manifest.size_bytes + (cache or 0) - refused.manifest.size_bytes - (before or 0),
        kl=metrics.get("distance/kl_mean"),
        flips_pct=metrics.get("distance/flips_pct"),
        search_kl=float(trial.kl.mean()),
        predicted_kl=trial.predicted,
        passed=trial.passed,
        reasons=trial.outcome.reasons,
        failed=trial.outcome.failed,
        run_id=trial.made.run_id,
    )
