"""An item's numbers do not depend on what it is scored with: those of transformers on its sequence alone."""

import pytest

from benchmarks.architectures import ARCHITECTURES, SCALED, WAYS, length_differences

QUICK = ["Phi3 longrope", "Llama longrope", "Phimoe longrope", "Gemma3Text longrope", "Llama dynamic", "Llama yarn"]
SLOW = [pytest.mark.slow, pytest.mark.ci]
NATS = 1e-4
"""Rounding in float32 moves these numbers by a few 1e-6, the frequencies of another length by 0.1 and more."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else SLOW) for n in [*ARCHITECTURES, *SCALED]])
def test_an_item_has_the_numbers_that_it_has_alone(name: str) -> None:
    found = length_differences(name)
    assert {way: found[way] for way in WAYS if found[way] > NATS} == {}
    assert not found["answers"]
    assert found["path"] == ("plain" if name == "Bloom" else "packed")  # Bloom adds its positions to the scores
