"""A model whose logits carry Gaussian noise: a control, stored as the base with a note in its configuration."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.utils.quantization_config import QuantizationConfigMixin

from mlflow_compress.models.architectures.own_format import OwnFormat

QUANT_METHOD = "noisy_logits"
KEY_ENTRIES = 8


class NoisyHead(nn.Linear):
    """A head that adds independent ``N(0, scale^2)`` to every logit of every position.

    The noise belongs to the position's hidden state: a generator is seeded with `seed` and eight of its entries in
    bfloat16. So the model stays a function of its input, a text scored twice gets the same noise, and rounding errors
    of another batch composition rarely reach it (some 0.2 % of positions then get another draw).
    """

    def __init__(self, head: nn.Linear, scale: float, seed: int) -> None:
        super().__init__(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
        self.weight, self.bias = head.weight, head.bias  # shared: tied embeddings stay tied
        self.scale, self.seed = scale, seed

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return noisy logits, shape (..., vocabulary), of states, shape (..., hidden)."""
        logits = super().forward(states)
        entries = states.reshape(-1, self.in_features)[:, :: -(-self.in_features // KEY_ENTRIES)]
        keys = entries.bfloat16().contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
        noise = np.empty((len(keys), self.out_features), dtype=np.float32)
        for row, key in zip(noise, keys, strict=True):
            np.random.default_rng([self.seed, *map(int, key)]).standard_normal(out=row, dtype=np.float32)
        return logits + self.scale * torch.from_numpy(noise).to(logits).reshape(logits.shape)


def add_noise(model: Any, scale: float, seed: int) -> None:
    """Put a `NoisyHead` in the place of the model's head."""
    model.set_output_embeddings(NoisyHead(model.get_output_embeddings(), scale, seed))


class NoisyLogitsConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The part of ``config.json`` that asks for noise."""

    def __init__(self, scale: float, seed: int, **kwargs: Any) -> None:
        super().__init__(QUANT_METHOD)
        self.scale, self.seed = scale, seed


class NoisyLogitsQuantizer(OwnFormat):
    """Transformers' hook after loading, where the noise is put in; nothing is quantized."""

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        add_noise(model, self.quantization_config.scale, self.quantization_config.seed)
        return model
