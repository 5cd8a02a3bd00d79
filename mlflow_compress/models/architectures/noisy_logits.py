"""A model with Gaussian noise on its logits: a control, stored as the base model with an entry in its configuration."""

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
        entries = states.reshape(-1, self.in_features)[:, :: -(-self.in_features // KEY_ENTRIES)]
        keys = entries.bfloat16().contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
        noise = np.empty((len(keys), self.out_features), dtype=np.float32)
        for row, key in zip(noise, keys, strict=True):
            np.random.default_rng([self.seed, *map(int, key)]).standard_normal(out=row, dtype=np.float32)
        return logits + self.scale * torch.from_numpy(noise).to(logits).reshape(logits.shape)


def add_noise(model: Any, scale: float, seed: int) -> None:
    """Replace the model's head by a `NoisyHead`."""
    model.set_output_embeddings(NoisyHead(model.get_output_embeddings(), scale, seed))


class NoisyLogitsConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The noise settings in ``config.json``."""

    def __init__(self, scale: float, seed: int, **kwargs: Any) -> None:
        super().__init__(QUANT_METHOD)
        self.scale, self.seed = scale, seed


class NoisyLogitsQuantizer(OwnFormat):
    """Transformers' hook after loading, which adds the noise; nothing is quantized."""

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        add_noise(model, self.quantization_config.scale, self.quantization_config.seed)
        return model
