"""The quantize stage: one method, one checkpoint with its manifest, checked by reloading it in a fresh process."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlflow_compress import __version__
from mlflow_compress.compress.checkpoint_manifest import MANIFEST_FILE, CheckpointManifest
from mlflow_compress.compress.method import METHODS, MethodConfig
from mlflow_compress.compress.method_settings import AUTO, NONE, method_config, parse_pairs
from mlflow_compress.compress.pipeline import compress_model
from mlflow_compress.config import QuantizeConfig
from mlflow_compress.errors import ConfigError
from mlflow_compress.home import out_folder
from mlflow_compress.models.source_model import SourceModel
from mlflow_compress.models.source_model import resolve as resolve_source
from mlflow_compress.models.stored_weights import hash_weights
from mlflow_compress.stages.model_names import model_label, model_path
from mlflow_compress.stages.task_inputs import calibration_set
from mlflow_compress.tasks.sources.calibration_sets import CalibrationSet
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracker import TrackedRun, Tracker
from mlflow_compress.tracking.views import how_to_open


def method_settings(config: QuantizeConfig) -> MethodConfig:
    """Return the method's own frozen settings, or raise the one clear error before any work is done."""
    given: dict[str, Any] = {"bits": config.bits, "group_size": config.group_size}
    if METHODS.get(config.method).needs_calibration:
        given |= {"calibration_samples": config.calibration_samples, "calibration_length": config.calibration_length}
        given["seed"] = config.seed
    if config.checkpoint != NONE:
        given["checkpoint"] = config.checkpoint
    further = parse_pairs(config.settings)
    if twice := sorted(given.keys() & further.keys()):
        raise ConfigError(f"{twice[0]} is a parameter of its own", got=config.settings, fix=f"Give -P {twice[0]}=...")
    return method_config(config.method, **given, **further)


def variant_name(config: QuantizeConfig) -> str:
    """Return the variant's short name, most distinctive first: "awq-4bit-g128"."""
    return METHODS.get(config.method).label(method_settings(config))


def resolved(config: QuantizeConfig, settings: MethodConfig, calibration: CalibrationSet | None) -> dict[str, object]:
    """Return the stage's parameters with what "auto" stands for; "none" is what the method does not have."""
    own = settings.settings()
    names_of_settings = ("bits", "group_size", "calibration_samples", "calibration_length")
    return {
        "model": config.model,
        "method": config.method,
        "seed": config.seed,
        "settings": config.settings,
        **{name: own.get(name, NONE) for name in names_of_settings},
        "calibration": calibration.name if calibration else NONE,
        "out": config.out,
    }


def checkpoint_folder(config: QuantizeConfig, settings: MethodConfig, source: SourceModel, texts: list[str]) -> Path:
    """Return where the checkpoint belongs: its name ends in a digest of everything that decides its bytes."""
    fingerprint = METHODS.get(config.method).fingerprint(settings)
    decides = [config.method, settings.settings(), texts, hash_weights(source.folder)[1], fingerprint, __version__]
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:8]
    label = model_label(config.model).replace("/", "-")
    return Path(config.out) / f"{label}-{variant_name(config)}-{digest}"


def size_values(manifest: CheckpointManifest) -> dict[str, float]:
    """Return what a manifest says of size and cost, as metrics."""
    zeros = {} if manifest.sparsity is None else {"size/sparsity": round(manifest.sparsity, 6)}
    return {
        **zeros,
        "size/ratio": round(manifest.size_ratio, 4),
        "size/bytes": manifest.size_bytes,
        "size/bits_per_weight": round(manifest.bits_per_weight, 4),
        "size/bits_per_weight_model": round(manifest.bits_per_weight_model, 4),
        "speed/compress_seconds": round(manifest.seconds, 2),
        "speed/compress_peak_memory_mb": round(manifest.peak_memory_bytes / 2**20, 1),
    }


def quantize(
    config: QuantizeConfig, settings: MethodConfig, calibration: CalibrationSet | None, run: TrackedRun
) -> tuple[CheckpointManifest, Path]:
    """Compress the baseline into a folder of `config.out`, and log settings, size and cost.

    A finished checkpoint that the same settings, weights and calibration text have made is used again, after its files
    were checked against its manifest.

    Raises
    ------
    MlflowCompressError
        Whatever is wrong with method, settings, model or calibration; a saved checkpoint that does not compute what
        the in-memory model computed is a `ReloadMismatchError`, and nothing is left in the output folder.
    """
    source = resolve_source(model_path(config.model), trust_remote_code=config.trust_remote_code)
    texts = calibration.rendered(source.tokenizer()) if calibration else []
    folder = checkpoint_folder(config, settings, source, texts)
    if folder.exists():
        manifest = CheckpointManifest.read(folder)
        run.set_tags({run_names.SKIPPED: "compression: the finished checkpoint was there already"})
    else:
        manifest = compress_model(
            model_path(config.model),
            config.method,
            settings,
            texts,
            folder,
            device=config.device,
            trust_remote_code=config.trust_remote_code,
        )
    device = manifest.device if config.device == AUTO else config.device
    run.log_params({**manifest.settings, **resolved(config, settings, calibration), "device": device})
    if calibration and manifest.calibration:
        run.log_params({"calibration_set": calibration.name, "calibration_sha256": manifest.calibration["sha256"]})
    run.set_tags(
        {run_names.CHECKPOINT: str(folder), run_names.METHOD: config.method, run_names.VARIANT: manifest.label}
    )
    run.log_values(size_values(manifest))
    run.log_file(folder / MANIFEST_FILE)
    run.set_note(f"**{manifest.label}**: {describe(manifest)}; reload check passed.")
    return manifest, folder


def describe(manifest: CheckpointManifest) -> str:
    """Return size and cost in plain words."""
    zeros = f", {100 * manifest.sparsity:.1f} % of them zero" if manifest.sparsity else ""
    return (
        f"{manifest.size_ratio:.2f}x smaller, {manifest.bits_per_weight:.2f} bits per linear weight{zeros} "
        f"({manifest.bits_per_weight_model:.2f} over the whole model), made in {manifest.seconds:.0f} s"
    )


def run_quantize(config: QuantizeConfig) -> str:
    """Run the stage under a run of its own and return what to tell the user; what is refused leaves no run behind."""
    settings, calibration = method_settings(config), calibration_set(config)
    METHODS.get(config.method).require_backend(settings)
    tracker = Tracker()
    config = replace(config, out=str(out_folder(config.out, tracker.uri)))
    label = model_label(config.model)
    with tracker.run(f"quantize {config.method} {label}", "quantize", {run_names.BASE_MODEL: label}) as run:
        manifest, folder = quantize(config, settings, calibration, run)
    return f"{manifest.label}: {describe(manifest)}\nCheckpoint: {folder}\n{how_to_open(tracker, run.run_id)}"
