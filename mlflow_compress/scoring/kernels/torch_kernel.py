"""The sums of a sweep on any device, in torch: tile by tile, so that what is worked on stays in cache."""

from __future__ import annotations

import torch

from mlflow_compress.scoring.kernels.row_divergence import divergences, finish
from mlflow_compress.scoring.kernels.row_stats import RowStats
from mlflow_compress.scoring.kernels.top_tokens import block_maxima

Tensor = torch.Tensor
# Elements a tile. On a CPU its five float32 buffers stay in cache; a GPU wants work for all its cores.
_TILE_CPU, _TILE_GPU = 1 << 17, 1 << 24


def reduce(logits: Tensor, baseline: Tensor | None) -> RowStats:
    """Return the sums of float32 rows, shape (n, vocab_size)."""
    n, width = logits.shape
    rows = max(1, (_TILE_CPU if logits.device.type == "cpu" else _TILE_GPU) // width)
    buffers = [torch.empty((min(rows, n), width), device=logits.device) for _ in range(2 if baseline is None else 5)]
    ours, theirs = _Normaliser(), _Normaliser()
    sums: list[tuple[Tensor, ...]] = []
    for start in range(0, n, rows):
        part = slice(start, min(start + rows, n))
        logq, work, *more = (b[: part.stop - start] for b in buffers)
        ours.run(logits[part], logq, work)
        if baseline is not None:
            theirs.run(baseline[part], more[0], work)
            sums.append(divergences(more[0], logq, (work, more[1], more[2])))
    maxima, log_normaliser, entropy = ours.joined()
    if baseline is None:
        return RowStats(maxima, log_normaliser, entropy)
    base_maxima, base_log_normaliser, _ = theirs.joined()
    found = finish(*(torch.cat(column) for column in zip(*sums, strict=True)))
    return RowStats(maxima, log_normaliser, entropy, base_maxima, base_log_normaliser, found)


class _Normaliser:
    """Log-softmax of tile after tile, and what is kept of each: sums are finished for all rows together."""

    def __init__(self) -> None:
        self._maxima: list[Tensor] = []
        self._highest: list[Tensor] = []
        self._totals: list[Tensor] = []
        self._means: list[Tensor] = []

    def run(self, logits: Tensor, out: Tensor, work: Tensor) -> None:
        """Write the log-softmax to `out`; with z = e^(x - highest) the sums of z and of z ln z are kept."""
        maxima = block_maxima(logits)
        highest = maxima.amax(dim=1, keepdim=True)
        torch.sub(logits, highest, out=out)
        total = torch.exp(out, out=work).sum(dim=1, keepdim=True)
        mean = work.mul_(out).sum(dim=1, keepdim=True)
        out.sub_(total.log())
        kept = (self._maxima, self._highest, self._totals, self._means)
        for values, value in zip(kept, (maxima, highest, total, mean), strict=True):
            values.append(value)

    def joined(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the block maxima, and in float64 on the CPU the logarithm of the normaliser and the entropy."""
        highest, total, mean = (
            torch.cat(kept)[:, 0].double().cpu() for kept in (self._highest, self._totals, self._means)
        )
        return torch.cat(self._maxima), highest + total.log(), total.log() - mean / total
