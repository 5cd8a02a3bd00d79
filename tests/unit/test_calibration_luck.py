"""The luck of a calibration: what makes with other samples share, and who is closer in a fresh one."""

from pathlib import Path

import numpy as np
import pytest

import mlflow_compress as mc
from mlflow_compress.commands.sweep.parameters import SweepConfig
from mlflow_compress.commands.sweep.plan import combinations
from mlflow_compress.config import parse
from mlflow_compress.config.policy import Policy, Requirements
from mlflow_compress.decide.item_checks import item_policy
from mlflow_compress.decide.promotion import Candidate, decide, gates_of
from mlflow_compress.decide.scoreboard import Scoreboard, scoreboard
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.metrics.core.account import CUT_PCT, UNSCORED_PCT
from mlflow_compress.metrics.stats.variance_components import closer_probability, make_spread
from mlflow_compress.reporting.scoreboard_text import scoreboard_markdown, scoreboard_text
from tests.scored_variants import scores, variant

ALONE = np.arange(20)
EVEN = np.tile([1.0, -1.0], 10)
ITEMS = 1.0 - EVEN  # 0, 2, 0, 2, ...
THREE = ITEMS + np.array([[0.0], [1.0], [2.0]]) + np.array([EVEN, 0 * EVEN, -EVEN])


def test_the_spread_of_three_makes_by_hand() -> None:
    """Means 1, 2, 3: s^2 = 1. What remains per make and item is 1, 0 or -1, 40 squares in all.

    So q = 20/19 * 40/(2 * 20^2) = 1/19, and between^2 = 18/19. The quantiles of chi2(2) are -2 ln(0.025) = 7.3778 and
    -2 ln(0.975) = 0.050636. The mean of the makes is 1, 3, 1, 3, ...: 20/19 * 20/20^2 = 1/19 is its variance.
    """
    found = make_spread(THREE, ALONE)
    assert found is not None and (found.n_makes, found.n_items) == (3, 20)
    assert (found.mean, found.between**2, found.items**2) == pytest.approx((2.0, 18 / 19, 1 / 19))
    assert (found.low**2, found.high**2) == pytest.approx((2 / 7.37776 - 1 / 19, 2 / 0.0506356 - 1 / 19), rel=1e-5)


