"""What is known of the luck of a calibration from a few makes: the variance between them, and who is closer next time.

Makes of two variants are simulated on 400 items: a KL of ``exp(normal)`` per item that both variants and all makes
share, each variant's own part, a part of each make and item, and the luck of each make, a normal number that all of its
items have. The luck's variance is a multiple of what the sampling of items leaves in a make's mean. The second variant
is made as often as the first, or once and for all. Items stand alone or come in groups of four that share a half of
their parts' variance.

First, the components: mean estimate over truth of the luck's variance, before and after a negative one becomes 0, of
the items' part in one make, and of the variance over items of the mean of all makes; and the share of the draws in
which the interval holds the luck. Then the probability: the share of the draws in which a fresh difference of the two
lies below the 2.5, 10, 25, 50, 75, 90 and 97.5 % point of what is said of it, and how often the closer one is wrong
where it is said with 95 % and more. The two's true means then differ by a normal number of twice the standard deviation
of a fresh difference.

Example
-------
python benchmarks/calibration_luck.py
"""

import argparse
import json

import numpy as np
import numpy.typing as npt

from mlflow_compress.metrics.stats.variance_components import closer_probability, make_spread, variance_of_makes

Float = npt.NDArray[np.float64]
ITEMS, KL = 400, 0.02
OF_GROUP = 4  # items of a group, where they come in groups
POINTS = (0.025, 0.1, 0.25, 0.5, 0.75, 0.9, 0.975)
SURE = 0.95


def parts(rng: np.random.Generator, rows: int, grouped: bool) -> Float:
    """Return standard normal numbers of shape (rows, items); those of a group have a correlation of 1/2."""
    own = rng.standard_normal((rows, ITEMS))
    if not grouped:
        return own
    shared = np.repeat(rng.standard_normal((rows, ITEMS // OF_GROUP)), OF_GROUP, axis=1)
    return np.sqrt(0.5) * (own + shared)


def main() -> None:
    """Print one JSON line per setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=4000, help="samples per setting (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    for grouped in (False, True):
        for multiple in (0.0, 1.0, 4.0, 16.0):
            for makes, others in ((3, 3), (3, 1), (5, 5)):
                print(json.dumps(cell(rng, grouped, multiple, makes, others, options.draws)), flush=True)


def cell(
    rng: np.random.Generator, grouped: bool, multiple: float, n_makes: int, n_others: int, draws: int
) -> dict[str, object]:
    """Return what holds in one setting."""
    groups = np.arange(ITEMS) // (OF_GROUP if grouped else 1)
    effect = 1 + 0.5 * (OF_GROUP - 1) if grouped else 1.0  # of groups on the variance of a mean
    shape, spread = 0.5, 0.3 * KL  # of the items' KL, and standard deviation of a make's part of an item
    inside = effect * spread**2 / ITEMS
    luck = np.sqrt(multiple * inside)
    fresh_sd = np.sqrt(luck**2 * (2 if n_others > 1 else 1) + 2 * inside)
    components, covered, below, sure = [], [], [], []
    for _ in range(draws):
        common = KL * np.exp(shape * parts(rng, 1, grouped) - shape**2 / 2)

        def made(n: int) -> Float:
            own = spread * parts(rng, 1, grouped)
            each = spread * parts(rng, n, grouped) if n > 1 else 0.0
            return common + own + each + (luck * rng.standard_normal((n, 1)) if n > 1 else 0.0)  # noqa: B023

        def fresh(n: int) -> float:
            return float(luck * rng.standard_normal()) if n > 1 else 0.0

        first, second = made(n_makes), made(n_others)
        found = make_spread(first, groups)
        square, left = variance_of_makes(first, groups)
        components.append((square - left, found.between**2, left, found.items**2))
        covered.append(found.low <= luck <= found.high)
        difference = fresh(n_makes) - fresh(n_others)
        point = closer_probability(first - difference, second, groups)
        gap = 2 * fresh_sd * rng.standard_normal()
        closer = closer_probability(first + gap, second, groups)
        below.append([point <= one for one in POINTS])
        if max(closer, 1 - closer) >= SURE:
            sure.append((gap + difference < 0) == (closer < 0.5))
    raw, cut, left, items = np.mean(components, axis=0).tolist()
    # Of exp(normal) values in groups whose logarithms have a correlation of 1/2.
    square = shape**2
    alone, together = np.exp(square) - 1, np.exp(square / 2) - 1
    shared = KL**2 * (alone + ((OF_GROUP - 1) * together if grouped else 0.0)) / ITEMS
    truth = shared + effect * spread**2 / ITEMS * (1 + 1 / n_makes)
    return {
        "groups of": OF_GROUP if grouped else 1,
        "luck over items' part": multiple,
        "makes": [n_makes, n_others],
        "variance of luck": round(raw / luck**2, 3) if luck else None,
        "cut at 0": round(cut / luck**2, 3) if luck else None,
        "items' part": round(left / inside, 3),
        "over items": round(items / truth, 3),
        "interval covers %": round(100 * float(np.mean(covered)), 1),
        "fresh below %": [round(100 * one, 1) for one in np.mean(below, axis=0).tolist()],
        "sure": len(sure),
        "of these wrong %": round(100 * float(np.mean(sure)), 1) if sure else None,
    }


if __name__ == "__main__":
    main()
