"""Saving a model whose weights stay plain floats: what is measured is exactly what is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from mlflow_compress.compression.method import CompressionJob


def save_and_measure(job: CompressionJob, model: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Round the model to its stored type, save it with its tokenizer, and measure the rounded weights in float32.

    Parameters
    ----------
    job : CompressionJob
        Where to write, and the probe.
    model : transformers model
        In any floating type; it is cast in place.
    dtype : torch.dtype, optional
        Type to store; the base's own where none is given.

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
    """Cast what a checkpoint stores, and nothing else.

    ``model.to`` would also round the rotary frequencies, which are computed anew at every loading.
    """
    stored = set(model.state_dict())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in stored and tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
