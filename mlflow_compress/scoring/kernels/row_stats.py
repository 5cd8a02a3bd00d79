"""Sums over the vocabulary, one per row of logits, and how they are computed in torch, on any device."""

import math
from typing import NamedTuple

import torch


class RowStats(NamedTuple):
    """Sums over the vocabulary, row by row."""

    maxima: torch.Tensor  # Highest logit of each block (see `_block_maxima`); shape (n, n_blocks)
    # ``ln sum e^x``; not finite where a logit is NaN or +inf, or no logit is finite; shape (n,)
    log_normaliser: torch.Tensor
    entropy: torch.Tensor  # ``-sum p ln p`` in nats; not finite where a token has probability 0; shape (n,)
    base_maxima: torch.Tensor | None = None  # The same of the baseline
    base_log_normaliser: torch.Tensor | None = None
    distances: torch.Tensor | None = None  # As `distances_from_sums` returns them; shape (4, n)


Tensor = torch.Tensor
DIVERGENCES = ("kl", "kl_reverse", "js", "tv")
_UPPER_BOUNDS = (math.inf, math.inf, math.log(2), 1.0)  # of each divergence, in the same order
MAX_LOG_RATIO = 60.0  # above this ln(q/p), p is near the smallest float32
TOP = 10  # most probable tokens that are compared
_PERSISTENCE = 0.9  # parameter p of the rank-biased overlap; the first ten ranks then have 86 % of the weight
BLOCK = 128  # tokens per block; the highest logit of each block is stored
_TILE = 1 << 24  # logits that are computed with at once


def divergence_sums(logp: Tensor, logq: Tensor) -> tuple[Tensor, ...]:
    """Return the sums from which `distances_from_sums` computes the divergences, of the rows' log-softmax.

    With ``d = ln q - ln p``, ``e = e^d - 1`` and ``l = ln(m/p) = ln(1 + e/2)`` the distances are written as::

        kl = sum p (e - d)    kl_reverse = sum p (e d - (e - d))
        tv = sum |p e| / 2    js = sum p ((1 + e) (d - l) - l) / 2

    For normalised distributions they equal the textbook formulas. They have no negative terms, so the rounding of the
    normalisation (1e-7) does not hide small distances. Equal rows give exactly 0.
    """
    d, p = logq - logp, logp.exp()
    far = d.amax(dim=1) > MAX_LOG_RATIO
    e = torch.expm1(d)
    pe, kl_terms = p * e, (e - d).mul_(p)
    kl_reverse = (pe * d).sub_(kl_terms).sum(dim=1)
    ln_m = torch.mul(e, 0.5).log1p_()
    rest = d.sub_(ln_m)
    js = torch.addcmul(rest, rest, e).sub_(ln_m).mul_(p).sum(dim=1)
    return kl_terms.sum(dim=1), kl_reverse, js, pe.abs_().sum(dim=1), far


def distances_from_sums(kl: Tensor, kl_reverse: Tensor, js: Tensor, abs_difference: Tensor, far: Tensor) -> Tensor:
    """Return the divergences in the order of `DIVERGENCES`, float32, shape (4, n).

    In nats: ``kl = sum p ln(p/q)``, ``kl_reverse = sum q ln(q/p)`` and ``js = (KL(p||m) + KL(q||m))/2`` with
    ``m = (p+q)/2``; and ``tv = sum |p-q| / 2``. Rows for which the sums are not exact are NaN, and must take
    `stable_divergences`: a token has probability 0, or an ln(q/p) above `MAX_LOG_RATIO` (then `far` is not 0).
    """
    divergences = torch.stack([kl, kl_reverse, 0.5 * js, 0.5 * abs_difference])
    exact = (far == 0) & divergences.isfinite().all(dim=0)
    return _clip_to_range(divergences).masked_fill_(~exact, math.nan)


def stable_divergences(logp: Tensor, logq: Tensor) -> Tensor:
    """Return the divergences as `distances_from_sums` does, for any normalised rows.

    Where p is 0 the limit is taken. NaN remains NaN.
    """
    p, q = logp.exp(), logq.exp()
    d = logq - logp
    d.masked_fill_((logp == -math.inf) & (logq == -math.inf), 0.0)
    limit = torch.finfo(d.dtype).max  # 0 * limit is 0, 0 * inf would not be; a real NaN passes through
    d.clamp_(-limit, limit)
    diff = q - p
    kl = _kl_sum(p, d, diff)
    kl_reverse = _kl_sum(q, -d, -diff)
    # ln(m/p) = max(d, 0) + s and ln(m/q) = max(-d, 0) + s, with s = ln((1 + e^-|d|) / 2)
    s = torch.expm1(-d.abs()).mul_(0.5).log1p_()
    js = -0.5 * (p * (d.clamp_min(0) + s) + q * ((-d).clamp_min(0) + s)).sum(dim=1)
    return _clip_to_range(torch.stack([kl, kl_reverse, js, 0.5 * diff.abs().sum(dim=1)]))


def _clip_to_range(divergences: Tensor) -> Tensor:
    """Clip each divergence to its range, which rounding may exceed; NaN remains NaN."""
    for divergence, highest in zip(divergences, _UPPER_BOUNDS, strict=True):
        divergence.clamp_(0.0, highest)
    return divergences


