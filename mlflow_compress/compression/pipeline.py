"""The compression pipeline: check, compress, verify by reloading, publish."""

import contextlib
import io
import json
import logging
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from mlflow_compress import files as atomic
from mlflow_compress.compression import probe as probe_module
from mlflow_compress.compression.calibration_tokens import Calibration, prepare_calibration
from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest, hash_others
from mlflow_compress.compression.method import (
    METHODS,
    CompressionJob,
    Logits,
    Method,
    MethodConfig,
    require_placed,
    variant_label,
)
from mlflow_compress.compression.servers import served_by
from mlflow_compress.errors import CheckpointError, ConfigError, UnsupportedError
from mlflow_compress.hashes import sha256_file
from mlflow_compress.lifetime import processor_time
from mlflow_compress.models import checkpoint_config, stored_weights
from mlflow_compress.models.model_files import open_config
from mlflow_compress.models.placement import BALANCED, Offload, placement
from mlflow_compress.models.source_model import SourceModel, resolve
from mlflow_compress.warm_python import WarmPython


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within this block, suppress output, progress bars, warnings, and log messages below ERROR.

    Exceptions are not affected. The libraries write several hundred lines for each compression. torch.fx logs through a
    handler that a redirection of the output does not reach, so logging itself is disabled. The environment variable
    TOKENIZERS_PARALLELISM is set within the block; llm-compressor would set it too, with a warning.
    """
    parallelism = os.environ.get("TOKENIZERS_PARALLELISM")
    logging_before = logging.root.manager.disable
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logging.disable(logging.WARNING)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging_before)
        if parallelism is None:
            os.environ.pop("TOKENIZERS_PARALLELISM", None)
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = parallelism


@dataclass
class Peak:
    """Result of `peak_memory`; it has its values when the block ends."""

    n_bytes: int = 0  # Peak memory in bytes
    # "cuda": allocated on the GPU by torch; "rss": resident memory of the process during the block; "rss_process":
    # resident memory since the process began, where the system cannot reset the peak
    kind: str = "rss"


@contextmanager
def peak_memory(device: str) -> Iterator[Peak]:
    """Measure the peak memory until the block ends."""
    peak = Peak()
    if device.startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats()
        yield peak
        peak.n_bytes, peak.kind = int(torch.cuda.max_memory_allocated()), "cuda"
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's peak to the present use (Linux)
    except OSError:
        peak.kind = "rss_process"
    yield peak
    peak.n_bytes = _peak_rss()


def _peak_rss() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024  # macOS counts bytes, Linux kibibytes


logger = logging.getLogger(__name__)

LIBRARIES = (
    "torch",
    "transformers",
    "llmcompressor",
    "compressed-tensors",
    "bitsandbytes",
    "gguf",
    "accelerate",
    "safetensors",
    "torchao",
    "llama-cpp-python",
    "gptqmodel",
    "auto-round",
)


def compress_model(
    model: str,
    method: str,
    config: MethodConfig | None,
    calibration: Sequence[str],
    out: Path,
    *,
    device: str = "auto",
    offload: Offload | None = None,
    trust_remote_code: bool = False,
) -> CheckpointManifest:
    """Compress a model into a new folder.

    The checkpoint is written to a hidden folder next to `out`, loaded in a new process, and compared with the model in
    memory. Then its manifest is written, and the folder is renamed to `out`. So `out` is always complete and verified.

    - `model`: Folder or hub id of a causal language model stored as safetensors.
    - `method`: Name in `METHODS`.
    - `config`: The method's settings (`method_config` builds them from text); None: its defaults.
    - `calibration`: Texts for methods that need them; others ignore them.
    - `out`: Folder to create; an existing one must be empty.
    - `device`: "auto" (a GPU if there is one), "cpu", "cuda", or "balanced": layer by layer, with most weights on the
      disk.
    - `offload`: With "balanced": the memory that weights may take, and where the rest is kept.
    - `trust_remote_code`: Whether the model's own Python code may run.

    Also written to ``out/compression.json``.
    """
    chosen = METHODS.get(method)
    settings = chosen.Config() if config is None else config
    if type(settings) is not chosen.Config:
        raise ConfigError(f"The settings are not those of method {method!r}", got=type(settings).__qualname__)
    label = variant_label(method, settings)
    chosen.require_backend(settings)
    if chosen.needs_calibration and not any(text.strip() for text in calibration):
        raise ConfigError(f"Method {method!r} needs calibration text", fix="Give a calibration file")
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError("The output folder exists and is not empty", got=str(out), fix="Give a new folder")
    if device not in ("auto", "cpu", "cuda", BALANCED):
        raise ConfigError("Unknown device", allowed=["auto", "cpu", "cuda", BALANCED], got=device)
    placed = str(placement("auto" if device == BALANCED else device)["device_map"][""].type)

    require_placed(chosen, settings, device)
    offload = (offload or Offload()) if device == BALANCED else None
    source = resolve(model, trust_remote_code=trust_remote_code)
    require_supported(chosen, settings, source)
    with quiet(), METHODS.blaming(method):
        tokens = _calibration(chosen, settings, source, calibration)
    with atomic.staging_folder(out) as folder:
        job = CompressionJob(
            source=source,
            config=settings,
            calibration=tokens,
            probe=probe_module.Probe.for_model(source),
            device=placed,
            folder=folder,
            offload=offload,
        )
        manifest = _compress_and_verify(chosen, job, label)
        manifest.write(folder)
    return manifest


def require_supported(method: Method[Any], settings: MethodConfig, source: SourceModel) -> None:
    """Raise an error, before any work, where a method cannot compress a model with these settings."""
    if method.linear_only:
        taken = method.takes_experts(settings)
        others = () if taken or not source.experts else _taking_experts(source)
        source.require_linear(method.name, with_experts=taken, taking_experts=others)
    if method.by_class and source.subclassed is not None:
        raise UnsupportedError(
            f"The library of {method.name!r} skips linear layers of a subclass, such as {source.subclassed}",
            got=source.architecture,
            fix="Use hqq, which supports them",
        )
    with quiet(), METHODS.blaming(method.name):
        method.check_folder(source.folder)
        method.check(settings, source)


def _taking_experts(source: SourceModel) -> list[str]:
    """Return the methods that compress this mixture's experts; GGUF has names for some architectures only."""
    names = []
    for name, method in METHODS.items():
        settings = method.Config()
        if method.takes_experts(settings):
            with suppress(UnsupportedError):
                if method.format == "gguf":
                    method.check(settings, source)
                names.append(name)
    return names


