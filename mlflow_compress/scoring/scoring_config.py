"""Settings of a scoring pass, and the report on one."""

from __future__ import annotations

from dataclasses import dataclass

from mlflow_compress.errors import ConfigError

PATHS = ("auto", "packed", "plain")
_HEAD_BYTES = 64 << 20  # of float32 logits per product with the head


def default_limits(vocabulary: int, *, on_gpu: bool) -> dict[str, int]:
    """Return the sizes of batches and head products where neither settings nor a baseline decide."""
    return {
        "batch_tokens": 4096 if on_gpu else 1024,
        "head_rows": max(1, min(1024, _HEAD_BYTES // (4 * vocabulary))),
    }


@dataclass(frozen=True, kw_only=True)
class ScoringConfig:
    """Sizes of batches and head products. Every setting gives the same results within rounding.

    Attributes
    ----------
    batch_tokens : int or None
        Tokens per forward pass. None: as the baseline; without one 1024 on a CPU (where small batches stay in cache)
        and 4096 on a GPU. It never depends on free memory, so that equal weights give equal numbers.
    head_rows : int or None
        Most rows per product with the head. None: as the baseline; without one as many as make 64 MB of logits, at
        most 1024.
    path : str
        "packed" (shared prefixes are computed once), "plain" (padded batches, sorted by length), or "auto": packed if
        the model supports it.
    progress : bool
        Show a progress bar on a terminal.
    shard_seconds : float
        How often a pass with a `resume` folder writes its results.
    """

    batch_tokens: int | None = None
    head_rows: int | None = None
    path: str = "auto"
    progress: bool = True
    shard_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "head_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be positive", got=value)
        if self.path not in PATHS:
            raise ConfigError("Unknown scoring path", allowed=PATHS, got=self.path)


@dataclass(frozen=True, kw_only=True)
class ScoringReport:
    """Report on one scoring pass.

    Attributes
    ----------
    path : str
        "packed" or "plain".
    plain_reason : str or None
        Why it was not packed; None where it was.
    n_requests, n_unscored, n_truncated : int
        Requests; those whose continuation is longer than the context (their `loglik` is null); those cut on the left.
    n_tokens, n_tokens_naive, n_rows : int
        Tokens computed; tokens that would be computed without shared prefixes; scored positions.
    plan : str
        Digest of the batches: passes with equal digests and weights give equal bits.
    same_plan_as_baseline : bool or None
        Whether the batches are those of the baseline; None without a baseline.
    same_rounding_as_baseline : bool or None
        Whether a stored baseline was computed on the same kind of processor with as many threads; if not, results
        differ by rounding. None without a stored baseline.
    n_splits : int
        How often memory ran out, after which smaller batches were used. It changes results within rounding.
    whole_model_reason : str or None
        Why the whole model ran instead of the body, and the head at scored positions; None where that was not needed.
    seconds : float
    """

    path: str
    plain_reason: str | None
    n_requests: int
    n_unscored: int
    n_truncated: int
    n_tokens: int
    n_tokens_naive: int
    n_rows: int
    plan: str
    same_plan_as_baseline: bool | None
    same_rounding_as_baseline: bool | None
    n_splits: int
    whole_model_reason: str | None
    seconds: float
