"""Saves a model whose weights are plain floats, and computes the logits of exactly the stored weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from mlflow_compress.compression.method import CompressionJob


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
