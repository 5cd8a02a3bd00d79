"""Weights that wait on disk, or on the host, until the layer that needs them runs (accelerate's offloading)."""

import ctypes
import json
import logging
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from mlflow_compress.errors import ConfigError
from mlflow_compress.models.memory_alignment import aligned
from mlflow_compress.models.weight_groups import decoder_layers

T = TypeVar("T")

logger = logging.getLogger(__name__)

OFFLOADED_FORMATS = (None, "compressed-tensors")
"""`quant_method` of checkpoints whose weights can be offloaded: plain ones, and those that llm-compressor writes."""
SAMPLE = 1 << 28  # bytes that are read to find how fast it is
_BLOCK = 1 << 20  # bytes that are read ahead at once
_M_MMAP_THRESHOLD, _LARGE = -3, 1 << 17  # of malloc.h; bytes


def return_freed_memory() -> None:
    """From now on, tensors of more than 1 MiB give their memory back to the system when they are freed (with glibc).

    By default glibc learns to keep blocks of up to 32 MiB for later. Small tensors then come to lie between the weights
    that are fetched and freed, the gaps are too small for the next weight, and memory grows with every layer.
    """
    with suppress(OSError, AttributeError):  # other C libraries keep no large blocks
        ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, _LARGE)


def offload_folder(parent: str | None) -> tempfile.TemporaryDirectory[str]:
    """Return a new folder for offloaded weights that are not in the checkpoint as they are needed."""
    try:
        return tempfile.TemporaryDirectory(prefix="mlflow-compress-offload-", dir=parent)
    except OSError as error:
        raise ConfigError(f"Parameter 'offload_dir' names no folder to write into: {error}", got=str(parent)) from error


def is_offloaded(model: torch.nn.Module) -> bool:
    """Return whether some weights are fetched only when their layer runs."""
    return any(parameter.device.type == "meta" for parameter in model.parameters())


def finish(model: Any, dtype: torch.dtype | None, folder: tempfile.TemporaryDirectory[str]) -> None:
    """Make a model with offloaded weights one that can be scored, and that computes what a whole one computes.

    Embeddings and head stay on the device that computes: ids are sent to the first, and the second runs without the
    body, and is stored with a baseline. Fetched weights are cast to `dtype` and `aligned`, as those of a whole model
    are. The folder is removed with the model.
    """
    for module in model.modules():
        hook = _hook(module)
        if hook is not None:
            hook.weights_map = _Fetched(hook.weights_map, dtype)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    for end in ends:
        if end is not None and _hook(end) is not None:
            _keep(end)
    if None not in ends and model.config.get_text_config(decoder=True).tie_word_embeddings:
        ends[1].weight = ends[0].weight
    _say_seconds_of_a_pass(model)
    weakref.finalize(model, folder.cleanup)


def _say_seconds_of_a_pass(model: Any) -> None:
    """Say what waits on disk or host, and how long a pass over it takes, as the first weights are read now."""
    waiting = [
        (hook.weights_map, name)
        for module in model.modules()
        if (hook := _hook(module)) is not None
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.device.type == "meta"
    ]
    if not waiting:
        return
    n_bytes = sum(parameter.nbytes for parameter in model.parameters() if parameter.device.type == "meta")
    began, read = time.perf_counter(), 0
    for weights, name in waiting:
        read += weights[name].nbytes
        if read > SAMPLE:
            break
    rate = read / (time.perf_counter() - began)
    text = "%.3g GB of weights are fetched again in every pass: about %.2g s each, at %.3g GB/s as measured now"
    logger.warning(text, n_bytes / 1e9, n_bytes / rate, rate / 1e9)


def _hook(module: torch.nn.Module) -> Any:
    """Return the hook that fetches a module's weights; None where they stay where they are."""
    hook = getattr(module, "_hf_hook", None)
    return hook if getattr(hook, "offload", False) and getattr(hook, "weights_map", None) is not None else None


@contextmanager
def held(layer: torch.nn.Module) -> Iterator[None]:
    """Within this block, the weights of a layer are in memory, however often it runs; they are fetched once."""
    from accelerate.utils import set_module_tensor_to_device

    fetched = [(module, hook) for module in layer.modules() if (hook := _hook(module)) is not None]
    try:
        for module, _ in fetched:
            _keep(module)
        yield
    finally:
        for module, hook in fetched:
            for name in [name for name, _ in module.named_parameters(recurse=False)]:
                set_module_tensor_to_device(module, name, "meta")
            hook.offload = True


