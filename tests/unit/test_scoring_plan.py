"""Tries and plans on random token sequences: all is computed, once where it is shared, and seen by the right tokens.

Rolling windows over documents: lm-evaluation-harness's own cut is the reference.

Token boundaries, prefix token and truncation against the rules that lm-evaluation-harness states.

What nobody reads is not computed: attention between branches, and the last layer at positions that are not scored.
"""

import gc
import hashlib
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mlflow_compress.errors import DataError
from mlflow_compress.kept import keeping
from mlflow_compress.records import Request
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from mlflow_compress.scoring.forward import tree_attention as tree_module
from mlflow_compress.scoring.forward.body import Body, split_body_and_head
from mlflow_compress.scoring.forward.tree_attention import Branch, build_branches, install_tree_attention
from mlflow_compress.scoring.plan import packing
from mlflow_compress.scoring.plan.corpus_windows import cut_documents
from mlflow_compress.scoring.plan.encoding import Encoded, Encoder
from tests.unit import scoring_models

Ids = np.ndarray
sequence = st.lists(st.integers(0, 2), min_size=1, max_size=14)


@st.composite
def tries(draw: st.DrawFn) -> tuple[list[Ids], list[int]]:
    """Sequences over three tokens, so that prefixes, duplicates and chains abound, and how many tokens are scored."""
    stems = draw(st.lists(sequence, min_size=1, max_size=3))
    tails = draw(st.lists(st.tuples(st.sampled_from(stems), sequence), min_size=1, max_size=12))
    sequences = [np.asarray(stem[: draw(st.integers(0, len(stem)))] + tail, np.int32) for stem, tail in tails]
    return sequences, [draw(st.integers(1, len(s))) for s in sequences]


def spelled(units: Sequence[packing.PackedBatch | packing.PaddedBatch]) -> list[tuple[int, ...]]:
    """The tokens that each row has seen, up to and including its own, rebuilt from what the masks let through."""
    prefixes: dict[int, tuple[int, ...]] = {packing.NO_PREFIX: ()}
    rows: list[tuple[int, ...]] = []
    finished = packing.last_uses(units)
    for number, unit in enumerate(units):
        if isinstance(unit, packing.PaddedBatch):
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
        if unit.keep != packing.NO_PREFIX:
            assert unit.is_path
            prefixes[unit.keep] = paths[-1]
        for prefix in finished.get(number, ()):
            del prefixes[prefix]
    assert list(prefixes) == [packing.NO_PREFIX]
    return rows


@settings(max_examples=150)
@given(tries(), st.integers(1, 40), st.integers(1, 6), st.booleans())
def test_every_scored_position_sees_its_own_tokens(
    trie: tuple[list[Ids], list[int]], batch_tokens: int, min_shared: int, packed: bool
) -> None:
    sequences, counts = trie
    if packed:
        plan = packing.plan_packs(sequences, counts, batch_tokens=batch_tokens, min_shared=min_shared)
    else:
        plan = packing.plan_batches(sequences, counts, batch_tokens=batch_tokens)
    rows = spelled(plan.units)
    assert len(set(rows)) == len(rows) == len(plan.keys)  # one row for equal contexts
    for ids, count, where in zip(sequences, counts, plan.sequence_rows, strict=True):
        assert [rows[r] for r in where] == [tuple(ids[: p + 1]) for p in range(len(ids) - count, len(ids))]
    for path, key in zip(rows, plan.keys, strict=True):
        raw = np.asarray(path, "<i4").tobytes()
        assert key.tobytes() == hashlib.blake2b(raw, digest_size=16).digest()


@settings(max_examples=80)
@given(tries(), st.integers(1, 40), st.booleans(), st.integers(1, 3))
def test_split_units_yield_the_same_rows(
    trie: tuple[list[Ids], list[int]], batch_tokens: int, packed: bool, times: int
) -> None:
    """What is done when memory runs out: every unit that can be is halved, again and again."""
    sequences, counts = trie
    make = packing.plan_packs if packed else packing.plan_batches
    plan = make(sequences, counts, batch_tokens=batch_tokens)
    units, spare = list(plan.units), 0
    for _ in range(times):
        halved: list[packing.PackedBatch | packing.PaddedBatch] = []
        for unit in units:
            if (len(unit.sequences) if isinstance(unit, packing.PaddedBatch) else unit.n_tokens) < 2:
                halved.append(unit)
                continue
            spare -= 1
            parts = packing.split_unit(unit, spare)
            assert sum(packing.n_scored_rows(p) for p in parts) == packing.n_scored_rows(unit)
            halved += parts
        units = halved
    assert spelled(units) == spelled(plan.units)


