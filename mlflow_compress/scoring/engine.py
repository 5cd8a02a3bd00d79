"""Scores requests and corpora with one model, and compares it with a baseline; returns records."""

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm

from mlflow_compress.errors import AlignmentError, ConfigError, UnsupportedError
from mlflow_compress.models.identity import check_same_tokenizer, tokenizer_hash
from mlflow_compress.models.length_regimes import LengthRegime, length_regimes
from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.models.offloading import is_offloaded
from mlflow_compress.models.placement import room_for_states
from mlflow_compress.records import OptionDistances, OptionScores, Request, TokenAnswers, TokenDistances, TokenScores
from mlflow_compress.scoring.baseline_store import StateStore, StateWriter, StoredModel
from mlflow_compress.scoring.child_process import in_forks
from mlflow_compress.scoring.forward.body import Body, reason_not_to_pack, split_body_and_head
from mlflow_compress.scoring.forward.by_layer import BodyByLayer, Form, body_by_layer
from mlflow_compress.scoring.forward.head import LanguageModelHead
from mlflow_compress.scoring.generation.decoding import RemoteCausalLM
from mlflow_compress.scoring.journal import Arrays, PassParts, joined_arrays
from mlflow_compress.scoring.kernels.logit_stats import load_loops
from mlflow_compress.scoring.plan.corpus_windows import Windows, cut
from mlflow_compress.scoring.plan.encoding import Encoded, Encoder, Shortened
from mlflow_compress.scoring.plan.packing import Plan, UnitGroup, group_units, plan_batches, plan_packs
from mlflow_compress.scoring.scoring_pass import DISTANCES, ModelRunner, ScoringPass, Targets

_PATHS = ("auto", "packed", "plain")
BaselineOutputs = StateStore | LoadedModel | None
_HEAD_BYTES = 64 << 20  # of float32 logits per product with the head

logger = logging.getLogger(__name__)


