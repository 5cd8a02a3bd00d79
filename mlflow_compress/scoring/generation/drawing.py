"""Draws tokens from logits. It needs torch alone: a worker in another environment reads it as a file."""

import torch

_HEAD = 1024  # candidates that are sorted at first


def draw(logits: torch.Tensor, u: torch.Tensor, temperature: torch.Tensor, *, top_k: int, top_p: float) -> torch.Tensor:
    """Return one token per row, drawn by inverting the cumulative distribution; the most probable token comes first.

    Logits, shape (rows, vocab), are computed with in float32, their cumulative sum in float64. `u` has a float64 number
    in [0, 1) per row, `temperature` a float32 number; where it is 0 the row's argmax is taken. The distribution is
    truncated first by `top_k`, then by `top_p` on the renormalised rest, as in transformers.
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
