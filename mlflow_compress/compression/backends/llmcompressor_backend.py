"""Running llm-compressor: without network or stray files, exact in float32, stored in the base's type."""

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
    """Return the config group of 8-bit weights, one scale a row, and 8-bit activations, one scale a token as they come.

    Both grids are symmetric. "float" is float8 e4m3: 4 bits of exponent, 3 of mantissa, magnitudes up to 448.
    """
    common = {"num_bits": 8, "type": kind, "symmetric": True}
    weights = {**common, "strategy": "channel"}
    activations = {**common, "strategy": "token", "dynamic": True}
    return {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}}


def require_known(source: SourceModel, known: Iterable[str], *, unknown: str, instead: str) -> None:
    """Raise `UnsupportedError` for an architecture without mappings: the method would do nothing, without a word."""
    if source.architecture not in (names := sorted(set(known))):
        raise UnsupportedError(unknown, allowed=names, got=source.architecture, fix=f"Use {instead}")


def run_oneshot(job: CompressionJob, recipe: Callable[[], Sequence[Any]], *, rescales: bool = False) -> torch.Tensor:
    """Apply modifiers to the source model, measure it on the probe and save it.

    Everything is computed in float32 and stored in the base's own element type. What is stored in less than float32
    (scales, and norms that a method rescaled) is rounded BEFORE the model is measured, so that the stored checkpoint
    is exactly the measured one. Integers that a method has already chosen survive it: a scale moves by at most 2^-9 of
    itself, which over up to 127 steps is a quarter of a step.

    Parameters
    ----------
    job : CompressionJob
        What to compress and where to write it.
    recipe : callable
        Returns the modifiers; called after llm-compressor has been imported.
    rescales : bool
        Whether they scale channels between layers, after which the unrounded model must compute what it did before.

    Returns
    -------
    torch.Tensor
        Logits of the in-memory model on the probe, shape (n_positions, vocabulary).

    Raises
    ------
    UnsupportedError
        llm-compressor cannot take the model, or scaled channels that are not the same ones.
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
        # What it raises where it cannot trace or match an architecture (and where memory runs out).
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
    """Refuse a model that computes something else than before although nothing is rounded yet."""
    from compressed_tensors.quantization import disable_quantization, enable_quantization

    model.apply(disable_quantization)
    report = probe.compare(before, job.probe.logits(model))
    model.apply(enable_quantization)
    if not report.agrees:
        raise UnsupportedError(
            "llm-compressor's scaling changes what this model computes: its channels belong to other layers",
            allowed="logits as before, nothing being rounded",
            got=f"{job.source.architecture}, KL up to {report.kl_max:.3g} nats",
            fix="Use a method that does not rescale",
        )


def _round_floats(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Round everything that will be stored as a float to `dtype`, keeping float32 arithmetic.

    The weights of quantized layers are left alone: only their integers are stored.
    """
    quantized = {id(m.weight) for m in model.modules() if hasattr(m, "quantization_scheme") and hasattr(m, "weight")}
    for tensor in model.parameters():
        if tensor.is_floating_point() and id(tensor) not in quantized:
            tensor.data = tensor.data.to(dtype).to(tensor.dtype)


def _save(model: Any, tokenizer: Any, job: CompressionJob) -> None:
    from compressed_tensors import ModelCompressor

    # Pack while the weights are float32, then cast: packing in bfloat16 would round weight / scale to 8 bits of
    # mantissa and land 8-bit weights on neighbouring integers.
    ModelCompressor.from_pretrained_model(model).compress_model(model, skip_compressed=True)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.itemsize > 1:  # 8-bit floats are what a method has chosen
            tensor.data = tensor.data.to(job.source.torch_dtype)
    model.config.dtype = job.source.torch_dtype
    model.save_pretrained(job.folder, save_compressed=True)
    tokenizer.save_pretrained(job.folder)


def _require_device(device: str) -> None:
    import torch

    if device == "cpu" and torch.accelerator.is_available():
        raise UnsupportedError(
            "llm-compressor always uses the accelerator that it finds",
            got="device=cpu",
            fix="Use device=auto, or hide the accelerator (CUDA_VISIBLE_DEVICES=)",
        )


@contextlib.contextmanager
def unpinned_cache() -> Iterator[None]:
    """Switch off page-locking of cached activations where there is no accelerator to transfer them to.

    Without one, torch refuses with "Cannot access accelerator device when none is available".
    """
    import torch
    from llmcompressor.pipelines.cache import IntermediatesCache

    if torch.accelerator.is_available():
        yield
        return
    original = IntermediatesCache.pin_memory

    def keep(self: Any, batch_index: int, input_names: list[str] | None = None) -> None:
        """Leave the batch where it is."""

    IntermediatesCache.pin_memory = keep
    try:
        yield
    finally:
        IntermediatesCache.pin_memory = original


def load() -> None:
    """Import llm-compressor and switch its own log off: the import installs a sink and switches it on."""
    import llmcompressor  # noqa: F401
    from loguru import logger

    for package in PACKAGES:
        logger.disable(package)
