"""The divergence kernel against float64 textbook formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlflow_compress.metrics.ranking import rank_biased_overlap, top_k_agreement
from mlflow_compress.scoring.divergence import divergences

NAMES = ("kl", "kl_reverse", "js", "tv")


def textbook(logits_p: torch.Tensor, logits_q: torch.Tensor) -> dict[str, np.ndarray]:
    lp, lq = (torch.log_softmax(x.double(), dim=1) for x in (logits_p, logits_q))
    p, q = lp.exp(), lq.exp()
    m = (p + q) / 2
    return {
        "kl": (p * (lp - lq)).sum(1).numpy(),
        "kl_reverse": (q * (lq - lp)).sum(1).numpy(),
        "js": (0.5 * (p * (lp - m.log()) + q * (lq - m.log()))).sum(1).numpy(),
        "tv": (0.5 * (p - q).abs()).sum(1).numpy(),
    }


def pair(
    n: int, vocab: int, distance: float, *, scale: float = 3.0, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p = scale * torch.randn(n, vocab, generator=generator)
    return p, p + distance * torch.randn(n, vocab, generator=generator)


@pytest.mark.parametrize("vocab", [2, 300, 33_000])
@pytest.mark.parametrize("distance", [1e-4, 1e-2, 1.0, 10.0])
def test_equals_the_textbook(vocab: int, distance: float) -> None:
    p, q = pair(7, vocab, distance)
    ours = divergences(torch.log_softmax(p, 1), torch.log_softmax(q, 1))
    for name, wanted in textbook(p, q).items():
        # Log-probabilities in float32 carry 1e-7 to 1e-6: of a difference of 1e-4 that is a hundredth.
        close = pytest.approx(
            wanted, rel=2e-6 / distance + 1e-4, abs=1e-7 if name == "tv" else 1e-7 * min(distance, 1.0)
        )
        assert getattr(ours, name).numpy() == close, name
    assert ours.same_top.tolist() == (p.argmax(1) == q.argmax(1)).tolist()
    tops = [x.sort(dim=1, descending=True).indices[:, :10].numpy() for x in (p, q)]
    assert ours.top10.numpy() == pytest.approx(top_k_agreement(*tops))
    assert ours.rbo10.numpy() == pytest.approx(rank_biased_overlap(*tops))


def test_small_distances_are_not_drowned_by_rounding() -> None:
    """The plain float32 sum p (ln p - ln q) is off by more than 1e-8 here, in both directions."""
    p, q = pair(50, 32_000, 1e-5)
    lp, lq = torch.log_softmax(p, 1), torch.log_softmax(q, 1)
    wanted = textbook(p, q)["kl"]
    ours = divergences(lp, lq).kl.numpy()
    plain = (lp.exp() * (lp - lq)).sum(1).numpy()
    assert np.abs(ours - wanted).max() < 1e-11
    assert np.abs(plain - wanted).max() > 1e-8


def test_equal_rows_are_exactly_zero() -> None:
    logp = torch.log_softmax(pair(9, 1000, 0.0)[0], 1)
    result = divergences(logp, logp.clone())
    for name in NAMES:
        assert (getattr(result, name) == 0.0).all(), name
    assert result.same_top.all()
    assert (result.top10 == 1).all()
    assert result.rbo10.numpy() == pytest.approx(1.0)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.floats(0, 60), st.floats(0, 60), st.integers(0, 100))
def test_identities(vocab: int, scale: float, distance: float, seed: int) -> None:
    p, q = (torch.log_softmax(x, 1) for x in pair(3, vocab, distance, scale=scale, seed=seed))
    there, back = divergences(p, q), divergences(q, p)
    assert torch.allclose(there.kl, back.kl_reverse, rtol=1e-5, atol=1e-9)
    assert torch.allclose(there.js, back.js, rtol=1e-4, atol=1e-7)
    assert (there.kl >= 0).all()
    assert (there.js <= math.log(2) + 1e-6).all()
    assert ((there.tv >= 0) & (there.tv <= 1 + 1e-6)).all()
    assert (there.tv <= (there.kl / 2).sqrt() + 1e-4).all()  # Pinsker


def test_impossible_tokens_take_the_limit() -> None:
    """A model may forbid tokens with -inf: 0 ln 0 = 0, and a token that only q allows makes KL(q||p) endless."""
    p = torch.log_softmax(torch.tensor([[0.0, 1.0, -math.inf, -math.inf]]), 1)
    q = torch.log_softmax(torch.tensor([[0.0, 1.0, 0.5, -math.inf]]), 1)
    result = divergences(p, q)
    wanted = -math.log(1 - float(q.exp()[0, 2]))
    assert float(result.kl) == pytest.approx(wanted, rel=1e-5)
    assert float(result.kl_reverse) > 1e30
    assert float(result.tv) == pytest.approx(float(q.exp()[0, 2]), rel=1e-5)
    assert 0 < float(result.js) < math.log(2)


def test_nan_is_not_hidden() -> None:
    p, q = (torch.log_softmax(x, 1) for x in pair(2, 10, 1.0))
    q[0, 3] = math.nan
    result = divergences(p, q)
    assert result.kl[0].isnan()
    assert not result.kl[1].isnan()


def test_no_rows() -> None:
    empty = torch.zeros(0, 10)
    assert divergences(empty, empty).kl.shape == (0,)
