"""The divergence kernel against float64 textbook formulas."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlflow_compress.errors import CheckpointError
from mlflow_compress.scoring.kernels import numba_kernel, row_stats
from mlflow_compress.scoring.kernels import row_stats as top_tokens
from mlflow_compress.scoring.kernels.logit_stats import compute_logit_stats
from mlflow_compress.scoring.kernels.row_stats import stable_divergences
from tests.unit.test_scoring_kernel_bounds import U, distances_with_bounds, normaliser_and_entropy

NAMES = ("kl", "kl_reverse", "js", "tv")


@pytest.fixture(params=["compiled loops", "torch"], autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On a CPU the loops run; here what runs elsewhere has to pass the same tests."""
    if request.param == "torch":
        monkeypatch.setattr(numba_kernel, "compute_row_stats", row_stats.compute_row_stats)
    return str(request.param)


def divergences(baseline: torch.Tensor, variant: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(**compute_logit_stats(variant, baseline).distances)


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


def careful_bounds(logits_p: torch.Tensor, logits_q: torch.Tensor) -> dict[str, np.ndarray]:
    """Return bounds of the errors of `stable_divergences`, or of torch or the loops where a row does not need it.

    To the errors of ln p and ln q it adds those of terms that cancel each other: U for each of at most eight operations,
    and sqrt(n) U of their sum (Higham and Mary 2019, theorem 2.4).
    """
    lp, lq = (torch.log_softmax(x.double(), dim=1).numpy() for x in (logits_p, logits_q))
    p, q, d = np.exp(lp), np.exp(lq), lq - lp
    s = -np.log1p(np.expm1(-np.abs(d)) / 2)
    cancelling = {
        "kl": np.where(np.abs(d) > 1, p + q + p * np.abs(d), 0.0).sum(axis=1),
        "kl_reverse": np.where(np.abs(d) > 1, p + q + q * np.abs(d), 0.0).sum(axis=1),
        "js": (p * (d.clip(min=0) + s) + q * ((-d).clip(min=0) + s)).sum(axis=1),
        "tv": np.zeros(len(p)),  # its terms are positive; q - p has the errors of p and q
    }
    terms = (p.shape[1] ** 0.5 + 8) * U
    ways = [distances_with_bounds(logits_p, logits_q, by_torch=by_torch) for by_torch in (True, False)]
    values = {name: np.maximum(*(way[name][1] for way in ways)) + terms * part for name, part in cancelling.items()}
    values["tv"] += U * (p * (np.abs(lp) + 8) + q * (np.abs(lq) + 8)).sum(axis=1) / 2
    return values


@pytest.mark.parametrize("vocab", [2, 300, 33_000])
@pytest.mark.parametrize("distance", [1e-4, 1e-2, 1.0, 10.0])
def test_equals_the_textbook(vocab: int, distance: float, kernel: str) -> None:
    p, q = pair(7, vocab, distance)
    ours = divergences(p, q)
    bounds = distances_with_bounds(p, q, by_torch=kernel == "torch")
    for name, wanted in textbook(p, q).items():
        assert (np.abs(getattr(ours, name).numpy() - wanted) <= bounds[name][1]).all(), name
    assert ours.same_top.tolist() == (p.argmax(1) == q.argmax(1)).tolist()
    tops = [x.sort(dim=1, descending=True).indices[:, :10].tolist() for x in (p, q)]
    found = list(zip(ours.top10.tolist(), ours.rbo10.tolist(), strict=True))
    assert found == [pytest.approx(textbook_agreement(*pair)) for pair in zip(*tops, strict=True)]


def textbook_agreement(a: list[int], b: list[int], p: float = 0.9) -> tuple[float, float]:
    """Share of common tokens and extrapolated rank-biased overlap (Webber et al. 2010, equation 30), by sets."""
    shares = [len(set(a[:depth]) & set(b[:depth])) / depth for depth in range(1, len(a) + 1)]
    weighted = sum(share * p**depth for depth, share in enumerate(shares, start=1))
    return shares[-1], shares[-1] * p ** len(a) + (1 - p) / p * weighted


def overlap_of(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return top_tokens.top_token_overlap(top_tokens.common_tokens(a, b))


def test_rankings_by_hand() -> None:
    # Depth 1: {1}/{2} share 0; depth 2: {1, 2} both, 2; depth 3: {1, 2, 3} and {1, 2, 4}, 2.
    share, overlap = overlap_of(torch.tensor([[1, 2, 3]]), torch.tensor([[2, 1, 4]]))
    assert share.tolist() == pytest.approx([2 / 3])
    # p = 0.9: (2/3) 0.9³ + (1/9) (0 x 0.9 + 1 x 0.9² + (2/3) 0.9³) = 0.486 + (0.81 + 0.486)/9.
    assert overlap.tolist() == pytest.approx([0.486 + 1.296 / 9])
    # p = 1/2: (2/3)/8 + 1 x (0/1 x 1/2 + 2/2 x 1/4 + 2/3 x 1/8) = 1/12 + 1/4 + 1/12.
    assert textbook_agreement([1, 2, 3], [2, 1, 4], p=0.5) == pytest.approx((2 / 3, 5 / 12))
    same = torch.arange(20).view(2, 10)
    assert [x.tolist() for x in overlap_of(same, same)] == [[1.0, 1.0], pytest.approx([1.0, 1.0])]
    assert [x.tolist() for x in overlap_of(same, same + 100)] == [[0.0, 0.0]] * 2


def test_small_distances_are_not_drowned_by_rounding(kernel: str) -> None:
    """The plain float32 sum p (ln p - ln q) is off by more than 1e-8 here, in both directions."""
    p, q = pair(50, 32_000, 1e-5)
    lp, lq = torch.log_softmax(p, 1), torch.log_softmax(q, 1)
    wanted = textbook(p, q)["kl"]
    ours = divergences(lp, lq).kl.numpy()
    plain = (lp.exp() * (lp - lq)).sum(1).numpy()
    # ln p and ln q are rounded by U of their values, which is what the loops are given.
    nats = U * float(torch.maximum(lp.abs(), lq.abs()).max())
    bound = distances_with_bounds(lp, lq, by_torch=kernel == "torch", nats=nats)["kl"][1]
    assert (np.abs(ours - wanted) <= bound).all() and bound.max() < 1e-8
    assert np.abs(plain - wanted).max() > 1e-8


def test_equal_rows_are_exactly_zero() -> None:
    logp = torch.log_softmax(pair(9, 1000, 0.0)[0], 1)
    result = divergences(logp, logp.clone())
    for name in NAMES:
        assert (getattr(result, name) == 0.0).all(), name
    assert result.same_top.all()
    assert (result.top10 == 1).all()
    assert result.rbo10.numpy() == pytest.approx(1.0)


@settings(max_examples=60)
@given(st.integers(1, 40), st.floats(0, 60), st.floats(0, 60), st.integers(0, 100))
@example(37, 60.0, 59.0, 97)  # rounded, its tv is 1.2e-6 above 1
@example(8, 20.0, 39.0, 24)  # here the loops' own bound is needed, which is above that of torch
@example(6, 17.0, 41.0, 24)  # a token of e^-94 counts as one of e^-87, and the variant has e^60 times as much of it
def test_identities(vocab: int, scale: float, distance: float, seed: int) -> None:
    p, q = (torch.log_softmax(x, 1) for x in pair(3, vocab, distance, scale=scale, seed=seed))
    there, back = divergences(p, q), divergences(q, p)
    bounds, mirrored = careful_bounds(p, q), careful_bounds(q, p)
    assert (np.abs((there.kl - back.kl_reverse).numpy()) <= bounds["kl"] + mirrored["kl_reverse"]).all()
    assert (np.abs((there.js - back.js).numpy()) <= bounds["js"] + mirrored["js"]).all()
    assert (there.kl >= 0).all()
    assert ((there.js >= 0) & (there.js <= float(np.float32(math.log(2))))).all()
    assert ((there.tv >= 0) & (there.tv <= 1)).all()
    assert (there.tv.numpy() - bounds["tv"] <= np.sqrt((there.kl.numpy() + bounds["kl"]) / 2)).all()  # Pinsker


def test_impossible_tokens_take_the_limit() -> None:
    """A model may forbid tokens with -inf: 0 ln 0 = 0, and a token that only q allows makes KL(q||p) endless."""
    p = torch.log_softmax(torch.tensor([[0.0, 1.0, -math.inf, -math.inf]]), 1)
    q = torch.log_softmax(torch.tensor([[0.0, 1.0, 0.5, -math.inf]]), 1)
    result = divergences(p, q)
    wanted = -math.log(1 - float(q.exp()[0, 2]))
    error = 32 * U  # four values below 2, each of fewer than eight operations
    assert float(result.kl) == pytest.approx(wanted, abs=error)
    assert float(result.kl_reverse) > 1e30
    assert float(result.tv) == pytest.approx(float(q.exp()[0, 2]), abs=error)
    assert 0 < float(result.js) < math.log(2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_logits_that_are_no_numbers_are_refused(value: float, which: int) -> None:
    rows = pair(2, 10, 1.0)
    rows[which][0, 3] = value
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        compute_logit_stats(*rows)


@pytest.mark.parametrize("distance", [0.0, 1e-3, 1.0])
def test_the_careful_way_gives_the_same(distance: float) -> None:
    p, q = pair(5, 3000, distance)
    fast = divergences(p, q)
    careful = stable_divergences(torch.log_softmax(p, 1), torch.log_softmax(q, 1))
    bounds = careful_bounds(p, q)
    for name, wanted in zip(NAMES, careful, strict=True):
        assert (np.abs((getattr(fast, name) - wanted).numpy()) <= 2 * bounds[name]).all(), name  # both are rounded


def test_far_rows_take_the_careful_way_and_leave_their_neighbours_alone() -> None:
    p, q = pair(6, 500, 0.1)
    alone = divergences(p, q)
    q[3] *= 100.0
    mixed = divergences(p, q)
    wanted, bounds = textbook(p, q), careful_bounds(p, q)
    for name in NAMES:
        values = getattr(mixed, name)
        assert (np.abs(values.numpy() - wanted[name]) <= bounds[name]).all(), name
        kept = torch.arange(6) != 3
        assert torch.equal(values[kept], getattr(alone, name)[kept]), name


@pytest.mark.parametrize("vocab", [1, 7, 128, 129, 5000, 40_000])
def test_normaliser_entropy_and_argmax(vocab: int, kernel: str) -> None:
    x = pair(9, vocab, 0.0)[0]
    x[4] = 0.0  # all ties: the lowest id
    if vocab > 2:
        x[5, -1] = -math.inf
    found = compute_logit_stats(x)
    (normaliser, error), (entropy, entropy_error) = normaliser_and_entropy(x, vocab if kernel == "torch" else None)
    assert (np.abs(found.log_normaliser.numpy() - normaliser) <= error).all()
    assert (np.abs(found.entropy.numpy() - entropy) <= entropy_error).all()
    assert found.argmax.tolist() == x.argmax(1).tolist()
    assert found.argmax[4] == 0


def test_rows_do_not_depend_on_their_neighbours_or_the_number_of_threads() -> None:
    p, q = pair(9, 3000, 0.1)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = compute_logit_stats(q, p)
        torch.set_num_threads(1)
        for row in range(9):
            alone = compute_logit_stats(q[row : row + 1], p[row : row + 1])
            for name in NAMES:
                assert alone.distances[name] == together.distances[name][row]
            assert alone.log_normaliser == together.log_normaliser[row]
    finally:
        torch.set_num_threads(threads)
