"""Common base of the loaders of our own formats."""

from __future__ import annotations

from transformers.quantizers import HfQuantizer


class OwnFormat(HfQuantizer):  # type: ignore[misc]
    """Transformers' hook during and after loading; a loaded model can compute, but not be saved again or trained."""

    def is_serializable(self) -> bool:
        """Return False: the loaded weights are not the stored ones."""
        return False

    @property
    def is_trainable(self) -> bool:
        """False: training would change weights that the format cannot hold."""
        return False
