"""Scores requests and corpora with a model that a server computes; the records are those of every other model."""

import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from mlflow_compress.engines.endpoint import routes
from mlflow_compress.errors import AlignmentError, EndpointError, StoreError, UnsupportedError
from mlflow_compress.records import TOP_LADDER, ItemKey, OptionBounds, OptionScores, Request, TokenAnswers, TokenScores
from mlflow_compress.scoring.baseline_store import StateKeys, StateStore
from mlflow_compress.scoring.engine import PassReport, option_scores, token_scores
from mlflow_compress.scoring.generation.decoding import RemoteCausalLM
from mlflow_compress.scoring.journal import Arrays
from mlflow_compress.scoring.plan.corpus_windows import cut
from mlflow_compress.scoring.plan.encoding import Encoded, Encoder, Shortened
from mlflow_compress.scoring.plan.packing import Ids, plan_batches, sequence_key
from mlflow_compress.scoring.scoring_pass import Targets
from mlflow_compress.transport.client import Transport
from mlflow_compress.transport.endpoint import EndpointConfig
from mlflow_compress.transport.replies import NoReply, ReplyCache, content_key

TOP_LISTS_FILE = "top_lists.parquet"
_NO_LIST: routes.TopList = np.zeros(0, np.int64), np.zeros(0)
"""Of a position that was asked without a list."""
_ROWS = 256  # whose logits are in memory at once


class TopLists(Protocol):
    """Interface of a baseline's lists."""

    @property
    def most(self) -> int:
        """Length of the longest list."""

    def lists(self, keys: StateKeys, k: int) -> Sequence[routes.TopList | None]:
        """Return the k most probable tokens at each position, fewer where there are fewer; None without a list."""


class StoredStates:
    """Lists of a baseline whose states are stored: from its whole distribution."""

    def __init__(self, store: StateStore) -> None:
        self._store = store

    @property
    def most(self) -> int:
        return self._store.manifest.vocab_size

    def lists(self, keys: StateKeys, k: int) -> list[routes.TopList]:
        rows, tops = self._store.rows_of(keys), list[routes.TopList]()
        for start in range(0, len(rows), _ROWS):
            logits = self._store.logits(rows[start : start + _ROWS], torch.device("cpu"))
            values, ids = torch.log_softmax(logits.float(), dim=-1).topk(k, dim=-1)
            tops += list(zip(ids.numpy(), values.double().numpy(), strict=True))
        return tops


class ShownLists:
    """Lists that a server has shown, in a folder."""

    def __init__(self, folder: Path) -> None:
        try:
            table = pq.read_table(folder / TOP_LISTS_FILE)
            self._row = {key: row for row, key in enumerate(table.column("key").to_pylist())}
            self._ids, self._logprobs = (table.column(name).to_pylist() for name in ("ids", "logprobs"))
        except (OSError, pa.ArrowInvalid, KeyError) as error:
            raise StoreError(
                f"The baseline's top lists cannot be read: {error}", fix="Evaluate the baseline again"
            ) from error

    @property
    def most(self) -> int:
        return max(map(len, self._ids), default=0)

    def lists(self, keys: StateKeys, k: int) -> list[routes.TopList | None]:
        """Return the k most probable tokens at each position, fewer where the server has shown fewer.

        None where it was asked without a list.
        """
        names = [key.tobytes() for key in keys]
        missing = sum(name not in self._row for name in names)
        if missing:
            raise AlignmentError(
                f"The baseline was not asked at {missing} of the {len(names)} scored positions",
                fix="Evaluate baseline and variant on the same tasks, limit and seed, with the same tokenizer",
            )
        rows = [self._row[name] for name in names]
        return [
            (np.asarray(self._ids[r][:k], np.int64), np.asarray(self._logprobs[r][:k], np.float64))
            if self._ids[r]
            else None
            for r in rows
        ]


