"""The quantize stage: compresses a model with one method, and checks the checkpoint in a fresh process."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow_compress.commands.quantize.parameters import QuantizeConfig
from mlflow_compress.commands.shared.get_or_create import store_of_command
from mlflow_compress.commands.shared.named_method import calibration_set, method_settings
from mlflow_compress.commands.shared.named_models import is_small, model_label, model_path
from mlflow_compress.commands.shared.tabular import Tabular, lines_of_run
from mlflow_compress.compression.checkpoint_manifest import MANIFEST_FILE, CheckpointManifest, hash_read
from mlflow_compress.compression.method import METHODS, MethodConfig, variant_label
from mlflow_compress.compression.pipeline import compress_model
from mlflow_compress.compression.servers import check_target
from mlflow_compress.config import as_text
from mlflow_compress.config.declarations import AUTO, NONE
from mlflow_compress.decide.gates import CACHE, CACHE_RATIO
from mlflow_compress.files import alone_with, drop_unfinished_folders
from mlflow_compress.home import out_folder
from mlflow_compress.items.sources.calibration_sets import CalibrationSet
from mlflow_compress.kept import kept
from mlflow_compress.lifetime import keep_freed_memory
from mlflow_compress.models.checkpoint_config import CACHE_IGNORED, QUANTIZED_CACHE, unused_weights
from mlflow_compress.models.gguf_file import text_warning
from mlflow_compress.models.placement import Offload
from mlflow_compress.models.source_model import SourceModel, local_model_folder
from mlflow_compress.models.source_model import resolve as resolve_source
from mlflow_compress.models.stored_weights import hash_weights
from mlflow_compress.paths import is_stage
from mlflow_compress.reporting.numbers import ratio_text
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.store import RunLink
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker
from mlflow_compress.version import __version__


@dataclass(frozen=True, kw_only=True)
class CompressedModel(Tabular):
    """A compressed checkpoint that was loaded again in a fresh process and computes what it should."""

    folder: Path  # The checkpoint: transformers, and engines that know its format, load it
    manifest: CheckpointManifest  # How it was made, and what it weighs
    run: RunLink  # The run that holds it
    warning: str | None = None  # What the checkpoint must not be used for, or which files of the model are not in it

    def __fspath__(self) -> str:
        """Return the folder: a result is given where a checkpoint is asked for."""
        return str(self.folder)

    @property
    def name(self) -> str:
        """The variant's short name: "awq-4bit-g128"."""
        return self.manifest.label

    @property
    def summary(self) -> str:
        made = self.manifest
        zeros, before = 100 * (made.sparsity or 0.0), 100 * (made.base_sparsity or 0.0)
        pruned = f", {zeros:.1f} % of them zero ({before:.1f} % in the baseline)" if zeros - before >= 0.05 else ""
        ratio = made.cache_ratio
        cache = "" if ratio is None or ratio == 1 else f", its cache {ratio_text(ratio)}"
        alone = ["Only this package reads its format: no server does"] if made.served_by == [] else []
        said = (
            f"{self.name}: {made.size_ratio:.2f}x smaller, {made.bits_per_weight:.2f} bits per linear weight{pruned} "
            f"({made.bits_per_weight_model:.2f} over the whole model){cache}, made in {made.seconds:.0f} s"
        )
        return ". ".join([said, *alone, *self._warnings])

    @property
    def remark(self) -> str:
        return f"{self.name}: {'. '.join(self._warnings)}" if self._warnings else ""

    @property
    def _warnings(self) -> list[str]:
        ignored = [CACHE_IGNORED] if QUANTIZED_CACHE in self.manifest.format else []
        return [*ignored, *([self.warning] if self.warning else [])]

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        kept = ("method", "format", "size_ratio", "size_bytes", "bits_per_weight", "bits_per_weight_model", "seconds")
        return [{"name": self.name, **{field: getattr(self.manifest, field) for field in kept}}]

    def as_text(self) -> str:
        return "\n".join([self.summary, f"Checkpoint: {self.folder}", *lines_of_run(self.run)])


def _source(config: QuantizeConfig) -> SourceModel:
    return resolve_source(model_path(config.source.model), trust_remote_code=config.source.trust_remote_code)


def variant_name(config: QuantizeConfig) -> str:
    """Return the variant's short name, such as "awq-4bit-g128"."""
    return variant_label(config.compression.method, method_settings(config.compression, config.source))


def resolved(config: QuantizeConfig, settings: MethodConfig, calibration: CalibrationSet | None) -> dict[str, object]:
    """Return the stage's parameters with "auto" resolved; "none" for settings that the method does not have."""
    own = settings.settings()
    names_of_settings = ("bits", "group_size", "calibration_samples", "calibration_length")
    return {
        "model": config.source.model,
        "method": config.compression.method,
        "seed": config.source.seed,
        "method_args": as_text(config)["method_args"],
        **{name: own.get(name, NONE) for name in names_of_settings},
        "calibration": calibration.name if calibration else NONE,
        "output_dir": config.compression.output_dir,
    }


