"""The quantize stage: one method, one checkpoint with its manifest, checked by reloading it in a fresh process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlflow_compress import demo
from mlflow_compress.compress.base import METHODS, method_config
from mlflow_compress.compress.manifest import Manifest
from mlflow_compress.compress.pipeline import compress_model
from mlflow_compress.config import QuantizeConfig
from mlflow_compress.stages.variant import model_label, model_path
from mlflow_compress.tasks.files import read_text
from mlflow_compress.tasks.suite import resolve
from mlflow_compress.tracking import names
from mlflow_compress.tracking.store import TrackedRun, Tracker
from mlflow_compress.tracking.views import how_to_open


def method_settings(config: QuantizeConfig) -> Any:
    """Return the method's own frozen configuration, or raise the one clear error before any work is done."""
    method = METHODS.get(config.method)
    given: dict[str, Any] = {}
    if method.needs_calibration:
        given = {"calibration_samples": config.calibration_samples, "calibration_length": config.calibration_length}
        given["seed"] = config.seed
    return method_config(config.method, bits=config.bits, group_size=config.group_size, **given)


def variant_name(config: QuantizeConfig) -> str:
    """Return the variant's short name, most distinctive first: "awq-4bit-g128"."""
    settings = method_settings(config)
    parts = [config.method]
    if getattr(settings, "bits", None) and config.method != "none":
        parts.append(f"{settings.bits}bit")
    if getattr(settings, "group_size", None):
        parts.append(f"g{settings.group_size}")
    return "-".join(parts)


def calibration_texts(config: QuantizeConfig) -> list[str]:
    """Return the calibration paragraphs, or none where the method needs none."""
    if not METHODS.get(config.method).needs_calibration:
        return []
    path = resolve(
        "calibration", config.calibration, model=config.model, embedded=demo.DATA_DIR / "calibration.txt"
    )
    return [paragraph for paragraph in read_text(path).split("\n\n") if paragraph.strip()]


def quantize(config: QuantizeConfig, run: TrackedRun) -> Manifest:
    """Compress the baseline into `<out>/<model>-<variant>`, and log settings, size and cost.

    Raises
    ------
    MlflowCompressError
        Whatever is wrong with method, settings, model or calibration; a saved checkpoint that does not compute what
        the in-memory model computed is a `ReloadMismatchError`, and nothing is left in the output folder.
    """
    settings = method_settings(config)
    texts = calibration_texts(config)
    name = variant_name(config)
    folder = Path(config.out).resolve() / f"{model_label(config.model).replace('/', '-')}-{name}"
    manifest = compress_model(
        model_path(config.model),
        config.method,
        settings,
        texts,
        folder,
        device=config.device,
        trust_remote_code=config.trust_remote_code,
    )
    run.log_params({"model": config.model, "method": config.method, **manifest.settings})
    run.set_tags({names.CHECKPOINT: str(folder), names.METHOD: config.method, names.VARIANT: name})
    run.log_values(size_values(manifest))
    run.log_file(folder / Manifest.FILE)
    return manifest


def size_values(manifest: Manifest) -> dict[str, float]:
    """Return what a manifest says of size and cost, as metrics."""
    return {
        "size/ratio": manifest.size_ratio,
        "size/bytes": manifest.bytes,
        "size/bits_per_weight": manifest.bits_per_weight,
        "speed/compress_seconds": manifest.seconds,
        "speed/compress_peak_memory_mb": manifest.peak_memory_bytes / 2**20,
    }


def run_quantize(config: QuantizeConfig) -> str:
    """Run the stage under a run of its own and return what to tell the user."""
    tracker = Tracker()
    label = model_label(config.model)
    name = f"quantize {variant_name(config)} {label}"
    with tracker.run(name, "quantize", {names.BASE_MODEL: label}) as run:
        manifest = quantize(config, run)
        folder = tracker.client.get_run(run.run_id).data.tags[names.CHECKPOINT]
    lines = [
        f"{variant_name(config)}: {manifest.size_ratio:.2f}x smaller, {manifest.bits_per_weight:.2f} bits per weight,",
        f"reload check passed, checkpoint in {folder}",
        how_to_open(tracker, run.run_id),
    ]
    return "\n".join(lines)
