"""Runs a diagnosis: each group of weights alone in the baseline, measured exactly; its texts, page and figures."""

import shlex
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mlflow_compress import files as atomic
from mlflow_compress.commands.command import Say, silent
from mlflow_compress.commands.diagnose.parameters import DiagnoseConfig, DiagnosisConfig
from mlflow_compress.commands.diagnose.result import Advice, Diagnosis
from mlflow_compress.commands.evaluate.items import suite_of, with_chat_template
from mlflow_compress.commands.evaluate.models import as_baseline, light
from mlflow_compress.commands.quantize.run import quantize
from mlflow_compress.commands.shared.get_or_create import digest, resumable_workdir, store_of_command
from mlflow_compress.commands.shared.named_method import calibration_set, method_settings
from mlflow_compress.commands.shared.named_models import described, folder_or_hub, model_label, model_path
from mlflow_compress.compression.checkpoint_manifest import MANIFEST_FILE, CheckpointManifest
from mlflow_compress.compression.method import METHODS, CalibratedConfig, method_config
from mlflow_compress.compression.mixed_recipe import KEPT, MIXED, MixedRecipe
from mlflow_compress.config import as_text
from mlflow_compress.errors import AlignmentError, ConfigError, MlflowCompressError
from mlflow_compress.home import out_folder
from mlflow_compress.items.suite import Suite
from mlflow_compress.items.task import Corpus
from mlflow_compress.metrics.diagnosis import (
    GroupsFound,
    MovedText,
    ShownText,
    SwapTable,
    by_category,
    by_class,
    by_position,
    class_rows,
    groups_to_keep,
    moved_texts,
    summarize_groups,
)
from mlflow_compress.models.identity import check_same_tokenizer
from mlflow_compress.models.loading import LightModel, LoadedModel, load_model
from mlflow_compress.models.source_model import SourceModel
from mlflow_compress.models.source_model import resolve as resolve_source
from mlflow_compress.models.weight_groups import Differences, find_differences
from mlflow_compress.records import MetricResult, SwapDistances
from mlflow_compress.reporting.search_tables import rows_csv
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from mlflow_compress.scoring.engine_identity import engine_identity
from mlflow_compress.scoring.plan.corpus_windows import Windows, cut_windows
from mlflow_compress.scoring.plan.encoding import Encoder
from mlflow_compress.scoring.swap_meter import ALL, NO_SWAP, WHOLE, Swap, SwapMeter, noise_swap
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.live_processes import scratch_folder
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker

_CONTEXT = 12  # tokens shown before a change


def _texts_of(corpora: Sequence[Corpus], model: LoadedModel, settings: DiagnosisConfig) -> dict[str, Windows]:
    """Return the texts of every corpus: windows one after the other, of which every token but the first is scored."""
    encoder = Encoder(model.tokenizer, model.max_length)
    texts = {}
    for corpus in corpora:
        limits = [n for n in (settings.corpus_tokens, corpus.max_tokens) if n]
        windows = cut_windows(encoder, corpus.text, settings.corpus_window, min(limits) if limits else None)
        texts[corpus.name] = replace(windows, scored=[np.arange(1, settings.corpus_window)] * len(windows.ids))
    return texts


class _TokenTexts:
    """What the tokens of the measured texts read as."""

    def __init__(self, windows: Mapping[str, Windows], tokenizer: Any) -> None:
        self._windows, self._tokenizer = windows, tokenizer
        self._after = cache(self._read_after)

    def rows(self, table: SwapTable) -> tuple[np.ndarray[Any, Any], list[str], list[str]]:
        """Return the token, its own text, and the text of the token before, of every row of a table."""
        tokens, token_texts, before = [], [], []
        for code, position in zip(table.text.tolist(), table.position.tolist(), strict=True):
            previous, token = (int(self._ids(*table.texts[code])[position + step]) for step in (-1, 0))
            tokens.append(token)
            token_texts.append(self._after(previous, token))
            before.append(self._text([previous]))
        return np.asarray(tokens, dtype=np.int64), token_texts, before

    def shown(self, moved: MovedText) -> ShownText:
        ids = self._ids(moved.task, moved.item_id)
        begins = self._text(ids[1 : _CONTEXT + 1].tolist())
        place = moved.first_change
        if place is None or moved.baseline_top is None or moved.variant_top is None:
            return ShownText(moved=moved, begins=begins)
        previous = int(ids[place - 1])
        return ShownText(
            moved=moved,
            begins=begins,
            context=self._text(ids[max(0, place - _CONTEXT) : place].tolist()),
            actual=self._after(previous, int(ids[place])),
            baseline=self._after(previous, moved.baseline_top),
            variant=self._after(previous, moved.variant_top),
        )

    def _ids(self, task: str, item_id: str) -> np.ndarray[Any, Any]:
        return np.asarray(self._windows[task].ids[int(item_id)])

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _read_after(self, previous: int, token: int) -> str:
        """Return a token's text as it reads after another: alone, some tokenizers drop its space."""
        return self._text([previous, token])[len(self._text([previous])) :]