def default_limits(vocabulary: int, *, on_gpu: bool) -> dict[str, int]:
    """Return the sizes of batches and head products where neither settings nor a baseline decide."""
    return {
        "batch_tokens": 4096 if on_gpu else 1024,
        "head_rows": max(1, min(1024, _HEAD_BYTES // (4 * vocabulary))),
    }


@dataclass(frozen=True, kw_only=True)
class ScoringConfig:
    """Sizes of batches and head products. Every setting gives the same results within rounding."""

    # Tokens per forward pass. None: as the baseline; without one 1024 on a CPU (where small batches stay in cache) and
    # 4096 on a GPU. It never depends on free memory, so that equal weights give equal numbers.
    batch_tokens: int | None = None
    # Most rows per product with the head. None: as the baseline; without one as many as make 64 MB of logits, at most
    # 1024.
    head_rows: int | None = None
    # "packed" (shared prefixes are computed once), "plain" (padded batches, sorted by length), or "auto": packed if the
    # model supports it
    path: str = "auto"
    progress: bool = True  # Show a progress bar on a terminal
    shard_seconds: float = 60.0  # How often a pass with a `resume` folder writes its results
    # Forks of this process that share a pass of a loaded model, each with as many threads as this process has; it
    # changes no bit
    processes: int = 1

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "head_rows", "processes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be positive", got=value)
        if self.path not in _PATHS:
            raise ConfigError("Unknown scoring path", allowed=_PATHS, got=self.path)


@dataclass(frozen=True, kw_only=True)
class PassReport:
    """What every scorer reports of its last pass."""

    n_truncated: int  # Requests that were cut on the left
    shortened: Shortened = field(repr=False)  # Items that the model cannot read whole
    asked_again: Mapping[str, int] = field(default_factory=dict)  # Requests to a server that were repeated, by fault


@dataclass(frozen=True, kw_only=True)
class _ScoringReport(PassReport):
    """Report on one scoring pass."""

    path: str  # "packed" or "plain"
    plain_reason: str | None  # Why it was not packed; None where it was
    # Requests; those whose continuation is longer than the context (their `loglik` is null)
    n_requests: int
    n_unscored: int
    n_tokens: int  # Tokens computed; tokens that would be computed without shared prefixes; scored positions
    n_tokens_naive: int
    n_rows: int
    plan: str  # Digest of the batches: passes with equal digests and weights give equal bits
    same_plan_as_baseline: bool | None  # Whether the batches are those of the baseline; None without a baseline
    # Whether a stored baseline was computed on the same kind of processor with as many threads; if not, results differ
    # by rounding. None without a stored baseline.
    same_rounding_as_baseline: bool | None
    # How often memory ran out, after which smaller batches were used. It changes results within rounding.
    n_splits: int
    # Why the whole model ran instead of the body, and the head at scored positions; None where that was not needed
    whole_model_reason: str | None
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PassWork:
    """A pass over a plan."""

    plan: Plan
    targets: Targets
    head_rows: int  # See `ScoringPass`
    entropy: bool  # See `ScoringPass`
    label: str  # Names the pass in the progress bar
    baseline: BaselineOutputs  # What the model is compared with
    capture: StateWriter | None  # Stores the model's states
    resume: tuple[Path, Mapping[str, str]] | None  # Folder of unfinished results, and what they depend on
    seconds: float  # How often this process writes its results there
    progress: bool  # Show a progress bar on a terminal

    def parts(self) -> PassParts:
        """Return the finished parts of an interrupted run, to which this run adds its own."""
        return PassParts(len(group_units(self.plan, self.head_rows)), self.resume, self.capture, label=self.label)

    def bar(self, missing: list[int]) -> tqdm:
        """Return the progress bar of the whole pass, in tokens."""
        groups = group_units(self.plan, self.head_rows)
        return tqdm(
            initial=self.plan.n_tokens - sum(groups[number].n_tokens for number in missing),
            total=self.plan.n_tokens,
            desc=self.label,
            unit="tok",
            unit_scale=True,
            disable=None if self.progress else True,
        )

    def empty(self) -> Arrays:
        """Return the results of a plan without groups."""
        names = ["logprob", "argmax", *(["entropy"] if self.entropy else [])]
        return {name: np.zeros(0) for name in (*names, *(DISTANCES if self.baseline is not None else ()))}


class Execution(Protocol):
    """Interface of what runs the passes of one model."""

    @property
    def whole_model_reason(self) -> str | None:
        """Why the whole model runs instead of its body, and the head at scored positions; None where it does not."""

    def reason_not_to_pack(self, max_length: int, baseline: BaselineOutputs) -> str | None:
        """Return why sequences of this length cannot share their prefixes; None where they can."""

    def length_regimes(self, baseline: BaselineOutputs) -> LengthRegime:
        """Return which lengths may be in one batch of this model and, if it is loaded, of the baseline."""

    def run(self, work: PassWork) -> tuple[Arrays, int]:
        """Run what an interrupted run has not finished. Return all results, and how often memory ran out."""


class RunsElsewhere(StoredModel, RemoteCausalLM, Protocol):
    """Interface of a model that is not in this process."""

    @property
    def execution(self) -> Execution:
        """Where its passes run."""


class InThisProcess:
    """Runs passes with a loaded model: in this process, or in several forks of it."""

    def __init__(self, loaded: LoadedModel, processes: int) -> None:
        self._body, self._head, self.whole_model_reason = split_for_passes(loaded)
        self._configuration = loaded.configuration()
        # Forks would fetch offloaded weights once each, and hold as many layers at once.
        self._processes = 1 if is_offloaded(loaded.model) else processes

    def reason_not_to_pack(self, max_length: int, baseline: BaselineOutputs) -> str | None:
        reason = reason_not_to_pack(self._body, max_length)
        if reason is None and isinstance(baseline, LoadedModel):
            reason = reason_not_to_pack(split_body_and_head(baseline.model)[0], max_length)
        return reason

    def length_regimes(self, baseline: BaselineOutputs) -> LengthRegime:
        others = [baseline.configuration()] if isinstance(baseline, LoadedModel) else []
        return length_regimes(self._configuration, *others)

    def run(self, work: PassWork) -> tuple[Arrays, int]:
        base = work.baseline
        compared = ModelRunner(*split_for_passes(base)[:2]) if isinstance(base, LoadedModel) else base
        if isinstance(self._body, BodyByLayer):
            self._body.say_reads(work.plan, group_units(work.plan, work.head_rows))
            self._body.journal, self._body.seconds = work.resume and work.resume[0], work.seconds
        return run_pass(work, ModelRunner(self._body, self._head), compared, self._processes)

    def run_forms(self, work: PassWork, forms: Sequence[Form]) -> list[Arrays]:
        """Return the results of a whole pass for each form of the model's layers.

        What a killed one had finished is kept sweep by sweep, and within a sweep as `BodyByLayer` does.
        """
        body, states = self._body, work.baseline
        if not isinstance(body, BodyByLayer):
            raise UnsupportedError("The model is not scored layer by layer", fix="Give less max_memory than it takes")
        assert not isinstance(states, LoadedModel)
        body.journal, body.seconds = work.resume and work.resume[0], work.seconds
        if work.resume is not None:
            folder, identity = work.resume
            work = replace(work, seconds=0.0, resume=(folder, {**identity, "forms": str(len(forms))}))
        body.forms = forms
        try:
            body.say_reads(work.plan, group_units(work.plan, work.head_rows))
            found, _ = run_pass(work, ModelRunner(body, self._head), states)
        finally:
            body.forms = ()
        if not work.plan.units:
            return [found for _ in forms]
        return [{name: found[f"{number} {name}"] for name in work.empty()} for number in range(len(forms))]


class _OneForm:
    """Runs the passes of one form of a model's layers; the first that is asked for runs all forms."""

    def __init__(self, whole: InThisProcess, number: int, run: Callable[[PassWork], list[Arrays]]) -> None:
        self._number, self._run = number, run
        self.whole_model_reason = whole.whole_model_reason
        self.reason_not_to_pack, self.length_regimes = whole.reason_not_to_pack, whole.length_regimes

    def run(self, work: PassWork) -> tuple[Arrays, int]:
        return self._run(work)[self._number], 0


def scorers_of_forms(loaded: LoadedModel, forms: Sequence[Form], config: ScoringConfig) -> "list[Scorer]":
    """Return a scorer of each form of the layers of a model that does not fit, as one of a model that has it.

    A pass that one of them is asked for is run for all, and a layer is read once for all. They must be asked alike.
    """
    whole = InThisProcess(loaded, processes=1)
    done: dict[str, list[Arrays]] = {}

    def run(work: PassWork) -> list[Arrays]:
        key = f"{work.label} {work.plan.digest} {work.targets.digest}"
        if key not in done:
            done[key] = whole.run_forms(work, forms)
        return done[key]

    return [Scorer(loaded, config, _OneForm(whole, number, run)) for number in range(len(forms))]


def split_for_passes(loaded: LoadedModel) -> tuple[Body, LanguageModelHead, str | None]:
    """Return what `split_body_and_head` does; the body of a model with offloaded weights runs layer by layer."""
    body, head, whole_model_reason = split_body_and_head(loaded.model)
    if is_offloaded(loaded.model):
        body, reason = body_by_layer(body, room_for_states(loaded.config.max_memory if loaded.config else {}))
        if reason is not None:
            logger.warning("Weights are fetched again for every batch: the model cannot run by layer (%s)", reason)
    return body, head, whole_model_reason


_AddedPart = tuple[int, int, Arrays, Mapping[str, Any] | None]  # The arguments of `PassParts.add`


def run_pass(
    work: PassWork, runner: ModelRunner, baseline: StateStore | ModelRunner | None, processes: int = 1
) -> tuple[Arrays, int]:
    """Run a pass with a head in this process, as `Execution.run` does; write the results down as they come.

    With several `processes`, forks of this one compute parts of it: the same batches, and so the same bits.
    """
    scoring = ScoringPass(
        runner=runner, head_rows=work.head_rows, capture=work.capture, baseline=baseline, entropy=work.entropy
    )
    groups = group_units(work.plan, work.head_rows)
    if not groups:
        return work.empty(), 0
    parts = work.parts()
    missing = parts.missing()
    compute = partial(_computed, work, scoring, groups)
    spans = _spans(missing, groups, processes)
    said = chain.from_iterable(map(compute, spans))
    if len(spans) > 1:
        load_loops()  # for all forks
        first: Iterable[tuple[_AddedPart | None, int, int]] = ()
        if work.capture is not None:  # the first group decides how states are stored
            first, spans[0] = compute(spans[0][:1]), spans[0][1:]
        said = chain(first, in_forks(compute, [span for span in spans if span], processes))
    n_splits = 0
    fresh: list[_AddedPart] = []
    written = time.monotonic()
    with work.bar(missing) as bar:
        for part, n_tokens, splits in said:
            fresh += [] if part is None else [part]
            if fresh and time.monotonic() - written >= work.seconds:
                _write(parts, fresh)
                written = time.monotonic()
            bar.update(n_tokens)
            n_splits += splits
    _write(parts, fresh)
    return parts.joined(), n_splits


def _write(parts: PassParts, fresh: list[_AddedPart]) -> None:
    """Add what was computed since the last call. What follows one another becomes one part: each waits for the disk."""
    fresh.sort(key=lambda part: part[0])
    while fresh:
        first, stop, arrays, captured = fresh.pop(0)
        more = [arrays]
        while fresh and captured is None and fresh[0][0] == stop and fresh[0][3] is None:
            _, stop, arrays, _ = fresh.pop(0)
            more.append(arrays)
        parts.add(first, stop, joined_arrays(more), captured)


_FEWEST_TOKENS = 8192  # of a pass that are worth forks
_SPANS_PER_PROCESS = 8  # so that a process which is held up does not hold up the pass as long


def _spans(missing: list[int], groups: Sequence[UnitGroup], processes: int) -> list[list[int]]:
    """Return the missing groups, cut into what one process computes at a time: all of them where it is alone."""
    n_tokens = np.cumsum([groups[number].n_tokens for number in missing])
    if processes == 1 or not missing or n_tokens[-1] < _FEWEST_TOKENS:
        return [missing] if missing else []
    n_spans = min(processes * _SPANS_PER_PROCESS, len(missing))  # few and large ones would end far apart
    cuts = np.searchsorted(n_tokens, n_tokens[-1] * np.arange(1, n_spans) / n_spans).tolist()
    spans = [missing[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(missing)], strict=True)]
    return [span for span in spans if span]