@settings(max_examples=60)
@given(tries(), st.integers(1, 20), st.integers(1, 10))
def test_groups_cover_units_and_rows_in_order(
    trie: tuple[list[Ids], list[int]], batch_tokens: int, head_rows: int
) -> None:
    plan = packing.plan_packs(*trie, batch_tokens=batch_tokens)
    cut = packing.group_units(plan, head_rows)
    units = [n for g in cut for n in range(g.units.start, g.units.stop)]
    rows = [n for g in cut for n in range(g.rows.start, g.rows.stop)]
    assert units == list(range(len(plan.units)))
    assert rows == list(range(len(plan.keys)))
    assert all(g.rows.stop - g.rows.start >= head_rows for g in cut[:-1])
    assert sum(g.n_tokens for g in cut) == plan.n_tokens


@settings(max_examples=60)
@given(tries(), st.integers(1, 40), st.randoms(use_true_random=False))
def test_plans_do_not_depend_on_the_order_of_requests(
    trie: tuple[list[Ids], list[int]], batch_tokens: int, random: object
) -> None:
    sequences, counts = trie
    order = list(range(len(sequences)))
    random.shuffle(order)  # type: ignore[attr-defined]
    for make in (packing.plan_packs, packing.plan_batches):
        one = make(sequences, counts, batch_tokens=batch_tokens)
        two = make([sequences[i] for i in order], [counts[i] for i in order], batch_tokens=batch_tokens)
        assert one.digest == two.digest
        assert (one.keys == two.keys).all()


@settings(max_examples=60)
@given(tries())
def test_a_large_enough_pack_computes_each_trie_token_once(trie: tuple[list[Ids], list[int]]) -> None:
    sequences, counts = trie
    distinct_prefixes = {tuple(s[:n]) for s in sequences for n in range(1, len(s) + 1)}
    plan = packing.plan_packs(sequences, counts, batch_tokens=10_000)
    assert len(plan.units) == 1
    assert plan.n_tokens == len(distinct_prefixes) == sum(packing.build_trie(sequences).subtree_sizes()[:1])


def test_a_header_is_computed_once_and_packs_keep_to_the_limit() -> None:
    header = np.arange(100, dtype=np.int32)
    sequences = [np.concatenate([header, np.full(20, 200 + i, np.int32)]) for i in range(30)]
    plan = packing.plan_packs(sequences, [1] * 30, batch_tokens=64)
    assert plan.n_tokens == 100 + 30 * 20
    kept, *packs = plan.units
    assert isinstance(kept, packing.PackedBatch)
    assert kept.n_tokens == 100
    assert kept.keep == 1
    assert all(isinstance(p, packing.PackedBatch) and p.prefix == 1 and p.n_tokens <= 64 for p in packs)
    assert max(int(p.positions.max()) for p in packs if isinstance(p, packing.PackedBatch)) == 119


def test_batches_keep_to_the_limit_and_short_stems_and_deep_chains_need_no_pass_of_their_own() -> None:
    sequences = [np.asarray(s, np.int32) for s in ([1], [1, 2], [1, 2, 3], [4, 5], [6])]
    plan = packing.plan_batches(sequences, [1] * 5, batch_tokens=5)
    assert [[s.tolist() for s in u.sequences] for u in plan.units if isinstance(u, packing.PaddedBatch)] == [
        [[1, 2, 3]],
        [[4, 5], [6]],
    ]
    assert len(plan.keys) == 5
    sequences = [np.asarray([7, *[i] * 30], np.int32) for i in range(10)]
    plan = packing.plan_packs(sequences, [1] * 10, batch_tokens=64)
    assert all(isinstance(u, packing.PackedBatch) and u.keep == packing.NO_PREFIX for u in plan.units)
    assert plan.n_tokens == 10 * 30 + len(plan.units)
    longest = np.zeros(3000, np.int32)
    sequences = [longest[:n] for n in range(1, 3001)]
    plan = packing.plan_packs(sequences, [1] * 3000, batch_tokens=100)
    assert len(plan.keys) == 3000
    assert plan.n_tokens < 3000 + 100


@pytest.mark.parametrize("make", [packing.plan_packs, packing.plan_batches])
def test_digests_tell_plans_apart(make: object) -> None:
    sequences = [np.asarray([1, 2, i], np.int32) for i in range(9)]
    a, b = (make(sequences, [1] * 9, batch_tokens=n).digest for n in (6, 12))  # type: ignore[operator]
    assert a != b


