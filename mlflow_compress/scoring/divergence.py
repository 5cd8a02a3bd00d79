"""How far two next-token distributions lie apart, row by row, in float32, without ever holding all rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

Tensor = torch.Tensor
_TILE = 1 << 17  # elements a tile: several float32 buffers of this size stay in a core's cache
TOP = 10
"""How many of the most probable tokens are compared."""
PERSISTENCE = 0.9
"""Of the rank-biased overlap: the first ten ranks then carry 86 % of the weight."""
_BLOCK = 128


@dataclass(frozen=True)
class Divergences:
    """Distances of q from p per row, float64 on the CPU, each of shape (n,).

    ``kl = sum p ln(p/q)``, ``kl_reverse = sum q ln(q/p)`` and ``js = (KL(p||m) + KL(q||m))/2`` with ``m = (p+q)/2``, in
    nats; ``tv = sum |p-q| / 2``; ``same_top`` whether the argmax agrees (the lowest index of equals); ``top10`` the
    share of the ten most probable tokens that both have, ``rbo10`` the extrapolated rank-biased overlap of these ten
    (as `metrics.ranking`), both of the whole vocabulary where it is smaller.
    """

    kl: Tensor
    kl_reverse: Tensor
    js: Tensor
    tv: Tensor
    same_top: Tensor
    top10: Tensor
    rbo10: Tensor


def divergences(logp: Tensor, logq: Tensor) -> Divergences:
    """Compare log-probabilities row by row.

    Parameters
    ----------
    logp, logq : Tensor of float32, shape (n, vocab_size)
        Log-softmax of baseline and variant.

    Notes
    -----
    With ``d = ln q - ln p`` the sums are written as ``sum p (e^d - 1 - d)`` and alike. That equals the textbook formula
    for normalised distributions, has no negative terms, and so is insensitive to the rounding of the normalisation,
    which at 1e-7 would otherwise drown small distances. Equal rows give exactly 0. Where p is 0 the limit is taken.
    """
    rows = max(1, _TILE // logp.shape[1])
    parts = [_tile(logp[i : i + rows], logq[i : i + rows]) for i in range(0, len(logp), rows)]
    kl, kl_reverse, js, tv = (
        torch.cat([part[k] for part in parts]).double().cpu() if parts else torch.zeros(0, dtype=torch.float64)
        for k in range(4)
    )
    same_top = (logp.argmax(dim=1) == logq.argmax(dim=1)).cpu()
    top10, rbo10 = _overlaps(top_tokens(logp, TOP), top_tokens(logq, TOP))
    return Divergences(kl, kl_reverse, js, tv, same_top, top10, rbo10)


def top_tokens(logp: Tensor, k: int) -> Tensor:
    """Return the `k` most probable tokens of every row, best first, shape (n, min(k, vocab_size)).

    They lie in the `k` blocks of the vocabulary with the highest maxima, so that a large vocabulary is read once and
    only those blocks are sorted. Equal rows give equal tokens.
    """
    n, width = logp.shape
    blocks = width // _BLOCK
    if blocks < 4 * k:
        return logp.topk(min(k, width), dim=1).indices
    split = logp[:, : blocks * _BLOCK].reshape(n, blocks, _BLOCK)
    best = split.amax(dim=2).topk(k, dim=1).indices
    columns = (best[:, :, None] * _BLOCK + torch.arange(_BLOCK, device=logp.device)).flatten(1)
    rest = torch.arange(blocks * _BLOCK, width, device=logp.device).expand(n, -1)
    columns = torch.cat([columns, rest], dim=1)
    return columns.gather(1, logp.gather(1, columns).topk(k, dim=1).indices)


def _overlaps(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the share of common tokens and the rank-biased overlap of two rankings of shape (n, k)."""
    k = a.shape[1]
    rank = torch.arange(k)
    same = (a[:, :, None] == b[:, None, :]).double().cpu()
    depth = torch.maximum(rank[:, None], rank[None, :])  # a pair counts from the deeper of its two ranks on
    overlap = torch.stack([(same * (depth <= d)).sum(dim=(1, 2)) for d in range(k)], dim=1)
    shares = overlap / (rank + 1)
    weights = PERSISTENCE ** (rank + 1).double()
    rbo = shares[:, -1] * PERSISTENCE**k + (1 - PERSISTENCE) / PERSISTENCE * (shares @ weights)
    return shares[:, -1], rbo


def _tile(logp: Tensor, logq: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    p, q = logp.exp(), logq.exp()
    d = logq - logp
    d.masked_fill_((logp == -math.inf) & (logq == -math.inf), 0.0)
    limit = torch.finfo(d.dtype).max  # 0 * limit is 0, 0 * inf would not be; a real NaN passes through
    d.clamp_(-limit, limit)
    diff = q - p
    kl = _positive(p, d, diff)
    kl_reverse = _positive(q, -d, -diff)
    # ln(m/p) = max(d, 0) + s and ln(m/q) = max(-d, 0) + s, with s = ln((1 + e^-|d|) / 2)
    s = torch.expm1(-d.abs()).mul_(0.5).log1p_()
    js = -0.5 * (p * (d.clamp_min(0) + s) + q * ((-d).clamp_min(0) + s)).sum(dim=1)
    return kl, kl_reverse, js.clamp_min_(0.0), 0.5 * diff.abs().sum(dim=1)


def _positive(p: Tensor, d: Tensor, diff: Tensor) -> Tensor:
    """Return ``sum p (e^d - 1 - d)``; far from 0 as ``(q - p) - p d``, which cannot overflow."""
    small = d.clamp(-1.0, 1.0)
    return torch.where(d == small, p * (torch.expm1(small) - small), diff - p * d).sum(dim=1)
