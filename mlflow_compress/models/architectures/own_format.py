"""What the loaders of our own formats have in common."""

from __future__ import annotations

from transformers.quantizers import HfQuantizer


class OwnFormat(HfQuantizer):  # type: ignore[misc]
    """Transformers' hook while and after loading: such a model can be computed with, but not saved again or trained."""

    def is_serializable(self) -> bool:
        """Return False: the method that made a checkpoint wrote it, and what is loaded is not what is stored."""
        return False

    @property
    def is_trainable(self) -> bool:
        """False: training would change weights that the format cannot hold."""
        return False