def _computed(
    work: PassWork, scoring: ScoringPass, groups: Sequence[UnitGroup], numbers: list[int]
) -> Iterator[tuple[_AddedPart | None, int, int]]:
    """Compute groups of a pass. Yield after each: what is finished (see `PassParts.add`), tokens, and new splits."""
    to_do = set(numbers)
    fresh: list[Arrays] = []
    written, n_splits = time.monotonic(), scoring.n_splits
    for number, results in scoring.run(work.plan, work.targets, numbers):
        fresh.append(results)
        part = None
        is_due = work.resume is not None and time.monotonic() - written >= work.seconds and not scoring.is_ahead()
        if number + 1 not in to_do or is_due:
            captured = work.capture.take() if work.capture is not None else None
            part = number + 1 - len(fresh), number + 1, joined_arrays(fresh), captured
            fresh, written = [], time.monotonic()
        yield part, groups[number].n_tokens, scoring.n_splits - n_splits
        n_splits = scoring.n_splits


def option_scores(
    requests: Sequence[Request],
    encoded: Sequence[Encoded],
    targets: Targets,
    place: npt.NDArray[np.int64],
    result: Arrays,
) -> OptionScores:
    """Return one row per request: its targets' summed log-probability, and whether all are the most probable token.

    `place` holds the indices of the targets, request by request. The results of a served model say themselves, in
    `is_argmax`, which targets are the most probable token. Of them alone NaN is a missing log-probability.
    """
    elsewhere = "is_argmax" in result
    logprob = result["logprob"][place]
    is_argmax = (
        result["is_argmax"][place] if elsewhere else result["argmax"][targets.row[place]] == targets.token[place]
    )
    starts = _starts(encoded)
    loglik: list[float | None] = [None] * len(requests)
    greedy: list[bool | None] = [None] * len(requests)
    if len(starts):
        fitting = (i for i, e in enumerate(encoded) if e.fits)
        sums, hits = np.add.reduceat(logprob, starts), np.logical_and.reduceat(is_argmax, starts)
        for i, total, every in zip(fitting, sums.tolist(), hits.tolist(), strict=True):
            if not (elsewhere and np.isnan(total)):
                loglik[i], greedy[i] = total, every
    return OptionScores.from_columns(
        {
            **_columns(requests, *OptionScores.KEY, "content", "n_chars", "n_bytes"),
            "loglik": loglik,
            "n_tokens": [len(e.targets) for e in encoded],
            "greedy": greedy,
        }
    )


