"""How a pass is cut, and what it reports about itself."""

from __future__ import annotations

from dataclasses import dataclass

from mlflow_compress.errors import ConfigError

PATHS = ("auto", "packed", "plain")


@dataclass(frozen=True, kw_only=True)
class ScoringConfig:
    """How work is cut; any setting gives the same results within rounding.

    Attributes
    ----------
    batch_tokens : int or None
        Tokens a forward pass. None: what the baseline was scored with, or 1024 on a CPU (where small batches stay in
        cache) and 4096 on a GPU. It never depends on free memory, so that equal weights give equal numbers.
    head_rows : int or None
        Most rows a head product. None: the baseline's, or what makes 64 MB of logits, at most 1024.
    path : str
        "packed" (shared prefixes once), "plain" (length-sorted batches), or "auto": packed where the model can.
    progress : bool
        Show a progress bar on a terminal.
    shard_seconds : float
        How often a pass with a `resume` folder writes down what it has.
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
    """What a pass did.

    Attributes
    ----------
    path : str
        "packed" or "plain".
    reason : str or None
        Why not packed.
    n_requests, n_unscored, n_truncated : int
        Requests; those whose continuation exceeds the context (their `loglik` is null); those cut on the left.
    n_tokens, n_tokens_naive, n_rows : int
        Tokens computed; tokens that one request at a time would compute; head products.
    plan : str
        Digest of the batches: passes with equal digests and weights give equal bits.
    same_plan_as_baseline : bool or None
        Whether the batches were cut as the baseline's; None without a baseline.
    same_rounding_as_baseline : bool or None
        Whether a stored baseline was computed on the same kind of processor with as many threads; if not, results
        differ by rounding. None without a stored baseline.
    n_splits : int
        How often memory ran out and the rest went on in smaller batches, which moves results within rounding.
    head : str or None
        Why the whole model had to run instead of its body and, at scored positions, its head; None where it had not.
    seconds : float
    n_processes : int
        Processes that had a share.
    alone : str or None
        Why it is one process although more were started; None where it is not.
    """

    path: str
    reason: str | None
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
    head: str | None
    seconds: float
    n_processes: int
    alone: str | None