def new_checkpoint_folder(config: QuantizeConfig, settings: MethodConfig, source: Path, texts: list[str]) -> Path:
    """Return the checkpoint's folder. Its name ends in a digest of everything that decides the checkpoint's bytes."""
    fingerprinted = [
        config.compression.method,
        settings.settings(),
        texts,
        kept(("weights", source), lambda: hash_weights(source)[1]),
        hash_read(source),
        METHODS.get(config.compression.method).fingerprint(settings),
        __version__,
    ]
    digest = hashlib.sha256(json.dumps(fingerprinted, sort_keys=True).encode()).hexdigest()[:8]
    label = model_label(config.source.model).replace("/", "-")
    return Path(config.compression.output_dir) / f"{label}-{variant_name(config)}-{digest}"


def size_values(manifest: CheckpointManifest) -> dict[str, float]:
    """Return size and cost of a checkpoint as metrics."""
    zeros = {} if manifest.sparsity is None else {"size/sparsity": round(manifest.sparsity, 6)}
    cache: dict[str, float] = {}
    if manifest.cache_bytes_per_token is not None and manifest.cache_ratio is not None:
        cache = {CACHE: round(manifest.cache_bytes_per_token, 2), CACHE_RATIO: round(manifest.cache_ratio, 4)}
    return {
        **zeros,
        **cache,
        run_names.PROCESSOR: round(manifest.processor_seconds, 2),
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
    """Compress the baseline, log settings, size and cost, and return manifest and folder.

    A finished checkpoint of the same settings, weights and calibration text is checked, and reused.
    """
    # Only what must be is described: that takes torch and transformers, and a finished checkpoint needs neither.
    if config.compression.target != "any":
        check_target(config.compression.target, METHODS.get(config.compression.method), settings, _source(config))
    texts = calibration.rendered(_source(config).tokenizer()) if calibration else []
    folder = new_checkpoint_folder(config, settings, local_model_folder(model_path(config.source.model)), texts)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone_with(folder.with_name(f".{folder.name}.lock")):  # another process may make the same checkpoint now
        if folder.exists():
            manifest = CheckpointManifest.read(folder)
            run.set_tags({run_names.SKIPPED: "compression: the finished checkpoint already existed"})
        else:
            drop_unfinished_folders(folder)  # of processes that were killed: this one has the lock
            manifest = compress_model(
                model_path(config.source.model),
                config.compression.method,
                settings,
                texts,
                folder,
                device=config.source.device,
                offload=Offload(max_memory=config.source.max_memory, folder=config.source.offload_dir),
                trust_remote_code=config.source.trust_remote_code,
            )
    device = manifest.device if config.source.device == AUTO else config.source.device
    run.log_params({**manifest.settings, **resolved(config, settings, calibration), "device": device})
    if calibration and manifest.calibration:
        run.log_params({"calibration_set": calibration.name, "calibration_sha256": manifest.calibration["sha256"]})
    run.set_tags(
        {
            run_names.CHECKPOINT: str(folder),
            run_names.METHOD: config.compression.method,
            run_names.VARIANT: manifest.label,
        }
    )
    run.log_values(size_values(manifest))
    run.log_file(folder / MANIFEST_FILE)
    return manifest, folder


def run_quantize(config: QuantizeConfig, store: Tracker | str | None = None) -> CompressedModel:
    """Run the stage in its own run, and return the checkpoint. Wrong parameters are refused before a run is made."""
    settings, calibration = (
        method_settings(config.compression, config.source),
        calibration_set(config.compression, config.source),
    )
    if is_stage() and is_small(config.source):  # a process of its own, whose tensors come and go
        keep_freed_memory()
    METHODS.get(config.compression.method).require_backend(settings)
    label, method = model_label(config.source.model), config.compression.method
    with (
        store_of_command(config, store) as store,
        store.run(f"quantize {method} {label}", "quantize", {run_names.BASE_MODEL: label}) as run,
    ):
        config = config.with_values(output_dir=str(out_folder(config.compression.output_dir, store.uri)))
        manifest, folder = quantize(config, settings, calibration, run)
        warnings = [text_warning(_source(config).tokenizer())] if manifest.format == "gguf" else []
        if unused := unused_weights(local_model_folder(model_path(config.source.model))):
            warnings.append(f"Not loaded from the model's folder, and not counted: {', '.join(unused)}")
        warning = ". ".join(filter(None, warnings)) or None
        compressed = CompressedModel(folder=folder, manifest=manifest, run=store.link(run.run_id), warning=warning)
        run.set_note(f"**{compressed.summary}**; reload check passed.")
    return compressed
