"""Sequence lengths at which a model's rotary frequencies change: LongRoPE and dynamic NTK.

For these, transformers (5.17, `modeling_rope_utils.dynamic_rope_update`) takes one length for a complete batch, that of
its longest sequence, and with dynamic NTK also looks at the batches before. So sequences are computed together only
where each has the frequencies that it would have alone.
"""

from collections.abc import Callable, Iterator
from typing import Any

LengthRegime = Callable[[int], int]
"""Maps a sequence's length in tokens to its regime. Sequences of one regime have the same rotary frequencies."""

BASE = 0
"""The regime of short sequences. It is the only one of a model whose frequencies do not depend on the length."""


def one_regime(_length: int) -> int:
    """The regimes of a model whose frequencies do not depend on the length."""
    return BASE


def length_regimes(*configs: Any) -> LengthRegime:
    """Return the regimes of models with these configurations: what one of them separates, all of them separate.

    LongRoPE has two, up to its original length and beyond it. With dynamic NTK every length beyond the original one has
    frequencies of its own.
    """
    switches: set[int] = set()
    growing: set[int] = set()
    for config in configs:
        text_config = config.get_text_config(decoder=True)
        for rope in _rope_parameters(text_config):
            kind = str(rope.get("rope_type") or rope.get("type"))  # code of a checkpoint's own may know the older name
            if kind in ("longrope", "su") or "long_mscale" in rope:  # a PhiMoE has two scales with any kind
                original = rope.get("original_max_position_embeddings")
                switches.add(int(original or text_config.original_max_position_embeddings))
            elif "dynamic" in kind:
                growing.add(int(text_config.max_position_embeddings))
    if not switches and not growing:
        return one_regime

    def regime(length: int) -> int:
        if growing and length > min(growing):
            return length
        return max((switch for switch in switches if switch < length), default=BASE)

    return regime


def _rope_parameters(text_config: Any) -> Iterator[dict[str, Any]]:
    """Yield the settings of a model's rotary embeddings: one, or one per type of layer."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    yield rope
    yield from (of_layers for of_layers in rope.values() if isinstance(of_layers, dict))


def forget_longer_sequences(model: Any) -> None:
    """Let every forward pass of a model begin with the rotary frequencies of a model that has not computed anything.

    Otherwise dynamic NTK keeps those of the longest sequence so far. LongRoPE of single types of layers keeps the long
    ones under a name, and then fails at the second long sequence (transformers 5.17).
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        scaled = any(kind == "longrope" or "dynamic" in str(kind) for kind in kinds)
        if scaled and _forget not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_forget)


def _forget(rotary: Any, _inputs: Any) -> None:
    for name in [*vars(rotary), *rotary._buffers]:
        if name.endswith("original_inv_freq"):
            setattr(rotary, name.replace("original_inv_freq", "inv_freq"), getattr(rotary, name))
        elif name.endswith("max_seq_len_cached"):
            setattr(rotary, name, rotary.original_max_seq_len)
        elif name.endswith("_long_inv_freq"):
            delattr(rotary, name)
