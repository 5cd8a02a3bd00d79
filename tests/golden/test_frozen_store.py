"""What version 1.0 has stored is read by this version: the same table, decision, history, comparison and figures."""

from pathlib import Path
from typing import Any

import pytest

from tests.golden.frozen_store import found_in, unpacked


def same(found: Any, expected: Any) -> bool:
    """Whether two values from JSON are equal; numbers may differ in rounding, a metric's description in its wording."""
    if isinstance(expected, dict):
        names = expected.keys() - {"meaning"}
        return found.keys() == expected.keys() and all(same(found[name], expected[name]) for name in names)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == pytest.approx(expected, rel=1e-9)) if isinstance(expected, float) else bool(found == expected)


def test_the_store_of_1_0_says_the_same(workdir: Path) -> None:
    expected = unpacked(workdir)
    found = found_in(expected["swept"], expected["runs"])
    assert {name for name, value in expected["found"].items() if not same(found[name], value)} == set()
    assert expected["found"]["champion"] == found["champion"] == "rtn-3bit-g128"
