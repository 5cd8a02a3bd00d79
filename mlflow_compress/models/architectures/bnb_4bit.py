"""4-bit bitsandbytes layers on a CPU, computed with their dequantized weights.

bitsandbytes 0.50 has two CPU kernels for these layers, and the processor decides which one runs. The AVX512-BF16 kernel
rounds activations to bfloat16, fails for some shapes, and has crashed with SIGFPE. On import, bitsandbytes also looks
for a third kernel on a hub. So layers on a CPU are expanded to plain ones, as in `gptq_awq`. Layers on a GPU stay as
they are.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

QUANT_METHOD = "bitsandbytes"


def import_offline() -> None:
    """Import bitsandbytes, if it is installed, without its search for a kernel on a hub and the warning about it.

    Later imports use the loaded package. If it is already loaded, nothing happens.
    """
    if "bitsandbytes" in sys.modules or importlib.util.find_spec("bitsandbytes") is None:
        return
    with _hidden("kernels"), _silent("bitsandbytes.backends.cpu.ops"):
        importlib.import_module("bitsandbytes")


def expand(model: Any) -> None:
    """Replace each 4-bit layer on a CPU by a plain one with its dequantized weights, in the model's dtype.

    Everything else stays as it is. Save a model before: expanded layers are not stored in 4 bits.
    """
    if "bitsandbytes" not in sys.modules:  # a model with such layers has imported it
        return
    from bitsandbytes.nn import Linear4bit
    from torch import nn

    for name, packed in list(model.named_modules()):
        if isinstance(packed, Linear4bit) and packed.weight.device.type == "cpu":
            plain = nn.Linear(packed.in_features, packed.out_features, bias=packed.bias is not None, device="meta")
            plain.weight = nn.Parameter(values(packed.weight).to(model.dtype), requires_grad=False)
            if packed.bias is not None:
                plain.bias = nn.Parameter(packed.bias.detach().to(model.dtype), requires_grad=False)
            model.set_submodule(name, plain.train(packed.training))


def values(weight: Any) -> torch.Tensor:
    """Return a dequantized 4-bit weight: ``code[level] * scale``, one float32 product per value.

    Computed here in torch, because bitsandbytes' own function depends on the processor. With AVX-512 it gave wrong
    values where a row is shorter than a block (48 and 64), and for odd row lengths it first compiles a kernel.

    Parameters
    ----------
    weight : bitsandbytes.nn.Params4bit
        Quantized, and not yet repacked by a forward pass.

    Returns
    -------
    torch.Tensor
        In the dtype from which it was quantized, shape (out_features, in_features).
    """
    import torch

    state = weight.quant_state
    assert not getattr(state, "packing_format_for_cpu", False), "a forward pass has repacked this weight"
    packed = weight.data.view(torch.uint8).reshape(-1)
    levels = torch.stack([packed >> 4, packed & 15], dim=1).reshape(-1)[: prod(state.shape)]
    scales = state.absmax
    if state.nested:
        inner = state.state2
        scales = _scale_blocks(inner.code.float()[scales.long()], inner.absmax, inner.blocksize) + state.offset
    found = _scale_blocks(state.code.float()[levels.long()], scales, state.blocksize)
    return found.reshape(state.shape).to(state.dtype)


def _scale_blocks(numbers: torch.Tensor, scales: torch.Tensor, blocksize: int) -> torch.Tensor:
    """Return the flat `numbers`, each times the scale of its block of `blocksize`; the last block may be shorter."""
    return numbers * scales.float().repeat_interleave(blocksize)[: len(numbers)]


@contextlib.contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Within this block, importing the package fails as if it were not installed."""
    loaded = {name: module for name, module in sys.modules.items() if name.split(".")[0] == package}
    for name in loaded:
        del sys.modules[name]
    sys.modules[package] = None  # type: ignore[assignment]  # Python's mark for a module that cannot be imported
    try:
        yield
    finally:
        del sys.modules[package]
        sys.modules.update(loaded)


@contextlib.contextmanager
def _silent(logger: str) -> Iterator[None]:
    """Within this block, the logger is disabled."""
    muted = logging.getLogger(logger)
    before, muted.disabled = muted.disabled, True
    try:
        yield
    finally:
        muted.disabled = before
