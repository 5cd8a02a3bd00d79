"""SparseGPT: prunes column by column, and corrects each column's error in the columns that follow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlflow_compress.compression.backends import llmcompressor_backend as backend
from mlflow_compress.compression.method import CompressionJob, register, require_at_least, require_between
from mlflow_compress.compression.pruning import (
    CalibratedPruningConfig,
    PruningMethod,
    modifier_options,
    require_pruned,
)
from mlflow_compress.errors import UnsupportedError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class SparseGptConfig(CalibratedPruningConfig):
    """Settings of `sparsegpt`."""

    damping: float = 0.01
    """Added to the Hessian's diagonal, as a fraction of its mean."""
    block_size: int = 128
    """Number of columns whose mask is chosen together."""

    def __post_init__(self) -> None:
        """Raise an error for damping and blocks that do not exist."""
        super().__post_init__()
        require_between("damping", self.damping, 0.0, 1.0)
        require_at_least("block_size", self.block_size, 4)


@register
class SparseGpt(PruningMethod):
    """Sets the weights with the smallest error to zero, and adjusts the others to compensate."""

    name = "sparsegpt"
    description = "SparseGPT pruning: repairs each column's error in the columns that follow"
    reference = "Frantar and Alistarh 2023, https://arxiv.org/abs/2301.00774 (llm-compressor SparseGPTModifier)"
    Config = SparseGptConfig
    needs_calibration = True
    requires = ("llmcompressor",)

    def takes_experts(self, config: Any) -> bool:
        """Return True."""
        return True

    def compress(self, job: CompressionJob) -> torch.Tensor:
        """Prune layer by layer, each on the outputs of the pruned layers before it."""

        def recipe() -> list[object]:
            from llmcompressor.modifiers.pruning import SparseGPTModifier

            config = job.config
            return [
                SparseGPTModifier(**modifier_options(job), dampening_frac=config.damping, block_size=config.block_size)
            ]

        with _refuse_fallback():
            logits = backend.run_oneshot(job, recipe)
        require_pruned(job)
        return logits


@contextlib.contextmanager
def _refuse_fallback() -> Iterator[None]:
    """Within this block, a Hessian that cannot be inverted is an error; by default it becomes the identity."""
    backend.load_for_llmcompressor()
    from llmcompressor.modifiers.pruning.sparsegpt import sgpt_sparsify

    original = sgpt_sparsify.logger

    class RaisingLogger:
        """Replaces the logger of the module whose only warning is about the fallback."""

        def warning(self, message: str, *_: Any) -> None:
            raise UnsupportedError(
                "SparseGPT's Hessian cannot be inverted", fix="Raise damping or give more calibration samples"
            )

    sgpt_sparsify.logger = RaisingLogger()
    try:
        yield
    finally:
        sgpt_sparsify.logger = original
