"""The Pareto front: the variants that no other one beats in both of two values."""

from __future__ import annotations

from collections.abc import Mapping


def pareto_front(points: Mapping[str, tuple[float, float]]) -> tuple[str, ...]:
    """Return the names on the front, sorted by the first value.

    Parameters
    ----------
    points : mapping of str to (float, float)
        Two values per name; of both, lower is better. Points that are equal are on the front together.

    Examples
    --------
    >>> pareto_front({"small": (1, 9), "close": (8, 2), "worse": (8, 3)})
    ('small', 'close')
    """
    front = [
        name
        for name, (x, y) in points.items()
        if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points.values())
    ]
    return tuple(sorted(front, key=lambda name: (points[name], name)))
