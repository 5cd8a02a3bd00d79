"""Costs, limits and the linear mix, from numbers that are worked out by hand."""

import numpy as np
import pytest

from mlflow_compress.decide.cost_table import CostTable, Limit, StoredSizes, linear_mix
from mlflow_compress.errors import ConfigError

SIZES = StoredSizes(
    groups=("a", "b"),
    formats=("x:3", "x:4"),
    layers=np.array([[300, 400], [600, 800]]),
    base=4800,
    rest=1000,
    weights=2400,
)
TABLE = CostTable(sizes=SIZES, kl=np.array([[[0.3, 0.5], [0.1, 0.1]], [[0.2, 0.2], [0.0, 0.1]]]))


def test_a_budget_the_choice_and_its_prediction_by_hand() -> None:
    """1,050 bytes: one group may have 4 bits if it is the first, which gains 0.3; the second would need 1,100."""
    found = TABLE.solved(Limit(kind="bits_per_weight", value=3.5))
    assert found.choice == (1, 0) and found.n_bytes == 1000
    assert found.cost == pytest.approx(0.3) == TABLE.predicted((1, 0))
    assert TABLE.solved(Limit(kind="max_kl", value=0.3)).choice == (1, 0)
    assert TABLE.solved(Limit(kind="max_kl", value=1.0)).choice == (0, 0)
    with pytest.raises(ConfigError, match=r"max_kl is out of range. Allowed: 0.15 or more.*Got: '0.1'"):
        TABLE.solved(Limit(kind="max_kl", value=0.1))
    assert SIZES.bits(900) == 3.0 and SIZES.uniform("x:4") == 1200
    assert Limit(kind="bits_per_weight", value=3.5).layer_bytes(SIZES) == 1050
    assert Limit(kind="max_bytes", value=2050).layer_bytes(SIZES) == 1050


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("bits_per_weight", 2.9, r"bits_per_weight is out of range. Allowed: 3 .* to 16 \(the baseline\). Got: '2.9'"),
        ("bits_per_weight", 16.1, "Got: '16.1'"),
        ("max_bytes", 1899, r"Allowed: 1900 \(every group in its smallest format\) to 5800"),
        ("max_bytes", 5801, "max_bytes is out of range"),
    ],
)
def test_a_wrong_budget_names_the_range(kind: str, value: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TABLE.solved(Limit(kind=kind, value=value))  # type: ignore[arg-type]


def test_names_of_limits() -> None:
    shown = [
        Limit(kind="bits_per_weight", value=4.5),
        Limit(kind="max_bytes", value=15e5),
        Limit(kind="max_kl", value=0.05),
    ]
    assert [limit.short for limit in shown] == ["4.5bit", "1500000B", "kl0.05"]


def test_caches_are_groups_with_formats_of_their_own() -> None:
    """Two layers and their caches: 100 bytes each as they are, 50 rounded. A size of 0 is no format of the group."""
    sizes = StoredSizes(
        groups=("a", "b", "a.cache", "b.cache"),
        formats=("x:3", "x:4", "cache:16", "cache:4"),
        layers=np.array([[300, 400, 0, 0], [600, 800, 0, 0], [0, 0, 100, 50], [0, 0, 100, 50]]),
        base=5000,
        rest=1000,
        weights=2400,
        cache=200,
    )
    costs = [[0.4, 0.1, 0, 0], [0.2, 0.05, 0, 0], [0, 0, 0, 0.3], [0, 0, 0, 0.02]]
    table = CostTable(sizes=sizes, kl=np.array(costs)[:, :, None])
    # 1,150 bytes: of what 100 to 150 bytes more than the smallest buy, 4 bits in the first layer gain most for each.
    found = table.solved(Limit(kind="max_bytes", value=2150))
    assert found.choice == (1, 0, 2, 3) and found.n_bytes == 1150 and found.gap == 0
    assert found.cost == pytest.approx(0.1 + 0.2 + 0.02)
    assert table.solved(Limit(kind="max_kl", value=0.36)).choice == found.choice  # 0.62 without the first cache
    with pytest.raises(ConfigError, match=r"max_kl is out of range. Allowed: 0.15 or more"):
        table.solved(Limit(kind="max_kl", value=0.1))
    with pytest.raises(ConfigError, match=r"max_bytes is out of range. Allowed: 2000 .* to 6000 \(the baseline\)"):
        table.solved(Limit(kind="max_bytes", value=1999))
    assert list(sizes.uniform_choices) == [(0, 0, 2, 2), (0, 0, 3, 3), (1, 1, 2, 2), (1, 1, 3, 3)]
    plain = table.largest_uniform(1150)
    assert plain is not None and (plain.choice, plain.n_bytes) == ((0, 0, 2, 2), 1100)
    assert plain.cost == pytest.approx(0.6) and sizes.uniform("x:4") == 1400


def test_the_linear_mix() -> None:
    """A quarter of the way from 100 to 200 bytes: three quarters of the smaller one's KL."""
    uniform = {"4": (200, np.array([1.0, 2.0])), "3": (100, np.array([5.0, 6.0])), "8": (400, np.zeros(2))}
    found = linear_mix(125, uniform)
    assert (found.smaller, found.larger, found.share) == ("3", "4", 0.25)
    assert found.kl.tolist() == [4.0, 5.0]
    assert linear_mix(99, uniform) is None and linear_mix(401, uniform) is None
    exact = linear_mix(200, uniform)
    assert exact is not None and exact.kl.tolist() == [1.0, 2.0]
