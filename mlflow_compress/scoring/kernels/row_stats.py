"""Result of the kernels: sums over the vocabulary, one per row of logits."""

from __future__ import annotations

from typing import NamedTuple

import torch


class RowStats(NamedTuple):
    """Sums over the vocabulary, row by row.

    Attributes
    ----------
    maxima : Tensor of float32, shape (n, n_blocks)
        Highest logit of each block (see `top_tokens.block_maxima`).
    log_normaliser : Tensor of float64, shape (n,)
        ``ln sum e^x``, on the CPU; not finite where a logit is NaN or +inf, or no logit is finite.
    entropy : Tensor of float64, shape (n,)
        ``-sum p ln p`` in nats, on the CPU; not finite where a token has probability 0.
    base_maxima, base_log_normaliser : Tensor or None
        The same of the baseline.
    distances : Tensor of float32 or None, shape (4, n)
        As `row_divergence.distances_from_sums` returns them.
    """

    maxima: torch.Tensor
    log_normaliser: torch.Tensor
    entropy: torch.Tensor
    base_maxima: torch.Tensor | None = None
    base_log_normaliser: torch.Tensor | None = None
    distances: torch.Tensor | None = None


class KlRows(NamedTuple):
    """KL and most probable token, row by row; every tensor has shape (n,) and is on the CPU.

    Attributes
    ----------
    kl : Tensor of float32
        As `row_divergence.distances_from_sums` returns it: NaN where the sum is not exact.
    top : Tensor of int64
        The model's most probable token, at a tie the lowest id.
    log_normaliser, base_log_normaliser : Tensor of float64
        As in `RowStats`, of the model and of the baseline.
    """

    kl: torch.Tensor
    top: torch.Tensor
    log_normaliser: torch.Tensor
    base_log_normaliser: torch.Tensor
