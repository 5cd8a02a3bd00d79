"""Statistics of rows of logits: normaliser, most probable token, entropy, and distances from a baseline."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from mlflow_compress.errors import CheckpointError
from mlflow_compress.scoring.kernels import numba_kernel, row_stats
from mlflow_compress.scoring.kernels.row_stats import (
    DIVERGENCES,
    RowStats,
    most_probable,
    stable_divergences,
    top_token_overlap,
    top_tokens,
)

Tensor = torch.Tensor
_STABLE_ELEMENTS = 1 << 22  # elements per call of `stable_divergences`


@dataclass(frozen=True)
class LogitStats:
    """Statistics of n rows of logits; every tensor has shape (n,) and is on the CPU."""

    log_normaliser: Tensor  # ``ln sum e^x`` of the logits x: the log-probability of token t is ``x[t]`` minus this
    argmax: Tensor  # The most probable token; at a tie the lowest id
    entropy: Tensor  # ``-sum p ln p`` in nats
    # Empty without a baseline. Else ``kl``, ``kl_reverse``, ``js``, ``tv``, float64 (see
    # `distances_from_sums`); ``same_top``, whether the most probable token is the same; ``top10``, the
    # share of the ten most probable tokens that both have; ``rbo10``, the rank-biased overlap of these ten (see
    # `top_token_overlap`). A vocabulary of fewer than ten tokens is compared as a whole.
    distances: dict[str, Tensor]


def compute_logit_stats(logits: Tensor, baseline: Tensor | None = None) -> LogitStats:
    """Return the statistics of rows of logits, and their distances from a baseline's.

    Both are float32 of shape (n, vocab_size), n >= 1; `baseline` may be log-probabilities.
    """
    sums = _sums(logits, baseline)
    argmax = most_probable(logits, sums.maxima).cpu()
    distances = {}
    if baseline is not None and sums.base_maxima is not None:
        distances = _distances(logits, baseline, sums)
        distances["same_top"] = most_probable(baseline, sums.base_maxima).cpu() == argmax
        tops = top_tokens(baseline, sums.base_maxima), top_tokens(logits, sums.maxima)
        distances["top10"], distances["rbo10"] = top_token_overlap(*tops)
    entropies = sums.entropy
    for row in torch.nonzero(~entropies.isfinite())[:, 0].tolist():
        p = torch.softmax(logits[row].double(), dim=0)
        entropies[row] = -torch.special.xlogy(p, p).sum()  # a token of probability 0 adds 0
    return LogitStats(sums.log_normaliser, argmax, entropies, distances)


def load_loops() -> None:
    """Load the compiled loops, so that forks of this process have them."""
    row = torch.zeros(1, 2)
    for baseline in (None, row):
        compute_logit_stats(row, baseline)


@dataclass(frozen=True, eq=False)
class KlBaseline:
    """A baseline's logits, which many models are compared with: what is the same for all is computed once."""

    logits: Tensor  # shape (n, vocab_size)

    @cached_property
    def rows(self) -> numba_kernel.BaselineRows:
        """The rows with their normalisers, for the CPU."""
        return numba_kernel.baseline_rows(self.logits.cpu())


def compute_kl(logits: Tensor, baseline: KlBaseline) -> tuple[Tensor, Tensor]:
    """Return KL(baseline || model), float64 in nats, and the model's most probable tokens; both shape (n,), on the CPU.

    They are those of `compute_logit_stats` within rounding; the other statistics are not computed. Equal rows give
    exactly 0.
    """
    if logits.device.type != "cpu":
        base = baseline.logits.to(logits.device)
        sums = _sums(logits, base)
        return _distances(logits, base, sums)["kl"], most_probable(logits, sums.maxima).cpu()
    kl, top, *log_normalisers = numba_kernel.compute_kl_rows(logits, baseline.rows)
    _require_finite(*log_normalisers)
    for row in _unsure(kl[None], logits.shape[1]):
        both = (x[row] for x in (torch.from_numpy(baseline.rows.logits), logits))
        kl[row] = stable_divergences(*(torch.log_softmax(x, dim=1) for x in both))[0]
    return kl.double(), top


def _sums(logits: Tensor, baseline: Tensor | None) -> RowStats:
    """Return the sums of all rows. Logits that are not numbers are refused."""
    kernel = numba_kernel if logits.device.type == "cpu" else row_stats
    sums: RowStats = kernel.compute_row_stats(logits, baseline)
    _require_finite(sums.log_normaliser, sums.base_log_normaliser)
    return sums


def _require_finite(*log_normalisers: Tensor | None) -> None:
    for log_normaliser in log_normalisers:
        if log_normaliser is not None and not bool(log_normaliser.isfinite().all()):
            raise CheckpointError(
                "A model gives logits that are NaN or infinite",
                fix="Load it in float32, or make the checkpoint again",
            )


def _unsure(distances: Tensor, width: int) -> Iterator[Tensor]:
    """Iterate over the rows for which the fast formulas are not exact, some at a time; distances have shape (k, n)."""
    unsure = torch.nonzero(distances.isnan().any(dim=0))[:, 0]
    n_rows = max(1, _STABLE_ELEMENTS // width)
    for start in range(0, len(unsure), n_rows):
        yield unsure[start : start + n_rows]


def _distances(logits: Tensor, baseline: Tensor, sums: RowStats) -> dict[str, Tensor]:
    """Return the distances by name; rows for which the fast formulas are not exact take the stable ones."""
    assert sums.distances is not None
    distances = sums.distances
    for row in _unsure(distances, logits.shape[1]):
        distances[:, row] = stable_divergences(*(torch.log_softmax(x[row], dim=1) for x in (baseline, logits)))
    return dict(zip(DIVERGENCES, distances.double().cpu(), strict=True))
