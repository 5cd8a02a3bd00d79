"""Choosing the next token: greedy, or from a truncated distribution with random numbers that belong to the row."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mlflow_compress.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How answers are drawn. The defaults are ConSCompF's.

    Attributes
    ----------
    max_new_tokens : int
        Longest answer in tokens.
    temperature : float
        Divides the logits; 0 means greedy decoding.
    top_k : int
        Only the k most probable tokens can be drawn; 0 means all.
    top_p : float
        Of these, only the smallest set whose probability reaches p, in (0, 1].
    samples : int
        Answers a prompt; greedy decoding has one.
    seed : int
        Seed of every draw.
    batch_rows : int
        Sequences a forward pass.
    """

    max_new_tokens: int = 128
    temperature: float = 0.7
    top_k: int = 50
    top_p: float = 0.95
    samples: int = 5
    seed: int = 42
    batch_rows: int = 64

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
                "Greedy decoding gives one answer a prompt",
                got=self.samples,
                fix="Set samples=1 or a temperature above 0",
            )

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken every time."""
        return self.temperature == 0.0


def uniforms(seed: int, prompt: str, sample: int, n: int) -> npt.NDArray[np.float64]:
    """Return the random numbers of one row, a function of (seed, prompt, sample) and of nothing else.

    The order of the prompts, the batch size and what else is generated therefore cannot change a row's draws.

    Returns
    -------
    numpy.ndarray, shape (n,)
        Numbers in [0, 1), one a token.
    """
    digest = hashlib.sha256(f"{seed}\n{sample}\n{prompt}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little"))).random(n)


def draw(logits: torch.Tensor, u: torch.Tensor, temperature: torch.Tensor, *, top_k: int, top_p: float) -> torch.Tensor:
    """Draw one token a row by inverting the cumulative distribution, the most probable token first.

    Parameters
    ----------
    logits : torch.Tensor, shape (rows, vocab)
        Any float dtype; computed in float32, the cumulative sum in float64.
    u : torch.Tensor of float64, shape (rows,)
        One number in [0, 1) a row.
    temperature : torch.Tensor of float32, shape (rows,)
        0 takes the argmax of that row.
    top_k, top_p : int, float
        Truncation, in this order, each on the renormalised rest, as in transformers.

    Returns
    -------
    torch.Tensor of int64, shape (rows,)
    """
    logits = logits.float()
    greedy = logits.argmax(dim=-1)
    kept = min(top_k, logits.shape[-1]) if top_k else logits.shape[-1]
    values, tokens = logits.topk(kept, dim=-1, sorted=True)  # before the division, which may round two to a tie
    scaled = values / torch.where(temperature > 0, temperature, torch.ones_like(temperature))[:, None]
    p = torch.softmax(scaled, dim=-1).double()
    before = p.cumsum(dim=-1) - p
    p = torch.where(before < top_p, p, torch.zeros_like(p))  # the first token always stays: nothing is before it
    cumulative = p.cumsum(dim=-1)
    target = u * cumulative[:, -1]
    rank = (cumulative <= target[:, None]).sum(dim=-1)
    # Rounding may push the target onto the total: the last token that can be drawn is the answer then.
    rank = torch.minimum(rank, (p > 0).sum(dim=-1) - 1)
    drawn = tokens.gather(-1, rank[:, None])[:, 0]
    return torch.where(temperature > 0, drawn, greedy)


class RowSampler:
    """A logits processor that leaves only the drawn token, so that transformers' greedy search follows our draws.

    Parameters
    ----------
    u : numpy.ndarray, shape (rows, max_new_tokens)
        Each row's random numbers.
    temperatures : sequence of float
        Each row's temperature.
    offset : sequence of int
        Tokens that each row already has: its next number is ``u[row, offset]``.
    prompt_length : int
        Padded length of the batch's input.
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
        """Return `scores` with -inf everywhere but at the drawn tokens; shapes (rows, length), (rows, vocab)."""
        step = (self._offset + input_ids.shape[1] - self._prompt_length)[:, None]
        u = self._u.gather(1, step)[:, 0]
        chosen = draw(scores, u, self._temperature, top_k=self._config.top_k, top_p=self._config.top_p)
        only = torch.full_like(scores, float("-inf"))
        return only.scatter_(1, chosen[:, None], 0.0)
