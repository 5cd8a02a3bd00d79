"""Row statistics on any device, in torch. Rows are processed in tiles that fit into the cache."""

from __future__ import annotations

import torch

from mlflow_compress.scoring.kernels.row_stats import RowStats, block_maxima, distances_from_sums, divergence_sums

Tensor = torch.Tensor
# Elements per tile. On a CPU its five float32 buffers fit into the cache; a GPU needs work for all its cores.
_TILE_CPU, _TILE_GPU = 1 << 17, 1 << 24


def compute_row_stats(logits: Tensor, baseline: Tensor | None) -> RowStats:
    """Return the statistics of float32 rows, shape (n, vocab_size)."""
    n, width = logits.shape
    rows = max(1, (_TILE_CPU if logits.device.type == "cpu" else _TILE_GPU) // width)
    buffers = [torch.empty((min(rows, n), width), device=logits.device) for _ in range(2 if baseline is None else 5)]
    variant, base = _Normaliser(), _Normaliser()
    sums: list[tuple[Tensor, ...]] = []
    for start in range(0, n, rows):
        part = slice(start, min(start + rows, n))
        logq, work, *more = (b[: part.stop - start] for b in buffers)
        variant.run(logits[part], logq, work)
        if baseline is not None:
            base.run(baseline[part], more[0], work)
            sums.append(divergence_sums(more[0], logq, (work, more[1], more[2])))
    maxima, log_normaliser, entropy = variant.joined()
    if baseline is None:
        return RowStats(maxima, log_normaliser, entropy)
    base_maxima, base_log_normaliser, _ = base.joined()
    distances = distances_from_sums(*(torch.cat(column) for column in zip(*sums, strict=True)))
    return RowStats(maxima, log_normaliser, entropy, base_maxima, base_log_normaliser, distances)


class _Normaliser:
    """Computes the log-softmax tile by tile, and collects the sums that the row statistics need."""

    def __init__(self) -> None:
        self._maxima: list[Tensor] = []
        self._highest: list[Tensor] = []
        self._totals: list[Tensor] = []
        self._means: list[Tensor] = []

    def run(self, logits: Tensor, out: Tensor, work: Tensor) -> None:
        """Write the log-softmax to `out`, and collect the sums of z and of z ln z, with z = e^(x - highest)."""
        maxima = block_maxima(logits)
        highest = maxima.amax(dim=1, keepdim=True)
        torch.sub(logits, highest, out=out)
        total = torch.exp(out, out=work).sum(dim=1, keepdim=True)
        mean = work.mul_(out).sum(dim=1, keepdim=True)
        out.sub_(total.log())
        lists = (self._maxima, self._highest, self._totals, self._means)
        for values, value in zip(lists, (maxima, highest, total, mean), strict=True):
            values.append(value)

    def joined(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return block maxima, log-normaliser and entropy of all rows; the last two in float64 on the CPU."""
        highest, total, mean = (
            torch.cat(values)[:, 0].double().cpu() for values in (self._highest, self._totals, self._means)
        )
        return torch.cat(self._maxima), highest + total.log(), total.log() - mean / total
