"""What a pass on a GPU copies, and what it waits for, counted on a GPU that is pretended (see `pretend_gpu`)."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.scoring.baseline_store import StateStore, StateWriter
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from mlflow_compress.scoring.forward.body import split_body_and_head
from mlflow_compress.scoring.forward.head import rebuild_head
from mlflow_compress.scoring.journal import Arrays, joined_arrays
from mlflow_compress.scoring.plan.packing import Plan, group_units, plan_batches, plan_packs
from mlflow_compress.scoring.scoring_pass import ModelRunner, ScoringPass, Targets
from tests.pretend_gpu import GPU, OnGpu, PretendGpu, pretend_gpu, send
from tests.unit.scoring_models import VOCAB, load_random, mixed_requests, rounding

HEAD_ROWS = 16


@pytest.fixture
def on_cpu() -> LoadedModel:
    return load_random("llama")


@pytest.fixture
def on_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    monkeypatch.setattr("mlflow_compress.models.loading.rounding_identity", lambda device: {"device": str(device)})
    loaded = load_random("llama", path=tmp_path / "model")
    send(loaded.model)
    return replace(loaded, device=GPU)


def plans() -> dict[str, Plan]:
    """Return a plan of packs, some behind a cached prefix, and one of padded batches of several lengths."""
    random = np.random.default_rng(0)
    stem = random.integers(2, VOCAB, 50).astype(np.int32)
    ends = [random.integers(2, VOCAB, 4 + length % 9).astype(np.int32) for length in range(40)]
    sequences, scored = [np.concatenate([stem, end]) for end in ends], [3] * 40
    return {
        "packs": plan_packs(sequences, scored, batch_tokens=100),
        "batches": plan_batches(sequences, scored, batch_tokens=300),
    }


def results(scoring: ScoringPass, plan: Plan) -> Arrays:
    rows = np.arange(len(plan.keys))
    return joined_arrays([found for _, found in scoring.run(plan, Targets(rows, rows % VOCAB))])


@pytest.mark.parametrize("kind", ["packs", "batches"])
def test_a_unit_goes_up_once_and_results_come_back_once_a_product_with_the_head(
    kind: str, on_cpu: LoadedModel, on_gpu: LoadedModel, tmp_path: Path
) -> None:
    plan = plans()[kind]
    n_units = len(plan.units)
    sizes = [group.rows.stop - group.rows.start for group in group_units(plan, HEAD_ROWS)]
    n_products = sum(-(-size // HEAD_ROWS) for size in sizes)
    assert n_units > 3 and len(sizes) > 1
    with pretend_gpu(on_gpu.model.model.layers) as gpu:
        runner = ModelRunner(*split_body_and_head(on_gpu.model)[:2])
        gpu.seen.clear()
        with StateWriter(tmp_path / "states", on_gpu) as writer:
            writer.begin({}, label="t", path=kind, plan=plan.digest)
            first = results(ScoringPass(runner, HEAD_ROWS, capture=writer), plan)
            written = writer.take()
            captured = gpu.count("down")
            # The head is compared with one that is made from its weights, and these are written.
            assert (gpu.count("up"), captured) == (n_units + n_products, 2 * n_products + 2)
            writer.adopt([written])
        gpu.seen.clear()
        store = StateStore.open(tmp_path / "states")
        second = results(ScoringPass(runner, HEAD_ROWS, baseline=store), plan)
        assert gpu.in_layers() == []
        # Of each product the targets go up, and the baseline's states.
        assert (gpu.count("up"), gpu.count("down")) == (n_units + 2 * n_products, n_products)
        assert gpu.count("up, waits") == 0
        if kind == "packs":  # of a padded batch transformers asks whether anything is padded
            assert gpu.count("waits") == 0
        other = ModelRunner(*split_body_and_head(on_gpu.model)[:2])
        gpu.seen.clear()
        results(ScoringPass(runner, HEAD_ROWS, baseline=other), plan)  # a baseline in memory: each runs every unit
        assert (gpu.count("up"), gpu.count("down")) == (2 * n_units + n_products, n_products)
    assert (second["kl"] == 0).all() and np.array_equal(first["logprob"], second["logprob"])
    here = results(ScoringPass(ModelRunner(*split_body_and_head(on_cpu.model)[:2]), HEAD_ROWS), plan)
    assert np.abs(here["logprob"] - first["logprob"]).max() <= 2 * rounding(on_cpu)  # both are rounded
    assert np.array_equal(here["argmax"], first["argmax"])


def test_a_scorer_says_on_it_what_it_says_on_a_cpu(on_cpu: LoadedModel, on_gpu: LoadedModel) -> None:
    requests, limits = mixed_requests(), {"batch_tokens": 256, "head_rows": HEAD_ROWS}
    found = []
    for loaded in (on_cpu, on_gpu):
        with pretend_gpu(loaded.model.model.layers):
            scorer = Scorer(loaded, ScoringConfig(progress=False, **limits))
            found.append(scorer.score(requests)[0])
            assert scorer.report is not None and scorer.report.path == "packed"
    one, other = (scores.column("loglik") for scores in found)
    assert np.nanmax(np.abs(one - other) / found[0].column("n_tokens")) <= 2 * rounding(on_cpu)


def test_cudnns_attention_is_not_taken_because_every_pack_has_another_shape(
    on_gpu: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed: list[bool] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def noted(*args: torch.Tensor, **kwargs: object) -> torch.Tensor:
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attention(*args, **kwargs)  # type: ignore[arg-type]

    with pretend_gpu(on_gpu.model.model.layers):
        runner = ModelRunner(*split_body_and_head(on_gpu.model)[:2])
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
        results(ScoringPass(runner, HEAD_ROWS), plans()["packs"])
    assert allowed and not any(allowed)
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_rows_of_a_mask_begin_where_attention_need_not_copy_it(on_cpu: LoadedModel) -> None:
    body = split_body_and_head(on_cpu.model)[0]
    for n, seen in ((5, 0), (8, 3), (16, 16)):
        mask = body._mask(torch.full((n,), n), seen)
        assert mask.shape == (1, 1, n, seen + n) and mask.stride(-1) == 1
        assert all(stride % 8 == 0 for stride in mask.stride()[:-1])


def test_of_a_stored_head_only_what_is_computed_with_goes_up() -> None:
    loaded = load_random("llama")
    weights = {"weight": loaded.model.lm_head.weight.detach().bfloat16()}
    with pretend_gpu(loaded.model.model.layers):
        head = rebuild_head(loaded.stored_config, weights).to(GPU)
        assert head.device == GPU and not isinstance(head.module.weight, OnGpu)


def test_the_gpu_that_is_pretended_notices_what_waits() -> None:
    with PretendGpu() as gpu:
        host = torch.arange(6.0)
        there = host.to("cuda")
        host.pin_memory().to(GPU, non_blocking=True)
        host.pin_memory().to(GPU)
        assert [kind for kind, _ in gpu.seen] == ["up, waits", "up", "up, waits"]
        gpu.seen.clear()
        assert float(there.sum()) == 15.0 and there.tolist() and there.max().item() == 5.0
        assert bool((there > 2).any()) and len(there[there > 3]) == 2
        assert {kind for kind, _ in gpu.seen} == {"waits"} and len(gpu.seen) == 5
        gpu.seen.clear()
        assert there[torch.tensor([1, 2])].device == GPU
        there.new_tensor([1.0])
        assert [kind for kind, _ in gpu.seen] == ["up, waits"] * 2
        assert (there * 2 + torch.zeros(6, device="cuda")).cpu().device.type == "cpu"
        assert gpu.seen[-1][0] == "down"
        with pytest.raises(AssertionError, match="two devices"):
            there + host
