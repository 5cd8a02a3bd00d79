"""Floating-point operations, bytes and seconds of a stage, from a model's shape and the amount of work.

A multiply-add is two operations. ``N`` tokens through the layers take ``2 N active``; attention takes two operations
for each pair of tokens and each number of `ModelShape.attention_width`, in every layer; a row of the head takes
``2 hidden vocabulary``. Norms, activations and rotary embeddings are left out, and that the last layer's feed-forward
part runs at scored positions only.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlflow_compress.scoring.baseline_store.store_manifest import SHARD_BYTES
from mlflow_compress.scoring.costs.model_shape import ModelShape
from mlflow_compress.scoring.costs.workload import Workload
from mlflow_compress.scoring.kernels.top_tokens import BLOCK, TOP

KEY_BYTES = 16 + 4  # stored beside each state: the digest of its tokens, and its target
TOKEN_BYTES = 4  # the tokens of all requests are in memory, each as it is without sharing
_LOOKED_AT_BYTES = 8 + 8 + 1 + 4  # token ids, a copy of them, whether each is a token, its logit
AWQ_GRID = 20  # scales that llm-compressor's AWQ tries, one forward pass of the layer each


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the work runs on. Give what a device sustains, not its data sheet's peak.

    Attributes
    ----------
    devices : int
    memory : float
        Bytes of one device.
    flops : float
        Operations a second of one device.
    bandwidth : float
        Bytes a second that one device reads of its own memory; it bounds the writing of answers.
    disk : float
        Bytes a second of the storage, for all devices together.
    price : float or None
        Dollars of one device for an hour.
    """

    devices: int
    memory: float
    flops: float
    bandwidth: float
    disk: float
    price: float | None

    def dollars(self, seconds: float | None) -> float | None:
        """Return the price of all devices for some seconds; None where seconds or price are not known."""
        return None if seconds is None or self.price is None else seconds / 3600 * self.devices * self.price


def scoring_operations(shape: ModelShape, work: Workload, *, heads: int = 1) -> float:
    """Return the operations of a pass; with a stored baseline its head runs too (`heads` is 2)."""
    layers = 2.0 * work.tokens * shape.active + 2.0 * work.pairs * shape.layers * shape.attention_width
    return layers + 2.0 * heads * work.rows * shape.hidden * shape.vocabulary


def states_bytes(shape: ModelShape, work: Workload, number_bytes: int) -> float:
    """Return the bytes of a baseline store: a state, a digest and a target a row, and the head once."""
    return _rows_bytes(shape, work, number_bytes) + shape.head * number_bytes


def _rows_bytes(shape: ModelShape, work: Workload, number_bytes: int) -> float:
    return work.rows * (shape.hidden * number_bytes + KEY_BYTES)


def scoring_memory(
    shape: ModelShape, work: Workload, number_bytes: int, *, weights: float, heads: int = 1, captures: bool = False
) -> float:
    """Return the bytes that a pass needs at once: weights, tokens, and the most of what its groups of units need.

    The memory of a product of the head is kept for the next, and is as large as the largest so far: the logits, and
    with a stored baseline (`heads` is 2) the baseline's, whose own head stays in memory too. Beside it a group needs
    the larger of two steps:

    - layers: keys and values, and the activations of a unit. These are those of a gated feed-forward part, the widest
      place of a layer: five tensors of about three times the hidden size. The attention mask of a pack is there, and
      the blocks of it that its branches read, which are at most as large.
    - distances: what the most probable tokens are looked for in.

    With `captures`, a shard of states that is joined and made a file, and the file of the head, can be the largest. A
    store that is read is mapped: its pages belong to the system.
    """
    head = float(shape.head * number_bytes)
    most = product = 0.0
    for group in work.groups:
        cached = group.most_cached * shape.layers * shape.cache_width
        activations = 15 * group.longest_unit * shape.hidden + 2 * group.largest_mask
        most = max(most, product + number_bytes * (cached + activations))
        product = max(product, 4.0 * heads * group.rows * shape.vocabulary)
        most = max(most, product + (heads == 2) * group.rows * TOP * BLOCK * _LOOKED_AT_BYTES)
    if captures:
        most = max(most, product + max(2 * min(_rows_bytes(shape, work, number_bytes), SHARD_BYTES), head))
    return weights + TOKEN_BYTES * work.tokens_unshared + (heads == 2) * head + most


def calibration_operations(method: str, shape: ModelShape, tokens: int, length: int) -> float | None:
    """Return the operations of a calibrated method; None where there is no formula for it.

    llm-compressor runs every layer twice: once to look at its inputs, once with the new weights. GPTQ and SparseGPT add
    ``2 in^2`` a token for the Hessian of each linear layer, about ``4/3 in^3`` to invert it, and ``2 out in^2`` to
    spread the errors. AWQ runs each layer once for every scale that it tries.
    """
    work = Workload(tokens=tokens, pairs=tokens * (length + 1) // 2)
    forward = scoring_operations(shape, work)
    if method in ("wanda", "smoothquant"):
        return 2 * forward
    if method == "awq":
        return (2 + AWQ_GRID) * forward
    if method in ("gptq", "sparsegpt"):
        return 2 * forward + 2.0 * tokens * shape.square_inputs + 4 / 3 * shape.cube_inputs + 2.0 * shape.solve
    return None


def answer_seconds(
    shape: ModelShape, work: Workload, *, number_bytes: int, batch: int, new_tokens: int, answers: int, machine: Machine
) -> float:
    """Return the seconds of one model copy for answers: reading the weights once a step bounds it, or the operations.

    A batch of one token each touches at most ``batch`` times the experts that one token uses.
    """
    experts = shape.experts * min(1.0, batch * shape.expert_share)
    step_bytes = number_bytes * (shape.dense + experts + shape.head)
    batches = -(-answers // batch)
    reading = batches * new_tokens * step_bytes / machine.bandwidth
    return max(reading, scoring_operations(shape, work) / machine.flops)