_MOST_KINDS = 8
_PREFIX = "diagnose"


def _diagnosis_values(diagnosis: Diagnosis) -> dict[str, float]:
    """Return the metrics of the run, all below one prefix and fewer than 50, whatever the model."""
    results = diagnosis.results
    values = {
        "kl": results.whole.value,
        "kl_together": results.together.value,
        "kl_no_swap": results.no_swap,
        "kl_sum_of_groups": results.sum_of_parts,
        "kl_largest_group": results.largest.kl.value,
        "groups": len(results.groups),
        "groups_without_noise_control": sum(group.no_noise is not None for group in results.groups),
        "texts": results.n_texts,
        "tokens": results.whole.n,
        "seconds": round(diagnosis.seconds, 2),
    }
    for name, result in (
        ("kl", results.whole),
        ("additivity", results.additivity),
        ("against_noise", results.noise_ratio),
    ):
        if result is not None:
            values[name] = result.value
            for end in ("low", "high"):
                if (bound := getattr(result, end)) is not None:
                    values[f"{name}_{end}"] = bound
    sums: dict[str, float] = defaultdict(float)
    for group in results.groups:
        sums[group.kind] += group.kl.value
    largest = sorted(sums.items(), key=lambda item: -item[1])[:_MOST_KINDS]
    values |= {f"kl_of_kind/{kind.replace('+', '_')}": kl for kind, kl in largest}
    for kind, points in (("kl_at", diagnosis.positions), ("kl_of_class", diagnosis.classes)):
        values |= {f"{kind}/{str(one.category).replace(' ', '_')}": one.value for one in points}
    return {f"{_PREFIX}/{name}": value for name, value in values.items()}


_RECIPE = "recipe"  # artifact folder
_MORE_BITS = 8  # of the groups to keep


def _advise(
    swappable: GroupsFound,
    differences: Differences,
    model: Any,
    source: SourceModel,
    manifest: CheckpointManifest,
    folder: Path,
) -> Advice:
    """Return which groups to keep at more bits, and write the recipe that does into a folder.

    Kept groups have 8 bits where the method has them, and else stay as they are. Only groups with linear layers, which
    recipes name, can be kept. What `mixed` cannot make has no recipe, but the reason.
    """
    layers = {
        group.name: {name for name in source.linear if any(f"{name}.".startswith(f"{m}.") for m in group.modules)}
        for group in differences.groups
    }
    sizes = {
        group.name: sum(p.numel() for module in group.modules for p in model.get_submodule(module).parameters())
        for group in differences.groups
    }
    keep = groups_to_keep(swappable.groups, {name: size for name, size in sizes.items() if layers[name]})
    own = {name: value for name, value in manifest.settings.items() if name not in CalibratedConfig.model_fields}
    bits = max((bits for bits in METHODS.get(manifest.method).supported_bits if bits <= _MORE_BITS), default=0)
    more = bits > own.get("bits", _MORE_BITS)
    advice = Advice(
        keep=keep,
        share=sum(group.share or 0.0 for group in swappable.groups if group.name in keep),
        weights=sum(sizes[name] for name in keep) / sum(sizes.values()),
        kept_as=f"at {bits} bits" if more else "as they are",
    )

    if not keep:
        return advice
    plain, better = (f"{manifest.method}:{n}" if n else manifest.method for n in (own.get("bits"), bits))
    settings = {"method": manifest.method, **own}
    kept = set().union(*(layers[name] for name in keep))
    recipe = MixedRecipe(
        formats={plain: settings, **({better: {**settings, "bits": bits}} if more else {})},
        layers={name: (better if more else KEPT) if name in kept else plain for name in source.linear},
    )
    path = folder / f"{manifest.label}-keep-{len(keep)}.json"
    recipe.write(path)
    try:
        METHODS.get(MIXED).check(method_config(MIXED, recipe=str(path)), source)
    except MlflowCompressError as error:
        path.unlink()
        return replace(advice, no_recipe=str(error).rstrip("."))
    length = {name: manifest.settings[name] for name in CalibratedConfig.model_fields if name in manifest.settings}
    asked = "".join(f" --{name} {shlex.quote(str(value))}" for name, value in length.items() if name != "seed")
    return replace(advice, recipe=path, calibration=asked)


