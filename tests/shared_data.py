"""Where optional real data for tests lies; tests that use it skip, with a reason, where it is missing."""

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2] / "shared"

needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason="the optional shared test data is not beside the checkout"
)
