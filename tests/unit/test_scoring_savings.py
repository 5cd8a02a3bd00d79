"""What nobody reads is not computed: attention between branches, and the last layer at positions that are not scored."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from mlflow_compress.scoring.forward import tree_attention as tree_module
from mlflow_compress.scoring.forward.body import Body, split_body_and_head
from mlflow_compress.scoring.forward.tree_attention import Branch, build_branches, install_tree_attention
from mlflow_compress.scoring.plan.packing import PaddedBatch
from tests.unit.scoring_models import CONFIGS, load_random, mixed_requests, naive_logliks, rounding, rounding_of


def tree(*ends: int) -> Branch:
    return build_branches(np.asarray(ends, dtype=np.int32))


def leaf(begin: int, stop: int) -> Branch:
    return Branch(begin, stop, stop, [])


def test_branches_are_cut_where_nothing_is_seen_of_what_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    # A stem of two with leaves of one and one; a leaf of three; two leaves of one.
    ends = [4, 4, 3, 4, 7, 7, 7, 8, 9]
    assert tree(*ends) == leaf(0, 9)  # too small to be worth a call each
    monkeypatch.setattr(tree_module, "_SMALLEST_BRANCH", 1)
    two = Branch(0, 2, 4, [leaf(2, 3), leaf(3, 4)])
    assert tree(*ends) == Branch(0, 0, 9, [two, leaf(4, 7), leaf(7, 8), leaf(8, 9)])
    # The same under one token that all of them see.
    under = tree(10, *(e + 1 for e in ends))
    assert (under.begin, under.stem, under.stop) == (0, 1, 10)
    assert under.children[0] == Branch(1, 3, 5, [leaf(3, 4), leaf(4, 5)])
    assert tree(3, 3, 3) == leaf(0, 3)
    monkeypatch.setattr(tree_module, "_SMALLEST_BRANCH", 4)
    assert tree(*ends) == Branch(0, 0, 9, [leaf(0, 4), leaf(4, 8), leaf(8, 9)])


def test_attention_keeps_no_tensor_when_it_is_done() -> None:
    """Without a collection of cycles: there are few Python objects in a pass, so that one comes late."""
    query, key, value = torch.randn(3, 1, 2, 4, 8).unbind()
    two = Branch(0, 0, 4, [leaf(0, 2), leaf(2, 4)])
    gc.disable()
    try:
        tree_module._attend_per_branch(query, key, value, two, lambda a, b, c, d: torch.zeros(1, 1, b - a, d - c), None)
        kept = [weakref.ref(tensor) for tensor in (query, key, value)]
        del query, key, value
        assert [reference() for reference in kept] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("batch_tokens", [200, 2000])
def test_results_are_those_of_the_naive_forward(name: str, batch_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_module, "_SMALLEST_BRANCH", 4)
    calls = {"_attend_per_branch": 0, "_attend_at_rows": 0}
    for function in calls:
        original = getattr(tree_module, function)

        def counted(*args: Any, function: str = function, original: Any = original) -> Any:
            calls[function] += 1
            return original(*args)

        monkeypatch.setattr(tree_module, function, counted)
    loaded, requests = load_random(name), mixed_requests()
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    scores, _ = Scorer(loaded, ScoringConfig(progress=False, batch_tokens=batch_tokens)).score(requests)
    wanted = naive_logliks(loaded, requests)
    assert np.abs((scores.column("loglik") - wanted) / scores.column("n_tokens")).max() < rounding(loaded)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before
    uses_sdpa = name != "gemma2"  # whose soft caps only its own attention knows
    assert (calls["_attend_per_branch"] > 0) == uses_sdpa
    assert (calls["_attend_at_rows"] > 0) == uses_sdpa


def test_the_attention_table_is_changed_within_the_block_only() -> None:
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with pytest.raises(ZeroDivisionError), install_tree_attention() as attention:
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attention
        raise ZeroDivisionError
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before


def test_the_last_feed_forward_part_sees_scored_positions_only() -> None:
    loaded = load_random("llama")
    seen: list[int] = []
    for layer in loaded.model.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, out: seen.append(args[0].shape[1]))
    body = Body(loaded.model)
    ids = np.arange(2, 32, dtype=np.int32)
    some = body.run(PaddedBatch([ids, ids[:20]], [np.asarray([5, 29]), np.asarray([19])]))
    assert seen == [30, 30, 3]
    body = Body(loaded.model)
    body._last_layer = None
    every = body.run(PaddedBatch([ids, ids[:20]], [np.asarray([5, 29]), np.asarray([19])]))
    assert seen[3:] == [30, 30, 30]
    error = rounding_of(loaded.model.model, torch.from_numpy(ids)[None].long(), read=lambda x: x.last_hidden_state)
    assert (some - every).abs().max() <= 2 * error  # both are rounded


def test_a_last_layer_that_looks_at_its_neighbours_runs_at_every_position() -> None:
    loaded = load_random("llama")
    mlp = loaded.model.model.layers[-1].mlp
    own = mlp.forward

    def shifted(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = own(x + torch.nn.functional.pad(x, (0, 0, 1, -1)))
        return result

    mlp.forward = shifted
    body, _, _ = split_body_and_head(loaded.model)
    assert body._last_layer is None
    assert split_body_and_head(load_random("llama").model)[0]._last_layer is not None
