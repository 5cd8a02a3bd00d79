"""Units as requests to another engine: every scored position once, before it can be in a cache; the states are the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlflow_compress.engines.vllm.vllm_model import VllmBody, read_head, requests_of
from mlflow_compress.models.light_model import open_light
from mlflow_compress.models.loading import LoadConfig, LoadedModel
from mlflow_compress.scoring.forward.body import Body
from mlflow_compress.scoring.forward.head import Head
from mlflow_compress.scoring.plan.encoding import Encoder
from mlflow_compress.scoring.plan.packing import NO_PREFIX, PackedBatch, PaddedBatch, Plan, plan_batches, plan_packs
from mlflow_compress.scoring.scoring_pass import ModelRunner, ScoringPass, Targets
from tests.unit.scoring_models import load_random, mixed_requests, rounding
from tests.unit.test_scoring_plan import spelled, tries


def asked(plan: Plan) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """What the requests of a plan spell, in order: up to each wanted position, and as a whole."""
    makers = {u.keep: u for u in plan.units if isinstance(u, PackedBatch) and u.keep != NO_PREFIX}
    wanted, whole = [], []
    seen: set[tuple[int, ...]] = set()
    for unit in plan.units:
        for request in requests_of(unit, makers):
            ids = tuple(request.ids.tolist())
            ends = [ids[: row + 1] for row in request.rows]
            # vLLM's cache holds whole prefixes of earlier requests: what it holds is not computed, and has no state.
            assert not seen & set(ends)
            seen |= {ids[:n] for n in range(1, len(ids) + 1)}
            wanted += ends
            whole.append(ids)
    return wanted, whole


@given(tries(), st.integers(1, 40), st.integers(1, 4))
def test_requests_spell_what_the_packs_of_a_plan_spell(
    drawn: tuple[list[np.ndarray], list[int]], batch_tokens: int, min_shared: int
) -> None:
    plan = plan_packs(*drawn, batch_tokens=batch_tokens, min_shared=min_shared)
    wanted, whole = asked(plan)
    assert wanted == spelled(plan.units)
    assert set(whole) <= {tuple(s[:n].tolist()) for s in drawn[0] for n in range(1, len(s) + 1)}


@given(tries(), st.integers(1, 40))
def test_requests_spell_what_the_padded_batches_of_a_plan_spell(
    drawn: tuple[list[np.ndarray], list[int]], batch_tokens: int
) -> None:
    plan = plan_batches(*drawn, batch_tokens=batch_tokens)
    assert asked(plan)[0] == spelled(plan.units)


def test_a_pack_of_two_branches_asks_for_the_shared_position_once() -> None:
    # The stem 5 6, behind it 7 and 8 9; scored are 6 (which both see), 7 and 9.
    unit = PackedBatch(
        ids=np.asarray([5, 6, 7, 8, 9], np.int32),
        positions=np.asarray([2, 3, 4, 4, 5], np.int32),
        ends=np.asarray([5, 5, 3, 5, 5], np.int32),
        rows=np.asarray([1, 2, 4]),
        prefix=1,
    )
    maker = PackedBatch(
        np.asarray([1, 2], np.int32),
        np.arange(2, dtype=np.int32),
        np.full(2, 2, np.int32),
        np.zeros(0, np.int64),
        keep=1,
    )
    found = requests_of(unit, {1: maker})
    assert [(r.ids.tolist(), r.rows) for r in found] == [([1, 2, 5, 6, 7], [3, 4]), ([1, 2, 5, 6, 8, 9], [5])]
    assert requests_of(maker, {}) == []


class Engine:
    """Another engine: transformers, one sequence at a time."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.body, self.calls = Body(loaded.model), 0

    def __call__(self, sequences: Sequence[np.ndarray], rows: Sequence[Sequence[int]]) -> torch.Tensor:
        self.calls += 1
        units = [PaddedBatch([ids], [np.asarray(r)]) for ids, r in zip(sequences, rows, strict=True)]
        return torch.cat([self.body.run(unit) for unit in units])


@pytest.mark.parametrize("make_plan", [plan_packs, plan_batches])
def test_a_pass_over_the_bodys_states_from_elsewhere_gives_the_same_results(make_plan) -> None:
    loaded = load_random("llama")
    encoded = [e for e in Encoder(loaded.tokenizer, loaded.max_length).encode(mixed_requests()) if e.fits]
    plan = make_plan([e.inputs for e in encoded], [len(e.targets) for e in encoded], batch_tokens=96)
    rows = np.concatenate(plan.sequence_rows)
    targets, _ = Targets.of(rows, np.concatenate([e.targets for e in encoded]).astype(np.int64))
    # A model of its own: it runs in another thread, and the head takes the body out of its model while it works.
    engine, head = Engine(load_random("llama")), Head(loaded.model)
    here = dict(ScoringPass(ModelRunner(Body(loaded.model), head), 16, entropy=True).run(plan, targets))
    body = VllmBody(plan, 16, engine)
    there = dict(ScoringPass(ModelRunner(body, head), 16, entropy=True).run(plan, targets))
    assert here.keys() == there.keys() and len(here) > 3
    nats = rounding(loaded)
    assert engine.calls == len(here) and not body.busy
    for number, expected in here.items():
        assert np.array_equal(there[number]["argmax"], expected["argmax"])
        assert np.abs(there[number]["logprob"] - expected["logprob"]).max() <= 2 * nats  # both are rounded
        # dH = sum (1 + ln p) dp, and dp is p times the change of ln p: at most (1 + H) of its largest.
        assert (np.abs(there[number]["entropy"] - expected["entropy"]) <= 2 * nats * (1 + expected["entropy"])).all()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_the_head_that_is_read_from_the_files_is_the_models_own(name: str, tmp_path: Path) -> None:
    loaded = load_random(name, path=tmp_path)  # gemma2 and gpt2 have tied embeddings, and gemma2 soft-caps its logits
    states = torch.randn(5, 48)
    read = read_head(open_light(LoadConfig(path=str(tmp_path), device="cpu")))
    assert torch.equal(read.logits(states), Head(loaded.model).logits(states))
