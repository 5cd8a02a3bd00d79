"""Runs llm-compressor without network access or extra files, in float32, and stores in the base's dtype."""

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from mlflow_compress import files as atomic
from mlflow_compress.compression import probe
from mlflow_compress.compression.method import CompressionJob, Logits, MethodConfig
from mlflow_compress.errors import CheckpointError, UnsupportedError
from mlflow_compress.files import read_json_object
from mlflow_compress.models.checkpoint_config import QUANTIZED_CACHE
from mlflow_compress.models.placement import BALANCED, placement
from mlflow_compress.models.source_model import SourceModel
from mlflow_compress.replaced import replaced

if TYPE_CHECKING:
    import torch


def _token_counter(unused: list[str]) -> Any:
    """Return a modifier that fills `unused` with the experts to which the router sends no calibration token.

    llm-compressor calibrates every expert on all tokens, so such an expert is calibrated too, but on the inputs of the
    others.
    """
    import torch
    from llmcompressor.modeling.moe.linearize import get_linearized_moes
    from llmcompressor.modifiers import Modifier

    counts: dict[str, torch.Tensor] = {}

    class ExpertTokenCounter(Modifier):  # type: ignore[misc]
        """Counts in the calibration pass alone: the library switches the hooks of modifiers off for all others."""

        def on_initialize(self, state: Any, **kwargs: Any) -> bool:
            return True

        def on_calibration_start(self, state: Any, event: Any, **kwargs: Any) -> None:
            for name, experts in get_linearized_moes(state.model):
                counts[name] = torch.zeros(experts.num_experts, dtype=torch.long)
                self.register_hook(experts, self._hook(name), "forward_pre", with_kwargs=True)

        @staticmethod
        def _hook(name: str) -> Any:
            def count(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
                chosen = named["top_k_index"] if "top_k_index" in named else arguments[1]
                counts[name] += torch.bincount(chosen.flatten().cpu(), minlength=len(counts[name]))

            return count

        def on_calibration_end(self, state: Any, event: Any, **kwargs: Any) -> None:
            self.remove_hooks()
            unused.extend(
                f"{name}.{n}" for name, seen in counts.items() for n in (seen == 0).nonzero().flatten().tolist()
            )

    return ExpertTokenCounter()


PACKAGES = ("llmcompressor", "compressed_tensors")
SHARD = "500MB"
_IN_FLOAT32 = "_global_scale"
"""End of the names of what the format itself stores in float32: NVFP4's scale of a tensor."""


def weight_scheme(bits: int, *, group_size: int | str, symmetric: bool, targets: Sequence[str]) -> dict[str, Any]:
    """Return a config group of weight-only integer quantization of layers."""
    grouped = not isinstance(group_size, str)
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if grouped else "channel",
        "group_size": group_size if grouped else None,
    }
    return {"targets": list(targets), "weights": weights}


def activation_scheme(kind: Literal["int", "float"], targets: Sequence[str]) -> dict[str, Any]:
    """Return a config group of 8-bit weights (one scale per row) and activations (one dynamic scale per token).

    Both grids are symmetric. "float" is float8 e4m3: 4 bits of exponent, 3 of mantissa, magnitudes up to 448.
    """
    common = {"num_bits": 8, "type": kind, "symmetric": True}
    weights = {**common, "strategy": "channel"}
    activations = {**common, "strategy": "token", "dynamic": True}
    return {"targets": list(targets), "weights": weights, "input_activations": activations}


def require_known(source: SourceModel, known: Iterable[str], *, unknown: str, instead: str) -> None:
    """Raise `UnsupportedError` for an architecture without mappings: the method would silently do nothing."""
    if source.architecture not in (names := sorted(set(known))):
        raise UnsupportedError(unknown, allowed=names, got=source.architecture, fix=f"Use {instead}")


def run_oneshot(
    job: CompressionJob[MethodConfig], recipe: Callable[[], Sequence[Any]], *, rescales: bool = False
) -> Logits:
    """Apply modifiers to the source model, save it, and return its logits on the probe.

    Everything is computed in float32 and stored in the base's dtype. What is stored with less precision than float32
    (scales, and norms that a method rescaled) is rounded BEFORE the logits are computed, so that they are exactly those
    of the stored checkpoint. Integers that a method has already chosen do not change: a scale changes by at most 2^-9
    of itself, which over up to 127 steps is a quarter of a step.

    `recipe` returns the modifiers; it is called after llm-compressor has been imported. With `rescales` they move
    scales between layers, and the model without rounding must then compute the same as before.
    """
    load_for_llmcompressor()
    import torch

    if job.device == "cpu" and torch.accelerator.is_available():
        raise UnsupportedError(
            "llm-compressor always uses an accelerator if there is one",
            got="device=cpu",
            fix="Use device=auto, or hide the accelerator (CUDA_VISIBLE_DEVICES=)",
        )
    with loaded(job) as model:
        return _run(job, model, recipe, rescales=rescales)


