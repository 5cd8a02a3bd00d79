"""Tries and plans on random token sequences: all is computed, once where it is shared, and seen by the right tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlflow_compress.scoring.plan.packing import (
    NO_PREFIX,
    PackedBatch,
    PaddedBatch,
    build_trie,
    group_units,
    last_uses,
    n_scored_rows,
    plan_batches,
    plan_packs,
    split_unit,
)

Ids = np.ndarray
sequence = st.lists(st.integers(0, 2), min_size=1, max_size=14)


@st.composite
def tries(draw: st.DrawFn) -> tuple[list[Ids], list[int]]:
    """Sequences over three tokens, so that prefixes, duplicates and chains abound, and how many tokens are scored."""
    stems = draw(st.lists(sequence, min_size=1, max_size=3))
    tails = draw(st.lists(st.tuples(st.sampled_from(stems), sequence), min_size=1, max_size=12))
    sequences = [np.asarray(stem[: draw(st.integers(0, len(stem)))] + tail, np.int32) for stem, tail in tails]
    return sequences, [draw(st.integers(1, len(s))) for s in sequences]


def spelled(units: Sequence[PackedBatch | PaddedBatch]) -> list[tuple[int, ...]]:
    """The tokens that each row has seen, up to and including its own, rebuilt from what the masks let through."""
    prefixes: dict[int, tuple[int, ...]] = {NO_PREFIX: ()}
    rows: list[tuple[int, ...]] = []
    finished = last_uses(units)
    for number, unit in enumerate(units):
        if isinstance(unit, PaddedBatch):
            rows += [
                tuple(s[: r + 1]) for s, where in zip(unit.sequences, unit.rows, strict=True) for r in where.tolist()
            ]
            continue
        before = prefixes[unit.prefix]
        paths = []
        for i in range(len(unit.ids)):
            visible = [j for j in range(i + 1) if i < unit.ends[j]]
            # Positions continue the prefix without a gap along every path.
            assert [int(unit.positions[j]) for j in visible] == list(range(len(before), len(before) + len(visible)))
            paths.append(before + tuple(int(unit.ids[j]) for j in visible))
        rows += [paths[i] for i in unit.rows.tolist()]
        if unit.keep != NO_PREFIX:
            assert unit.is_path
            prefixes[unit.keep] = paths[-1]
        for prefix in finished.get(number, ()):
            del prefixes[prefix]
    assert list(prefixes) == [NO_PREFIX]
    return rows


@settings(max_examples=150, deadline=None)
@given(tries(), st.integers(1, 40), st.integers(1, 6), st.booleans())
def test_every_scored_position_sees_its_own_tokens(
    trie: tuple[list[Ids], list[int]], batch_tokens: int, min_shared: int, packed: bool
) -> None:
    sequences, counts = trie
    if packed:
        plan = plan_packs(sequences, counts, batch_tokens=batch_tokens, min_shared=min_shared)
    else:
        plan = plan_batches(sequences, counts, batch_tokens=batch_tokens)
    rows = spelled(plan.units)
    assert len(set(rows)) == len(rows) == len(plan.keys)  # one row for equal contexts
    for ids, count, where in zip(sequences, counts, plan.sequence_rows, strict=True):
        assert [rows[r] for r in where] == [tuple(ids[: p + 1]) for p in range(len(ids) - count, len(ids))]
    for path, key in zip(rows, plan.keys, strict=True):
        raw = np.asarray(path, "<i4").tobytes()
        assert key.tobytes() == hashlib.blake2b(raw, digest_size=16).digest()


@settings(max_examples=80, deadline=None)
@given(tries(), st.integers(1, 40), st.booleans(), st.integers(1, 3))
def test_split_units_yield_the_same_rows(
    trie: tuple[list[Ids], list[int]], batch_tokens: int, packed: bool, times: int
) -> None:
    """What is done when memory runs out: every unit that can be is halved, again and again."""
    sequences, counts = trie
    make = plan_packs if packed else plan_batches
    plan = make(sequences, counts, batch_tokens=batch_tokens)
    units, spare = list(plan.units), 0
    for _ in range(times):
        halved: list[PackedBatch | PaddedBatch] = []
        for unit in units:
            if (len(unit.sequences) if isinstance(unit, PaddedBatch) else unit.n_tokens) < 2:
                halved.append(unit)
                continue
            spare -= 1
            parts = split_unit(unit, spare)
            assert sum(n_scored_rows(p) for p in parts) == n_scored_rows(unit)
            halved += parts
        units = halved
    assert spelled(units) == spelled(plan.units)


@settings(max_examples=60, deadline=None)
@given(tries(), st.integers(1, 20), st.integers(1, 10))
def test_groups_cover_units_and_rows_in_order(
    trie: tuple[list[Ids], list[int]], batch_tokens: int, head_rows: int
) -> None:
    plan = plan_packs(*trie, batch_tokens=batch_tokens)
    cut = group_units(plan, head_rows)
    units = [n for g in cut for n in range(g.units.start, g.units.stop)]
    rows = [n for g in cut for n in range(g.rows.start, g.rows.stop)]
    assert units == list(range(len(plan.units)))
    assert rows == list(range(len(plan.keys)))
    assert all(g.rows.stop - g.rows.start >= head_rows for g in cut[:-1])
    assert sum(g.n_tokens for g in cut) == plan.n_tokens


@settings(max_examples=60, deadline=None)
@given(tries(), st.integers(1, 40), st.randoms(use_true_random=False))
def test_plans_do_not_depend_on_the_order_of_requests(
    trie: tuple[list[Ids], list[int]], batch_tokens: int, random: object
) -> None:
    sequences, counts = trie
    order = list(range(len(sequences)))
    random.shuffle(order)  # type: ignore[attr-defined]
    for make in (plan_packs, plan_batches):
        one = make(sequences, counts, batch_tokens=batch_tokens)
        two = make([sequences[i] for i in order], [counts[i] for i in order], batch_tokens=batch_tokens)
        assert one.digest == two.digest
        assert (one.keys == two.keys).all()


@settings(max_examples=60, deadline=None)
@given(tries())
def test_a_large_enough_pack_computes_each_trie_token_once(trie: tuple[list[Ids], list[int]]) -> None:
    sequences, counts = trie
    distinct_prefixes = {tuple(s[:n]) for s in sequences for n in range(1, len(s) + 1)}
    plan = plan_packs(sequences, counts, batch_tokens=10_000)
    assert len(plan.units) == 1
    assert plan.n_tokens == len(distinct_prefixes) == sum(build_trie(sequences).subtree_sizes()[:1])


def test_a_header_is_computed_once_and_packs_keep_to_the_limit() -> None:
    header = np.arange(100, dtype=np.int32)
    sequences = [np.concatenate([header, np.full(20, 200 + i, np.int32)]) for i in range(30)]
    plan = plan_packs(sequences, [1] * 30, batch_tokens=64)
    assert plan.n_tokens == 100 + 30 * 20
    kept, *packs = plan.units
    assert isinstance(kept, PackedBatch)
    assert kept.n_tokens == 100
    assert kept.keep == 1
    assert all(isinstance(p, PackedBatch) and p.prefix == 1 and p.n_tokens <= 64 for p in packs)
    assert max(int(p.positions.max()) for p in packs if isinstance(p, PackedBatch)) == 119


def test_a_short_stem_is_not_worth_a_pass_of_its_own() -> None:
    sequences = [np.asarray([7, *[i] * 30], np.int32) for i in range(10)]
    plan = plan_packs(sequences, [1] * 10, batch_tokens=64)
    assert all(isinstance(u, PackedBatch) and u.keep == NO_PREFIX for u in plan.units)
    assert plan.n_tokens == 10 * 30 + len(plan.units)


def test_deep_chains_do_not_recurse() -> None:
    longest = np.zeros(3000, np.int32)
    sequences = [longest[:n] for n in range(1, 3001)]
    plan = plan_packs(sequences, [1] * 3000, batch_tokens=100)
    assert len(plan.keys) == 3000
    assert plan.n_tokens < 3000 + 100


def test_batches_leave_out_sequences_that_begin_another_and_keep_to_the_limit() -> None:
    sequences = [np.asarray(s, np.int32) for s in ([1], [1, 2], [1, 2, 3], [4, 5], [6])]
    plan = plan_batches(sequences, [1] * 5, batch_tokens=5)
    assert [[s.tolist() for s in u.sequences] for u in plan.units if isinstance(u, PaddedBatch)] == [
        [[1, 2, 3]],
        [[4, 5], [6]],
    ]
    assert len(plan.keys) == 5


@pytest.mark.parametrize("make", [plan_packs, plan_batches])
def test_digests_tell_plans_apart(make: object) -> None:
    sequences = [np.asarray([1, 2, i], np.int32) for i in range(9)]
    a, b = (make(sequences, [1] * 9, batch_tokens=n).digest for n in (6, 12))  # type: ignore[operator]
    assert a != b
