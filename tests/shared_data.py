"""Where real data for tests lies: published figures, and optional texts and models, without which their tests skip."""

from pathlib import Path

import pytest

PUBLISHED = Path(__file__).parent / "golden" / "published"
SHARED = Path(__file__).parents[2] / "shared"

needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason="the optional shared test data is not beside the checkout"
)