def _write_diagnosis(
    store: Tracker, run: TrackedRun, diagnosis: Diagnosis, records: SwapDistances, manifest: CheckpointManifest
) -> None:
    """Log everything on the run."""
    from mlflow_compress.reporting.diagnosis_page import render_diagnosis
    from mlflow_compress.reporting.figures import draw_diagnosis

    advice = diagnosis.advice
    recipe = "" if advice.recipe is None else f"The recipe for it is {_RECIPE}/{advice.recipe.name} of this run."
    run.log_values(_diagnosis_values(diagnosis))
    run.log_json(diagnosis.to_dict(), "diagnosis.json")
    with scratch_folder(store.uri) as folder:
        figures = draw_diagnosis(diagnosis.results, diagnosis.positions, diagnosis.classes, folder / "figures")
        page = render_diagnosis(
            title=f"{diagnosis.name} against {diagnosis.baseline}: where it moves",
            sentence=diagnosis.summary,
            advice=f"{advice.text} {recipe}",
            results=diagnosis.results,
            figures=figures,
            categories=diagnosis.categories,
            texts=diagnosis.texts,
            setup={
                "method": manifest.method,
                "settings": manifest.settings,
                "checkpoint": diagnosis.checkpoint,
                "tokens measured": diagnosis.results.whole.n,
                "groups with the baseline's weights": len(diagnosis.unchanged),
                "every layer computed for every group because": diagnosis.whole_model_reason
                or "only those after a swap were",
                "seconds": round(diagnosis.seconds, 1),
                "run": diagnosis.run.run_id,
            },
        )
        for name, text in (("diagnosis.html", page), ("groups.csv", rows_csv(diagnosis.to_rows()))):
            atomic.write(folder / name, text.encode())
            run.log_file(folder / name)
        run.log_folder(folder / "figures", "figures")
        records.write(folder / run_names.RECORDS)
        run.log_folder(folder / run_names.RECORDS, run_names.RECORDS)
    run.set_tags({run_names.VERDICT: diagnosis.summary})
    run.set_note(diagnosis.summary)


NOISE_ON = "noise on {}"
_SAME = 0.01  # of the whole variant's KL: what rounding may change


def _given_variant(config: DiagnoseConfig) -> CheckpointManifest | None:
    """Return what is known of a checkpoint of ours that is given; None where a variant has to be made."""
    checkpoint = config.compression.checkpoint
    if checkpoint is None or not (Path(checkpoint) / MANIFEST_FILE).is_file():
        return None
    made = described(checkpoint, config.source, config.evaluate_config.served)
    assert isinstance(made, CheckpointManifest)  # a folder is not served
    return made


def run_diagnose(config: DiagnoseConfig, store: Tracker | str | None = None, say: Say = silent) -> Diagnosis:
    """Run the stage in its own run, and return the diagnosis. Wrong parameters are refused before a run is made."""
    suite = suite_of(config.evaluate_config)
    corpora = _running_text(suite, config.evaluation.tasks)
    quantization, existing = config.quantize_config, _given_variant(config)
    if existing is None:
        settings, calibration = (
            method_settings(quantization.compression, config.source),
            calibration_set(quantization.compression, config.source),
        )
        METHODS.get(quantization.compression.method).require_backend(settings)
    label, path = model_label(config.source.model), model_path(config.source.model)
    with folder_or_hub("model", path):
        base = light(path, config.source, config.inference)
    inference = as_baseline(config.inference, base)
    with (
        store_of_command(config, store) as opened,
        opened.run(f"diagnose {label}", "diagnose", {run_names.BASE_MODEL: label}) as run,
    ):
        # The parameters of the compression are logged by it, with "auto" resolved.
        text = as_text(config)
        kinds = (config.evaluation, config.diagnosis, config.inference)
        names = ["model", *(name for group in kinds for name in type(group).model_fields)]
        run.log_params({**{name: text[name] for name in names}, "dtype": inference.dtype, **config.source.reason})
        if existing is not None:
            manifest, folder = existing, Path(str(config.compression.checkpoint))
        else:
            placed = out_folder(quantization.compression.output_dir, opened.uri)
            quantization = quantization.with_values(output_dir=str(placed))
            manifest, folder = quantize(quantization, settings, calibration, run)
        run.rename(f"diagnose {manifest.label} {label}")
        tags = {run_names.VARIANT: manifest.label, run_names.METHOD: manifest.method}
        run.set_tags({**tags, run_names.CHECKPOINT: str(folder)})
        variant = light(str(folder), config.source, inference)
        check_same_tokenizer(base, variant)
        began = time.monotonic()

        with resumable_workdir(opened.uri, _fingerprint(config, base, variant, suite)) as resume:
            models = load_model(base.config), load_model(variant.config)
            differences = find_differences(models[0].model, models[1].model)
            say(f"{manifest.label} differs from {label} in {len(differences.groups)} groups of weights")
            windows = _texts_of(corpora, models[0], config.diagnosis)
            records, groups, whole_model_reason = _measure(config, models, differences, windows, resume)
            categories = _categories(models, with_chat_template(base.tokenizer, suite), resume)
        table = SwapTable.of(records)
        texts = _TokenTexts(windows, base.tokenizer)
        tokens, texts_of_tokens, before = texts.rows(table)
        with scratch_folder(opened.uri) as scratch:
            recipes = scratch / _RECIPE
            recipes.mkdir()
            source = resolve_source(path, trust_remote_code=config.source.trust_remote_code)
            advice = _advise(groups, differences, models[0].model, source, manifest, recipes)
            if advice.recipe is not None:
                run.log_folder(recipes, _RECIPE)
        diagnosis = Diagnosis(
            name=manifest.label,
            baseline=label,
            model=config.source.model,
            advice=advice,
            checkpoint=str(folder),
            results=groups,
            unchanged=tuple(group.name for group in differences.unchanged),
            positions=by_position(table, WHOLE),
            classes=by_class(table, WHOLE, class_rows(texts_of_tokens, before, tokens)),
            categories=categories,
            texts=tuple(texts.shown(moved) for moved in moved_texts(table, WHOLE, NO_SWAP)),
            whole_model_reason=whole_model_reason,
            seconds=time.monotonic() - began,
            records_folder=Path(),
            run=opened.link(run.run_id),
        )
        _write_diagnosis(opened, run, diagnosis, records, manifest)
    run_id = diagnosis.run.run_id
    if advice.recipe is not None:
        advice = replace(advice, recipe=opened.fetch(run_id, _RECIPE) / advice.recipe.name)
    return replace(diagnosis, advice=advice, records_folder=opened.fetch(run_id, run_names.RECORDS))


