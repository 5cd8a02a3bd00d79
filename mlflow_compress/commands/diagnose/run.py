"""The diagnose stage: swaps one group of weights at a time, and says where a variant's movement comes from."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlflow_compress.commands.diagnose.diagnosis_files import (
    TokenTexts,
    corpora_of,
    logged_params,
    texts_of,
    write_diagnosis,
)
from mlflow_compress.commands.diagnose.parameters import DiagnoseConfig
from mlflow_compress.commands.diagnose.result import Diagnosis
from mlflow_compress.commands.evaluate.models import light
from mlflow_compress.commands.evaluate.run import with_chat_template
from mlflow_compress.commands.quantize.run import method_settings, quantize
from mlflow_compress.commands.shared.get_or_create import digest, resumable_workdir
from mlflow_compress.commands.shared.model_names import folder_or_hub, model_label, model_path
from mlflow_compress.commands.shared.task_inputs import calibration_set, suite_of
from mlflow_compress.commands.shared.unfinished import store_of_command
from mlflow_compress.compression.checkpoint_manifest import MANIFEST_FILE, CheckpointManifest
from mlflow_compress.compression.method import METHODS
from mlflow_compress.errors import AlignmentError, UnsupportedError
from mlflow_compress.home import out_folder
from mlflow_compress.items.suite import Suite
from mlflow_compress.items.task import Corpus
from mlflow_compress.metrics.diagnosis import (
    SwapTable,
    by_category,
    by_class,
    by_position,
    class_rows,
    moved_texts,
    summarize_groups,
)
from mlflow_compress.models.identity import check_same_tokenizer
from mlflow_compress.models.light_model import LightModel
from mlflow_compress.models.loading import LoadedModel, load_model
from mlflow_compress.models.placement import BALANCED
from mlflow_compress.models.weight_groups import Differences, find_differences
from mlflow_compress.records import MetricResult, SwapDistances
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from mlflow_compress.scoring.engine_identity import engine_identity
from mlflow_compress.scoring.plan.corpus_windows import Windows
from mlflow_compress.scoring.swaps.swap_meter import ALL, NO_SWAP, WHOLE, Swap, SwapMeter, noise_swap
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.store import OpenRun, Store

NOISE = "noise on {}"
_SAME = 0.01  # of the whole variant's KL: what rounding may change
Say = Callable[[str], None]
VariantMaker = Callable[[OpenRun, str], tuple[CheckpointManifest, Path]]


@dataclass(frozen=True)
class _Measured:
    """The distances of all swaps, and which swap is what."""

    records: SwapDistances
    noise: dict[str, str]
    no_noise: dict[str, str]
    whole_model_reason: str | None


def run_diagnose(config: DiagnoseConfig, store: Store | None = None, say: Say = lambda line: None) -> Diagnosis:
    """Run the stage in its own run, and return the diagnosis. Wrong parameters are refused before a run is made.

    Raises
    ------
    ConfigError, DataError
        A parameter is wrong, or there is no running text.
    UnsupportedError
        The variant cannot be swapped into its baseline group by group (see `find_differences`).
    AlignmentError
        A control has failed: without a swap the KL is not 0, or all groups together are not the variant.
    """
    suite = suite_of(config.evaluate_config)
    corpora = corpora_of(suite, config.evaluation.tasks)
    if config.source.device == BALANCED:
        raise UnsupportedError(
            "A diagnosis holds both models in memory", got="device=balanced", fix="Use another device"
        )
    make = _maker(config)
    with store_of_command(config, store) as opened:
        return _diagnose(config, suite, corpora, make, opened, say)


def _diagnose(
    config: DiagnoseConfig, suite: Suite, corpora: Sequence[Corpus], make: VariantMaker, store: Store, say: Say
) -> Diagnosis:
    label = model_label(config.source.model)
    path = model_path(config.source.model)
    with folder_or_hub("model", path):
        base = light(path, config.source, config.inference)
    with store.run(f"diagnose {label}", "diagnose", {run_names.BASE_MODEL: label}) as run:
        run.log_params(logged_params(config))
        manifest, folder = make(run, store.uri)
        run.rename(f"diagnose {manifest.label} {label}")
        run.set_tags(
            {
                run_names.VARIANT: manifest.label,
                run_names.METHOD: manifest.method,
                run_names.CHECKPOINT: str(folder),
            }
        )
        variant = light(str(folder), config.source, config.inference)
        check_same_tokenizer(base, variant)
        began = time.monotonic()
        with resumable_workdir(store.uri, _fingerprint(config, base, variant, suite)) as resume:
            models = load_model(base.config), load_model(variant.config)
            found = find_differences(models[0].model, models[1].model)
            say(f"{manifest.label} differs from {label} in {len(found.groups)} groups of weights")
            windows = texts_of(corpora, models[0], config.diagnosis)
            measured = _measure(config, models, found, windows, resume)
            categories = _categories(models, with_chat_template(base, suite), resume)
        table = SwapTable.of(measured.records)
        groups = summarize_groups(
            table, found.groups, measured.noise, measured.no_noise, whole=WHOLE, together=ALL, no_swap=NO_SWAP
        )
        _require_whole(groups.whole, groups.together)
        texts = TokenTexts(windows, base.tokenizer)
        tokens, own, before = texts.rows(table)
        diagnosis = Diagnosis(
            name=manifest.label,
            baseline=label,
            checkpoint=str(folder),
            found=groups,
            unchanged=tuple(group.name for group in found.unchanged),
            positions=by_position(table, WHOLE),
            classes=by_class(table, WHOLE, class_rows(own, before, tokens)),
            categories=categories,
            texts=tuple(texts.shown(moved) for moved in moved_texts(table, WHOLE, NO_SWAP)),
            whole_model_reason=measured.whole_model_reason,
            seconds=time.monotonic() - began,
            records_folder=Path(),
            run=store.link(run.run_id),
        )
        write_diagnosis(store, run, diagnosis, measured.records, manifest)
    return replace(diagnosis, records_folder=store.fetch(diagnosis.run.run_id, run_names.RECORDS))


def _maker(config: DiagnoseConfig) -> VariantMaker:
    """Return what gives the variant: the checkpoint that exists, or the compression. Wrong settings are refused now."""
    given = config.compression.checkpoint
    if given is not None and (Path(given) / MANIFEST_FILE).is_file():
        manifest = CheckpointManifest.read(Path(given))
        return lambda run, uri: (manifest, Path(given))
    asked = config.quantize_config
    settings, calibration = method_settings(asked), calibration_set(asked)
    METHODS.get(asked.compression.method).require_backend(settings)

    def make(run: OpenRun, uri: str) -> tuple[CheckpointManifest, Path]:
        placed = asked.with_values(output_dir=str(out_folder(asked.compression.output_dir, uri)))
        return quantize(placed, settings, calibration, run)

    return make


def _fingerprint(config: DiagnoseConfig, base: LightModel, variant: LightModel, suite: Suite) -> str:
    """Return the digest of everything that the measurements depend on."""
    return digest(
        {
            "stage": "diagnose",
            "baseline": base.weights,
            "variant": variant.weights,
            "dtype": str(base.dtype),
            "device": base.device.type,
            "rounding": base.rounding,
            "tasks": suite.hashes(),
            "settings": config.diagnosis.model_dump(),
            "seed": config.source.seed,
            **engine_identity(base.path),
        }
    )


def _measure(
    config: DiagnoseConfig,
    models: tuple[LoadedModel, LoadedModel],
    found: Differences,
    windows: dict[str, Windows],
    resume: Path,
) -> _Measured:
    base, variant = models
    swaps = [Swap.of(group, variant.model) for group in found.groups]
    controls: dict[str, Swap | str] = {}
    if config.diagnosis.noise_control:
        controls = {
            group.name: noise_swap(
                group, NOISE.format(group.name), base.model, variant.model, found, seed=config.source.seed
            )
            for group in found.groups
        }
    noise = {name: swap for name, swap in controls.items() if isinstance(swap, Swap)}
    meter = SwapMeter(base, state_bytes=int(config.diagnosis.state_memory * 2**30))
    identity = {"variant": variant.weights, "seed": str(config.source.seed)}
    parts = [
        meter.measure(
            task,
            texts,
            [*swaps, *noise.values(), Swap.together(ALL, swaps)],
            variant=variant,
            resume=resume,
            identity=identity,
        )
        for task, texts in windows.items()
    ]
    return _Measured(
        records=SwapDistances.concat(parts),
        noise={name: swap.name for name, swap in noise.items()},
        no_noise={name: reason for name, reason in controls.items() if isinstance(reason, str)},
        whole_model_reason=meter.whole_model_reason,
    )


def _categories(models: tuple[LoadedModel, LoadedModel], suite: Suite, resume: Path) -> tuple[MetricResult, ...]:
    """Return the KL of the whole variant by task and category; nothing where the tasks have no scored items."""
    requests = [request for request in suite.requests if request.permutation == 0]
    if not requests:
        return ()
    base, variant = models
    _, distances = Scorer(variant, ScoringConfig()).score(requests, baseline=base, resume=resume)
    assert distances is not None  # there is a baseline
    return by_category(suite.items, distances)


def _require_whole(whole: MetricResult, together: MetricResult) -> None:
    """Refuse a diagnosis whose groups do not make up the variant."""
    if abs(whole.value - together.value) > _SAME * max(whole.value, 1e-6):
        raise AlignmentError(
            "All groups together are not the variant: it differs in something that is in none of them",
            allowed=f"a KL of {whole.value:.6g}, within rounding",
            got=f"{together.value:.6g}",
            fix="Evaluate it as a whole instead (mlflow-compress evaluate)",
        )
