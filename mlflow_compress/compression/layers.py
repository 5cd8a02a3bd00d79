"""Saves a model whose weights are plain floats, and computes the logits of exactly the stored weights."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from mlflow_compress.compression.backends import llmcompressor_backend as backend

if TYPE_CHECKING:
    import torch

    from mlflow_compress.compression.method import CompressionJob
    from mlflow_compress.models.source_model import SourceModel


class ForLayers:
    """A method that quantizes all linear layers by itself, or some of them for `mixed`."""

    rescales: ClassVar[bool] = False
    """Whether it moves scales between neighbouring layers. Such a method cannot share a checkpoint with another one."""

    def scheme(self, config: Any, targets: Sequence[str]) -> dict[str, Any]:
        """Return llm-compressor's config group for layers; by default integer weights.

        Parameters
        ----------
        config : MethodConfig
            The method's settings.
        targets : sequence of str
            Names of modules, or "Linear" for all linear layers.
        """
        return backend.weight_scheme(
            config.bits, group_size=config.group_size, symmetric=config.symmetric, targets=targets
        )

    def modifiers(
        self, config: Any, source: SourceModel, schemes: Mapping[str, dict[str, Any]], ignored: Sequence[str]
    ) -> list[object]:
        """Return the modifiers of a recipe, by default the one that rounds to nearest; llm-compressor is imported.

        Parameters
        ----------
        config : MethodConfig
            The settings that all config groups share.
        source : SourceModel
            The model to compress.
        schemes : mapping
            Config groups by name.
        ignored : sequence of str
            Linear layers that stay as they are.
        """
        from llmcompressor.modifiers.quantization import QuantizationModifier

        return [QuantizationModifier(config_groups=dict(schemes), ignore=list(ignored))]

    def guarded(self) -> AbstractContextManager[object]:
        """Return what must be in force while a recipe runs; by default nothing."""
        return contextlib.nullcontext()

    def compress_all(self, job: CompressionJob) -> torch.Tensor:
        """Quantize every linear layer alike; contract as `Method.compress`."""

        def recipe() -> list[object]:
            return self.modifiers(
                job.config, job.source, {"group_0": self.scheme(job.config, ["Linear"])}, job.source.ignored
            )

        with self.guarded():
            return backend.run_oneshot(job, recipe, rescales=self.rescales)


def save_and_measure(job: CompressionJob, model: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Cast the model to its stored dtype, save it with its tokenizer, and return its logits, computed in float32.

    Parameters
    ----------
    job : CompressionJob
        The folder to write to, and the probe.
    model : transformers model
        In any floating type; cast in place.
    dtype : torch.dtype, optional
        Dtype to store; by default the base's own.

    Returns
    -------
    torch.Tensor
        Logits on the probe, shape (n_positions, vocabulary).
    """
    import torch

    stored = dtype or job.source.torch_dtype
    cast_stored(model, stored)
    model.config.dtype = stored
    model.save_pretrained(job.folder)
    job.source.tokenizer().save_pretrained(job.folder)
    cast_stored(model, torch.float32)
    return job.probe.logits(model)


def cast_stored(model: Any, dtype: torch.dtype) -> None:
    """Cast the tensors that a checkpoint stores, and no others.

    ``model.to`` would also round the rotary frequencies, which are not stored but computed at loading.
    """
    stored = set(model.state_dict())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in stored and tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
