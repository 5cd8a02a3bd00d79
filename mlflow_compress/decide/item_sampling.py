"""Which items a variant is scored on: more where the baseline's lead says that they can flip, in rounds.

How many items are drawn in all may follow what was seen of a variant. Their shares by stratum must not: a stratum whose
first items show no flip by chance would get few more, and one whose items do would have that diluted, so that flips
were underestimated (by 0.2 to 0.5 points of 1 to 3 %, and intervals held in 63 to 90 %). So the shares are those that
`GUESS` gives, the same for every variant and in every round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from mlflow_compress.config.groups import SampleSize
from mlflow_compress.config.policy import MARGIN, Policy
from mlflow_compress.decide.item_checks import ItemCheck, item_checks
from mlflow_compress.metrics.core.estimates import Estimate, Mean, PairedDifference, Proportion
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.stats.arrays import Float, Int
from mlflow_compress.metrics.stats.flip_model import GUESS
from mlflow_compress.metrics.stats.sequential import random_order
from mlflow_compress.metrics.stats.stratified import EARLY, FEWEST, NEARLY_ALL, allocate, lead_strata
from mlflow_compress.records import Draws, ItemKey

DRAWING = 4  # Raised when other items would be drawn: evaluations of drawn items are compared within one such version
PILOT_ITEMS = 100  # where a width is asked for, or a decision
_PILOT_FEWEST = 4  # of each stratum
_GROWTH = (1.1, 4.0)  # least and most growth of a round towards a width, or a decision
_SECOND = 2.0  # most growth of the second round: the pilot's interval is wide where it has seen no flip by chance
_LOOKS = 4  # at most, before all items are scored, to see whether a policy is decided
_FLOOR = 0.5
"""Smallest deviation of a stratum, as a share of that of all: what the guess holds for impossible is looked at too."""


@dataclass(kw_only=True)
class ItemSampler:
    """Draws items in rounds. The order within a stratum is random, and the same for every variant of a baseline."""

    size: SampleSize
    leads: Float  # Of the headline's items, NaN where one has none; shape (n_headline,)
    strata: Int  # Their strata
    orders: list[list[ItemKey]]  # By stratum, those of tasks that are not in the headline last: the order of drawing
    drawn: Int = field(init=False)  # Items drawn so far, by stratum
    _spread: Float = field(init=False)  # Of an item's flip, by stratum: what the shares of items follow
    rounds: int = 0  # Rounds that were looked at
    more_rounds: int = 0  # Further rounds so far

    @classmethod
    def of_baseline(cls, size: SampleSize, inputs: MetricInputs, *, seed: int) -> ItemSampler:
        """Return the sampler of a baseline's items; `inputs` is about the baseline alone.

        Items of graded tasks that the headline does not have are drawn at random, by family, at the headline's share.
        """
        view, rows = inputs.view, inputs.headline_rows
        leads = inputs.baseline_predictions.lead[rows, 0]
        strata = lead_strata(leads)
        parts = [rows[strata == code] for code in range(strata.max() + 1)]
        others = [name for name in view.graded if name not in inputs.headline_families]
        parts += [np.flatnonzero(view.family == name) for name in others]
        orders = []
        for part in parts:
            keys = [(str(view.task[row]), str(view.item_id[row])) for row in part]
            orders.append([keys[place] for place in random_order(keys, seed=seed)])
        return cls(size=size, leads=leads, strata=strata, orders=orders)

    def __post_init__(self) -> None:
        p = np.minimum(np.nan_to_num(GUESS.probability(self.leads), nan=0.5), 0.5)
        mean = np.bincount(self.strata, weights=p) / self._sizes
        spread = np.sqrt(mean * (1 - mean))
        self._spread = np.maximum(spread, _FLOOR * math.sqrt(float(self._sizes @ spread**2) / len(p)))
        self._draw(self.size.count or PILOT_ITEMS, np.minimum(_PILOT_FEWEST, self._sizes))

    @property
    def _sizes(self) -> Int:
        return np.bincount(self.strata)

    @property
    def n_drawn(self) -> int:
        """Items of the headline that were drawn."""
        return int(self.drawn[: len(self._sizes)].sum())

    @property
    def keys(self) -> list[ItemKey]:
        """All items that were drawn."""
        return [key for order, n in zip(self.orders, self.drawn.tolist(), strict=True) for key in order[:n]]

    def _draw(self, total: int, least: Int) -> None:
        drawn = allocate(self._sizes, self._spread, total, drawn=least)
        share = drawn.sum() / len(self.strata)
        others = [len(order) for order in self.orders[len(drawn) :]]
        self.drawn = np.array([*drawn, *(min(max(math.ceil(share * n), FEWEST), n) for n in others)], dtype=np.int64)

    def draws(self) -> Draws:
        """Return how the items were drawn."""
        rows = [
            {"task": task, "item_id": item, "stratum": code, "stratum_size": len(order), "drawn": n}
            | {"probability": n / len(order)}
            for code, (order, n) in enumerate(zip(self.orders, self.drawn.tolist(), strict=True))
            for task, item in order[:n]
        ]
        return Draws.from_rows(rows)

    def begin_after(self, draws: Draws) -> None:
        """Begin where an earlier run has ended, whose rounds were all of this one's but the last further one."""
        place = {key: code for code, order in enumerate(self.orders) for key in order}
        codes = [place[(str(task), str(item))] for task, item, *_ in draws.key_rows()]
        self.drawn = np.bincount(codes, minlength=len(self.orders))
        self.more_rounds = len(self.size.more) - 1

    def go_on(self, inputs: MetricInputs) -> bool:
        """Draw more items, after what was found on those so far; return False where they are enough."""
        self.rounds += 1
        target = self.n_drawn if self.more_rounds else self._next_size(inputs)
        if target <= self.n_drawn:
            further = self.size.more[self.more_rounds :]
            target = next((count for count in further if count > self.n_drawn), 0)
            self.more_rounds += 1
        if target <= self.n_drawn or self.n_drawn == len(self.strata):
            return False
        self._draw(target, self.drawn[: len(self._sizes)])
        return True

    def _next_size(self, inputs: MetricInputs) -> int:
        n = self.n_drawn
        if self.size.count is not None:
            return n
        if self.size.policy is None or not item_checks(self.size.policy):
            need = _needed_for_width(inputs, self.size.width or MARGIN)
        elif self.rounds > _LOOKS:
            return len(self.strata)
        else:
            need = _needed_to_decide(self.size.policy, inputs)
        if need <= 1:
            return n
        most = _SECOND if self.rounds == 1 else _GROWTH[1]
        target, every = n * min(max(need, _GROWTH[0]), most), len(self.strata)
        return math.ceil(target) if target < NEARLY_ALL * every else every