def _compress_and_verify(method: Method[Any], job: CompressionJob[MethodConfig], label: str) -> CheckpointManifest:
    start, processor = time.perf_counter(), processor_time()
    with peak_memory(job.device) as peak:
        logits = write_compressed(method, job)
    seconds, processor = time.perf_counter() - start, processor_time() - processor
    probe_file = probe_module.write_probe(job.folder, job.probe, logits, rounded=method.rounds(job.config))
    atomic.give_usual_permissions(job.folder)  # before its files are hashed
    report = reload_in_fresh_process(
        job.folder, device=job.device, offload=job.offload, trust_remote_code=job.source.trust_remote_code
    )
    tensors, base = stored_weights.read_headers(job.folder), stored_weights.read_headers(job.source.folder)
    size, base_size = stored_weights.total_bytes(tensors), stored_weights.total_bytes(base)
    matrices = job.source.stored_matrices
    n_weights = sum(rows * columns for rows, columns in matrices.values())
    sparsity = stored_weights.sparsity_of_layers(job.folder, matrices)

    return CheckpointManifest(
        method=method.name,
        label=label,
        settings=job.config.settings(),
        format=method.format_of(job.config),
        served_by=served_by(method, job.config, job.source),
        base_model=job.source.name,
        base_weights_hash=stored_weights.hash_weights(job.source.folder)[1],
        base_size_bytes=base_size,
        base_parameters=job.source.parameters,
        base_dtype=job.source.dtype,
        calibration=_describe_calibration(method, job),
        size_bytes=size,
        size_ratio=base_size / size,
        bits_per_weight=8 * stored_weights.bytes_of_layers(tensors, matrices) / n_weights,
        bits_per_weight_model=8 * size / job.source.parameters,
        cache_bytes_per_token=_cache_bytes(job.folder, job.source),
        base_cache_bytes_per_token=_cache_bytes(job.source.folder, job.source),
        sparsity=sparsity,
        base_sparsity=stored_weights.sparsity_of_layers(job.source.folder, matrices) if sparsity else None,
        seconds=seconds,
        processor_seconds=processor,
        peak_memory_bytes=peak.n_bytes,
        peak_memory_kind=peak.kind,
        device=job.device,
        library_versions=_versions(),
        weight_files=stored_weights.hash_weights(job.folder)[0],
        other_files=hash_others(job.folder),
        probe_sha256=sha256_file(probe_file),
        reload=asdict(report),
    )


def _cache_bytes(folder: Path, source: SourceModel) -> float | None:
    from mlflow_compress.models.architectures.quantized_cache import cache_bytes_per_token

    return cache_bytes_per_token(open_config(folder, trust_remote_code=source.trust_remote_code))


def write_compressed(method: Method[Any], job: CompressionJob[MethodConfig]) -> Logits:
    """Return what a method's `compress` returns; a plug-in's errors and wrong answers name the plug-in."""
    import torch

    with quiet(), torch.random.fork_rng(), METHODS.blaming(method.name):
        torch.manual_seed(getattr(job.config, "seed", 0))
        logits: object = method.compress(job)
        if not checkpoint_config.weight_files(job.folder):
            raise ValueError("compress() wrote no weights into job.folder")
        if not isinstance(logits, torch.Tensor) or logits.shape[:-1] != (job.probe.n_positions,):
            shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
            raise TypeError(f"compress() gave {shape}, and not logits of shape ({job.probe.n_positions}, vocabulary)")
    _require_compressed(method, job)
    return logits


