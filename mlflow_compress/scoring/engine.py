"""Score requests and corpora with one model: the records of one evaluation, and its distance from a stored baseline."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlflow_compress.errors import AlignmentError, ConfigError
from mlflow_compress.records import OptionDistances, OptionScores, Request, TokenDistances, TokenScores
from mlflow_compress.scoring.assemble import option_distances, option_scores, token_distances, token_scores
from mlflow_compress.scoring.body import Body, check_can_pack
from mlflow_compress.scoring.corpus import cut_windows, plan_windows
from mlflow_compress.scoring.execute import Pass, RowResults, Targets
from mlflow_compress.scoring.head import Head
from mlflow_compress.scoring.loading import LoadedModel, tokenizer_hash
from mlflow_compress.scoring.plan import Plan, plan_batches, plan_packs
from mlflow_compress.scoring.requests import Encoder
from mlflow_compress.scoring.store import StateStore, StateWriter

logger = logging.getLogger(__name__)

PATHS = ("auto", "packed", "plain")
_HEAD_BYTES = 32 << 20  # of float32 logits a head product


@dataclass(frozen=True, kw_only=True)
class ScoringConfig:
    """How work is cut; any setting gives the same results within rounding.

    Attributes
    ----------
    batch_tokens : int or None
        Tokens a forward pass. None: what the baseline was scored with, or 512 on a CPU (where small batches stay in
        cache) and 4096 on a GPU. It never depends on free memory, so that equal weights give equal numbers.
    path : str
        "packed" (shared prefixes once), "plain" (length-sorted batches), or "auto": packed where the model can.
    progress : bool
        Show a progress bar on a terminal.
    """

    batch_tokens: int | None = None
    path: str = "auto"
    progress: bool = True

    def __post_init__(self) -> None:
        if self.batch_tokens is not None and self.batch_tokens < 1:
            raise ConfigError("batch_tokens must be positive", got=self.batch_tokens)
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
    seconds : float
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
    seconds: float


class Scorer:
    """Scores with one model.

    Parameters
    ----------
    loaded : LoadedModel
    config : ScoringConfig

    Attributes
    ----------
    report : ScoringReport or None
        About the last pass.
    """

    def __init__(self, loaded: LoadedModel, config: ScoringConfig | None = None) -> None:
        self.loaded = loaded
        self.config = config or ScoringConfig()
        self.body = Body(loaded.model)
        self.head = Head(loaded.model)
        self.encoder = Encoder(loaded.tokenizer, loaded.max_length)
        self.report: ScoringReport | None = None

    def score(
        self,
        requests: Sequence[Request],
        *,
        capture: StateWriter | None = None,
        baseline: StateStore | None = None,
    ) -> tuple[OptionScores, OptionDistances | None]:
        """Score continuations, and measure their distance from a baseline.

        Parameters
        ----------
        requests : sequence of Request
            Of all tasks together: whatever they share is computed once.
        capture : StateWriter, optional
            Stores this model's states, for later variants.
        baseline : StateStore, optional
            States of the baseline on the same requests.

        Returns
        -------
        OptionScores, OptionDistances or None
            One row a request, in the order given. `loglik`, `greedy` and the distances are null where the option alone
            is longer than the model's context.

        Raises
        ------
        AlignmentError
            When the baseline read other tokens, or has another vocabulary.
        DataError
            When a continuation has no token of its own.
        """
        began = time.monotonic()
        encoded = self.encoder.encode(requests)
        fits = [i for i, e in enumerate(encoded) if e.fits]
        sequences = [encoded[i].inputs for i in fits]
        counts = [len(encoded[i].targets) for i in fits]
        limits = self._limits(baseline)
        path, reason = self._path(max(map(len, sequences), default=0), baseline)
        make = plan_packs if path == "packed" else plan_batches
        plan = make(sequences, counts, batch_tokens=limits["batch_tokens"])
        rows = np.concatenate(plan.sequence_rows) if fits else np.zeros(0, np.int64)
        tokens = np.concatenate([encoded[i].targets for i in fits]) if fits else np.zeros(0, np.int32)
        targets, place = Targets.of(rows, tokens.astype(np.int64))
        result = self._run(plan, targets, limits, path, "options", capture, baseline)
        self._tell(plan, path, reason, began, baseline, sum(map(len, sequences)), encoded)
        scores = option_scores(requests, encoded, targets, place, result)
        return scores, option_distances(requests, encoded, targets, place, result)

    def score_corpus(
        self,
        task: str,
        text: str,
        *,
        window: int = 512,
        capture: StateWriter | None = None,
        baseline: StateStore | None = None,
    ) -> tuple[TokenScores, TokenDistances | None]:
        """Score running text in llama.cpp's windows.

        Windows of `window` tokens are independent, the tail is dropped, BOS replaces a window's first token where the
        tokenizer adds one, and the second half of each window is scored: positions ``window/2 + 1 .. window - 1``.

        Raises
        ------
        DataError
            When the text has fewer than two windows of tokens.
        ConfigError
            When the window exceeds the model's context.
        """
        began = time.monotonic()
        windows = cut_windows(self.encoder, text, window)
        limits = self._limits(baseline)
        plan, targets = plan_windows(windows, batch_tokens=limits["batch_tokens"])
        result = self._run(plan, targets, limits, "plain", task, capture, baseline)
        self._tell(plan, "plain", "corpus windows share nothing", began, baseline, windows.size, ())
        return token_scores(task, windows, result), token_distances(task, windows, result)

    def _run(
        self,
        plan: Plan,
        targets: Targets,
        limits: dict[str, int],
        path: str,
        label: str,
        capture: StateWriter | None,
        baseline: StateStore | None,
    ) -> RowResults:
        if capture is not None:
            capture.begin(limits, label=label, path=path, plan=plan.digest())
        job = Pass(
            self.body,
            self.head,
            head_rows=limits["head_rows"],
            capture=capture,
            baseline=baseline,
            progress=self.config.progress,
            label=label,
        )
        return job.run(plan, targets)

    def _limits(self, baseline: StateStore | None) -> dict[str, int]:
        """Return what fixes how work is cut: from the configuration, the baseline, or device and vocabulary."""
        stored: dict[str, int] = {}
        if baseline is not None:
            self._check_baseline(baseline)
            stored = baseline.manifest.limits
        automatic = 4096 if self.body.device.type == "cuda" else 512
        rows = max(1, min(1024, _HEAD_BYTES // (4 * self.loaded.vocab_size)))
        return {
            "batch_tokens": self.config.batch_tokens or stored.get("batch_tokens") or automatic,
            "head_rows": stored.get("head_rows") or rows,
        }

    def _path(self, max_length: int, baseline: StateStore | None) -> tuple[str, str | None]:
        """Return "packed" or "plain", and why not packed."""
        if self.config.path == "plain":
            return "plain", "asked for"
        if self.config.path == "auto" and baseline is not None:
            paths = {p["path"] for p in baseline.manifest.passes if p["label"] == "options"}
            if paths == {"plain"}:
                return "plain", "as the baseline"
        reason = check_can_pack(self.body, max_length)
        if reason is not None and self.config.path == "packed":
            raise ConfigError(f"This model cannot be scored in packs: {reason}", fix="Use path 'auto'")
        return "packed" if reason is None else "plain", reason

    def _check_baseline(self, baseline: StateStore) -> None:
        manifest = baseline.manifest
        fix = "Compare with the baseline that this variant was made from"
        if manifest.vocab_size != self.loaded.vocab_size:
            raise AlignmentError(
                "The baseline has logits of another width",
                allowed=str(manifest.vocab_size),
                got=self.loaded.vocab_size,
                fix=fix,
            )
        if manifest.tokenizer != tokenizer_hash(self.loaded.tokenizer):
            raise AlignmentError("The baseline store was written with another tokenizer", fix=fix)

    def _tell(
        self,
        plan: Plan,
        path: str,
        reason: str | None,
        began: float,
        baseline: StateStore | None,
        naive: int,
        encoded: Sequence[Any],
    ) -> None:
        digest = plan.digest()
        same = None if baseline is None else digest in {p["plan"] for p in baseline.manifest.passes}
        self.report = ScoringReport(
            path=path,
            reason=reason,
            n_requests=len(encoded),
            n_unscored=sum(not e.fits for e in encoded),
            n_truncated=sum(e.truncated for e in encoded),
            n_tokens=plan.n_tokens,
            n_tokens_naive=naive,
            n_rows=len(plan.keys),
            plan=digest,
            same_plan_as_baseline=same,
            seconds=time.monotonic() - began,
        )
        logger.info("scored: %s", self.report)
        if self.report.n_unscored:
            logger.warning("%d options are longer than the model's context and stay unscored", self.report.n_unscored)
