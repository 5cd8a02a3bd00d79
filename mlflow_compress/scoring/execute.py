"""Carry out a plan: body by units, head by chunks of rows, and what each row and each target yields."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tqdm.auto import tqdm

from mlflow_compress.errors import AlignmentError, CheckpointError
from mlflow_compress.scoring.body import Body, last_uses
from mlflow_compress.scoring.divergence import Divergences, divergences
from mlflow_compress.scoring.head import Head
from mlflow_compress.scoring.plan import Batch, Pack, Plan
from mlflow_compress.scoring.store import StateStore, StateWriter

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Targets:
    """Tokens whose log-probability is wanted: `token[i]` after row `row[i]`; rows never fall, every row occurs."""

    row: Ints
    token: Ints

    @classmethod
    def of(cls, row: Ints, token: Ints) -> tuple[Targets, Ints]:
        """Return the distinct pairs in order of rows, and for each pair given its place among them."""
        pairs, place = np.unique(np.stack([row, token]), axis=1, return_inverse=True)
        return cls(pairs[0], pairs[1]), place.reshape(-1).astype(np.int64)

    def first_tokens(self) -> npt.NDArray[np.int32]:
        """Return the first target of every row."""
        _, first = np.unique(self.row, return_index=True)
        return self.token[first].astype(np.int32)


@dataclass(frozen=True)
class RowResults:
    """What a pass yields.

    Attributes
    ----------
    logprob : ndarray of float64, shape (n_targets,)
        ln p of each target, in nats.
    argmax : ndarray of int64, shape (n_rows,)
        Most probable token, the lowest id of equals.
    entropy : ndarray of float64, shape (n_rows,)
        In nats.
    distances : Divergences or None
        From the baseline's distribution at the same row, where a baseline was given.
    """

    logprob: Floats
    argmax: Ints
    entropy: Floats
    distances: Divergences | None


class Pass:
    """One pass of one model over one plan.

    Parameters
    ----------
    body, head : Body, Head
        Of the model that is scored.
    head_rows : int
        Rows a head product. Fixed by the settings, never by free memory: equal states then give equal bits.
    capture : StateWriter, optional
        Receives the head's inputs.
    baseline : StateStore, optional
        Distances from it are measured.
    """

    def __init__(
        self,
        body: Body,
        head: Head,
        *,
        head_rows: int,
        capture: StateWriter | None = None,
        baseline: StateStore | None = None,
        progress: bool = True,
        label: str = "scoring",
    ) -> None:
        self.body, self.head, self.head_rows = body, head, head_rows
        self.capture, self.baseline = capture, baseline
        self.progress, self.label = progress, label

    def run(self, plan: Plan, targets: Targets) -> RowResults:
        """Run every unit and return results in the plan's row order."""
        found = self._find(plan)
        first = targets.first_tokens()
        parts: list[RowResults] = []
        waiting: list[torch.Tensor] = []
        done = n_waiting = 0
        finished = last_uses(plan.units)
        bar = tqdm(
            total=plan.n_tokens, desc=self.label, unit="tok", unit_scale=True, disable=None if self.progress else True
        )
        with bar:
            for number, unit in enumerate(plan.units):
                states = self._states(unit)
                for prefix in finished.get(number, ()):
                    self.body.forget(prefix)
                waiting.append(states)
                n_waiting += len(states)
                last = number == len(plan.units) - 1
                if n_waiting >= self.head_rows or (last and n_waiting):
                    ready = torch.cat(waiting)
                    while len(ready) >= self.head_rows or (last and len(ready)):
                        chunk, ready = ready[: self.head_rows].clone(), ready[self.head_rows :]
                        rows = slice(done, done + len(chunk))
                        done += len(chunk)
                        if self.capture is not None:
                            self.capture.append(chunk, plan.keys[rows], first[rows])
                        parts.append(self._chunk(chunk, rows, targets, found))
                    waiting, n_waiting = [ready], len(ready)
                bar.update(unit.n_tokens)
        self.body.clear()
        return _joined(parts)

    def _states(self, unit: Pack | Batch) -> torch.Tensor:
        return self.body.run(unit)

    def _find(self, plan: Plan) -> Ints | None:
        if self.baseline is None:
            return None
        found = self.baseline.find(plan.keys)
        if (found < 0).any():
            raise AlignmentError(
                f"The baseline store lacks {int((found < 0).sum())} of the {len(found)} scored positions",
                fix="Evaluate baseline and variant on the same tasks, limit and seed, with the same tokenizer",
            )
        return found

    def _chunk(self, states: torch.Tensor, rows: slice, targets: Targets, found: Ints | None) -> RowResults:
        logp = log_softmax(self.head, states)
        start, stop = np.searchsorted(targets.row, [rows.start, rows.stop])
        row = torch.from_numpy(targets.row[start:stop] - rows.start).to(logp.device)
        token = torch.from_numpy(targets.token[start:stop]).to(logp.device)
        p = logp.exp()
        entropy = -torch.special.xlogy(p, p).sum(dim=1)
        distances = None
        if self.baseline is not None and found is not None:
            base = log_softmax(self.baseline.head(), self.baseline.states(found[rows]).to(states.device))
            distances = divergences(base.to(logp.device), logp)
        return RowResults(
            logprob=logp[row, token].double().cpu().numpy(),
            argmax=logp.argmax(dim=1).cpu().numpy(),
            entropy=entropy.double().cpu().numpy(),
            distances=distances,
        )


def log_softmax(head: Head, states: torch.Tensor) -> torch.Tensor:
    """Return float32 log-probabilities, shape (n, vocab_size); a model that gives NaN is a `CheckpointError`."""
    logp = torch.log_softmax(head.logits(states), dim=1)
    if bool(logp[:, 0].isnan().any()):  # one NaN among the logits makes its whole row NaN
        raise CheckpointError("The model gives NaN logits", fix="Load it in float32, or make the checkpoint again")
    return logp


def _joined(parts: list[RowResults]) -> RowResults:
    def cat(values: list[Any]) -> Any:
        return np.concatenate(values) if values else np.zeros(0)

    distances = None
    with_distances = [p.distances for p in parts if p.distances is not None]
    if with_distances:
        distances = Divergences(
            **{f.name: torch.cat([getattr(d, f.name) for d in with_distances]) for f in fields(Divergences)}
        )
    return RowResults(
        logprob=cat([p.logprob for p in parts]),
        argmax=cat([p.argmax for p in parts]),
        entropy=cat([p.entropy for p in parts]),
        distances=distances,
    )
