"""Statistics of rows of logits: normaliser, most probable token, entropy, and distances from a baseline."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from mlflow_compress.errors import CheckpointError
from mlflow_compress.scoring.kernels import numba_kernel, row_stats
from mlflow_compress.scoring.kernels.row_stats import (
    DIVERGENCES,
    common_tokens,
    most_probable,
    stable_divergences,
    top_token_overlap,
    top_tokens,
)

Tensor = torch.Tensor
_STABLE_ELEMENTS = 1 << 22  # elements per call of `stable_divergences`


@dataclass(frozen=True)
class LogitStats:
    """Statistics of n rows of logits; every tensor is on the CPU, and of shape (n,) unless said otherwise."""

    log_normaliser: Tensor  # ``ln sum e^x`` of the logits x: the log-probability of token t is ``x[t]`` minus this
    logprob: Tensor  # Log-probability of each target, in nats; shape (n_targets,)
    argmax: Tensor  # The most probable token; at a tie the lowest id
    entropy: Tensor  # ``-sum p ln p`` in nats
    # Empty without a baseline. Else ``kl``, ``kl_reverse``, ``js``, ``tv``, float64 (see
    # `distances_from_sums`); ``same_top``, whether the most probable token is the same; ``top10``, the
    # share of the ten most probable tokens that both have; ``rbo10``, the rank-biased overlap of these ten (see
    # `top_token_overlap`). A vocabulary of fewer than ten tokens is compared as a whole.
    distances: dict[str, Tensor]


def compute_logit_stats(logits: Tensor, baseline: Tensor | None = None, targets: Tensor | None = None) -> LogitStats:
    """Return the statistics of rows of logits, their distances from a baseline's, and the targets' log-probabilities.

    Both are float32 of shape (n, vocab_size), n >= 1; `baseline` may be log-probabilities. `targets` are the rows and
    the tokens of what is scored, shape (2, n_targets).
    """
    row, token = torch.zeros((2, 0), dtype=torch.long, device=logits.device) if targets is None else targets
    sums = (numba_kernel if logits.device.type == "cpu" else row_stats).compute_row_stats(logits, baseline)
    found = {
        "log_normaliser": sums.log_normaliser,
        "of_targets": logits[row, token].double() - sums.log_normaliser[row],
        "argmax": most_probable(logits, sums.maxima),
        "entropy": sums.entropy,
    }
    if baseline is not None:
        assert sums.base_log_normaliser is not None and sums.base_maxima is not None and sums.distances is not None
        found["base_log_normaliser"] = sums.base_log_normaliser
        found["base_argmax"] = most_probable(baseline, sums.base_maxima)
        found["common"] = common_tokens(top_tokens(baseline, sums.base_maxima), top_tokens(logits, sums.maxima))
        found["distances"] = sums.distances
    found = _fetched(found)
    _require_finite(found["log_normaliser"], found.get("base_log_normaliser"))
    distances = {}
    if baseline is not None:
        for rows in _unsure(found["distances"], logits.shape[1]):
            both = (torch.log_softmax(x[rows], dim=1) for x in (baseline, logits))
            found["distances"][:, rows] = stable_divergences(*both).double().cpu()
        distances = dict(zip(DIVERGENCES, found["distances"], strict=True))
        distances["same_top"] = found["base_argmax"] == found["argmax"]
        distances["top10"], distances["rbo10"] = top_token_overlap(found["common"])
    entropies = found["entropy"]
    for i in torch.nonzero(~entropies.isfinite())[:, 0].tolist():
        p = torch.softmax(logits[i].double(), dim=0)
        entropies[i] = -torch.special.xlogy(p, p).sum()  # a token of probability 0 adds 0
    return LogitStats(found["log_normaliser"], found["of_targets"], found["argmax"].long(), entropies, distances)


def _fetched(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in float64 on the CPU. They come in one copy: each waits until the device has nothing to do."""
    flat = torch.cat([tensor.double().reshape(-1) for tensor in found.values()]).cpu()
    parts = torch.split(flat, [tensor.numel() for tensor in found.values()])
    return {name: part.view(tensor.shape) for part, (name, tensor) in zip(parts, found.items(), strict=True)}


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

    They are those of `compute_logit_stats` within rounding; on a CPU the other statistics are not computed. Equal rows
    give exactly 0.
    """
    if logits.device.type != "cpu":
        stats = compute_logit_stats(logits, baseline.logits.to(logits.device))
        return stats.distances["kl"], stats.argmax
    kl, top, *log_normalisers = numba_kernel.compute_kl_rows(logits, baseline.rows)
    _require_finite(*log_normalisers)
    for row in _unsure(kl[None], logits.shape[1]):
        both = (x[row] for x in (torch.from_numpy(baseline.rows.logits), logits))
        kl[row] = stable_divergences(*(torch.log_softmax(x, dim=1) for x in both))[0]
    return kl.double(), top


def _require_finite(*log_normalisers: Tensor | None) -> None:
    for log_normaliser in log_normalisers:
        if log_normaliser is not None and not bool(log_normaliser.isfinite().all()):
            raise CheckpointError(
                "A model gives logits that are NaN or infinite",
                fix="Load it in float32, or compress the model again",
            )


def _unsure(distances: Tensor, width: int) -> Iterator[Tensor]:
    """Iterate over the rows for which the fast formulas are not exact, some at a time; distances have shape (k, n)."""
    unsure = torch.nonzero(distances.isnan().any(dim=0))[:, 0]
    n_rows = max(1, _STABLE_ELEMENTS // width)
    for start in range(0, len(unsure), n_rows):
        yield unsure[start : start + n_rows]
