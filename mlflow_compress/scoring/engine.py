"""Score requests and corpora with one model: the records of one evaluation, and its distance from a stored baseline."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mlflow_compress.errors import AlignmentError, ConfigError
from mlflow_compress.models.loading import LoadedModel, check_same_tokenizer, tokenizer_hash
from mlflow_compress.models.memory_alignment import rounding_identity
from mlflow_compress.records import OptionDistances, OptionScores, Request, TokenDistances, TokenScores
from mlflow_compress.scoring.baseline_store.state_store import StateStore, StateWriter
from mlflow_compress.scoring.checkpointing.journal import Arrays
from mlflow_compress.scoring.forward.body import check_can_pack, split_body_and_head
from mlflow_compress.scoring.plan.corpus_windows import Windows, cut_documents, cut_strided, cut_windows
from mlflow_compress.scoring.plan.encoding import Encoded, Encoder
from mlflow_compress.scoring.plan.packing import plan_batches, plan_packs
from mlflow_compress.scoring.plan.units import Plan
from mlflow_compress.scoring.processes.spread import Spread, run_spread
from mlflow_compress.scoring.record_assembly import option_distances, option_scores, token_distances, token_scores
from mlflow_compress.scoring.scoring_config import ScoringConfig, ScoringReport
from mlflow_compress.scoring.scoring_pass import ModelRunner, ScoringPass, Targets

__all__ = ["Scorer", "ScoringConfig", "ScoringReport"]

logger = logging.getLogger(__name__)

_HEAD_BYTES = 64 << 20  # of float32 logits a head product


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
        self.body, self.head, self._whole = split_body_and_head(loaded.model)
        self.encoder = Encoder(loaded.tokenizer, loaded.max_length)
        self.report: ScoringReport | None = None

    def score(
        self,
        requests: Sequence[Request],
        *,
        capture: StateWriter | None = None,
        baseline: StateStore | LoadedModel | None = None,
        resume: Path | None = None,
    ) -> tuple[OptionScores, OptionDistances | None]:
        """Score continuations, and measure their distance from a baseline.

        Parameters
        ----------
        requests : sequence of Request
            Of all tasks together: whatever they share is computed once.
        capture : StateWriter, optional
            Stores this model's states, for later variants.
        baseline : StateStore or LoadedModel, optional
            States of the baseline on the same requests, or the baseline itself: it then runs beside this model on the
            same batches, and nothing is stored.
        resume : Path, optional
            Folder of unfinished results: a killed run goes on from there. Delete it when the records are safe.

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
        StoreError
            When the folder to resume from belongs to another pass, or is damaged.
        """
        began = time.monotonic()
        encoded = self.encoder.encode(requests)
        fits = [i for i, e in enumerate(encoded) if e.fits]
        sequences = [encoded[i].inputs for i in fits]
        counts = [len(encoded[i].targets) for i in fits]
        limits, beside = self._limits(baseline), self._beside(baseline)
        path, reason = self._path(max(map(len, sequences), default=0), beside)
        make = plan_packs if path == "packed" else plan_batches
        plan = make(sequences, counts, batch_tokens=limits["batch_tokens"])
        rows = np.concatenate(plan.sequence_rows) if fits else np.zeros(0, np.int64)
        tokens = np.concatenate([encoded[i].targets for i in fits]) if fits else np.zeros(0, np.int32)
        targets, place = Targets.of(rows, tokens.astype(np.int64))
        job = self._job(limits, "options", capture, beside)
        result, spread = self._run(job, plan, targets, limits, path, resume, baseline)
        self._tell(job, plan, path, reason, began, sum(map(len, sequences)), encoded, spread)
        scores = option_scores(requests, encoded, targets, place, result)
        return scores, option_distances(requests, encoded, targets, place, result)

    def score_corpus(
        self,
        task: str,
        text: str | Sequence[str],
        *,
        window: int = 512,
        stride: int | None = None,
        max_tokens: int | None = None,
        capture: StateWriter | None = None,
        baseline: StateStore | LoadedModel | None = None,
        resume: Path | None = None,
    ) -> tuple[TokenScores, TokenDistances | None]:
        """Score running text, or documents.

        Without a `stride` in llama.cpp's windows: they are independent, the tail is dropped, BOS replaces a window's
        first token where the tokenizer adds one, and positions ``window/2 + 1 .. window - 1`` are scored; of a
        long text the first `max_tokens` are taken. With a
        `stride` windows overlap and every token but the first is scored once (see `corpus.cut_strided`). Several
        documents are scored in lm-evaluation-harness's rolling windows, each token once (see `corpus.cut_documents`).

        Raises
        ------
        DataError
            When the text is too short.
        ConfigError
            When the window exceeds the model's context, or the stride the window.
        """
        began = time.monotonic()
        if not isinstance(text, str):
            windows: Windows = cut_documents(self.encoder, text)
        elif stride is None:
            windows = cut_windows(self.encoder, text, window, max_tokens)
        else:
            windows = cut_strided(self.encoder, text, window, stride)
        limits = self._limits(baseline)
        plan, targets = windows.plan(limits["batch_tokens"])
        job = self._job(limits, task, capture, self._beside(baseline), entropy=True)
        result, spread = self._run(job, plan, targets, limits, "plain", resume, baseline)
        self._tell(job, plan, "plain", "corpus windows share nothing", began, plan.n_tokens, (), spread)
        return token_scores(task, windows, result), token_distances(task, windows, result)

    def _beside(self, baseline: StateStore | LoadedModel | None) -> StateStore | ModelRunner | None:
        if isinstance(baseline, LoadedModel):
            check_same_tokenizer(baseline, self.loaded)
            body, head, _ = split_body_and_head(baseline.model)
            return ModelRunner(body, head)
        return baseline

    def _job(
        self,
        limits: dict[str, int],
        label: str,
        capture: StateWriter | None,
        beside: StateStore | ModelRunner | None,
        *,
        entropy: bool = False,
    ) -> ScoringPass:
        return ScoringPass(
            lane=ModelRunner(self.body, self.head),
            head_rows=limits["head_rows"],
            capture=capture,
            baseline=beside,
            seconds=self.config.shard_seconds,
            progress=self.config.progress,
            label=label,
            entropy=entropy,
        )

    def _run(
        self,
        job: ScoringPass,
        plan: Plan,
        targets: Targets,
        limits: dict[str, int],
        path: str,
        resume: Path | None,
        baseline: StateStore | LoadedModel | None,
    ) -> tuple[Arrays, Spread]:
        digest, unfinished = plan.digest, None
        if job.capture is not None:
            job.capture.begin(limits, label=job.label, path=path, plan=digest)
        if resume is not None:
            wanted = hashlib.sha256(targets.row.tobytes() + targets.token.tobytes()).hexdigest()
            identity = {
                "weights": self.loaded.weights,
                "dtype": str(self.loaded.dtype),
                "plan": digest,
                "targets": wanted,
                "limits": json.dumps(limits),
                "baseline": _identity(job.baseline),
                "capture": str(job.capture is not None),
            }
            unfinished = Path(resume) / job.label, identity
        return run_spread(job, plan, targets, model=self.loaded, baseline=baseline, resume=unfinished)

    def _limits(self, baseline: StateStore | LoadedModel | None) -> dict[str, int]:
        """Return what fixes how work is cut: from the configuration, the baseline, or device and vocabulary."""
        stored: dict[str, int] = {}
        if isinstance(baseline, StateStore):
            self._check_baseline(baseline)
            stored = baseline.manifest.limits
        automatic = 4096 if self.body.device.type == "cuda" else 1024
        rows = max(1, min(1024, _HEAD_BYTES // (4 * self.loaded.vocab_size)))
        return {
            "batch_tokens": self.config.batch_tokens or stored.get("batch_tokens") or automatic,
            "head_rows": self.config.head_rows or stored.get("head_rows") or rows,
        }

    def _path(self, max_length: int, beside: StateStore | ModelRunner | None) -> tuple[str, str | None]:
        """Return "packed" or "plain", and why not packed."""
        if self.config.path == "plain":
            return "plain", "asked for"
        if self.config.path == "auto" and isinstance(beside, StateStore):
            paths = {p["path"] for p in beside.manifest.passes if p["label"] == "options"}
            if paths == {"plain"}:
                return "plain", "as the baseline"
        bodies = [self.body, *([beside.body] if isinstance(beside, ModelRunner) else [])]
        reason = next((r for r in (check_can_pack(b, max_length) for b in bodies) if r is not None), None)
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
        job: ScoringPass,
        plan: Plan,
        path: str,
        reason: str | None,
        began: float,
        naive: int,
        encoded: Sequence[Encoded],
        spread: Spread,
    ) -> None:
        digest = plan.digest
        same = same_rounding = None
        if isinstance(job.baseline, StateStore):
            same_rounding = job.baseline.manifest.rounding == rounding_identity(self.loaded.device)
            same = digest in {p["plan"] for p in job.baseline.manifest.passes}
        elif job.baseline is not None:
            same = job.n_splits == 0
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
            same_rounding_as_baseline=same_rounding,
            n_splits=job.n_splits,
            head=self._whole,
            seconds=time.monotonic() - began,
            n_processes=spread.n_processes,
            alone=spread.alone,
        )
        logger.info("scored: %s", self.report)
        if same_rounding is False:
            logger.warning("The baseline was computed with other threads or another processor: it differs by rounding")
        if self.report.n_unscored:
            logger.warning("%d options are longer than the model's context and stay unscored", self.report.n_unscored)


def _identity(baseline: StateStore | ModelRunner | None) -> str:
    """Return what a journal has to know about the baseline."""
    if baseline is None:
        return "none"
    if isinstance(baseline, ModelRunner):
        return f"resident {baseline.body.model.config.name_or_path}"
    return baseline.manifest.digest
