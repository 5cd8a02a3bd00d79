"""The direction of a variant: whether its answers are worse than its baseline's, no worse than a margin, or open."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mlflow_compress.decide.gates import DELTA, FLIPS
from mlflow_compress.errors import ConfigError
from mlflow_compress.metrics.stats.intervals import paired_difference
from mlflow_compress.metrics.stats.sample_size import items_to_settle, round_up
from mlflow_compress.records import MetricResult


@dataclass(frozen=True, kw_only=True)
class HarmVerdict:
    """What the paired change of accuracy shows."""

    worse: bool  # Harm is shown: the interval lies below 0
    within_margin: bool  # Harm above the margin is excluded: the interval lies above -margin
    margin: float  # In points
    items: int | None  # About how many items would settle what is open; None where nothing is, or none settles it

    @property
    def word(self) -> Literal["worse", "no worse", "open"]:
        """The verdict in one word. Shown harm is "worse", however small it is."""
        return "worse" if self.worse else "no worse" if self.within_margin else "open"

    @property
    def text(self) -> str:
        """The verdict in words: "no worse than 1 point", "worse, by less than 1 point", "open (...)"."""
        points = f"{self.margin:g} {'point' if self.margin == 1 else 'points'}"
        if self.worse:
            return f"worse, by less than {points}" if self.within_margin else "worse"
        if self.within_margin:
            return f"no worse than {points}"
        if self.items is None:
            return "open (with a margin of 0 no number of items settles a change near 0)"
        return f"open (about {self.items:,} items would settle it)"


def harm_verdict(
    change: float, low: float, high: float, *, discordant: float, n: float, margin: float, effect: float = 1.0
) -> HarmVerdict:
    """Return the verdict on a paired change of accuracy with its 95 % interval, all shares; the margin is in points.

    "worse" where ``high < 0``, "no worse than the margin M" where ``low > -M``. Both can hold: shown harm that is
    smaller than the margin. Each is wrong in at most about 2.5 %, as one end of a 95 % interval decides.

    Where neither holds, `items` is the number of which 80 % of samples show one of those that are true, whatever the
    true change is: see `items_to_settle`. It depends on `discordant`, the share of the `n` items that only one model
    has right. With a margin of 0 there is none. Of items in groups as many times more are needed as the design effect
    says, `effect`. The number is rounded up to two digits.

    Examples
    --------
    >>> harm_verdict(-0.004, -0.019, 0.011, discordant=0.061, n=1000, margin=1.0).text
    'open (about 8,400 items would settle it)'
    """
    if not 0 <= margin <= 100:
        raise ConfigError("The margin is an accepted loss of accuracy in points", allowed="0 to 100", got=margin)
    accepted = margin / 100
    discordant = max(discordant, abs(change))  # a change needs as many; stored values may be rounded
    worse, within = high < 0, low > -accepted
    items = None
    if not worse and not within and accepted > 0:
        items = round_up(effect * items_to_settle(discordant, n / effect, accepted))
    return HarmVerdict(worse=worse, within_margin=within, margin=margin, items=items)


def harm_of(pooled: Mapping[str, MetricResult], margin: float) -> HarmVerdict | None:
    """Return the verdict from headline results; None where the accuracy change was not measured or has no interval."""
    delta, flips = pooled.get(DELTA), pooled.get(FLIPS)
    if delta is None or delta.low is None or delta.high is None or flips is None:
        return None
    change, discordant = delta.value, max(flips.value / 100, abs(delta.value))
    gained, lost = ((discordant + sign * change) / 2 * delta.n for sign in (1, -1))
    # Items in groups make the interval as much wider as the root of their design effect.
    alone = paired_difference(gained, lost, delta.n, level=delta.level)
    effect = max(1.0, round(((delta.high - delta.low) / (alone.high - alone.low)) ** 2, 3))
    return harm_verdict(change, delta.low, delta.high, discordant=discordant, n=delta.n, margin=margin, effect=effect)
