"""Our HQQ against the quantizer of the `hqq` package (0.2.8.post1, axis 1, group 64, CPU)."""

import hashlib
import itertools

import numpy as np
import pytest
import torch

from mlflow_compress.compression.methods.hqq import Hqq, half_quadratic

# bits: first 16 digits of the SHA-256 over the levels as bytes, the first two zero points and scales; what
# `Quantizer.quantize(weight, nbits=bits, group_size=64, axis=1, device="cpu", bitpack=False)` gave on `weight()`.
PUBLISHED = {
    8: ("b090d5d15b7b60f2", (121.15421, 127.61109), (0.0011895, 0.0014660)),
    4: ("920eb51f0ab9b476", (7.04216, 7.73999), (0.0202208, 0.0249226)),
    3: ("57ed84d61580c3c5", (3.32384, 3.62970), (0.0433302, 0.0534055)),
    2: ("016223c249c1282a", (1.27718, 1.48862), (0.1011039, 0.1246129)),
    1: ("eefcb964b27058da", (0.01948, 0.05823), (0.3033117, 0.3738387)),
}


def weight(rows: int = 16, columns: int = 128) -> torch.Tensor:
    """A heavy-tailed weight, the same everywhere."""
    return torch.from_numpy((np.random.default_rng(0).standard_t(4, size=(rows, columns)) * 0.05).astype(np.float32))


@pytest.mark.parametrize("bits", Hqq.supported_bits)
def test_levels_zero_points_and_scales_are_the_packages(bits: int) -> None:
    levels, scale, zero = half_quadratic(weight(), bits, 64)
    digest, zeros, scales = PUBLISHED[bits]
    assert hashlib.sha256(levels.to(torch.uint8).numpy().tobytes()).hexdigest()[:16] == digest
    assert zero.flatten()[:2].tolist() == pytest.approx(zeros, abs=1e-5)
    assert scale.flatten()[:2].tolist() == pytest.approx(scales, abs=1e-7)


def test_the_package_itself_agrees_where_it_is_installed() -> None:
    quantizer = pytest.importorskip("hqq.core.quantize", reason="needs the package hqq").Quantizer
    given = weight(64, 512)
    for bits, group_size in itertools.product(Hqq.supported_bits, (64, 128, None)):
        theirs, meta = quantizer.quantize(
            given.clone(), nbits=bits, group_size=group_size, axis=1, device="cpu", bitpack=False
        )
        levels, scale, zero = half_quadratic(given, bits, group_size or "channel")
        assert torch.equal(theirs.reshape(levels.shape), levels)
        assert torch.equal(meta["zero"].flatten(), zero.flatten())
        assert torch.equal(meta["scale"].flatten(), scale.flatten())