def test_what_cancels_within_groups_or_is_shared_by_items_is_no_spread_of_the_makes() -> None:
    found = make_spread(np.concatenate([THREE, THREE], axis=1), np.arange(40) // 2)
    assert found is not None and found.between == pytest.approx(1.0)
    assert make_spread(THREE, ALONE // 2) is None  # 10 groups
    assert make_spread(THREE[:1], ALONE) is None
    rng = np.random.default_rng(1)
    one = rng.exponential(size=(1, 50))
    same = make_spread(np.tile(one, (3, 1)), np.arange(50))
    assert same is not None and (same.between, same.low, same.high) == (0.0, 0.0, 0.0) and same.items > 0
    makes = rng.normal(size=(4, 50)) + 10 * one
    a, b = (make_spread(x, np.arange(50)) for x in (makes, makes[[2, 0, 3, 1]] + 100 * one))
    assert (a.between, a.low, a.high) == pytest.approx((b.between, b.low, b.high))


def test_the_probability_by_hand() -> None:
    """Against 3, 5, 3, 5, ..., made once: D = -2 on every item, so v = 0 and V = 4/3 * 18/19 = 1.2632.

    Degrees of freedom: V^2/(16/9 * (1/2 + (1/19)^2/(2 * 19))) = 1.7947. So it is P(T < 2/sqrt(1.2632)) = 0.8844.
    """
    found = closer_probability(THREE, ITEMS[None] + 3, ALONE)
    assert found == pytest.approx(0.8844, abs=5e-5)
    assert closer_probability(ITEMS[None] + 3, THREE, ALONE) == pytest.approx(1 - found)
    assert closer_probability(THREE, THREE, ALONE) == 0.5
    assert closer_probability(ITEMS[None], ITEMS[None] + 3, ALONE) is None  # nothing varies
    assert closer_probability(THREE[:, :19], THREE[:, :19], ALONE[:19]) is None


def test_simulated_components_are_recovered_within_10_percent() -> None:
    rng = np.random.default_rng(2)
    found = []
    for _ in range(3000):
        makes = rng.normal(size=(1, 40)) * 3 + rng.normal(size=(5, 40)) + 0.4 * rng.normal(size=(5, 1))
        spread = make_spread(makes, np.arange(40))
        found.append((spread.between**2, spread.items**2))
    assert np.mean(found, axis=0) == pytest.approx((0.4**2, (9 + 1 / 5) / 40), rel=0.1)


def board_of(*, replicates: int = 2) -> Scoreboard:
    rng = np.random.default_rng(3)
    right = (rng.random((4, 60)) < 0.9).astype(float)
    kl = rng.exponential(0.02, 60) * np.array([[1.0], [1.1], [1.2], [3.0]])
    made = [scores(*of) for of in zip(right, kl, strict=True)]
    again = {f"run{k}": made[1 + k] for k in range(replicates)}
    return scoreboard(
        [
            variant("gptq-4bit", kl=0.02, items=made[0], again=again),
            variant("rtn-4bit", kl=0.06, items=made[3], made_once=True),
            variant("awq-4bit", kl=0.07, items=made[3]),
        ],
        baseline="demo",
        evaluation="e",
    )


def test_the_scoreboard_shows_the_spread_and_the_probability_and_who_is_made_once() -> None:
    board = board_of()
    luck = {row.name: row.luck for row in board.rows}
    assert luck["rtn-4bit"] is None and luck["awq-4bit"] is None
    gptq = luck["gptq-4bit"]
    assert gptq is not None and gptq.runs == ("run0", "run1") and gptq.kl is not None and gptq.flips is not None
    assert gptq.kl.n_makes == 3 and 0 < gptq.flips.mean < 30
    [pair] = board.closer  # one make of awq says nothing of another
    assert (pair.first, pair.second) == ("gptq-4bit", "rtn-4bit") and pair.kl is not None and pair.kl > 0.9
    text = " ".join(scoreboard_text(board).split())
    assert "3 replicates of gptq-4bit: KL 0.0" in text and "; flips in %" in text
    assert "One replicate, because no calibration text is read: rtn-4bit" in text
    assert f"A new gptq-4bit is closer than a new rtn-4bit with probability {pair.kl:.2f} by KL" in text
    assert "standard deviation between replicates" in scoreboard_markdown(board)
    assert board.to_dict()["rows"][0]["luck"]["kl"]["between"] == gptq.kl.between


def test_without_replicates_nothing_is_said_of_luck() -> None:
    board = board_of(replicates=0)
    assert board.closer == () and all(row.luck is None for row in board.rows)
    assert "make" not in scoreboard_text(board)


def names(**values: object) -> list[tuple[str, str, int | None]]:
    chosen, _ = combinations(parse(SweepConfig, values))
    return [(one.name, one.replicate_of, one.own_settings.get("seed")) for one in chosen]


def test_replicates_come_last_with_other_seeds_and_only_where_calibration_text_is_read() -> None:
    plain = names(methods="gptq,rtn", bits="4")
    assert plain == [("gptq-4bit-g128", "", 42), ("rtn-4bit-g128", "", None)]
    assert names(methods="gptq,rtn", bits="4", replicates=3) == [
        *plain,
        ("gptq-4bit-g128 (replicate 2)", "gptq-4bit-g128", 43),
        ("gptq-4bit-g128 (replicate 3)", "gptq-4bit-g128", 44),
    ]
    chosen, _ = combinations(parse(SweepConfig, {"methods": "gptq", "replicates": 2, "method_args": "seed=7"}))
    again = chosen[1].config
    assert (again.source.seed, again.compression.method_args) == (42, {"seed": "8"})  # the evaluation stays the same
    assert not again.judge and not again.speed and chosen[0].config.judge


def test_a_grid_that_holds_a_replicate_of_its_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text("- {method: gptq, method_args: [{seed: 1}, {seed: 2}]}\n")
    assert len(names(grid=str(tmp_path / "grid.yaml"))) == 2
    with pytest.raises(ConfigError, match="The grid holds a replicate of one of its variants"):
        names(grid=str(tmp_path / "grid.yaml"), replicates=2)
    with pytest.raises(ConfigError, match="'replicates' is too small"):
        mc.sweep(replicates=0)


@pytest.mark.parametrize(("makes", "passes"), [(1, False), (2, False), (3, True), (None, True)])
def test_a_policy_may_require_replicates(makes: int | None, passes: bool) -> None:
    policy = Policy(kl=None, gates=(), margins=(), require=Requirements(replicates=3))
    metrics = {UNSCORED_PCT: 0.0, CUT_PCT: 0.0, "size/bytes": 1.0, "size/ratio": 2.0}
    one = Candidate(name="a", run_id="r", version=None, method="gptq", metrics=metrics, items=100, makes=makes)
    gates = gates_of(policy)
    [outcome] = decide([one], gates.gates, rules=gates.rules).outcomes
    reasons = "; ".join(outcome.reasons)
    assert (f"{makes} replicates < 3" in reasons) != passes
    with pytest.raises(UnsupportedError, match="cannot require replicates"):
        item_policy(policy)
