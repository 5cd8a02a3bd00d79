"""The most probable tokens of many rows over a large vocabulary, and the overlap of two rankings."""

from __future__ import annotations

import torch

Tensor = torch.Tensor
TOP = 10
"""Number of most probable tokens that are compared."""
PERSISTENCE = 0.9
"""Parameter p of the rank-biased overlap; the first ten ranks then have 86 % of the weight."""
BLOCK = 128
"""Tokens per block; the highest logit of each block is stored."""


def n_blocks(width: int) -> int:
    """Return the number of blocks of a vocabulary."""
    return -(-width // BLOCK)


def block_maxima(logits: Tensor) -> Tensor:
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


def top_token_overlap(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the share of common tokens and the extrapolated rank-biased overlap of two rankings of shape (n, k).

    ``RBO = (X_k/k) p^k + (1 - p)/p sum_{d=1..k} (X_d/d) p^d``, where `X_d` counts the common tokens among the first d.

    References
    ----------
    Webber, Moffat and Zobel, "A similarity measure for indefinite rankings", TOIS 2010, equation 30.
    """
    k = a.shape[1]
    rank = torch.arange(k)
    same = (a[:, :, None] == b[:, None, :]).double().cpu()
    depth = torch.maximum(rank[:, None], rank[None, :])  # a common token counts from the deeper of its two ranks on
    overlap = torch.stack([(same * (depth <= d)).sum(dim=(1, 2)) for d in range(k)], dim=1)
    shares = overlap / (rank + 1)
    weights = PERSISTENCE ** (rank + 1).double()
    rbo = shares[:, -1] * PERSISTENCE**k + (1 - PERSISTENCE) / PERSISTENCE * (shares @ weights)
    return shares[:, -1], rbo


def _columns(logits: Tensor, blocks: Tensor) -> Tensor:
    """Return the token ids in the given blocks of every row; the last block may go beyond the vocabulary."""
    inside = torch.arange(BLOCK, device=logits.device)
    return (blocks[:, :, None] * BLOCK + inside).flatten(1)


def _values(logits: Tensor, columns: Tensor) -> Tensor:
    beyond = columns >= logits.shape[1]
    return logits.gather(1, columns.masked_fill(beyond, 0)).masked_fill_(beyond, -torch.inf)
