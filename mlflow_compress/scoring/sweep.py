"""One sweep over the logits of a chunk of rows: normalisation, ranks, entropy and distances, tile by tile in cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mlflow_compress.errors import CheckpointError
from mlflow_compress.scoring.divergence import KINDS, careful_divergences, divergences, finish
from mlflow_compress.scoring.ranks import agreement, block_maxima, most_probable, top_tokens

Tensor = torch.Tensor
# Elements a tile. On a CPU its five float32 buffers stay in cache; a GPU wants work for all its cores.
_TILE_CPU, _TILE_GPU = 1 << 17, 1 << 24


@dataclass(frozen=True)
class Sweep:
    """What a chunk of rows yields, each of shape (n,), on the CPU.

    Attributes
    ----------
    log_normaliser : Tensor of float64
        ``ln sum e^x`` of the logits x: the log-probability of token t is ``x[t]`` less this.
    argmax : Tensor of int64
        The most probable token, the lowest id of equals.
    entropy : Tensor of float64 or None
        ``-sum p ln p`` in nats.
    distances : dict of str to Tensor
        With a baseline: ``kl``, ``kl_reverse``, ``js``, ``tv`` (see `divergence.finish`), float64; ``same_top``
        whether the most probable token agrees; ``top10`` the share of the ten most probable tokens that both have, and
        ``rbo10`` the rank-biased overlap of these ten (as `metrics.ranking`), of the whole vocabulary where it is
        smaller.
    """

    log_normaliser: Tensor
    argmax: Tensor
    entropy: Tensor | None
    distances: dict[str, Tensor]


def sweep(logits: Tensor, baseline: Tensor | None = None, *, entropy: bool = False) -> Sweep:
    """Reduce the logits of a chunk, and compare them with a baseline's.

    Parameters
    ----------
    logits : Tensor of float32, shape (n, vocab_size)
    baseline : Tensor of float32, shape (n, vocab_size), optional
        Its logits on the same rows; log-probabilities are logits too.
    entropy : bool
        Whether the entropies are wanted.

    Raises
    ------
    CheckpointError
        When a row has a NaN or +inf logit, or none that is finite.
    """
    n, width = logits.shape
    rows = max(1, (_TILE_CPU if logits.device.type == "cpu" else _TILE_GPU) // width)
    buffers = [torch.empty((min(rows, n), width), device=logits.device) for _ in range(2 if baseline is None else 5)]
    ours, theirs = _Normaliser(), _Normaliser()
    sums: list[tuple[Tensor, ...]] = []
    for start in range(0, n, rows):
        part = slice(start, min(start + rows, n))
        logq, work, *more = (b[: part.stop - start] for b in buffers)
        ours.run(logits[part], logq, work, entropy=entropy)
        if baseline is not None:
            logp = more[0]
            theirs.run(baseline[part], logp, work)
            sums.append(divergences(logp, logq, (work, more[1], more[2])))
    maxima, log_normaliser = ours.joined(logits)
    argmax = most_probable(logits, maxima).cpu()
    distances = {}
    if baseline is not None:
        base_maxima, _ = theirs.joined(baseline)
        distances = _distances(logits, baseline, sums)
        distances["same_top"] = most_probable(baseline, base_maxima).cpu() == argmax
        tops = top_tokens(baseline, base_maxima), top_tokens(logits, maxima)
        distances["top10"], distances["rbo10"] = agreement(*tops)
    return Sweep(log_normaliser, argmax, ours.entropies(logits) if entropy else None, distances)


class _Normaliser:
    """Log-softmax of tile after tile, and what is kept of each: sums are finished for all rows together."""

    def __init__(self) -> None:
        self._maxima: list[Tensor] = []
        self._highest: list[Tensor] = []
        self._totals: list[Tensor] = []
        self._means: list[Tensor] = []

    def run(self, logits: Tensor, out: Tensor, work: Tensor, *, entropy: bool = False) -> None:
        """Write the log-softmax to `out`."""
        maxima = block_maxima(logits)
        highest = maxima.amax(dim=1, keepdim=True)
        torch.sub(logits, highest, out=out)
        total = torch.exp(out, out=work).sum(dim=1, keepdim=True)
        if entropy:
            self._means.append(work.mul_(out).sum(dim=1))
        out.sub_(total.log())
        for kept, value in zip((self._maxima, self._highest, self._totals), (maxima, highest, total), strict=True):
            kept.append(value)

    def joined(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the block maxima and, in float64 on the CPU, the logarithm of the normaliser, of all rows."""
        if not self._totals:
            return block_maxima(logits), torch.zeros(0, dtype=torch.float64)
        highest, total = torch.cat(self._highest), torch.cat(self._totals)
        log_normaliser = (highest.double() + total.double().log())[:, 0].cpu()
        if not bool(log_normaliser.isfinite().all()):
            raise CheckpointError(
                "A model gives logits that are NaN or infinite",
                fix="Load it in float32, or make the checkpoint again",
            )
        return torch.cat(self._maxima), log_normaliser

    def entropies(self, logits: Tensor) -> Tensor:
        """Return ``ln s - sum z ln z / s`` with ``z = e^(x - highest)`` and ``s = sum z``, in float64 on the CPU."""
        if not self._means:
            return torch.zeros(0, dtype=torch.float64)
        total, mean = torch.cat(self._totals)[:, 0].double(), torch.cat(self._means).double()
        found = (total.log() - mean / total).cpu()
        for row in torch.nonzero(found.isnan())[:, 0].tolist():  # a token is impossible: its 0 ln 0 is 0
            p = torch.softmax(logits[row].double(), dim=0)
            found[row] = -torch.special.xlogy(p, p).sum()
        return found


def _distances(logits: Tensor, baseline: Tensor, sums: list[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    if not sums:
        return {kind: torch.zeros(0, dtype=torch.float64) for kind in KINDS}
    found = finish(*(torch.cat(column) for column in zip(*sums, strict=True)))
    unsure = torch.nonzero(found.isnan().any(dim=0))[:, 0]
    n_rows = max(1, _TILE_CPU // logits.shape[1])
    for start in range(0, len(unsure), n_rows):
        row = unsure[start : start + n_rows]
        found[:, row] = careful_divergences(*(torch.log_softmax(x[row], dim=1) for x in (baseline, logits)))
    return dict(zip(KINDS, found.double().cpu(), strict=True))