def _describe_calibration(
    method: Method[Any], job: CompressionJob[MethodConfig]
) -> dict[str, int | str | list[str]] | None:
    """Return the manifest's entries about the calibration, and warn of experts that had no tokens of their own."""
    if job.calibration is None:
        return None
    described: dict[str, int | str | list[str]] = {**job.calibration.describe()}
    if job.source.experts and method.takes_experts(job.config):
        unused = job.experts_without_tokens
        described["experts_without_tokens"] = unused
        if unused:
            logger.warning("The router sent no calibration token to %d experts: %s", len(unused), ", ".join(unused))
    return described


def _require_compressed(method: Method[Any], job: CompressionJob[MethodConfig]) -> None:
    """Raise `UnsupportedError` where a quantization method has silently skipped linear layers."""
    if not method.supported_bits:
        return
    with_experts = method.takes_experts(job.config)
    matrices = job.source.stored_matrices if with_experts else job.source.linear
    plain = stored_weights.plain_layers(stored_weights.read_headers(job.folder), matrices)
    # Rounded weights may be stored as floats: a method is often tried out before there is a format for it.
    base, made = (
        stored_weights.read_tensors(folder, set(plain).__contains__) if plain else {}
        for folder in (job.source.folder, job.folder)
    )
    weights = {name: f"{name}.weight" for name in plain}
    left = [n for n, w in weights.items() if w not in base or base[w].to(made[w].dtype).equal(made[w])]
    if left:
        raise UnsupportedError(
            f"Method {method.name!r} left {len(left)} of {len(matrices)} linear layers unchanged, "
            f"the first of them {left[0]}",
            got=job.source.architecture,
            fix="Use another method, or another backend of this one",
        )


_OF_EVERY_CHECK = ("compressed_tensors", "torch", "transformers.models.auto.modeling_auto")
# The checkpoint is local: without network access, a request to the hub would only cost time.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
_python: ContextVar[WarmPython | None] = ContextVar("python of reload checks", default=None)


@contextmanager
def reload_helper() -> Iterator[WarmPython]:
    """Within this block, reload checks are forked from one process, which has imported the libraries."""
    if (python := _python.get()) is not None:  # a block within a block uses the same
        yield python
        return
    with WarmPython(_OF_EVERY_CHECK, _OFFLINE) as python:
        before = _python.set(python)
        try:
            yield python
        finally:
            _python.reset(before)


def reload_in_fresh_process(
    folder: Path, *, device: str = "cpu", offload: Offload | None = None, trust_remote_code: bool = False
) -> probe_module.ReloadReport:
    """Load a checkpoint in a new Python process, and return how far its logits are from the stored ones."""
    import torch

    command = ["-m", "mlflow_compress.compression.reload_check", str(folder.resolve()), "--device", device]
    command += ["--threads", str(torch.get_num_threads()), *(["--trust-remote-code"] if trust_remote_code else [])]
    if offload is not None:
        command += ["--offload", json.dumps({"max_memory": dict(offload.max_memory), "folder": offload.folder})]
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as wrong, reload_helper() as python:
        environment = {**os.environ, **_OFFLINE}
        output = said.fileno(), wrong.fileno()
        code = python.run(command, environment=environment, folder=Path.cwd(), output=output)
        lines, complaints = (_lines(file) for file in (said, wrong))
    answers = [line for line in lines if line.startswith("{")]
    complaint = (complaints or [f"exit code {code}"])[-1]
    answer = dict(json.loads(answers[-1])) if answers else {"error": complaint}
    if reason := answer.get("error"):
        broken = CheckpointError(f"The saved checkpoint does not load in a new process: {reason}", got=str(folder))
        raise broken from RuntimeError(reason)  # what that process has raised
    del answer["agrees"]
    report = probe_module.ReloadReport(**answer)
    report.require_agreement()
    return report


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return file.read().decode(errors="replace").strip().splitlines()


def _calibration(method: Method[Any], settings: Any, source: SourceModel, texts: Sequence[str]) -> Calibration | None:
    if not method.needs_calibration:
        return None
    if settings.calibration_length > source.max_length:
        raise ConfigError(
            "calibration_length is longer than the model's context",
            allowed=f"at most {source.max_length}",
            got=settings.calibration_length,
        )
    return prepare_calibration(
        source.tokenizer(),
        texts,
        samples=settings.calibration_samples,
        length=settings.calibration_length,
        seed=settings.seed,
    )


def _versions() -> dict[str, str]:
    from mlflow_compress.version import __version__

    versions = {"python": platform.python_version(), "mlflow_compress": __version__}
    for library in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):  # an optional backend that this method did not use
            versions[library] = metadata.version(library)
    return versions
