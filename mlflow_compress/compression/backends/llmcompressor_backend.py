"""Runs llm-compressor without network access or extra files, in float32, and stores in the base's dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from mlflow_compress.compression import probe
from mlflow_compress.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

    from mlflow_compress.compression.method import CompressionJob
    from mlflow_compress.models.source_model import SourceModel

PACKAGES = ("llmcompressor", "compressed_tensors")


def weight_scheme(bits: int, *, group_size: int | str, symmetric: bool) -> dict[str, Any]:
    """Return the config group of weight-only integer quantization of every linear layer."""
    grouped = not isinstance(group_size, str)
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if grouped else "channel",
        "group_size": group_size if grouped else None,
    }
    return {"group_0": {"targets": ["Linear"], "weights": weights}}


def activation_scheme(kind: Literal["int", "float"]) -> dict[str, Any]:
    """Return the config group of 8-bit weights (one scale per row) and activations (one dynamic scale per token).

    Both grids are symmetric. "float" is float8 e4m3: 4 bits of exponent, 3 of mantissa, magnitudes up to 448.
    """
    common = {"num_bits": 8, "type": kind, "symmetric": True}
    weights = {**common, "strategy": "channel"}
    activations = {**common, "strategy": "token", "dynamic": True}
    return {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}}


def require_known(source: SourceModel, known: Iterable[str], *, unknown: str, instead: str) -> None:
    """Raise `UnsupportedError` for an architecture without mappings: the method would silently do nothing."""
    if source.architecture not in (names := sorted(set(known))):
        raise UnsupportedError(unknown, allowed=names, got=source.architecture, fix=f"Use {instead}")


def run_oneshot(job: CompressionJob, recipe: Callable[[], Sequence[Any]], *, rescales: bool = False) -> torch.Tensor:
    """Apply modifiers to the source model, save it, and return its logits on the probe.

    Everything is computed in float32 and stored in the base's dtype. What is stored with less precision than float32
    (scales, and norms that a method rescaled) is rounded BEFORE the logits are computed, so that they are exactly those
    of the stored checkpoint. Integers that a method has already chosen do not change: a scale changes by at most 2^-9
    of itself, which over up to 127 steps is a quarter of a step.

    Parameters
    ----------
    job : CompressionJob
        What to compress, and where to write it.
    recipe : callable
        Returns the modifiers; called after llm-compressor has been imported.
    rescales : bool
        Whether the modifiers move scales between layers. The model without rounding must then compute the same as
        before.

    Returns
    -------
    torch.Tensor
        Logits of the model in memory on the probe, shape (n_positions, vocabulary).

    Raises
    ------
    UnsupportedError
        llm-compressor does not support the model, or moved scales between channels that do not belong together.
    """
    load()
    _require_device(job.device)
    from compressed_tensors.offload import remove_dispatch
    from llmcompressor import oneshot

    model, tokenizer = job.source.load(job.device), job.source.tokenizer()
    before = job.probe.logits(model) if rescales else None
    data: dict[str, Any] = {"pipeline": "datafree"}
    if job.calibration is not None:
        samples, length = job.calibration.ids.shape
        data = {
            "dataset": job.calibration.loader(),
            "num_calibration_samples": samples,
            "max_seq_length": length,
            "pipeline": "sequential",
        }
    try:
        oneshot(
            model=model,
            tokenizer=tokenizer,
            recipe=list(recipe()),
            trust_remote_code_model=job.source.trust_remote_code,
            **data,
        )
    except (ValueError, RuntimeError, AttributeError, TypeError, LookupError) as error:
        # Raised where it cannot trace or match an architecture (and where memory runs out).
        raise UnsupportedError(
            f"llm-compressor cannot compress this model: {error}", got=job.source.architecture
        ) from error
    remove_dispatch(model, onload_tensors=True)
    model.to(job.device).eval()
    if before is not None:
        _require_same_function(job, model, before)
    _round_floats(model, job.source.torch_dtype)
    logits = job.probe.logits(model)
    _save(model, tokenizer, job)
    return logits


def _require_same_function(job: CompressionJob, model: Any, before: torch.Tensor) -> None:
    """Raise `UnsupportedError` where the model without rounding computes other logits than before."""
    from compressed_tensors.quantization import disable_quantization, enable_quantization

    model.apply(disable_quantization)
    report = probe.compare(before, job.probe.logits(model))
    model.apply(enable_quantization)
    if not report.agrees:
        raise UnsupportedError(
            "llm-compressor's scaling changes what this model computes: its channels belong to other layers",
            allowed="logits as before, without rounding",
            got=f"{job.source.architecture}, KL up to {report.kl_max:.3g} nats",
            fix="Use a method that does not rescale",
        )


def _round_floats(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Round everything that will be stored as a float to `dtype`; tensors stay float32.

    The weights of quantized layers are not rounded: only their integers are stored.
    """
    quantized = {id(m.weight) for m in model.modules() if hasattr(m, "quantization_scheme") and hasattr(m, "weight")}
    for tensor in model.parameters():
        if tensor.is_floating_point() and id(tensor) not in quantized:
            tensor.data = tensor.data.to(dtype).to(tensor.dtype)


def _save(model: Any, tokenizer: Any, job: CompressionJob) -> None:
    from compressed_tensors import ModelCompressor

    # Pack while the weights are float32, then cast: packing in bfloat16 would round weight / scale to 8 bits of
    # mantissa, and some 8-bit weights to a neighbouring integer.
    ModelCompressor.from_pretrained_model(model).compress_model(model, skip_compressed=True)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.itemsize > 1:  # 8-bit floats are quantized weights
            tensor.data = tensor.data.to(job.source.torch_dtype)
    model.config.dtype = job.source.torch_dtype
    model.save_pretrained(job.folder, save_compressed=True)
    tokenizer.save_pretrained(job.folder)


def _require_device(device: str) -> None:
    import torch

    if device == "cpu" and torch.accelerator.is_available():
        raise UnsupportedError(
            "llm-compressor always uses an accelerator if there is one",
            got="device=cpu",
            fix="Use device=auto, or hide the accelerator (CUDA_VISIBLE_DEVICES=)",
        )


@contextlib.contextmanager
def unpinned_cache() -> Iterator[None]:
    """Within this block, cached activations are not page-locked if there is no accelerator.

    Otherwise torch raises "Cannot access accelerator device when none is available".
    """
    import torch
    from llmcompressor.pipelines.cache import IntermediatesCache

    if torch.accelerator.is_available():
        yield
        return
    original = IntermediatesCache.pin_memory

    def keep(self: Any, batch_index: int, input_names: list[str] | None = None) -> None:
        """Do nothing."""

    IntermediatesCache.pin_memory = keep
    try:
        yield
    finally:
        IntermediatesCache.pin_memory = original


def load() -> None:
    """Import llm-compressor, and disable its log, which the import enables."""
    import llmcompressor  # noqa: F401
    from loguru import logger

    for package in PACKAGES:
        logger.disable(package)