@contextmanager
def read_ahead(layer: torch.nn.Module | None) -> Iterator[None]:
    """While this block runs, a thread reads a layer's weights from the disk into the system's cache of files.

    That is memory which the system takes back when it needs some, so `max_memory` holds, whatever a layer has. The
    block ends when they are read, or with the error of reading them.
    """
    if layer is None:
        yield
        return
    ended = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(_read, layer, ended)
        try:
            yield
            reading.result()
        finally:
            ended.set()


def _read(layer: torch.nn.Module, ended: threading.Event) -> None:
    """Read a layer's waiting weights from their files, until that is asked to end.

    No file is mapped: mapped pages count as memory of the process while they are.
    """
    files: dict[str, set[str]] = {}  # names of tensors by file
    for module in layer.modules():
        hook = _hook(module)
        for name, parameter in module.named_parameters(recurse=False):
            if hook is not None and parameter.device.type == "meta" and (place := hook.weights_map.place(name)):
                files.setdefault(place[0], set()).add(place[1])
    block = bytearray(_BLOCK)
    for path, names in files.items():
        with Path(path).open("rb", buffering=0) as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
            for start, stop in sorted(header[name]["data_offsets"] for name in names):
                file.seek(8 + size + start)
                rest = stop - start
                while rest and not ended.is_set() and (n := file.readinto(memoryview(block)[:rest])):
                    rest -= n


def probed(model: Any, probe: Callable[[], T], objects: Callable[[T], bool]) -> T:
    """Return what a probe finds out about a model's code, for which weights need not be the right ones.

    While it runs, each layer has the weights of the first one like it, so that few are read, and once. What the probe
    `objects` to may be due to these weights, so it is asked again with the right ones.
    """
    if is_offloaded(model) and (layers := decoder_layers(model)) is not None:
        with _alike(model, layers[1]):
            found = probe()
        if not objects(found):
            return found
    return probe()


@contextmanager
def _alike(model: torch.nn.Module, layers: torch.nn.ModuleList) -> Iterator[None]:
    """Within this block, layers whose waiting weights have equal shapes have those of the first of them, in memory."""
    first: dict[tuple[Any, ...], torch.nn.Module] = {}
    with ExitStack() as stack:
        for layer in layers:
            waiting = {name: hook for name, module in layer.named_modules() if (hook := _hook(module)) is not None}
            shapes = tuple(
                (name, str(hook.execution_device), own, weight.shape, weight.dtype)
                for name, hook in waiting.items()
                for own, weight in layer.get_submodule(name).named_parameters(recurse=False)
            )
            lender = first.setdefault(shapes, layer)
            if lender is layer:
                stack.enter_context(held(layer))
            for name, hook in waiting.items() if lender is not layer else ():
                stack.callback(_give_back, layer.get_submodule(name), hook, dict(layer.get_submodule(name)._parameters))
                layer.get_submodule(name)._parameters.update(lender.get_submodule(name)._parameters)
                hook.offload = False
        stack.enter_context(held(model))  # what lies outside the layers: of these nothing waits now
        yield


def _give_back(module: torch.nn.Module, hook: Any, own: dict[str, Any]) -> None:
    module._parameters.update(own)
    hook.offload = True


def _keep(module: torch.nn.Module) -> None:
    from accelerate.utils import set_module_tensor_to_device

    hook = _hook(module)
    for name in [name for name, _ in module.named_parameters(recurse=False)]:
        set_module_tensor_to_device(module, name, hook.execution_device, value=hook.weights_map[name])
    hook.offload = False


class _Fetched(Mapping[str, Any]):
    """A module's weights by name, fetched when asked for: in one dtype, and aligned in memory."""

    def __init__(self, weights: Mapping[str, Any], dtype: torch.dtype | None) -> None:
        self._weights, self._dtype = weights, dtype

    def __getitem__(self, name: str) -> Any:
        weight = self._weights[name]
        if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
            return weight
        return aligned(weight if self._dtype is None else weight.to(self._dtype))

    def place(self, name: str) -> tuple[str, str] | None:
        """Return the safetensors file that a weight is read from, and its name there; None: it is on the host."""
        from accelerate.utils import PrefixedDataset

        if not isinstance(self._weights, PrefixedDataset):
            return None
        found = self._weights.dataset.index.get(f"{self._weights.prefix}{name}")
        return None if found is None else (found["safetensors_file"], found["weight_name"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
