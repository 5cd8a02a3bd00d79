"""How far two next-token distributions lie apart, row by row, in float32."""

from __future__ import annotations

import math

import torch

Tensor = torch.Tensor
KINDS = ("kl", "kl_reverse", "js", "tv")
LARGEST = (math.inf, math.inf, math.log(2), 1.0)  # of each kind, in its order
FARTHEST = 60.0  # a larger ln(q/p) belongs to a p near the smallest float32


def divergences(logp: Tensor, logq: Tensor, spare: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Reduce normalised rows to the sums of which `finish` makes distances; `logp` and `logq` are written over.

    Parameters
    ----------
    logp, logq : Tensor of float32, shape (n, vocab_size)
        Log-softmax of baseline and variant.
    spare : three Tensors of the same shape
        To work in.

    Notes
    -----
    With ``d = ln q - ln p``, ``e = e^d - 1`` and ``l = ln(m/p) = ln(1 + e/2)`` the distances are written as::

        kl = sum p (e - d)    kl_reverse = sum p (e d - (e - d))
        tv = sum |p e| / 2    js = sum p ((1 + e) (d - l) - l) / 2

    For normalised distributions they equal the textbook formulas, have no negative terms, and so are insensitive to the
    rounding of the normalisation, which at 1e-7 would otherwise drown small distances. Equal rows give exactly 0.
    """
    one, two, three = spare
    d = logq.sub_(logp)
    p = logp.exp_()
    far = d.amax(dim=1) > FARTHEST
    e = torch.expm1(d, out=one)
    pe = torch.mul(p, e, out=two)
    both_ways = torch.mul(pe, d, out=three)
    apart = pe.abs_().sum(dim=1)
    one_way = torch.sub(e, d, out=two).mul_(p)
    kl, kl_reverse = one_way.sum(dim=1), both_ways.sub_(one_way).sum(dim=1)
    ln_m = torch.mul(e, 0.5, out=two).log1p_()
    rest = d.sub_(ln_m)
    js = torch.addcmul(rest, rest, e, out=three).sub_(ln_m).mul_(p).sum(dim=1)
    return kl, kl_reverse, js, apart, far


def finish(kl: Tensor, kl_reverse: Tensor, js: Tensor, apart: Tensor, far: Tensor) -> Tensor:
    """Return the distances in the order of `KINDS`, float32, shape (4, n), from the sums of all rows.

    In nats: ``kl = sum p ln(p/q)``, ``kl_reverse = sum q ln(q/p)`` and ``js = (KL(p||m) + KL(q||m))/2`` with
    ``m = (p+q)/2``; and ``tv = sum |p-q| / 2``. Rows for which the sums are not exact (impossible tokens, or `far` is
    not 0: a token has an ln(q/p) above `FARTHEST`) are NaN: they take `careful_divergences`.
    """
    found = torch.stack([kl, kl_reverse, 0.5 * js, 0.5 * apart])
    exact = (far == 0) & found.isfinite().all(dim=0)
    return _possible(found).masked_fill_(~exact, math.nan)


def careful_divergences(logp: Tensor, logq: Tensor) -> Tensor:
    """Return what `finish` does, for any normalised rows; where p is 0 the limit is taken, and NaN remains NaN."""
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
    return _possible(torch.stack([kl, kl_reverse, js, 0.5 * diff.abs().sum(dim=1)]))


def _possible(found: Tensor) -> Tensor:
    """Cut off what rounding adds beyond the distances' ranges; NaN remains NaN."""
    return found.clamp_(found.new_zeros(4, 1), found.new_tensor(LARGEST)[:, None])


def _positive(p: Tensor, d: Tensor, diff: Tensor) -> Tensor:
    """Return ``sum p (e^d - 1 - d)``; far from 0 as ``(q - p) - p d``, which cannot overflow."""
    small = d.clamp(-1.0, 1.0)
    return torch.where(d == small, p * (torch.expm1(small) - small), diff - p * d).sum(dim=1)
