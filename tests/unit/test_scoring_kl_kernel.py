"""KL alone: what the kernel with all statistics says, and float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mlflow_compress.errors import CheckpointError
from mlflow_compress.scoring.kernels.logit_stats import KlBaseline, compute_kl, compute_logit_stats
from tests.unit.test_scoring_kernel_bounds import distances_with_bounds


def pair(n: int, width: int, scale: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    base = 4 * torch.randn((n, width), generator=random)
    return base + scale * torch.randn((n, width), generator=random), base


@pytest.mark.parametrize("width", [3, 128, 129, 2048, 5000])
@pytest.mark.parametrize("scale", [1e-4, 0.05, 3.0])
def test_kl_alone_is_that_of_all_statistics(width: int, scale: float) -> None:
    logits, base = pair(17, width, scale)
    kl, top = compute_kl(logits, KlBaseline(base))
    wanted = compute_logit_stats(logits, base)
    truth, bound = distances_with_bounds(base, logits)["kl"]
    assert kl.dtype == torch.float64 and top.dtype == torch.int64
    assert (np.abs(kl.numpy() - truth) <= bound).all()
    assert (np.abs(kl.numpy() - wanted.distances["kl"].numpy()) <= 2 * bound).all()  # both are rounded
    assert torch.equal(top, wanted.argmax) and torch.equal(top, logits.argmax(dim=1))


def test_one_baseline_serves_many_models() -> None:
    base = pair(9, 300, 0.0)[1]
    shared = KlBaseline(base)
    for seed in range(3):
        logits = base + 0.1 * torch.randn(base.shape, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(compute_kl(logits, shared)[0], compute_kl(logits, KlBaseline(base.clone()))[0])


def test_equal_rows_give_exactly_zero_and_ties_the_lowest_token() -> None:
    logits, _ = pair(5, 300, 0.0)
    logits[:, [200, 7]] = 50.0
    kl, top = compute_kl(logits, KlBaseline(logits.clone()))
    assert (kl == 0).all() and (top == 7).all()


def test_tokens_of_probability_zero_take_the_stable_way() -> None:
    logits, base = pair(4, 64, 0.1)
    base[:, 3] = logits[:, 3] = -torch.inf
    base[1, 5] = -torch.inf
    base[2, :] = -200.0
    base[2, 9] = 0.0
    kl, _ = compute_kl(logits, KlBaseline(base))
    wanted = compute_logit_stats(logits, base).distances["kl"]
    assert torch.equal(kl, wanted)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", [0, 1])
def test_logits_that_are_not_numbers_are_refused(bad: float, side: int) -> None:
    both = pair(3, 64, 0.1)
    both[side][1, 8] = bad
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        compute_kl(both[0], KlBaseline(both[1]))