def option_distances(
    requests: Sequence[Request],
    encoded: Sequence[Encoded],
    targets: Targets,
    place: npt.NDArray[np.int64],
    result: Arrays,
) -> OptionDistances | None:
    """Return one row per request: the distances, averaged over its tokens. None without a baseline."""
    if "kl" not in result:
        return None
    rows, starts = targets.row[place], _starts(encoded)
    counts = np.diff([*starts, len(rows)])
    columns: dict[str, Any] = _columns(requests, *OptionDistances.KEY)
    for kind in DISTANCES:
        values = result[kind].astype(np.float64)[rows]
        means = iter((np.add.reduceat(values, starts) / counts).tolist() if len(starts) else ())
        columns[kind] = [next(means) if e.fits else None for e in encoded]
    return OptionDistances.from_columns(columns)


def token_scores(task: str, windows: Windows, result: Arrays) -> TokenScores:
    """Return one row per scored corpus token, window by window."""
    return TokenScores.from_columns(
        {
            **windows.keys(task),
            "target": windows.targets,
            "nll": -result["logprob"],
            "p_target": np.exp(result["logprob"]),
            "argmax": result["argmax"],
            "entropy": result.get("entropy", [None] * len(windows.targets)),
        }
    )


def token_distances(task: str, windows: Windows, result: Arrays) -> TokenDistances | None:
    """Return the distances of each scored corpus token; None without a baseline."""
    if "kl" not in result:
        return None
    return TokenDistances.from_columns({**windows.keys(task), **{k: result[k] for k in DISTANCES}})


