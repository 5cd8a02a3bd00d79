"""Methods that work layer by layer; saves a model of plain floats, and computes the logits of what is stored."""

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from mlflow_compress.compression.backends import llmcompressor_backend as backend
from mlflow_compress.compression.method import CompressionJob, Logits, Method, MethodConfig, S
from mlflow_compress.models.source_model import SourceModel

if TYPE_CHECKING:
    import torch


class ForLayers(Method[S]):
    """A method that quantizes all linear layers by itself, or some of them for `mixed`."""

    by_class = True
    experts = True
    requires = ("llmcompressor",)
    rescales: ClassVar[bool] = False
    """Whether it moves scales between neighbouring layers. Such a method cannot share a checkpoint with another one."""

    def scheme(self, config: Any, targets: Sequence[str]) -> dict[str, Any]:
        """Return llm-compressor's config group for layers, or for "Linear", all of them; by default integer weights."""
        return backend.weight_scheme(
            config.bits, group_size=config.group_size, symmetric=config.symmetric, targets=targets
        )

    def modifiers(
        self, config: S, source: SourceModel, schemes: Mapping[str, dict[str, Any]], ignored: Sequence[str]
    ) -> list[object]:
        """Return the modifiers of a recipe, by default the one that rounds to nearest; llm-compressor is imported.

        `config` has the settings that all config groups share; linear layers that are `ignored` stay as they are.
        """
        from llmcompressor.modifiers.quantization import QuantizationModifier

        return [QuantizationModifier(config_groups=dict(schemes), ignore=list(ignored))]

    def guarded(self) -> AbstractContextManager[object]:
        """Return what must be in force while a recipe runs; by default nothing."""
        return contextlib.nullcontext()

    def compress(self, job: CompressionJob[S]) -> Logits:
        def recipe() -> list[object]:
            schemes = {"group_0": self.scheme(job.config, ["Linear"])}
            return self.modifiers(job.config, job.source, schemes, job.source.ignored)

        with self.guarded():
            return backend.run_oneshot(job, recipe, rescales=self.rescales)


def save_and_measure(job: CompressionJob[MethodConfig], model: Any, dtype: "torch.dtype | None" = None) -> Logits:
    """Cast a model in place, save it with its tokenizer, and return its logits, computed in float32.

    `dtype` is the one to store, by default the base's own. The logits are those on the probe, shape (n_positions,
    vocabulary). With `job.offload`, the model is the one that `llmcompressor_backend.loaded` yields.
    """
    import torch

    stored = dtype or job.source.torch_dtype
    model.config.dtype = stored
    if job.offload is not None:
        backend.round_floats(model, stored)
        logits = job.probe.logits(model)
        backend.cast_offloaded(model, stored)
        model.save_pretrained(job.folder, max_shard_size=backend.SHARD)
        job.source.save_others(job.folder)
        return logits
    cast_stored(model, stored)
    model.save_pretrained(job.folder)
    job.source.save_others(job.folder)
    cast_stored(model, torch.float32)
    return job.probe.logits(model)


def cast_stored(model: Any, dtype: "torch.dtype") -> None:
    """Cast the tensors that a checkpoint stores, and no others.

    ``model.to`` would also round the rotary frequencies, which are not stored but computed at loading.
    """
    stored = set(model.state_dict())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in stored and tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