def _run(
    job: CompressionJob[MethodConfig], model: Any, recipe: Callable[[], Sequence[Any]], *, rescales: bool
) -> Logits:
    from compressed_tensors.offload import remove_dispatch
    from compressed_tensors.quantization import disable_quantization, enable_quantization
    from llmcompressor import oneshot
    from llmcompressor.modeling.moe.linearize import linearize_moe, repack_moe

    from mlflow_compress.models.architectures.linear_experts import one_by_one

    before = job.probe.logits(model) if rescales or job.source.experts else None
    modifiers = list(recipe())
    if before is not None and job.source.experts:
        try:
            linearize_moe(model)
        except (ValueError, RuntimeError, AttributeError, TypeError, LookupError) as error:
            raise UnsupportedError(
                f"llm-compressor cannot separate this model's experts: {error}", got=type(model).__name__
            ) from error
        _require_same_function(job, model, before, "form of its experts")
        if job.calibration is not None:
            modifiers.insert(0, _token_counter(job.experts_without_tokens))
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
            tokenizer=job.source.tokenizer(),
            recipe=modifiers,
            trust_remote_code_model=job.source.trust_remote_code,
            **data,
        )
    except (ValueError, RuntimeError, AttributeError, TypeError, LookupError) as error:
        # Raised where it cannot trace or match an architecture (and where memory runs out).
        raise UnsupportedError(
            f"llm-compressor cannot compress this model: {error}", got=job.source.architecture
        ) from error
    if job.offload is None:
        remove_dispatch(model, onload_tensors=True)
        model.to(job.device)
    if job.source.experts:
        # A checkpoint has one name for each matrix of each expert, as its architecture stores them.
        if any(hasattr(module, "quantization_scheme") for module in model.modules()):
            model._weight_conversions = one_by_one(model._weight_conversions)
        else:
            repack_moe(model)
    model.eval()
    if before is not None and rescales:
        model.apply(disable_quantization)
        _require_same_function(job, model, before, "scaling")
        model.apply(enable_quantization)
    job.round_cache(model)
    round_floats(model, job.source.torch_dtype)
    with _fetched_once(model):
        logits = job.probe.logits(model)
    _save(model, job)
    return logits


def _require_same_function(job: CompressionJob[MethodConfig], model: Any, before: "torch.Tensor", step: str) -> None:
    """Raise `UnsupportedError` where the model, which rounds nothing now, computes other logits than before a step."""
    report = probe.compare_logits(before, job.probe.logits(model))
    if not report.agrees:
        raise UnsupportedError(
            f"llm-compressor's {step} changes this model's function",
            allowed="logits as before, without rounding",
            got=f"{job.source.architecture}, KL up to {report.kl_max:.3g} nats",
            fix="Use another method",
        )


@contextlib.contextmanager
def loaded(job: CompressionJob[MethodConfig]) -> Iterator[Any]:
    """Yield the model in float32; with `job.offload`, most weights are read from the disk when a layer runs.

    What is read is a new tensor each time: `compressed_tensors.offload.update_offload_parameter` stores another one.
    """
    if job.offload is None:
        yield job.source.load(job.device)
        return
    from compressed_tensors.offload import from_accelerate

    from mlflow_compress.models.offloading import offload_folder, return_freed_memory

    return_freed_memory()
    with offload_folder(job.offload.folder) as folder:
        placed = placement(BALANCED, job.offload.max_memory)
        model = job.source.load(job.device, **placed, offload_folder=folder, offload_buffers=True)
        from_accelerate(model)  # llm-compressor's own offloading, which can write weights too
        yield model


