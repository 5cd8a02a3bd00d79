"""Shares of a plan: together they are the plan, each can be sent away, and each alone sees its own tokens."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlflow_compress.scoring.forward.body import split_body_and_head
from mlflow_compress.scoring.plan.packing import plan_batches, plan_packs
from mlflow_compress.scoring.plan.units import NO_PREFIX, PackedBatch, Plan, group_units
from mlflow_compress.scoring.processes.shares import Share, cut_into_shares
from mlflow_compress.scoring.scoring_pass import ModelRunner, ScoringPass, Targets
from tests.unit.scoring_models import VOCAB, load_random
from tests.unit.test_scoring_plan import tries


def targets_of(plan: Plan) -> Targets:
    """One or two targets a row."""
    rows = np.sort(np.concatenate([np.arange(len(plan.keys)), np.arange(0, len(plan.keys), 3)]))
    return Targets(rows, np.arange(len(rows)) % VOCAB)


@settings(max_examples=150, deadline=None)
@given(tries(), st.integers(1, 40), st.integers(1, 6), st.integers(1, 5), st.booleans())
def test_shares_are_the_plan_in_order_and_whole_in_themselves(
    given_tries: tuple[list[np.ndarray], list[int]], batch_tokens: int, head_rows: int, n: int, packed: bool
) -> None:
    sequences, counts = given_tries
    plan = (
        plan_packs(sequences, counts, batch_tokens=batch_tokens, min_shared=1)
        if packed
        else plan_batches(sequences, counts, batch_tokens=batch_tokens)
    )
    targets, cut = targets_of(plan), group_units(plan, head_rows)
    parts = cut_into_shares(plan, targets, head_rows, n)
    assert len(parts) == min(n, len(cut))
    assert [id(u) for part in parts for u in part.plan.units] == [id(u) for u in plan.units]
    assert np.array_equal(np.concatenate([part.plan.keys for part in parts]), plan.keys)
    assert [g.n_tokens for part in parts for g in group_units(part.plan, head_rows)] == [g.n_tokens for g in cut]
    starts = np.cumsum([0, *(len(part.plan.keys) for part in parts)])[:-1]
    for name in ("row", "token"):
        shift = starts if name == "row" else np.zeros(len(parts), int)
        found = [getattr(part.targets, name) + s for part, s in zip(parts, shift, strict=True)]
        assert np.array_equal(np.concatenate(found), getattr(targets, name))
    for part in parts:
        made = {u.keep for u in (*part.plan.before, *part.plan.units) if isinstance(u, PackedBatch)} | {NO_PREFIX}
        read = {u.prefix for u in (*part.plan.before, *part.plan.units) if isinstance(u, PackedBatch)}
        assert read <= made
        own = {id(u) for u in part.plan.units}
        assert not any(id(u) in own for u in part.plan.before)


def header(n: int, first: int) -> np.ndarray:
    return (np.arange(n, dtype=np.int32) * 7 + first) % VOCAB


def subjects(n_headers: int) -> tuple[list[np.ndarray], list[int]]:
    """A few questions behind each of some headers."""
    sequences = [
        np.concatenate([header(40, 3 * h), header(12, 11 * q + h)]).astype(np.int32)
        for h in range(n_headers)
        for q in range(5)
    ]
    return sequences, [3] * len(sequences)


def test_cuts_lie_between_subjects_where_that_is_hardly_uneven() -> None:
    plan = plan_packs(*subjects(3), batch_tokens=30, min_shared=8)
    first, second = cut_into_shares(plan, targets_of(plan), 1, 2)
    # Half of three headers is in the middle of the second; there its header would be computed twice.
    assert first.plan.before == [] and second.plan.before == []
    assert abs(first.plan.n_tokens - second.plan.n_tokens) == plan.n_tokens / 3


def test_one_subject_is_divided_all_the_same() -> None:
    plan = plan_packs(*subjects(1), batch_tokens=30, min_shared=8)
    parts = cut_into_shares(plan, targets_of(plan), 1, 2)
    assert [pack.n_tokens for pack in parts[1].plan.before] == [40]


def test_a_plan_without_work_is_one_share() -> None:
    plan = plan_packs([], [], batch_tokens=30)
    assert len(cut_into_shares(plan, targets_of(plan), 4, 3)) == 1


@pytest.mark.parametrize("n", [2, 5])
def test_a_share_that_was_sent_away_gives_the_same_bits(n: int) -> None:
    loaded = load_random("llama")
    body, head, _ = split_body_and_head(loaded.model)
    plan = plan_packs(*subjects(3), batch_tokens=30, min_shared=8)
    targets = targets_of(plan)

    def run(part: Share) -> dict[str, np.ndarray]:
        return ScoringPass(runner=ModelRunner(body, head), head_rows=4, progress=False, entropy=True).run(
            part.plan, part.targets
        )

    whole = run(Share(plan, targets))
    parts: Sequence[Share] = pickle.loads(pickle.dumps(cut_into_shares(plan, targets, 4, n)))  # noqa: S301 - our own bytes
    assert len(parts) == n and any(part.plan.before for part in parts)
    results = [run(part) for part in reversed(parts)][::-1]
    for name, values in whole.items():
        assert np.array_equal(np.concatenate([r[name] for r in results]), values), name
