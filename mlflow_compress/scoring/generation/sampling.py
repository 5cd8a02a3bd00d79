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

_HEAD = 1024  # candidates that are sorted at first


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Settings of generation. The defaults are ConSCompF's.

    Attributes
    ----------
    max_new_tokens : int
        Length limit of an answer, in tokens.
    temperature : float
        Divides the logits; 0 means greedy decoding.
    top_k : int
        Only the k most probable tokens can be drawn; 0 means all.
    top_p : float
        Of these, only the smallest set whose probability reaches p can be drawn; in (0, 1].
    samples : int
        Answers per prompt; 1 for greedy decoding.
    seed : int
        Seed of every draw.
    batch_rows : int
        Sequences per forward pass.
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

    Returns
    -------
    numpy.ndarray, shape (n,)
        Numbers in [0, 1), one per token.
    """
    digest = hashlib.sha256(f"{seed}\n{sample}\n{prompt}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little"))).random(n)


def draw(logits: torch.Tensor, u: torch.Tensor, temperature: torch.Tensor, *, top_k: int, top_p: float) -> torch.Tensor:
    """Return one token per row, drawn by inverting the cumulative distribution; the most probable token comes first.

    Parameters
    ----------
    logits : torch.Tensor, shape (rows, vocab)
        Any float dtype; computed in float32, the cumulative sum in float64.
    u : torch.Tensor of float64, shape (rows,)
        One number in [0, 1) per row.
    temperature : torch.Tensor of float32, shape (rows,)
        0 takes the argmax of that row.
    top_k, top_p : int, float
        Truncation, first by k, then by p on the renormalised rest, as in transformers.

    Returns
    -------
    torch.Tensor of int64, shape (rows,)
    """
    logits = logits.float()
    chosen = logits.argmax(dim=-1)
    n_candidates = min(top_k, logits.shape[-1]) if top_k else logits.shape[-1]
    open_rows = torch.nonzero(temperature > 0)[:, 0]
    # Sorting a large vocabulary costs more than a small model's forward pass, and its tail is hardly ever needed.
    for n_sorted in sorted({min(_HEAD, n_candidates), n_candidates}):
        if len(open_rows):
            tokens, settled = _draw_among(
                logits[open_rows], u[open_rows], temperature[open_rows], n_sorted, n_candidates, top_p
            )
            chosen[open_rows] = tokens
            open_rows = open_rows[~settled]
    return chosen


def _draw_among(
    logits: torch.Tensor, u: torch.Tensor, temperature: torch.Tensor, n_sorted: int, n_candidates: int, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the drawn tokens, and which are right although only the `n_sorted` most probable were looked at."""
    values, tokens = logits.topk(n_sorted, dim=-1, sorted=True)  # before the division, which may make ties by rounding
    best, divisor = values[:, :1], temperature[:, None]
    weights = torch.exp((values - best) / divisor).double()
    if n_candidates == n_sorted:
        total = weights.sum(dim=-1, keepdim=True)
    else:  # all are candidates, or the best `n_candidates`
        others = logits if n_candidates == logits.shape[-1] else logits.topk(n_candidates, dim=-1).values
        total = torch.exp((others - best) / divisor).sum(dim=-1, keepdim=True, dtype=torch.float64)
    p = weights / total
    kept = p.cumsum(dim=-1) - p < top_p  # the first token always remains
    p = torch.where(kept, p, torch.zeros_like(p))
    cumulative = p.cumsum(dim=-1)
    # Where the candidates go on behind the sorted ones, all of them together have the probability 1.
    cut_off = ~kept[:, -1] | (n_sorted == n_candidates)
    target = u * torch.where(cut_off, cumulative[:, -1], torch.ones_like(u))
    rank = (cumulative <= target[:, None]).sum(dim=-1)
    settled = cut_off | ((top_p >= 1.0) & (rank < n_sorted))
    # Rounding may make the target equal to the total: then take the last token that can be drawn.
    rank = torch.minimum(rank, (p > 0).sum(dim=-1) - 1)
    return tokens.gather(-1, rank[:, None])[:, 0], settled


class RowSampler:
    """Logits processor that leaves only the drawn token, so that transformers' greedy search takes it.

    Parameters
    ----------
    u : numpy.ndarray, shape (rows, max_new_tokens)
        Each row's random numbers.
    temperatures : sequence of float
        Each row's temperature.
    offset : sequence of int
        Number of tokens that each row already has; its next random number is ``u[row, offset]``.
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
        """Return scores of shape (rows, vocab) that are 0 at the drawn tokens and -inf elsewhere."""
        step = (self._offset + input_ids.shape[1] - self._prompt_length)[:, None]
        u = self._u.gather(1, step)[:, 0]
        chosen = draw(scores, u, self._temperature, top_k=self._config.top_k, top_p=self._config.top_p)
        only = torch.full_like(scores, float("-inf"))
        return only.scatter_(1, chosen[:, None], 0.0)
