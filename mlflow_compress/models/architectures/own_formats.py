"""Our own formats, in transformers' table of quantization formats: packed HQQ weights, and noisy logits.

The ``hqq`` package saves pickles, and transformers 5.17 can no longer read its safetensors. compressed-tensors has only
integer zero points, and those of HQQ are not integers. So its format here is packed integers, with a float16 scale and
zero point for each group of a row. The other one is the base model with an entry in its configuration.
"""

from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from mlflow_compress.models.checkpoint_config import HQQ_PACKED, NOISY_LOGITS

PACKED_PARTS = ("weight_packed", "weight_scale", "weight_zero")
_KEY_ENTRIES = 8


class OwnFormatConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The settings of one of our formats in ``config.json``."""

    def __init__(self, quant_method: str, **settings: Any) -> None:
        super().__init__(quant_method)
        self.__dict__ |= settings


class _OwnFormat(HfQuantizer):  # type: ignore[misc]
    """Transformers' hook during and after loading; a loaded model can compute, but not be saved again or trained."""

    is_trainable = False  # training would change weights that the format cannot hold

    def is_serializable(self) -> bool:
        """Return False: the loaded weights are not the stored ones."""
        return False


def pack(levels: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int) -> dict[str, torch.Tensor]:
    """Return the stored tensors of one layer, by the names in `PACKED_PARTS`.

    `levels` are whole numbers from 0 to ``2^bits - 1``, shape (out_features, in_features); 32 neighbours of a row take
    `bits` words of 32 bits. `scale` and `zero`, shape (out_features, groups), are rounded to float16.
    """
    signed = (levels.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
    return dict(zip(PACKED_PARTS, (pack_to_int32(signed, bits), scale.half(), zero.half()), strict=True))


def unpack(stored: dict[str, torch.Tensor], bits: int, in_features: int) -> torch.Tensor:
    """Return ``(level - zero) * scale``, float32, shape (out_features, in_features): the inverse of `pack`."""
    packed, scale, zero = (stored[part] for part in PACKED_PARTS)
    shape = torch.Size((packed.shape[0], in_features))
    levels = unpack_from_int32(packed, bits, shape).float() + 2 ** (bits - 1)
    groups = levels.reshape(*scale.shape, -1)
    weight: torch.Tensor = (groups - zero.float()[..., None]) * scale.float()[..., None]
    return weight.reshape(shape)


class _UnpackHqq(ConversionOps):  # type: ignore[misc]
    """Unpacks one layer's weight while transformers loads it."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def convert(
        self, input_dict: dict[str, Any], *, full_layer_name: str, model: Any, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """Return the weight in the dtype that the model is loaded in."""
        stored = {name.rstrip("$"): value[0] for name, value in input_dict.items()}
        expected = model.get_parameter(full_layer_name)
        return {full_layer_name: unpack(stored, self.bits, expected.shape[1]).to(expected.dtype)}


class _HqqPackedQuantizer(_OwnFormat):
    """Loads packed weights into plain linear layers; a loaded model can compute, but not be saved again."""

    def get_weight_conversions(self) -> list[Any]:
        bits = self.quantization_config.bits
        return [WeightConverter([f"{part}$" for part in PACKED_PARTS], "weight", [_UnpackHqq(bits)])]


class _NoisyHead(nn.Linear):
    """A head that adds independent ``N(0, scale^2)`` to every logit of every position.

    The noise depends on the position's hidden state: a generator is seeded with `seed` and eight entries of the state
    in bfloat16. So a text that is scored twice gets the same noise. The rounding of another batch composition rarely
    changes it (about 0.2 % of positions then get another draw).
    """

    def __init__(self, head: nn.Linear, scale: float, seed: int) -> None:
        super().__init__(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
        self.weight, self.bias = head.weight, head.bias  # shared: tied embeddings stay tied
        self.scale, self.seed = scale, seed

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return noisy logits, shape (..., vocabulary), of states, shape (..., hidden)."""
        logits = super().forward(states)
        entries = states.reshape(-1, self.in_features)[:, :: -(-self.in_features // _KEY_ENTRIES)]
        keys = entries.bfloat16().contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
        noise = np.empty((len(keys), self.out_features), dtype=np.float32)
        for row, key in zip(noise, keys, strict=True):
            np.random.default_rng([self.seed, *map(int, key)]).standard_normal(out=row, dtype=np.float32)
        return logits + self.scale * torch.from_numpy(noise).to(logits).reshape(logits.shape)


def add_noise(model: Any, scale: float, seed: int) -> None:
    """Replace the model's head by a `_NoisyHead`."""
    model.set_output_embeddings(_NoisyHead(model.get_output_embeddings(), scale, seed))


class _NoisyLogitsQuantizer(_OwnFormat):
    """Transformers' hook after loading, which adds the noise; nothing is quantized."""

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        add_noise(model, self.quantization_config.scale, self.quantization_config.seed)
        return model


QUANTIZERS = {HQQ_PACKED: _HqqPackedQuantizer, NOISY_LOGITS: _NoisyLogitsQuantizer}
