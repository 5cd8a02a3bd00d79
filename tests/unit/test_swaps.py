"""Swaps: no swap changes nothing, all swaps are the variant, and the short way gives the long way's bits."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from mlflow_compress.errors import AlignmentError, ConfigError, DataError, StoreError
from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.models.weight_groups import find_differences, weight_groups
from mlflow_compress.records import TokenAnswers
from mlflow_compress.scoring import swap_meter
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from mlflow_compress.scoring.forward.head import replaced_modules
from mlflow_compress.scoring.plan.corpus_windows import Windows, cut_answers
from mlflow_compress.scoring.swap_meter import ALL, NO_SWAP, WHOLE, KeptOutputs, Swap, SwapMeter, noise_swap
from tests.unit.scoring_models import CONFIGS, VOCAB, U, load_random, rounding

NAMES = list(CONFIGS)


def texts(n: int = 3, length: int = 24) -> Windows:
    ids = [np.random.default_rng(i).integers(2, VOCAB, size=length - i).astype(np.int32) for i in range(n)]
    return Windows(ids, [np.arange(1, len(x)) for x in ids])


def rounded(loaded: LoadedModel) -> LoadedModel:
    """The model with the matrices of its layers rounded to 7 levels a row."""
    model = copy.deepcopy(loaded.model)
    with torch.no_grad():
        for group in weight_groups(model):
            for name in group.modules if group.layer is not None and group.kind != "norm" else ():
                weight = model.get_submodule(name).weight
                step = weight.abs().amax(1, keepdim=True) / 7
                weight.copy_((weight / step).round() * step)
    return LoadedModel(model, loaded.tokenizer, loaded.path, loaded.dtype, loaded.device)


def kl_error(kl: np.ndarray, nats: float) -> np.ndarray:
    """Return a bound of what log-probabilities that move by up to `nats` do to a KL.

    KL = sum p (e^d - 1 - d) with d = ln q - ln p: the slope in d is p (e^d - 1), whose sum is 2 TV <= sqrt(2 KL)
    (Pinsker), p's own change is at most `nats` of it, and half of the square is the next term.
    """
    return nats * (np.sqrt(2 * kl) + kl) + nats**2 / 2


def swaps_of(base: LoadedModel, variant: LoadedModel) -> list[Swap]:
    return [Swap.of(group, variant.model) for group in find_differences(base.model, variant.model).groups]


@pytest.mark.parametrize("name", NAMES)
def test_no_swap_is_exactly_zero_and_all_swaps_are_the_variant(name: str) -> None:
    base = load_random(name)
    variant = rounded(base)
    swaps = swaps_of(base, variant)
    assert [s.name for s in swaps] == [f"layers.{i}.{k}" for i in range(3) for k in ("qkv", "o", "gate_up", "down")]
    before = {n: p.clone() for n, p in base.model.named_parameters()}
    meter = SwapMeter(base, progress=False)
    found = meter.measure("t", texts(), [*swaps, Swap.together(ALL, swaps)], variant=variant)
    assert meter.whole_model_reason is None
    assert (found.where(swap=NO_SWAP).column("kl") == 0).all()
    kl = {swap.name: found.where(swap=swap.name).column("kl") for swap in swaps}
    assert all(values.mean() > 1e-6 for values in kl.values())
    all_, whole = found.where(swap=ALL), found.where(swap=WHOLE)
    error = kl_error(whole.column("kl"), 2 * rounding(variant))  # the variant by two ways, each of them rounded
    assert (np.abs(all_.column("kl") - whole.column("kl")) <= error).all()
    assert (all_.column("top") == whole.column("top")).mean() > 0.98
    # The baseline is as it was.
    assert all(torch.equal(before[n], p) for n, p in base.model.named_parameters())


@pytest.mark.parametrize("name", NAMES)
def test_the_short_way_gives_the_long_way_s_bits(name: str) -> None:
    base = load_random(name)
    swaps = swaps_of(base, rounded(base))
    head = copy.deepcopy(base.model.get_output_embeddings())
    with torch.no_grad():
        head.weight.mul_(1.01)
    path = next(n for n, m in base.model.named_modules() if m is base.model.get_output_embeddings())
    swaps.append(Swap("head", {path: head}))
    tables = []
    for suffix_only, state_bytes in (
        (True, 1 << 30),
        (False, 1 << 30),
        (True, 3 * 24 * 48 * 4),
        (True, 3 * 24 * 96 * 4),
    ):
        meter = SwapMeter(base, suffix_only=suffix_only, state_bytes=state_bytes, progress=False)
        tables.append(meter.measure("t", texts(), swaps).table)
        assert meter.whole_model_reason is None
    assert all(table.equals(tables[0]) for table in tables[1:])


def test_the_whole_variant_is_what_the_scoring_engine_measures() -> None:
    base = load_random("llama")
    variant = rounded(base)
    rows = [
        {
            "task": "t",
            "item_id": str(i),
            "sample": 0,
            "prompt_tokens": ids[:1].tolist(),
            "tokens": ids[1:].tolist(),
            "text": "",
            "reasoning_begin": None,
            "reasoning_end": None,
        }
        for i, ids in enumerate(texts().ids)
    ]
    answers = TokenAnswers.from_rows(rows)
    _, wanted = Scorer(variant, ScoringConfig(progress=False)).score_corpus("t", answers, baseline=base)
    swaps = swaps_of(base, variant)
    found = SwapMeter(base, progress=False).measure("t", cut_answers(answers), [Swap.together(ALL, swaps)])
    together = found.where(swap=ALL)
    assert together.column("item_id").tolist() == wanted.column("item_id").tolist()
    assert together.column("position").tolist() == wanted.column("position").tolist()
    nats = 2 * (rounding(base) + rounding(variant))  # each model in two passes
    assert (np.abs(together.column("kl") - wanted.column("kl")) <= kl_error(wanted.column("kl"), nats)).all()
    assert (together.column("same_top") == wanted.column("same_top")).mean() > 0.98


def test_what_is_kept_stays_within_its_bound_whatever_the_depth() -> None:
    body = swap_meter.split_body_and_head(load_random("llama").model)[0]
    one = 24 * 48 * 4  # a layer's output: tokens x hidden size x float32
    n_layers = 3
    for bound, every in ((one, 3), (2 * one, 2), (3 * one, 1), (100 * one, 1)):
        kept = KeptOutputs(body, 24, bound)
        assert kept.every == every
        kept.compute(texts(1).plan(1024)[0].units[0])  # type: ignore[arg-type]
        kept_values = [t for v in kept._kept.values() for t in (v if isinstance(v, tuple) else (v,)) if t is not None]
        sizes = {t.data_ptr(): t.nbytes for t in kept_values}
        assert 0 < sum(sizes.values()) <= bound
        assert n_layers == kept.n_layers
        kept.forget()
        assert not kept._kept
    with pytest.raises(ConfigError, match="cannot hold the output of one layer"):
        KeptOutputs(body, 24, one - 1)


def test_a_swap_begins_with_the_layer_of_its_first_module() -> None:
    kept = KeptOutputs(swap_meter.split_body_and_head(load_random("llama").model)[0], 24, 1 << 20)
    mlp, attention = "model.layers.2.mlp.down_proj", "model.layers.1.self_attn.q_proj"
    assert (kept.finished([mlp]), kept.finished([mlp, attention]), kept.finished([])) == (2, 1, 3)
    assert (kept.finished(["lm_head"]), kept.finished(["model.embed_tokens"]), kept.finished(["model.norm"])) == (
        3,
        0,
        0,
    )


def test_a_model_that_changes_between_passes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = SwapMeter(load_random("llama"), progress=False, suffix_only=False)
    whole = KeptOutputs.run_behind
    monkeypatch.setattr(KeptOutputs, "run_behind", lambda *given: whole(*given) * 1.001)
    monkeypatch.setattr(KeptOutputs, "_check", lambda self: None)
    with pytest.raises(AlignmentError, match="Without any swap"):
        meter.measure("t", texts(), [])


def test_a_model_whose_layers_cannot_be_run_alone_is_computed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_meter, "default_limits", lambda vocabulary, on_gpu: {"batch_tokens": 24, "head_rows": 64})
    base = load_random("llama")
    swaps = swaps_of(base, rounded(base))
    wanted = SwapMeter(base, progress=False).measure("t", texts(), swaps)
    # The second layer also reads the first one's input: later layers do not depend on its states alone.
    seen: list[torch.Tensor] = []
    first, second = base.model.model.layers[:2]
    first.register_forward_pre_hook(lambda _module, given: seen.append(given[0].clone()))
    second.register_forward_hook(lambda _module, _given, output: output + 1e-3 * seen.pop())
    meter = SwapMeter(base, progress=False)
    found = meter.measure("t", texts(), swaps)
    assert "computes something else than as a whole" in str(meter.whole_model_reason)
    assert (found.where(swap=NO_SWAP).column("kl") == 0).all()
    kl, before = (table.where(swap="layers.2.o").column("kl") for table in (found, wanted))
    assert kl.mean() > 1e-6 and not np.array_equal(kl, before)


def test_a_block_with_a_swap_leaves_the_baseline_as_it_was() -> None:
    model = load_random("llama").model
    path = "model.layers.1.mlp.down_proj"
    other = torch.nn.Linear(64, 48, bias=False)
    before = model.get_submodule(path)
    with pytest.raises(RuntimeError, match="stop"), replaced_modules(model, Swap("s", {path: other}).modules):
        assert model.get_submodule(path) is other
        raise RuntimeError("stop")
    assert model.get_submodule(path) is before


def test_an_interrupted_pass_goes_on_and_loses_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = load_random("llama", path=tmp_path / "model")
    swaps = swaps_of(base, rounded(base))
    many = texts(5)
    monkeypatch.setattr(swap_meter, "default_limits", lambda vocabulary, on_gpu: {"batch_tokens": 24, "head_rows": 64})
    wanted = SwapMeter(base, progress=False).measure("t", many, swaps)
    whole, batches = SwapMeter._batch, []

    def stops(self: SwapMeter, *given: object) -> object:
        batches.append(1)
        if len(batches) == 3:
            raise KeyboardInterrupt
        return whole(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(SwapMeter, "_batch", stops)
    with pytest.raises(KeyboardInterrupt):
        SwapMeter(base, progress=False).measure("t", many, swaps, resume=tmp_path / "r", identity={"v": "1"})
    assert len(batches) == 3
    found = SwapMeter(base, progress=False).measure("t", many, swaps, resume=tmp_path / "r", identity={"v": "1"})
    assert len(batches) == 6  # two were kept, the third was computed again
    assert found.table.equals(wanted.table)
    with pytest.raises(StoreError, match="other v"):
        SwapMeter(base, progress=False).measure("t", many, swaps, resume=tmp_path / "r", identity={"v": "2"})


def test_wrong_calls_are_refused() -> None:
    base = load_random("llama")
    with pytest.raises(ConfigError, match="Two swaps have one name"):
        SwapMeter(base, progress=False).measure("t", texts(), [Swap("a", {}), Swap("a", {})])
    with pytest.raises(DataError, match="no text"):
        SwapMeter(base, progress=False).measure("t", Windows([], []), [])


def test_noise_has_the_size_of_the_change_and_its_seed_decides_it() -> None:
    base = load_random("llama")
    variant = rounded(base)
    found = find_differences(base.model, variant.model)
    group = found.groups[0]
    one, again, other = (noise_swap(group, "n", base.model, variant.model, found, seed=seed) for seed in (1, 1, 2))
    assert isinstance(one, Swap) and isinstance(again, Swap) and isinstance(other, Swap)
    assert tuple(one.modules) == group.modules
    for path in group.modules:
        old, new = (m.get_submodule(path).weight.detach() for m in (base.model, variant.model))
        noise = one.modules[path].weight.detach() - old
        # `noise` is a difference of weights that were rounded: by U of each, and a norm of n terms by n U of itself.
        size, error = float((new - old).norm()), U * float(old.norm() + one.modules[path].weight.detach().norm())
        assert abs(float(noise.norm()) - size) <= error + 2 * old.numel() * U * size
        # Another direction than the change: two random vectors of n entries have a cosine of about 1/sqrt(n).
        cosine = float((noise * (new - old)).sum() / noise.norm() / (new - old).norm())
        assert abs(cosine) < 5 / old.numel() ** 0.5
        assert torch.equal(one.modules[path].weight, again.modules[path].weight)
        assert not torch.equal(one.modules[path].weight, other.modules[path].weight)