def test_windows_equal_the_harness() -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    scorer = Scorer(scoring_models.load_random("llama"))
    encoder, room = scorer.encoder, scorer.loaded.max_length
    texts = [scoring_models.TEXT * 3, "The river", scoring_models.TEXT, scoring_models.TEXT * 2]
    windows = cut_documents(encoder, texts)
    wanted = []
    for number, ids in enumerate(encoder.ids(texts)):
        rolling = get_rolling_token_windows(ids.tolist(), encoder.prefix_token, room, 1)
        for part, (context, targets) in enumerate(map(make_disjoint_window, rolling)):
            wanted.append((f"{number}.{part}", (context + targets)[-(room + 1) :], targets))
    assert [(n, i.tolist()) for n, i in zip(windows.names, windows.ids, strict=True)] == [w[:2] for w in wanted]
    assert [i[p].tolist() for i, p in zip(windows.ids, windows.scored, strict=True)] == [w[2] for w in wanted]
    assert max(len(i) for i in windows.ids) == room + 1


def test_scores_equal_a_naive_pass() -> None:
    loaded = scoring_models.load_random("gpt2", adds_bos=False)  # learned positions: one token too many would fail
    texts = ["The river runs past the old mill", scoring_models.TEXT * 2]
    scores, _ = Scorer(loaded).score_corpus("t", texts)
    nll = scores.column("nll")[scores.column("item_id") == "0.0"]
    [naive] = scoring_models.naive_logprobs(loaded, [scoring_models.request(0, "", texts[0])])
    ids = loaded.tokenizer(texts[0], add_special_tokens=False)["input_ids"]
    assert np.abs(nll[-len(ids) :] + naive[np.arange(len(ids)), ids]).max() < scoring_models.rounding(loaded)
    assert len(scores) == sum(len(loaded.tokenizer(text)["input_ids"]) for text in texts)


def test_an_empty_document_is_refused() -> None:
    with pytest.raises(DataError, match="document 1"):
        cut_documents(Scorer(scoring_models.load_random("llama", adds_bos=False)).encoder, ["a", ""])


