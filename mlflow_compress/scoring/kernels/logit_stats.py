"""One sweep over the logits of a chunk of rows: normalisation, ranks, entropy and distances."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mlflow_compress.errors import CheckpointError
from mlflow_compress.scoring.kernels import numba_kernel, torch_kernel
from mlflow_compress.scoring.kernels.row_divergence import KINDS, careful_divergences
from mlflow_compress.scoring.kernels.row_stats import RowStats
from mlflow_compress.scoring.kernels.top_tokens import agreement, most_probable, top_tokens

Tensor = torch.Tensor
_CAREFUL = 1 << 22  # elements of a careful computation


@dataclass(frozen=True)
class LogitStats:
    """What a chunk of rows yields, each of shape (n,), on the CPU.

    Attributes
    ----------
    log_normaliser : Tensor of float64
        ``ln sum e^x`` of the logits x: the log-probability of token t is ``x[t]`` less this.
    argmax : Tensor of int64
        The most probable token, the lowest id of equals.
    entropy : Tensor of float64
        ``-sum p ln p`` in nats.
    distances : dict of str to Tensor
        With a baseline: ``kl``, ``kl_reverse``, ``js``, ``tv`` (see `divergence.finish`), float64; ``same_top``
        whether the most probable token agrees; ``top10`` the share of the ten most probable tokens that both have, and
        ``rbo10`` the rank-biased overlap of these ten (see `ranks.agreement`), of the whole vocabulary where it is
        smaller.
    """

    log_normaliser: Tensor
    argmax: Tensor
    entropy: Tensor
    distances: dict[str, Tensor]


def sweep(logits: Tensor, baseline: Tensor | None = None) -> LogitStats:
    """Reduce the logits of a chunk, and compare them with a baseline's.

    Parameters
    ----------
    logits : Tensor of float32, shape (n, vocab_size), n >= 1
    baseline : Tensor of float32, shape (n, vocab_size), optional
        Its logits on the same rows; log-probabilities are logits too.

    Raises
    ------
    CheckpointError
        When a row has a NaN or +inf logit, or none that is finite.
    """
    sums = (numba_kernel if logits.device.type == "cpu" else torch_kernel).reduce(logits, baseline)
    for log_normaliser in (sums.log_normaliser, sums.base_log_normaliser):
        if log_normaliser is not None and not bool(log_normaliser.isfinite().all()):
            raise CheckpointError(
                "A model gives logits that are NaN or infinite",
                fix="Load it in float32, or make the checkpoint again",
            )
    argmax = most_probable(logits, sums.maxima).cpu()
    distances = {}
    if baseline is not None and sums.base_maxima is not None:
        distances = _distances(logits, baseline, sums)
        distances["same_top"] = most_probable(baseline, sums.base_maxima).cpu() == argmax
        tops = top_tokens(baseline, sums.base_maxima), top_tokens(logits, sums.maxima)
        distances["top10"], distances["rbo10"] = agreement(*tops)
    return LogitStats(sums.log_normaliser, argmax, _entropies(logits, sums), distances)


def _entropies(logits: Tensor, sums: RowStats) -> Tensor:
    """Return the entropies; where a token is impossible its 0 ln 0 is 0."""
    found = sums.entropy
    for row in torch.nonzero(~found.isfinite())[:, 0].tolist():
        p = torch.softmax(logits[row].double(), dim=0)
        found[row] = -torch.special.xlogy(p, p).sum()
    return found


def _distances(logits: Tensor, baseline: Tensor, sums: RowStats) -> dict[str, Tensor]:
    """Return the distances; rows for which the fast formulas are not exact take the careful ones."""
    assert sums.distances is not None
    found = sums.distances
    unsure = torch.nonzero(found.isnan().any(dim=0))[:, 0]
    n_rows = max(1, _CAREFUL // logits.shape[1])
    for start in range(0, len(unsure), n_rows):
        row = unsure[start : start + n_rows]
        found[:, row] = careful_divergences(*(torch.log_softmax(x[row], dim=1) for x in (baseline, logits)))
    return dict(zip(KINDS, found.double().cpu(), strict=True))
