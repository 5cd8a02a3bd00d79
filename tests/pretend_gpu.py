"""A GPU that is pretended: tensors of the CPU that say they are elsewhere, and a record of every copy and every wait.

Python's calls of torch are intercepted, those of transformers too. So a whole pass runs the code of a GPU, with real
numbers, and a test can count what would go up to the device, what would come back, and what would wait for it. What a
single operation does within itself is not seen.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda:0")
_QUESTIONS = ("item", "tolist", "numpy", "nonzero", "equal", "unique", "masked_select", "is_nonzero")
_WAITS = (*_QUESTIONS, "__bool__", "__int__", "__float__", "__index__")
_MOVES = ("to", "cpu", "cuda")


class OnGpu(torch.Tensor):
    """A tensor that says it is on the GPU."""

    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)


class Pinned(torch.Tensor):
    """A tensor of the CPU from which a copy to the GPU does not wait."""


class PretendGpu(TorchFunctionMode):
    """Within this block there is a GPU. `seen` has what happened: a word, and the name of the layer it happened in.

    - "up": a copy to the GPU that nothing waits for; "up, waits": one that waits.
    - "down": a copy of a tensor to the CPU, which waits until the GPU has computed everything.
    - "waits": another question to the GPU, such as `item` and `nonzero`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []
        self.layer = ""

    def count(self, *kinds: str) -> int:
        """Return how often any of these happened."""
        return sum(kind in kinds for kind, _ in self.seen)

    def in_layers(self) -> list[tuple[str, str]]:
        """Return what happened within a layer."""
        return [one for one in self.seen if one[1]]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        leaves = tree_leaves((args, kwargs))
        there = any(isinstance(leaf, OnGpu) for leaf in leaves)
        asked = [leaf for leaf in leaves if isinstance(leaf, torch.device) or _is_device(leaf)]
        goes_up = (bool(asked) and torch.device(asked[0]).type == "cuda") or name == "cuda"
        comes_down = name in _MOVES and there and not goes_up and (bool(asked) or name == "cpu")
        if name == "pin_memory":
            assert not there
            return args[0].as_subclass(Pinned)
        if name in _MOVES and goes_up and not there:
            free = isinstance(args[0], Pinned) and kwargs.get("non_blocking")
            self._note("up" if free else "up, waits")
        elif (name in ("tensor", "as_tensor") and goes_up) or (name == "new_tensor" and there):
            if np.size(args[-1]):  # of nothing nothing is copied
                self._note("up, waits")
        elif comes_down:
            self._note("down")
        elif there and (name in _WAITS or _by_truth(name, args)):
            self._note("waits")
        elif there and name in ("__getitem__", "__setitem__", "index_put_") and _from_cpu(args[1:]):
            self._note("up, waits")
        elif there and name not in _MOVES:
            sizes = [leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, OnGpu)]
            assert all(len(size) == 0 for size in sizes), f"{name}: tensors are on two devices"
        here = tree_map(lambda leaf: torch.device("cpu") if _is(leaf, asked) else leaf, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*here[0], **here[1])
        if (there or goes_up) and not comes_down and name not in ("numpy", "tolist"):
            return tree_map(lambda leaf: _sent(leaf, [] if name in _MOVES else leaves), result)
        return tree_map(lambda leaf: leaf.as_subclass(torch.Tensor) if isinstance(leaf, OnGpu) else leaf, result)

    def _note(self, kind: str) -> None:
        self.seen.append((kind, self.layer))


def _is_device(leaf: Any) -> bool:
    return isinstance(leaf, str) and leaf in ("cpu", "cuda", "cuda:0")


def _is(leaf: Any, asked: list[Any]) -> bool:
    return any(leaf is one for one in asked)


def _sent(leaf: Any, given: list[Any]) -> Any:
    if not isinstance(leaf, torch.Tensor) or any(leaf is one for one in given):
        return leaf
    return leaf.as_subclass(OnGpu)


def _by_truth(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether elements are chosen by truth values on the GPU, of which the CPU must know how many are true."""
    return name == "__getitem__" and any(
        isinstance(leaf, OnGpu) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1:])
    )


def _from_cpu(index: tuple[Any, ...]) -> bool:
    """Return whether an index, or what is written there, is an array or a tensor of the CPU with a dimension."""
    arrays = [leaf for leaf in tree_leaves(index) if isinstance(leaf, torch.Tensor | np.ndarray)]
    return any(not isinstance(array, OnGpu) and array.ndim for array in arrays)


def send(model: torch.nn.Module, device: torch.device = GPU) -> torch.nn.Module:
    """Send a model's parameters and buffers to the GPU that is pretended, as `torch.nn.Module.to` does."""
    assert device == GPU
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                moved = parameter.detach().as_subclass(OnGpu)
                module._parameters[name] = torch.nn.Parameter(moved, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.as_subclass(OnGpu)
    return model


@contextmanager
def pretend_gpu(layers: torch.nn.ModuleList) -> Iterator[PretendGpu]:
    """Within this block there is a GPU, which knows in which of these layers something happens."""
    with PretendGpu() as gpu:

        def begin(name: str, *_: Any) -> None:
            gpu.layer = name

        def end(*_: Any) -> None:
            gpu.layer = ""

        moving = patch.object(torch.nn.Module, "to", send)  # it would keep the class of the parameters
        hooks = []
        for number, layer in enumerate(layers):
            hooks.append(layer.register_forward_pre_hook(lambda *_, name=f"layer {number}": begin(name)))
            hooks.append(layer.register_forward_hook(end))
        try:
            with moving:
                yield gpu
        finally:
            for hook in hooks:
                hook.remove()
