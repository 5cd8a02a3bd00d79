"""Calibration sets: whole windows, seeded choice, a hash that follows the tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_compress.compression.calibration_tokens import Calibration, prepare_calibration
from mlflow_compress.errors import ConfigError


def letters(text: str, **_: bool) -> dict[str, list[int]]:
    """Tokenize one letter a token."""
    return {"input_ids": [ord(letter) for letter in text]}


class WithBos:
    """Tokenizes one letter a token, and puts a BOS before it where it is asked to."""

    bos_token = "<"

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return letters("<" * add_special_tokens + text)


def test_windows_are_cut_from_the_joined_texts() -> None:
    # "abc" + "defgh" = 8 tokens = 2 windows of 3 and a rest of 2 that is dropped.
    calibration = prepare_calibration(letters, ["abc", "defgh"], samples=2, length=3, seed=0)
    assert sorted(calibration.ids.tolist()) == [[97, 98, 99], [100, 101, 102]]


def test_a_text_that_begins_with_bos_gets_no_second_one() -> None:
    # "<ab" and "<cd", six tokens: a chat template has written the BOS of the first text already.
    assert prepare_calibration(WithBos(), ["<ab", "cd"], samples=1, length=6, seed=0).ids.tolist() == [
        [60, 97, 98, 60, 99, 100]
    ]


@given(st.integers(0, 2**31), st.integers(1, 20))
def test_the_seed_alone_decides(seed: int, samples: int) -> None:
    text = ["".join(chr(33 + i) for i in range(100))]
    first = prepare_calibration(letters, text, samples=samples, length=5, seed=seed)
    again = prepare_calibration(letters, text, samples=samples, length=5, seed=seed)
    assert np.array_equal(first.ids, again.ids) and first.sha256 == again.sha256
    assert len({row[0] for row in first.ids.tolist()}) == samples  # no window twice


def test_other_seeds_give_other_sets() -> None:
    text = ["".join(chr(33 + i % 90) for i in range(90))]
    hashes = {prepare_calibration(letters, text, samples=6, length=5, seed=seed).sha256 for seed in range(5)}
    assert len(hashes) == 5


def test_too_little_text_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"at least 12 tokens \(3 samples of 4\).*11 tokens, 2 samples"):
        prepare_calibration(letters, ["hello world"], samples=3, length=4, seed=0)


def test_the_hash_is_of_the_token_ids() -> None:
    # The number 1 as eight bytes: python -c "import hashlib as h; print(h.sha256(b'\x01' + bytes(7)).hexdigest())"
    digest = "7c9fa136d4413fa6173637e883b6998d32e1d675f88cddff9dcbcf331820f4b8"
    assert Calibration(np.array([[1]])).sha256 == digest


def test_batches_hold_every_sample_in_order() -> None:
    calibration = Calibration(np.arange(20).reshape(5, 4))
    batches = list(calibration.loader(batch_size=2))
    assert [len(batch["input_ids"]) for batch in batches] == [2, 2, 1]
    assert np.array_equal(np.concatenate([batch["input_ids"].numpy() for batch in batches]), calibration.ids)