def _columns(requests: Sequence[Request], *names: str) -> dict[str, list[Any]]:
    return {name: [getattr(r, name) for r in requests] for name in names}


def _starts(encoded: Sequence[Encoded]) -> npt.NDArray[np.int64]:
    """Return the index of the first target of each request that fits into the context."""
    lengths = [len(e.targets) for e in encoded if e.fits]
    return np.cumsum([0, *lengths[:-1]]) if lengths else np.zeros(0, np.int64)


class Scorer:
    """Scores requests and corpora with one model: in this process, or on the workers of a cluster.

    `report` describes the last pass; None before the first.
    """

    def __init__(
        self,
        loaded: LoadedModel | RunsElsewhere,
        config: ScoringConfig | None = None,
        execution: Execution | None = None,
    ) -> None:
        self.loaded = loaded
        self.config = config or ScoringConfig()
        if execution is None:
            if isinstance(loaded, LoadedModel):
                execution = InThisProcess(loaded, self.config.processes)
            else:
                execution = loaded.execution
        self._execution = execution
        self.encoder = Encoder(loaded.tokenizer, loaded.max_length, loaded.vocab_size)
        self.report: _ScoringReport | None = None

    def score(
        self,
        requests: Sequence[Request],
        *,
        capture: StateWriter | None = None,
        baseline: BaselineOutputs = None,
        resume: Path | None = None,
    ) -> tuple[OptionScores, OptionDistances | None]:
        """Score the requests of all tasks together, since shared prefixes are computed once; one row each, in order.

        `capture` stores this model's states, so that variants can be compared with it later. `baseline` are stored
        states on the same requests, or the baseline model itself: it runs on the same batches as this one, and nothing
        is stored. From the folder `resume` a killed run goes on; delete it when the records are saved. `loglik`,
        `greedy` and the distances are null where the option alone is longer than the model's context.

        Raises `AlignmentError` when the baseline was scored on other tokens, or has another vocabulary; `DataError`
        when a continuation has no token of its own; `StoreError` when the folder to resume from belongs to another
        pass, or is damaged.
        """
        began = time.monotonic()
        encoded = self.encoder.encode(requests)
        fitting = [e for e in encoded if e.fits]
        sequences = [e.inputs for e in fitting]
        limits = self._limits(baseline)
        path, reason = self._path(max(map(len, sequences), default=0), baseline)
        n_scored, batch_tokens = [len(e.targets) for e in fitting], limits["batch_tokens"]
        if path == "packed":
            plan = plan_packs(sequences, n_scored, batch_tokens=batch_tokens)
        else:
            regime = self._execution.length_regimes(baseline)
            plan = plan_batches(sequences, n_scored, batch_tokens=batch_tokens, regime=regime)
        rows = np.concatenate([np.zeros(0, np.int64), *plan.sequence_rows])
        tokens = np.concatenate([np.zeros(0, np.int64), *(e.targets for e in fitting)])
        targets, place = Targets.of(rows, tokens)
        work = self._work(plan, targets, limits, path, "options", capture, baseline, resume)
        result, n_splits = self._execution.run(work)
        self._record_report(work, n_splits, path, reason, began, sum(map(len, sequences)), requests, encoded)
        scores = option_scores(requests, encoded, targets, place, result)
        return scores, option_distances(requests, encoded, targets, place, result)

    def score_corpus(
        self,
        task: str,
        text: str | Sequence[str] | TokenAnswers,
        *,
        window: int = 512,
        max_tokens: int | None = None,
        starts: Sequence[int] = (),
        capture: StateWriter | None = None,
        baseline: BaselineOutputs = None,
        resume: Path | None = None,
    ) -> tuple[TokenScores, TokenDistances | None]:
        """Score each token of a running text, of several documents, or of a model's answers.

        A text is cut into llama.cpp's independent windows (see `corpus_windows.cut_windows`), documents into
        lm-evaluation-harness's rolling windows (see `corpus_windows.cut_documents`). Of answers the tokens behind the
        prompt are scored, as they were written (see `corpus_windows.cut_answers`).

        With `starts`, the characters at which a text's documents begin, the windows are named "7.41": the 41st, whose
        first scored token is of document 7.

        Raises `DataError` when the text is too short; `ConfigError` when the window exceeds the model's context.
        """
        began = time.monotonic()
        windows = cut(self.encoder, text, window=window, max_tokens=max_tokens, starts=starts)
        limits = self._limits(baseline)
        plan, targets = windows.plan(limits["batch_tokens"], self._execution.length_regimes(baseline))
        work = self._work(plan, targets, limits, "plain", task, capture, baseline, resume, entropy=True)
        result, n_splits = self._execution.run(work)
        self._record_report(work, n_splits, "plain", "corpus windows share no prefixes", began, plan.n_tokens)
        return token_scores(task, windows, result), token_distances(task, windows, result)

    def _work(
        self,
        plan: Plan,
        targets: Targets,
        limits: dict[str, int],
        path: str,
        label: str,
        capture: StateWriter | None,
        baseline: BaselineOutputs,
        resume: Path | None,
        *,
        entropy: bool = False,
    ) -> PassWork:
        if capture is not None:
            capture.begin(limits, label=label, path=path, plan=plan.digest)
        identity = None
        if resume is not None:
            identity = {
                "weights": self.loaded.weights,
                "dtype": str(self.loaded.dtype),
                "plan": plan.digest,
                "targets": targets.digest,
                "limits": json.dumps(limits),
                "baseline": _baseline_identity(baseline),
                "capture": str(capture is not None),
                "rounding": json.dumps(self.loaded.rounding),
            }
        return PassWork(
            plan=plan,
            targets=targets,
            head_rows=limits["head_rows"],
            entropy=entropy,
            label=label,
            baseline=baseline,
            capture=capture,
            resume=(Path(resume) / label, identity) if resume is not None and identity is not None else None,
            seconds=self.config.shard_seconds,
            progress=self.config.progress,
        )

    def _limits(self, baseline: BaselineOutputs) -> dict[str, int]:
        """Return the sizes of batches and head products: from the configuration, the baseline's, or the defaults."""
        stored: dict[str, int] = {}
        if isinstance(baseline, StateStore):
            stored = baseline.manifest.limits
            fix = "Compare with the baseline that this variant was made from"
            if baseline.manifest.vocab_size != self.loaded.vocab_size:
                raise AlignmentError(
                    "The baseline has logits of another width",
                    allowed=str(baseline.manifest.vocab_size),
                    got=self.loaded.vocab_size,
                    fix=fix,
                )
            if baseline.manifest.tokenizer != tokenizer_hash(self.loaded.tokenizer):
                raise AlignmentError("The baseline store was written with another tokenizer", fix=fix)
        elif isinstance(baseline, LoadedModel):
            check_same_tokenizer(baseline, self.loaded)
        automatic = default_limits(self.loaded.vocab_size, on_gpu=self.loaded.device.type == "cuda")
        return {name: getattr(self.config, name) or stored.get(name) or size for name, size in automatic.items()}

    def _path(self, max_length: int, baseline: BaselineOutputs) -> tuple[str, str | None]:
        """Return "packed" or "plain", and the reason for "plain"."""
        if self.config.path == "plain":
            return "plain", "the configuration asks for it"
        if self.config.path == "auto" and isinstance(baseline, StateStore):
            paths = {p["path"] for p in baseline.manifest.passes if p["label"] == "options"}
            if paths == {"plain"}:
                return "plain", "the baseline was scored this way"
        reason = self._execution.reason_not_to_pack(max_length, baseline)
        if reason is not None and self.config.path == "packed":
            raise ConfigError(f"This model cannot be scored in packed batches: {reason}", fix="Use path 'auto'")
        return "packed" if reason is None else "plain", reason

    def _record_report(
        self,
        work: PassWork,
        n_splits: int,
        path: str,
        reason: str | None,
        began: float,
        n_tokens_naive: int,
        requests: Sequence[Request] = (),
        encoded: Sequence[Encoded] = (),
    ) -> None:
        plan, baseline = work.plan, work.baseline
        same_plan = same_rounding = None
        if isinstance(baseline, StateStore):
            same_rounding = baseline.manifest.rounding == self.loaded.rounding
            same_plan = plan.digest in {p["plan"] for p in baseline.manifest.passes}
        elif baseline is not None:
            same_plan = n_splits == 0

        self.report = _ScoringReport(
            path=path,
            plain_reason=reason,
            n_requests=len(encoded),
            n_unscored=sum(not e.fits for e in encoded),
            n_truncated=sum(e.truncated for e in encoded),
            shortened=Shortened.of(requests, encoded),
            n_tokens=plan.n_tokens,
            n_tokens_naive=n_tokens_naive,
            n_rows=len(plan.keys),
            plan=plan.digest,
            same_plan_as_baseline=same_plan,
            same_rounding_as_baseline=same_rounding,
            n_splits=n_splits,
            whole_model_reason=self._execution.whole_model_reason,
            seconds=time.monotonic() - began,
        )
        logger.info("scored: %s", self.report)
        if same_rounding is False and isinstance(baseline, StateStore):
            then, now = baseline.manifest.rounding, self.loaded.rounding
            changed = [f"{n} {then.get(n)} -> {now.get(n)}" for n in {**then, **now} if then.get(n) != now.get(n)]
            logger.warning("The baseline was computed otherwise (%s): results differ by rounding", ", ".join(changed))
        if self.report.n_unscored:
            logger.warning("%d options are longer than the model's context and are not scored", self.report.n_unscored)


def _baseline_identity(baseline: BaselineOutputs) -> str:
    """Return what identifies the baseline in a journal."""
    if isinstance(baseline, LoadedModel):
        return f"resident {baseline.model.config.name_or_path}"
    return "none" if baseline is None else baseline.manifest.digest