def harness_pair(tokenizer: object, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """What `TemplateLM.loglikelihood` of lm-eval 0.4.13 does before the model runs."""
    encode = tokenizer.encode  # type: ignore[attr-defined]
    if context == "":
        ids = encode(continuation, add_special_tokens=False)
        bos = tokenizer.bos_token_id  # type: ignore[attr-defined]
        return ([bos], ids) if ids[0] != bos else (ids[:1], ids[1:])
    n_spaces = len(context) - len(context.rstrip())
    if n_spaces > 0:
        continuation = context[-n_spaces:] + continuation
        context = context[:-n_spaces]
    special = not context.startswith("<s>")
    whole = encode(context + continuation, add_special_tokens=special)
    before = encode(context, add_special_tokens=special)
    return before, whole[len(before) :]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_tokens_are_the_harness_s(adds_bos: bool) -> None:
    tokenizer = scoring_models.build_tokenizer(adds_bos=adds_bos)
    limit = 60
    requests = [
        *scoring_models.mixed_requests(),
        scoring_models.request("bos", "<s>The river", " runs"),
        scoring_models.request("lines", "Answer:\n\n", "B flour"),
    ]
    requests.append(scoring_models.request("bos option", "", "<s>The"))
    for r, encoded in zip(requests, Encoder(tokenizer, limit).encode(requests), strict=True):
        context, targets = harness_pair(tokenizer, r.context, r.continuation)
        assert encoded.targets.tolist() == targets
        assert encoded.inputs.tolist() == (context + targets)[-(limit + 1) :][:-1]
        assert encoded.truncated == (len(context) + len(targets) > limit + 1)
        assert encoded.fits == (len(targets) <= limit)


def test_bos_is_found_where_the_tokenizer_adds_it() -> None:
    assert Encoder(scoring_models.build_tokenizer(adds_bos=True), 10).adds_bos
    assert not Encoder(scoring_models.build_tokenizer(adds_bos=False), 10).adds_bos


def test_a_tokenizer_that_appends_eos_does_not_shift_the_boundary() -> None:
    from tokenizers import processors

    plain, tokenizer = scoring_models.build_tokenizer(), scoring_models.build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    assert tokenizer.encode("The")[-1] == 1
    r = [scoring_models.request(0, "The river", " runs past")]
    ours, theirs = Encoder(tokenizer, 100).encode(r)[0], Encoder(plain, 100).encode(r)[0]
    assert ours.inputs.tolist() == theirs.inputs.tolist()
    assert ours.targets.tolist() == theirs.targets.tolist()


def test_a_continuation_without_a_token_or_a_needed_prefix_is_refused() -> None:
    with pytest.raises(DataError, match=r"Option 2 of item 'x' of task 't'"):
        Encoder(scoring_models.build_tokenizer(), 100).encode([scoring_models.request("x", "The river", "", option=2)])
    with pytest.raises(DataError, match="no token of its own"):
        Encoder(scoring_models.build_tokenizer(), 100).encode([scoring_models.request("x", "", "<s>")])
    tokenizer = scoring_models.build_tokenizer(adds_bos=False)
    tokenizer.bos_token = tokenizer.eos_token = None
    encoder = Encoder(tokenizer, 100)
    assert len(encoder.encode([scoring_models.request(0, "The", " river")])) == 1
    with pytest.raises(DataError, match="neither a BOS nor an EOS"):
        encoder.encode([scoring_models.request(0, "", "river")])


def test_stored_tokens_are_those_of_their_requests_and_of_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, tokenizer = scoring_models.mixed_requests(), scoring_models.build_tokenizer()
    encoder = Encoder(tokenizer, 60)
    encoder.write(requests, tmp_path / "tokens.npz")
    made = encoder.encode(requests)
    encoder.write([], tmp_path / "none.npz")
    encode, asked = Encoder._encode, []

    def noting(encoder: Encoder, new: Sequence[Request]) -> dict[tuple[str, str], Encoded]:
        asked.append(len(new))
        return encode(encoder, new)

    monkeypatch.setattr(Encoder, "_encode", noting)
    with keeping():
        encoder.remember(requests[1:], tmp_path / "tokens.npz")
        Encoder(tokenizer, 61).remember(requests, tmp_path / "tokens.npz")
        encoder.remember([], tmp_path / "none.npz")  # texts alone
        encoder.encode(requests[1:])
        Encoder(tokenizer, 61).encode(requests)
    assert asked == [len(requests) - 1, len(requests)]
    with keeping():
        encoder.remember(requests, tmp_path / "tokens.npz")
        stored = encoder.encode(requests)
    assert asked[2:] == [0]
    for one, two in zip(made, stored, strict=True):
        assert (one.inputs.tolist(), one.targets.tolist()) == (two.inputs.tolist(), two.targets.tolist())
        assert (one.truncated, one.fits) == (two.truncated, two.fits)


def test_texts_that_were_encoded_before_are_encoded_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, encoder = scoring_models.mixed_requests(), Encoder(scoring_models.build_tokenizer(), 60)
    asked: list[int] = []
    ids = Encoder.ids
    monkeypatch.setattr(
        Encoder, "ids", lambda self, strings, **how: asked.append(len(strings)) or ids(self, strings, **how)
    )
    with keeping():
        first = encoder.encode(requests[:5])
        asked.clear()
        assert encoder.encode(requests[1:4]) == first[1:4] and not any(asked)
        assert len(encoder.encode(requests)) == len(requests) and any(asked)


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


@pytest.mark.parametrize("name", scoring_models.CONFIGS)
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
    loaded, requests = scoring_models.load_random(name), scoring_models.mixed_requests()
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    scores, _ = Scorer(loaded, ScoringConfig(progress=False, batch_tokens=batch_tokens)).score(requests)
    wanted = scoring_models.naive_logliks(loaded, requests)
    assert np.abs((scores.column("loglik") - wanted) / scores.column("n_tokens")).max() < scoring_models.rounding(
        loaded
    )
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


def test_the_last_layer_sees_scored_positions_only_unless_it_looks_at_its_neighbours() -> None:
    loaded = scoring_models.load_random("llama")
    seen: list[int] = []
    for layer in loaded.model.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, out: seen.append(args[0].shape[1]))
    body = Body(loaded.model)
    ids = np.arange(2, 32, dtype=np.int32)
    some = body.run(packing.PaddedBatch([ids, ids[:20]], [np.asarray([5, 29]), np.asarray([19])]))
    assert seen == [30, 30, 3]
    body = Body(loaded.model)
    body._last_layer = None
    every = body.run(packing.PaddedBatch([ids, ids[:20]], [np.asarray([5, 29]), np.asarray([19])]))
    assert seen[3:] == [30, 30, 30]
    error = scoring_models.rounding_of(
        loaded.model.model, torch.from_numpy(ids)[None].long(), read=lambda x: x.last_hidden_state
    )
    assert (some - every).abs().max() <= 2 * error  # both are rounded
    loaded = scoring_models.load_random("llama")
    mlp = loaded.model.model.layers[-1].mlp
    own = mlp.forward

    def shifted(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = own(x + torch.nn.functional.pad(x, (0, 0, 1, -1)))
        return result

    mlp.forward = shifted
    body, _, _ = split_body_and_head(loaded.model)
    assert body._last_layer is None
    assert split_body_and_head(scoring_models.load_random("llama").model)[0]._last_layer is not None