def _write_lists(folder: Path, lists: Mapping[bytes, routes.TopList]) -> None:
    """Store the lists that a server has shown in one pass over requests, by the key of their position."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = {
        "key": pa.array(lists, pa.binary(16)),
        "ids": pa.array([ids.tolist() for ids, _ in lists.values()], pa.list_(pa.int64())),
        "logprobs": pa.array([values.tolist() for _, values in lists.values()], pa.list_(pa.float64())),
    }
    pq.write_table(pa.table(columns), folder / TOP_LISTS_FILE)


logger = logging.getLogger(__name__)

_BATCH = 1024  # only numbers the rows: a server makes its own batches


@dataclass(frozen=True)
class _TopBound:
    """What two lists say about the divergence of their distributions."""

    kl: float  # KL of the merged distributions in nats: at most the exact KL(baseline || variant)
    kept_baseline: float  # Mass of the tokens that both lists hold
    kept_variant: float
    clipped: int  # How many of the two rests were negative by rounding, and are set to 0


@dataclass
class _Rows:
    """What a server has shown at every row: the log-probability of tokens, the most probable one, and whole lists."""

    logprob: dict[tuple[int, int], float] = field(default_factory=dict)
    best: dict[int, tuple[int, float]] = field(default_factory=dict)
    top: dict[int, routes.TopList] = field(default_factory=dict)  # Where a whole list was asked for

    def add(self, row: int, token: int | None, position: routes.Position, *, whole: bool) -> None:
        """Take over an answer; every token of its list is known with it."""
        if len(position.top[0]):
            self.best[row] = int(position.top[0][0]), float(position.top[1][0])
            if whole:
                self.top[row] = position.top
            for known, value in zip(position.top[0].tolist(), position.top[1].tolist(), strict=True):
                self.logprob.setdefault((row, known), value)
        if token is not None and position.logprob is not None:
            self.logprob[row, token] = position.logprob


@dataclass(frozen=True, kw_only=True)
class _ServedReport(PassReport):
    """Report on one scoring pass of a served model."""

    # Options without a log-likelihood, because the model or the server reads no prompt of this length, or no text
    # becomes their tokens
    n_unscored: int
    n_asked: int  # Requests to the server whose answers are used, those of an interrupted run among them
    seconds: float


SERVED_ANSWERS = "served_answers.jsonl"
_BYTES_PER_ID = 4  # what paces requests by tokens counts bytes
_MOST_PROMPTS, _MOST_TOKENS = 16, 4096  # of prompts that share a request


@dataclass
class ServedAnswers:
    """Answers of one served model, and what it took to get them."""

    endpoint: EndpointConfig
    model: str  # Name of the model there
    route: routes.Route  # How it is asked
    lists: bool  # Whether a request may hold several prompts
    identity: str  # Digest of what is known of the model; the cache's keys begin with it
    folder: Path | None = None  # Where the answers are kept until the records are written; None: in memory alone
    n_asked: int = 0  # As in `_ServedReport`
    asked_again: Counter[str] = field(default_factory=Counter)

    def ask(
        self, questions: Sequence[routes.TokenQuestion], *, label: str, repeat: int = 0
    ) -> list[list[routes.Position] | None]:
        """Return the answer to each question, in order; None where no text of the server's terms asks it.

        Equal questions are asked once, and those with a common beginning follow each other, as prefix caches like it.
        `repeat` 1 asks the same again. A reply is checked before it is kept. What was answered before an error is kept.
        """
        from tqdm import tqdm

        if not questions:
            return []
        cache = ReplyCache(self.folder / SERVED_ANSWERS if self.folder is not None else None, ("positions",))
        keys = [content_key(model=self.identity, repeat=repeat, **question.content) for question in questions]
        by_key = dict(sorted(zip(keys, questions, strict=True), key=lambda pair: sequence_key(pair[1].tokens)))
        requests = self._requests(
            {key: q for key, q in by_key.items() if cache.get(key) is not None or self.route.request(q) is not None}
        )
        to_ask = [left for one in requests if (left := [key for key in one if cache.get(key) is None])]
        n, n_known = len(requests), len(requests) - len(to_ask)
        self.n_asked += n
        failed: list[NoReply] = []
        failed_in_a_row = 0
        bar = tqdm(initial=n_known, total=n, desc=label, unit="request", disable=None, leave=False)
        with Transport(self.endpoint) as transport, bar:

            async def one(keys: Sequence[str]) -> None:
                nonlocal failed_in_a_row
                if failed_in_a_row >= self.endpoint.concurrency:
                    return  # The server is broken, and each request would take all its retries
                asked = [by_key[key] for key in keys]
                path, body = self.route.request(*asked) or ("", {})
                reply = await transport.post(
                    path,
                    body,
                    lambda text: self.route.read(text, *asked),
                    model=self.model,
                    n_bytes=_BYTES_PER_ID * sum(len(question.tokens) for question in asked),
                )
                if isinstance(reply, NoReply):
                    failed.append(reply)
                    failed_in_a_row += 1
                    return
                failed_in_a_row = 0
                answers = [[position.to_json() for position in answer] for answer in reply.of_questions]
                cache.put_all({key: {"positions": answer} for key, answer in zip(keys, answers, strict=True)})
                bar.update(1)

            try:
                transport.for_all(one, to_ask)
            except EndpointError as error:
                raise EndpointError(str(error), fix=self._kept(cache, requests)) from None
            finally:
                self.asked_again += transport.asked_again
        if failed:
            kinds = ", ".join(f"{kind} {n_of_kind}" for kind, n_of_kind in Counter(f.reason for f in failed).items())
            raise EndpointError(
                f"{len(failed)} of {n} requests to the served model failed ({kinds}): {failed[0].detail}",
                fix=self._kept(cache, requests),
            )
        answers = (cache.get(key) for key in keys)
        return [
            None if row is None else [routes.Position.from_json(position) for position in row["positions"]]
            for row in answers
        ]

    def _requests(self, by_key: Mapping[str, routes.TokenQuestion]) -> list[list[str]]:
        """Return the keys of the questions of each request: one, or several echoes with lists of one length."""
        requests: list[list[str]] = []
        open_: dict[int | None, tuple[list[str], int]] = {}  # By that length: what echoes are added to, and its tokens
        for key, question in by_key.items():
            if not self.lists or not question.scored:
                requests.append([key])
                continue
            request, n_tokens = open_.get(question.top, ([], 0))
            n_tokens += len(question.tokens)
            if not request or n_tokens > _MOST_TOKENS or len(request) == _MOST_PROMPTS:
                request, n_tokens = [], len(question.tokens)
                requests.append(request)
            request.append(key)
            open_[question.top] = request, n_tokens
        return requests

    def _kept(self, cache: ReplyCache, requests: Sequence[Sequence[str]]) -> str | None:
        """Return what an error says about the answers that are there."""
        if self.folder is None:
            return None
        n_kept = sum(all(cache.get(key) is not None for key in one) for one in requests)
        return f"The answers to {n_kept} of {len(requests)} are saved: the same command asks only for the rest"


class _AskedModel(RemoteCausalLM, Protocol):
    """Interface of a served model, as far as scoring asks it."""

    @property
    def can(self) -> routes.Capabilities:
        """What its server can."""

    def answers(self, folder: Path | None) -> ServedAnswers:
        """Return what asks it, and keeps the answers in a folder."""


class EndpointScorer:
    """Scores requests and corpora with a served model.

    `repeat` 1 asks again what was asked before, for the noise floor. `listed` are the items whose lists of most
    probable tokens are wanted, None: of all; other items have no bounds, unless their lists cost nothing. `report`
    describes the last pass over requests.
    """

    def __init__(self, loaded: _AskedModel, *, repeat: int = 0, listed: Collection[ItemKey] | None = None) -> None:
        self.loaded = loaded
        self.encoder = Encoder(loaded.tokenizer, loaded.max_length)
        self.report: _ServedReport | None = None
        self._repeat = repeat
        self._listed = listed

    def score(
        self,
        requests: Sequence[Request],
        *,
        capture: Path | None = None,
        baseline: TopLists | None = None,
        resume: Path | None = None,
    ) -> tuple[OptionScores, OptionBounds | None]:
        """Score continuations, and bound their distance from a baseline.

        One row per request, in order; what could not be asked is null. The bounds are those of items whose lists were
        wanted, of the baseline too. Answers are kept in the folder `resume`, so that a killed run asks for none of them
        again.
        """
        began = time.monotonic()
        encoded = self.encoder.encode(requests)
        fits = [i for i, e in enumerate(encoded) if e.fits]
        unlisted = self._unlisted(requests, encoded)
        tops = [1 if (requests[i].task, requests[i].item_id) in unlisted else None for i in fits]
        inputs, predicted = [encoded[i].inputs for i in fits], [encoded[i].targets for i in fits]
        plan = plan_batches(inputs, [len(t) for t in predicted], batch_tokens=_BATCH)
        rows = np.concatenate(plan.sequence_rows) if fits else np.zeros(0, np.int64)
        tokens = np.concatenate(predicted) if fits else np.zeros(0, np.int32)
        targets, place = Targets.of(rows, tokens.astype(np.int64))
        answers = self.loaded.answers(resume)
        shown = self._ask(answers, self._wanted(inputs, predicted, plan.sequence_rows, tops), label="options")
        scores = option_scores(requests, encoded, targets, place, _arrays(targets, shown))
        if capture is not None:
            _write_lists(
                capture, {plan.keys[row].tobytes(): shown.top.get(row, _NO_LIST) for row in sorted(shown.best)}
            )
        n_unscored = sum(value is None for value in scores.column("loglik").tolist())
        self._record_report("options", answers, began, requests, encoded, n_unscored)
        if baseline is None:
            return scores, None
        bounds, unlisted_rows, k = self._bounds(shown, plan.keys, baseline)
        split = np.split(rows, np.cumsum([len(t) for t in predicted])[:-1]) if fits else []
        of_request = dict(zip(fits, split, strict=True))
        for i, places in of_request.items():
            if not unlisted_rows.isdisjoint(places.tolist()):
                unlisted.add((requests[i].task, requests[i].item_id))
        kept = [i for i, r in enumerate(requests) if (r.task, r.item_id) not in unlisted]
        return scores, _option_bounds(
            [requests[i] for i in kept], [of_request.get(i, _NO_ROWS) for i in kept], bounds, k
        )

    def _unlisted(self, requests: Sequence[Request], encoded: Sequence[Encoded]) -> set[ItemKey]:
        """Return the items that are asked without lists: not wanted, and not those of options of one token."""
        can = self.loaded.can
        if self._listed is None or not can.echo:
            return set()
        costly = {
            (r.task, r.item_id)
            for r, e in zip(requests, encoded, strict=True)
            if not (can.steps and len(e.targets) == 1)
        }
        return costly - set(self._listed)

    def score_corpus(
        self,
        task: str,
        text: str | Sequence[str] | TokenAnswers,
        *,
        window: int = 512,
        max_tokens: int | None = None,
        starts: Sequence[int] = (),
        capture: Path | None = None,
        baseline: TopLists | None = None,
        resume: Path | None = None,
    ) -> tuple[TokenScores, None]:
        """Score each token of a text, as `engine.Scorer.score_corpus` cuts it. Lists are of options alone.

        A server that reads no window of this length is an `UnsupportedError`.
        """
        began = time.monotonic()
        windows = cut(self.encoder, text, window=window, max_tokens=max_tokens, starts=starts)
        plan, targets = windows.plan(_BATCH)
        inputs = [ids[:-1] for ids in windows.ids]
        predicted = [ids[places] for ids, places in zip(windows.ids, windows.scored, strict=True)]
        answers = self.loaded.answers(resume)
        asked = self._wanted(inputs, predicted, plan.sequence_rows, [1] * len(inputs))
        shown = self._ask(answers, asked, label=task)
        result = _arrays(targets, shown)
        missing = int(np.isnan(result["logprob"]).sum())
        if missing:
            longest, read = max(map(len, windows.ids)), self.loaded.can.max_length
            too_long = read is not None and longest > read
            raise UnsupportedError(
                f"The server has not scored {missing} of {len(targets.row)} tokens of {task!r}",
                got=f"windows of up to {longest} tokens"
                + (f", and the server reads {read}" if too_long else "; it says that these tokens have probability 0"),
                fix=("Serve the model with a longer context, or leave" if too_long else "Leave")
                + " the corpus out of tasks",
            )
        self._record_report(task, answers, began)
        return token_scores(task, windows, result), None

    def _record_report(
        self,
        label: str,
        answers: ServedAnswers,
        began: float,
        requests: Sequence[Request] = (),
        encoded: Sequence[Encoded] = (),
        n_unscored: int = 0,
    ) -> None:
        self.report = _ServedReport(
            n_unscored=n_unscored,
            n_truncated=sum(e.truncated for e in encoded),
            shortened=Shortened.of(requests, encoded),
            n_asked=answers.n_asked,
            asked_again=dict(answers.asked_again),
            seconds=time.monotonic() - began,
        )
        logger.info("scored %s%s: %s", label, " again, for the noise floor" if self._repeat else "", self.report)

    def _wanted(
        self,
        inputs: Sequence[Ids],
        predicted: Sequence[Ids],
        rows: Sequence[npt.NDArray[np.int64]],
        tops: Sequence[int | None],
    ) -> routes.Wanted:
        can = self.loaded.can
        return routes.wanted(inputs, predicted, rows, tops, echo=can.echo, steps=can.steps)

    def _ask(self, answers: ServedAnswers, asked: routes.Wanted, *, label: str) -> _Rows:
        """Return what the server shows: first its lists, then the wanted tokens that no list holds."""
        can, told = self.loaded.can, _Rows()

        def ask(questions: Sequence[routes.TokenQuestion]) -> list[list[routes.Position] | None]:
            return answers.ask(questions, label=label, repeat=self._repeat)

        fitting = [(q, rows) for q, rows in zip(asked.whole, asked.rows, strict=True) if self._fits(q)]
        force = None if can.echo or not can.forces else 0
        steps = {
            row: routes.TokenQuestion(prefix, forced=None if force is None else asked.tokens[row][0])
            for row, prefix in asked.prefix.items()
        }
        steps = {row: question for row, question in steps.items() if self._fits(question)}
        replies = ask([*(q for q, _ in fitting), *steps.values()])
        for (question, rows), positions in zip(fitting, replies, strict=False):
            tokens = question.tokens[-question.scored :].tolist()
            for row, token, position in zip(rows.tolist(), tokens, positions or [], strict=False):
                told.add(row, token, position, whole=question.top is None)
        for (row, question), positions in zip(steps.items(), replies[len(fitting) :], strict=True):
            for position in positions or []:
                told.add(row, question.forced, position, whole=True)
        left = [
            (row, token, self._alone(asked.prefix[row], token))
            for row, wanted_tokens in asked.tokens.items()
            for token in wanted_tokens
            if (row, token) not in told.logprob
        ]
        left = [(row, token, question) for row, token, question in left if self._fits(question)]
        for (row, token, _), positions in zip(left, ask([q for *_, q in left]), strict=True):
            for position in positions or []:
                told.add(row, token, position, whole=False)
        return told

    def _alone(self, prefix: Ids, token: int) -> routes.TokenQuestion:
        if self.loaded.can.echo:
            return routes.TokenQuestion(np.append(prefix, token).astype(np.int32), scored=1, top=1)
        return routes.TokenQuestion(prefix, forced=token)

    def _fits(self, question: routes.TokenQuestion) -> bool:
        can = self.loaded.can
        written = 0 if question.scored and can.echo_alone else 1
        return can.max_length is None or len(question.tokens) + written <= can.max_length

    def _bounds(self, told: _Rows, keys: StateKeys, baseline: TopLists) -> tuple[dict[int, _TopBound], set[int], int]:
        """Return the bound at every row, the rows whose list the baseline lacks, and the length of the lists."""
        longest = min(self.loaded.can.n_top, baseline.most)
        k = next((rung for rung in TOP_LADDER if rung <= longest), 0)
        rows = sorted(row for row, top in told.top.items() if k and len(top[0]) >= k)
        lists = dict(zip(rows, baseline.lists(keys[rows], k) if rows else [], strict=True))
        bounds = {
            row: top_k_bound(theirs, (told.top[row][0][:k], told.top[row][1][:k]))
            for row, theirs in lists.items()
            if theirs is not None
        }
        return bounds, lists.keys() - bounds.keys(), k


def top_k_bound(baseline: routes.TopList, variant: routes.TopList) -> _TopBound:
    """Return the KL divergence after all tokens that are not in both lists were merged into one.

    It is the least that the two lists allow (data-processing inequality).
    """
    _, here, there = np.intersect1d(baseline[0], variant[0], assume_unique=True, return_indices=True)
    p, q = np.exp(baseline[1][here]), np.exp(variant[1][there])
    rest_p, rest_q = 1.0 - float(p.sum()), 1.0 - float(q.sum())
    clipped = int(rest_p < 0) + int(rest_q < 0)
    masses_p, masses_q = np.append(p, max(rest_p, 0.0)), np.append(q, max(rest_q, 0.0))
    if masses_q[-1] == 0.0 and masses_p[-1] > 0.0 and len(p):
        # Rounding has left the variant no rest. Merged into its least probable token, the bound stays finite, and one.
        least = int(np.argmin(q))
        masses_p[least] += masses_p[-1]
        masses_p, masses_q = masses_p[:-1], masses_q[:-1]
    some = masses_p > 0
    # Both sides are normalised again: what rounding has clipped would otherwise be a divergence below zero.
    masses_p, masses_q = masses_p / masses_p.sum(), masses_q / masses_q.sum()
    kl = float(np.sum(masses_p[some] * np.log(masses_p[some] / masses_q[some])))
    return _TopBound(max(kl, 0.0), float(p.sum()), float(q.sum()), clipped)


def _arrays(targets: Targets, told: _Rows) -> Arrays:
    """Return the results of a pass as `record_assembly` reads them; NaN where the server has said nothing."""
    rows, tokens = targets.row.tolist(), targets.token.tolist()
    logprob = np.asarray([told.logprob.get(pair, np.nan) for pair in zip(rows, tokens, strict=True)], np.float64)
    tops = [told.best.get(row, (None, np.nan)) for row in rows]
    argmax = np.asarray([token for token, _ in tops], object)
    best = np.asarray([value for _, value in tops], np.float64)
    # Of equally probable tokens a server may write any; each of them is what greedy decoding can give.
    return {"logprob": logprob, "is_argmax": logprob >= best, "argmax": argmax}


_NO_ROWS = np.zeros(0, np.int64)  # of a request that does not fit


def _option_bounds(
    requests: Sequence[Request], rows: Sequence[npt.NDArray[np.int64]], bounds: Mapping[int, _TopBound], k: int
) -> OptionBounds:
    """Return one row per request: means over its tokens; null where a token has no bound."""
    columns: dict[str, list[object]] = {
        name: [getattr(r, name) for r in requests] for name in ("task", "item_id", "permutation", "option")
    }
    own: list[list[_TopBound] | None] = []
    for places in rows:
        of_places = [bounds.get(row) for row in places.tolist()]
        there = [bound for bound in of_places if bound is not None]
        own.append(there if there and len(there) == len(of_places) else None)
    columns["k"] = [k] * len(requests)
    for name in ("kl", "kept_baseline", "kept_variant"):
        columns[name] = [None if b is None else float(np.mean([getattr(x, name) for x in b])) for b in own]
    columns["clipped"] = [None if b is None else sum(x.clipped for x in b) for b in own]
    return OptionBounds.from_columns(columns)