def _running_text(suite: Suite, tasks: str) -> list[Corpus]:
    corpora = [corpus for corpus in suite.corpora if isinstance(corpus, Corpus)]
    if not corpora or len(corpora) < len(suite.corpora):
        raise ConfigError(
            "A diagnosis needs an existing text corpus",
            allowed="tasks with a corpus: demo, wikitext2, or a file such as corpus.txt",
            got=tasks,
            fix="Add a corpus to 'tasks', and leave 'traces' out",
        )
    return corpora


def _fingerprint(config: DiagnoseConfig, base: LightModel, variant: LightModel, suite: Suite) -> str:
    return digest(
        {
            "stage": "diagnose",
            "baseline": base.weights,
            "variant": variant.weights,
            "dtype": str(base.dtype),
            "device": base.device.type,
            "rounding": base.rounding,
            "tasks": suite.hashes,
            "settings": config.diagnosis.model_dump(),
            "seed": config.source.seed,
            **engine_identity(base.path),
        }
    )


def _measure(
    config: DiagnoseConfig,
    models: tuple[LoadedModel, LoadedModel],
    differences: Differences,
    windows: dict[str, Windows],
    resume: Path,
) -> tuple[SwapDistances, GroupsFound, str | None]:
    """Return the distances of all swaps, those of the groups, and why every swap runs the whole model, if it does."""
    base, variant = models
    swaps = [Swap.of(group, variant.model) for group in differences.groups]
    controls: dict[str, Swap | str] = {}
    if config.diagnosis.noise_control:
        controls = {
            group.name: noise_swap(
                group, NOISE_ON.format(group.name), base.model, variant.model, differences, seed=config.source.seed
            )
            for group in differences.groups
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
    records = SwapDistances.concat(parts)
    noise_names = {name: swap.name for name, swap in noise.items()}
    no_noise = {name: reason for name, reason in controls.items() if isinstance(reason, str)}
    named = {group.name: (group.kind, group.layer) for group in differences.groups}
    groups = summarize_groups(
        SwapTable.of(records), named, noise_names, no_noise, whole=WHOLE, together=ALL, no_swap=NO_SWAP
    )
    whole, together = groups.whole.value, groups.together.value
    if abs(whole - together) > _SAME * max(whole, 1e-6):
        raise AlignmentError(
            "All groups together do not give the variant: it differs in something that no group contains",
            allowed=f"a KL of {whole:.6g}, within rounding",
            got=f"{together:.6g}",
            fix="Evaluate the complete variant instead (mlflow-compress evaluate)",
        )
    return records, groups, meter.whole_model_reason


def _categories(models: tuple[LoadedModel, LoadedModel], suite: Suite, resume: Path) -> tuple[MetricResult, ...]:
    """Return the KL of the whole variant by task and category; nothing where the tasks have no scored items."""
    requests = [request for request in suite.requests if request.permutation == 0]
    if not requests:
        return ()
    base, variant = models
    _, distances = Scorer(variant, ScoringConfig()).score(requests, baseline=base, resume=resume)
    assert distances is not None  # there is a baseline
    return by_category(suite.items, distances)