@contextlib.contextmanager
def _fetched_once(model: "torch.nn.Module") -> Iterator[None]:
    """Within this block, a quantized layer reads its offloaded weights once a call.

    compressed-tensors 0.19 rounds the weights that it has read, and then lets the layer read them again: from the disk
    these are the ones that are not rounded.
    """
    from compressed_tensors.offload import disable_offloading

    def once(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)  # the hook of a quantized cache reads the names of its arguments
        def call(*arguments: Any, **named: Any) -> Any:
            with disable_offloading():
                return forward(*arguments, **named)

        return call

    with contextlib.ExitStack() as until_the_end:
        for module in model.modules():
            if hasattr(module, "quantization_scheme"):
                until_the_end.enter_context(replaced(module, "forward", once(module.forward)))
        yield


def round_floats(model: "torch.nn.Module", dtype: "torch.dtype") -> None:
    """Round everything that will be stored as a float to `dtype`; tensors stay float32.

    The weights of quantized layers are not rounded: only their integers are stored. It is done module by module,
    because an offloaded tensor is a new one whenever it is read.
    """
    from compressed_tensors.offload import update_offload_parameter

    for module in model.modules():
        is_quantized = hasattr(module, "quantization_scheme")
        for name in list(module._parameters):
            tensor = module._parameters[name]
            if tensor is None or not tensor.is_floating_point() or name.endswith(_IN_FLOAT32):
                continue
            if is_quantized and name == "weight":
                continue
            rounded = tensor.data.to(dtype).to(tensor.dtype)
            if not rounded.equal(tensor.data):
                update_offload_parameter(module, name, rounded)


def cast_offloaded(model: "torch.nn.Module", dtype: "torch.dtype") -> None:
    """Store the floats of an offloaded model in `dtype`, module by module; of tied ones, only the first stays."""
    import torch

    seen: set[torch.Tensor] = set()  # What stands for a tensor on the disk; tied ones have the same
    for module in model.modules():
        for kind in ("_parameters", "_buffers"):
            tensors = getattr(module, kind)
            on_disk = getattr(tensors, "offloaded_values", {})
            for name in list(tensors):
                if name.endswith(_IN_FLOAT32):
                    continue
                before = on_disk.get(name)
                if before in seen:
                    del on_disk[name]
                    continue
                if before is not None:
                    seen.add(before)
                tensor = tensors[name]
                if tensor is not None and tensor.is_floating_point() and tensor.itemsize > 1 and tensor.dtype != dtype:
                    cast = tensor.data.to(dtype)
                    del tensors[name]
                    is_parameter = kind == "_parameters"
                    tensors[name] = torch.nn.Parameter(cast, requires_grad=False) if is_parameter else cast


def _save(model: Any, job: CompressionJob[MethodConfig]) -> None:
    from compressed_tensors import ModelCompressor

    # Pack while the weights are float32, then cast: packing in bfloat16 would round weight / scale to 8 bits of
    # mantissa, and some 8-bit weights to a neighbouring integer.
    ModelCompressor.from_pretrained_model(model).compress_model(model, skip_compressed=True)
    if job.offload is not None:
        cast_offloaded(model, job.source.torch_dtype)
    else:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            # 8-bit floats are quantized weights
            if tensor.is_floating_point() and tensor.itemsize > 1 and not name.endswith(_IN_FLOAT32):
                tensor.data = tensor.data.to(job.source.torch_dtype)
    model.config.dtype = job.source.torch_dtype
    size = {} if job.offload is None else {"max_shard_size": SHARD}  # a shard is in memory when it is written
    model.save_pretrained(job.folder, save_compressed=True, **size)
    if job.caches:  # the library writes the base's configuration again, with its own entry alone
        path, text = job.folder / "config.json", model.config.get_text_config()
        stored = read_json_object(path, error=CheckpointError)
        part = stored if text is model.config else stored["text_config"]
        part[QUANTIZED_CACHE] = getattr(text, QUANTIZED_CACHE)
        atomic.write(path, json.dumps(stored, indent=2).encode())
    job.source.save_others(job.folder)


def unpinned_cache() -> contextlib.AbstractContextManager[Any]:
    """Within this block, cached activations are not page-locked if there is no accelerator.

    Otherwise torch raises "Cannot access accelerator device when none is available".
    """
    import torch
    from llmcompressor.pipelines.cache import IntermediatesCache

    if torch.accelerator.is_available():
        return contextlib.nullcontext()
    return replaced(IntermediatesCache, "pin_memory", lambda *_, **__: None, of="llmcompressor 0.14")


def load_for_llmcompressor() -> None:
    """Import llm-compressor, and disable its log, which the import enables."""
    import llmcompressor  # noqa: F401
    from loguru import logger

    for package in PACKAGES:
        logger.disable(package)