def _kl_sum(p: Tensor, d: Tensor, diff: Tensor) -> Tensor:
    """Return ``sum p (e^d - 1 - d)``; for large |d| as ``(q - p) - p d``, which cannot overflow."""
    small = d.clamp(-1.0, 1.0)
    return torch.where(d == small, p * (torch.expm1(small) - small), diff - p * d).sum(dim=1)


def n_blocks(width: int) -> int:
    """Return the number of blocks of a vocabulary."""
    return -(-width // BLOCK)


def _block_maxima(logits: Tensor) -> Tensor:
    """Return the highest logit of every block of 128 tokens, the last one shorter, shape (n, n_blocks)."""
    width = logits.shape[1]
    whole = width // BLOCK * BLOCK
    maxima = logits[:, :whole].view(len(logits), -1, BLOCK).amax(dim=2) if whole else logits[:, :0]
    return maxima if whole == width else torch.cat([maxima, logits[:, whole:].amax(dim=1, keepdim=True)], dim=1)


def most_probable(logits: Tensor, maxima: Tensor) -> Tensor:
    """Return the most probable token of every row, at a tie the lowest id, shape (n,)."""
    columns = _columns(logits, maxima.max(dim=1, keepdim=True).indices)
    return columns.gather(1, _values(logits, columns).max(dim=1, keepdim=True).indices)[:, 0]


def top_tokens(logits: Tensor, maxima: Tensor, k: int = TOP) -> Tensor:
    """Return the `k` most probable tokens of every row, best first, shape (n, min(k, vocab_size)).

    They are in the `k` blocks with the highest maxima, so only these blocks are sorted. Equal rows give equal tokens.
    """
    width = logits.shape[1]
    columns = _columns(logits, maxima.topk(min(k, maxima.shape[1]), dim=1).indices)
    return columns.gather(1, _values(logits, columns).topk(min(k, width), dim=1).indices)


def common_tokens(a: Tensor, b: Tensor) -> Tensor:
    """Return how many tokens are common to the first d of two rankings of shape (n, k), for d = 1 .. k."""
    same = a[:, :, None] == b[:, None, :]
    return same.cumsum(dim=1).cumsum(dim=2).diagonal(dim1=1, dim2=2)


def top_token_overlap(common: Tensor) -> tuple[Tensor, Tensor]:
    """Return the share of common tokens and the extrapolated rank-biased overlap of two rankings.

    ``RBO = (X_k/k) p^k + (1 - p)/p sum_{d=1..k} (X_d/d) p^d``, where `X_d` counts the common tokens among the first d,
    as `common_tokens` does (Webber, Moffat and Zobel, "A similarity measure for indefinite rankings", TOIS 2010,
    equation 30).
    """
    k = common.shape[1]
    rank = torch.arange(k)
    shares = common.double() / (rank + 1)
    weights = _PERSISTENCE ** (rank + 1).double()
    rbo = shares[:, -1] * _PERSISTENCE**k + (1 - _PERSISTENCE) / _PERSISTENCE * (shares @ weights)
    return shares[:, -1], rbo


def _columns(logits: Tensor, blocks: Tensor) -> Tensor:
    """Return the token ids in the given blocks of every row; the last block may go beyond the vocabulary."""
    inside = torch.arange(BLOCK, device=logits.device)
    return (blocks[:, :, None] * BLOCK + inside).flatten(1)


def _values(logits: Tensor, columns: Tensor) -> Tensor:
    beyond = columns >= logits.shape[1]
    return logits.gather(1, columns.masked_fill(beyond, 0)).masked_fill_(beyond, -torch.inf)


def compute_row_stats(logits: Tensor, baseline: Tensor | None) -> RowStats:
    """Return the statistics of float32 rows, shape (n, vocab_size)."""
    n, width = logits.shape
    rows = max(1, _TILE // width)
    variants, bases, sums = [], [], []
    for start in range(0, n, rows):
        logq, *of_variant = _normalised(logits[start : start + rows])
        variants.append(of_variant)
        if baseline is not None:
            logp, *of_base = _normalised(baseline[start : start + rows])
            bases.append(of_base)
            sums.append(divergence_sums(logp, logq))
    maxima, log_normaliser, entropy = _joined(variants)
    if baseline is None:
        return RowStats(maxima, log_normaliser, entropy)
    base_maxima, base_log_normaliser, _ = _joined(bases)
    distances = distances_from_sums(*(torch.cat(column) for column in zip(*sums, strict=True)))
    return RowStats(maxima, log_normaliser, entropy, base_maxima, base_log_normaliser, distances)


def _normalised(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return log-softmax, block maxima, highest logit, and the sums of z and of z ln z, with z = e^(x - highest)."""
    maxima = _block_maxima(logits)
    highest = maxima.amax(dim=1, keepdim=True)
    ln_z = logits - highest
    z = torch.exp(ln_z)
    total = z.sum(dim=1, keepdim=True)
    mean = z.mul_(ln_z).sum(dim=1, keepdim=True)
    return ln_z.sub_(total.log()), maxima, highest, total, mean


def _joined(tiles: list[list[Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return block maxima, log-normaliser and entropy of all rows; the last two in float64."""
    maxima, *columns = (torch.cat(values) for values in zip(*tiles, strict=True))
    highest, total, mean = (column[:, 0].double() for column in columns)
    return maxima, highest + total.log(), total.log() - mean / total
