"""Chooses the next token: greedily, or from a truncated distribution with random numbers of the row's own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mlflow_compress.errors import ConfigError
from mlflow_compress.scoring.generation.drawing import draw


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Settings of generation. The defaults are ConSCompF's."""

    max_new_tokens: int = 128  # Length limit of an answer, in tokens
    temperature: float = 0.7  # Divides the logits; 0 means greedy decoding
    top_k: int = 50  # Only the k most probable tokens can be drawn; 0 means all
    top_p: float = 0.95  # Of these, only the smallest set whose probability reaches p can be drawn; in (0, 1]
    samples: int = 5  # Answers per prompt; 1 for greedy decoding
    seed: int = 42  # Seed of every draw
    batch_rows: int = 64  # Sequences per forward pass

    def __post_init__(self) -> None:
        for name, low in (("max_new_tokens", 1), ("top_k", 0), ("samples", 1), ("seed", 0), ("batch_rows", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}", got=getattr(self, name))
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError("temperature must be 0 or larger, and finite", got=self.temperature)
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError("top_p must lie in (0, 1]", got=self.top_p)
        if self.greedy and self.samples > 1:
            raise ConfigError(
                "Greedy decoding gives one answer per prompt",
                got=self.samples,
                fix="Set samples=1 or a temperature above 0",
            )

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0.0


def uniforms(seed: int, prompt: str, sample: int, n: int) -> npt.NDArray[np.float64]:
    """Return the random numbers of one row, a function of (seed, prompt, sample) and of nothing else.

    So the order of the prompts, the batch size and the other rows cannot change them.

    Numbers in [0, 1), one per token.
    """
    digest = hashlib.sha256(f"{seed}\n{sample}\n{prompt}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little"))).random(n)


class RowSampler:
    """Logits processor that leaves only the drawn token, so that transformers' greedy search takes it.

    `u` has shape (rows, max_new_tokens). `offset` is the number of tokens that each row already has; its next random
    number is ``u[row, offset]``. `prompt_length` is the padded length of the batch's input.
    """

    def __init__(
        self,
        u: npt.NDArray[np.float64],
        temperatures: Sequence[float],
        offset: Sequence[int],
        *,
        prompt_length: int,
        config: GenerationConfig,
        device: Any,
    ) -> None:
        self._u = torch.from_numpy(u).to(device)
        self._temperature = torch.tensor(temperatures, dtype=torch.float32, device=device)
        self._offset = torch.tensor(offset, device=device)
        self._prompt_length = prompt_length
        self._config = config

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores of shape (rows, vocab) that are 0 at the drawn tokens and -inf elsewhere."""
        step = (self._offset + input_ids.shape[1] - self._prompt_length)[:, None]
        u = self._u.gather(1, step)[:, 0]
        chosen = draw(scores, u, self._temperature, top_k=self._config.top_k, top_p=self._config.top_p)
        only = torch.full_like(scores, float("-inf"))
        return only.scatter_(1, chosen[:, None], 0.0)