def _times(half: float, wanted: float, events: float) -> float:
    """Return by how many times as many items an interval of half this width becomes the `wanted` one.

    The score intervals of a share of `events` have half widths h with ``h² ~ (events + h)/n``: of few events it is
    1/n, of many the root. `events` is infinite for means.
    """
    few = 1.0 if math.isinf(events) else (events + wanted) / (events + half)
    return few * (half / wanted) ** 2 if wanted > 0 else math.inf


def _needed_to_decide(policy: Policy, inputs: MetricInputs) -> float:
    """Return how many times the items are needed until the policy is decided: at most 1 where it is.

    It is decided once one check fails surely, or all pass surely: by intervals that leave an early look's error.
    """
    checks = standings(policy, inputs, level=1 - EARLY * (1 - inputs.settings.level))
    fails = [needed for passes, needed in checks if not passes]
    return min(fails) if fails else max((needed for _, needed in checks), default=0.0)


def standings(policy: Policy, inputs: MetricInputs, *, level: float) -> list[tuple[bool, float]]:
    """Return for each of a policy's checks of items whether its value passes, and how many times the items are needed.

    At most 1 means that the whole interval is on the value's side of the limit. A check that is about no item with a
    value is not decided by items, and left out.
    """
    settings, standing = replace(inputs.settings, level=level), []
    for check in (one.within(inputs.view) for one in item_checks(policy)):
        rows = check.rows(inputs.view, inputs.headline_families)
        limit, at_least = check.claim.limit, check.claim.at_least
        estimate, events = _estimate(check, inputs, rows)
        if not estimate.n:
            continue
        value, ends = estimate.at(settings, 1.0)
        passes = value >= limit if at_least else value <= limit
        # The end on the side of the limit
        end = None if ends is None else ends[0] if passes == at_least else ends[1]
        needed = math.inf if end is None else _times(abs(end - value), abs(limit - value), events)
        standing.append((passes, needed))
    return standing


def _estimate(check: ItemCheck, inputs: MetricInputs, rows: Int) -> tuple[Estimate, float]:
    """Return what a check is about, and the share of its events; infinite for a mean."""
    x = check.values(inputs)[0][rows]
    there = np.isfinite(x)
    x, units = x[there], inputs.units(rows[there])
    if not np.isin(x, (-1, 0, 1)).all():
        return Mean.of(x, units, bounds=(check.claim.low, check.claim.high)), math.inf
    if check.claim.low < 0:
        changed = PairedDifference.of(x < 0, x > 0, units)
        return changed, (changed.gained + changed.lost) / max(changed.n, 1)
    share = Proportion.of(x > 0, units)
    return share, share.count / max(share.n, 1)


def _needed_for_width(inputs: MetricInputs, width: float) -> float:
    """Return how many times the items are needed until flips and accuracy change have intervals of half this width.

    - `width`: From the value to the farther end, in points.
    """
    rows = inputs.headline_rows[inputs.scored_by_both[inputs.headline_rows]]
    if not len(rows):
        return math.inf
    before, after = inputs.baseline_predictions.correct[rows, 0], inputs.variant_predictions.correct[rows, 0]
    flips = Proportion.of(before != after, inputs.units(rows))
    half = half_width(inputs)
    return math.inf if math.isinf(half) else _times(half / 100, width / 100, flips.count / flips.n)


def half_width(inputs: MetricInputs) -> float:
    """Return how far flips and accuracy change, in points, are from the farther ends of their intervals: the larger.

    It is infinite where one of them has no interval.
    """
    rows = inputs.headline_rows[inputs.scored_by_both[inputs.headline_rows]]
    if not len(rows):
        return math.inf
    before, after = inputs.baseline_predictions.correct[rows, 0], inputs.variant_predictions.correct[rows, 0]
    units = inputs.units(rows)
    widths = []
    for estimate in (Proportion.of(before != after, units), PairedDifference.of(before, after, units)):
        value, interval = estimate.at(inputs.settings, 100.0)
        widths.append(math.inf if interval is None else max(interval[1] - value, value - interval[0]))
    return max(widths)
