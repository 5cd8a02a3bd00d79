"""Floating-point operations, bytes and seconds of a stage, from a model's shape and the amount of work.

A multiply-add is two operations. ``N`` tokens through the layers take ``2 N active``; attention takes two operations
for each pair of tokens and each number of `ModelShape.attention_width`, in every layer; a row of the head takes
``2 hidden vocabulary``. Norms, activations and rotary embeddings are left out, and that the last layer's feed-forward
part runs at scored positions only.
"""

import os
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from mlflow_compress.errors import UnsupportedError
from mlflow_compress.models.model_files import library_errors
from mlflow_compress.models.offloading import SAMPLE
from mlflow_compress.models.weight_groups import decoder_layers
from mlflow_compress.scoring.baseline_store import SHARD_BYTES
from mlflow_compress.scoring.kernels.row_stats import BLOCK, TOP
from mlflow_compress.scoring.plan import packing

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a causal language model."""

    parameters: int  # All weights; tied weights count once
    dense: int  # Weights of the layers' matrices that every token is multiplied with
    experts: int  # Weights of all routed experts together; 0 without a mixture
    expert_share: float  # Share of the experts that one token uses
    head: int  # Weights of the language-model head
    hidden: int
    vocabulary: int
    layers: int
    # Multiply-adds of one layer's attention for one pair of tokens: over all heads, the width of queries plus that of
    # values
    attention_width: int
    cache_width: int  # Numbers that the cache of keys and values holds, per token and layer
    # Sum of in_features squared over the linear layers that one token goes through (what the Hessians cost it)
    square_inputs: float
    # Sums of in_features cubed, and of out_features times in_features squared (what solving with the Hessian costs)
    cube_inputs: int
    solve: int

    @property
    def active(self) -> float:
        """Weights of the layers' matrices that one token is multiplied with."""
        return self.dense + self.experts * self.expert_share


def model_shape(config: Any, *, trust_remote_code: bool = False) -> ModelShape:
    """Return the shape of the model that a configuration describes.

    Layers whose attention looks at a window only are counted as if it saw everything, so that the cost is an upper
    bound. State-space layers are not counted apart.
    """
    kind = type(config).__name__
    with library_errors("The configuration is not that of a causal language model", kind), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    text = config.get_text_config(decoder=True)
    n_experts = next((int(n) for name in _EXPERTS if (n := getattr(text, name, None))), 0)
    used = int(getattr(text, "num_experts_per_tok", 0) or 0)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    apart = {id(embeddings.weight), *([id(head.weight)] if head is not None else [])}
    matrices = [(n, p) for n, p in model.named_parameters() if p.ndim > 1 and id(p) not in apart]
    experts = [(n, p) for n, p in matrices if n_experts and ".experts." in n and ".shared_" not in n]
    of_experts = {name for name, _ in experts}
    share = used / n_experts if n_experts else 0.0
    shapes = [(prod(several), rows, columns) for _, p in matrices for *several, rows, columns in [p.shape]]
    squares = sum((share if name in of_experts else 1) * p.numel() // p.shape[-2] * p.shape[-1] for name, p in matrices)
    heads = int(text.num_attention_heads)
    queries, values, cached = _attention(text, heads)
    return ModelShape(
        parameters=sum(p.numel() for p in model.parameters()),
        dense=sum(p.numel() for name, p in matrices if name not in of_experts),
        experts=sum(p.numel() for _, p in experts),
        expert_share=share,
        head=head.weight.numel() if head is not None else 0,
        hidden=int(text.hidden_size),
        vocabulary=int(text.vocab_size),
        layers=int(text.num_hidden_layers),
        attention_width=heads * (queries + values),
        cache_width=cached * (queries + values),
        square_inputs=squares,
        cube_inputs=sum(n * cols**3 for n, _, cols in shapes),
        solve=sum(n * rows * cols**2 for n, rows, cols in shapes),
    )


def _attention(config: Any, heads: int) -> tuple[int, int, int]:
    """Return the width of a head's queries and of its values, and the number of heads that the cache holds."""
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "kv_lora_rank", None):  # transformers caches the expanded keys and values of all heads
        return config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim, heads
    return size, size, int(getattr(config, "num_key_value_heads", None) or heads)


@dataclass(frozen=True, kw_only=True)
class PassGroupSize:
    """What a group of forward passes holds at most; the head takes its rows together."""

    longest_unit: int = 0  # Most tokens in one forward pass
    most_cached: int = 0  # Most tokens whose keys and values are in memory at once
    largest_mask: int = 0  # Most numbers of an attention mask: tokens of a pack by tokens that they could attend to
    masks: int = 0  # Numbers of all masks
    rows: int = 0  # Positions whose logits are there at once


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Amounts of work of one or more passes."""

    tokens: int = 0  # Tokens that the body computes
    tokens_unshared: int = 0  # The same if no prefix were shared: what other tools compute
    pairs: int = 0  # Pairs of a token and a token that it attends to
    rows: int = 0  # Positions at which the head runs, and whose states a baseline stores
    groups: tuple[PassGroupSize, ...] = ()  # In the order in which they run
    # Pass by pass, of each group layer by layer: hidden states, and what it takes of the room for them (`n_states`)
    states: tuple[tuple[tuple[int, int], ...], ...] = ()

    def __add__(self, other: "Workload") -> "Workload":
        return Workload(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


def workload(plan: packing.Plan, tokens_unshared: int, head_rows: int) -> Workload:
    """Return the work of one plan; `tokens_unshared` counts its sequences as they were given."""
    return Workload(
        tokens=plan.n_tokens,
        tokens_unshared=tokens_unshared,
        pairs=sum(_pairs(unit) for unit in plan.units),
        rows=sum(packing.n_scored_rows(unit) for unit in plan.units),
        groups=tuple(_group_sizes(plan, head_rows)),
        states=(
            tuple(
                (sum(map(packing.n_computed, units)), sum(map(packing.n_states, units)))
                for units in (plan.units[group.units] for group in packing.group_units(plan, head_rows))
            ),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class GeneratedWork:
    """Answers that are written token by token; those to one prompt share the reading of it."""

    prompts: Sequence[int]  # Tokens of each
    samples: int = 1  # Answers to each
    longest: int  # Tokens that an answer may have
    usual: int  # Tokens that answers have on average

    @property
    def n_answers(self) -> int:
        return self.samples * len(self.prompts)

    @property
    def cached(self) -> int:
        """Cached tokens that are read, summed over all steps."""
        return self.samples * sum(self.usual * n + self.usual * (self.usual + 1) // 2 for n in self.prompts)

    def steps(self, batch: int) -> int:
        return -(-self.n_answers // batch) * self.usual

    def workload(self, batch: int) -> Workload:
        """Return the work; a batch holds as much as if all of its answers had the greatest length."""
        read, most, rows = sum(self.prompts), max(self.prompts, default=0), min(batch, self.n_answers)
        written = self.n_answers * self.usual
        return Workload(
            tokens=read + written,
            tokens_unshared=self.samples * read + written,
            pairs=sum(n * (n + 1) // 2 for n in self.prompts) + self.cached,
            rows=written,
            groups=(
                PassGroupSize(
                    longest_unit=-(-rows // self.samples) * most, most_cached=rows * (most + self.longest), rows=rows
                ),
            ),
        )


def _pairs(unit: packing.PackedBatch | packing.PaddedBatch) -> int:
    if isinstance(unit, packing.PackedBatch):
        return int((unit.positions.astype("int64") + 1).sum())
    return sum(len(ids) * (len(ids) + 1) // 2 for ids in unit.sequences)


def _group_sizes(plan: packing.Plan, head_rows: int) -> Iterator[PassGroupSize]:
    """Yield what each group holds: of kept prefixes, and of the unit that runs."""
    done, size, kept = packing.last_uses(plan.units), {packing.NO_PREFIX: 0}, 0
    for group in packing.group_units(plan, head_rows):
        longest = most = mask = masks = 0
        for number in range(group.units.start, group.units.stop):
            unit, running = plan.units[number], 0
            if isinstance(unit, packing.PackedBatch):
                # The running unit's cache is a copy of its prefix, and its own tokens.
                running = size[unit.prefix] + unit.n_tokens
                if size[unit.prefix] or not unit.is_path:  # a plain sequence needs no mask
                    mask, masks = max(mask, unit.n_tokens * running), masks + unit.n_tokens * running
                if unit.keep != packing.NO_PREFIX:
                    size[unit.keep] = running
                    kept += running
            longest, most = max(longest, packing.n_computed(unit)), max(most, kept + running)
            kept -= sum(size.pop(prefix) for prefix in done.get(number, ()))
        rows = min(head_rows, group.rows.stop - group.rows.start)
        yield PassGroupSize(longest_unit=longest, most_cached=most, largest_mask=mask, masks=masks, rows=rows)


@dataclass(frozen=True, kw_only=True)
class Offloaded:
    """What of a model waits on disk or host while it is scored layer by layer; all in bytes."""

    waiting: int  # Weights that are read once a sweep
    largest: int  # The largest of the layers that wait, which are in memory one at a time
    opening: int  # Weights that are read when the model is opened: a layer of each shape, by each probe, and a sample
    room: int  # Memory for hidden states

    def reads(self, work: Workload, state_bytes: int) -> tuple[int, int]:
        """Return how often the waiting weights are read, and the most bytes of hidden states that are held at once."""
        n_reads = most = 0
        for groups in work.states:
            cut = packing.cut_to_fit((taken * state_bytes for _, taken in groups), self.room)
            sweeps = [sum(states for states, _ in groups[part]) for part in cut]
            n_reads, most = n_reads + len(sweeps), max(most, *sweeps, 0)
        return n_reads, most * state_bytes

    def extra_seconds(
        self, shape: ModelShape, work: Workload, reads: int, *, number_bytes: int, machine: "Machine", streams: int = 1
    ) -> float:
        """Return the seconds that a pass takes more than one of a model in memory, without those of the disk.

        Weights are cast as they are read. A batch is prepared again for each layer: its mask is written and cut, and
        its states are embedded, handed on and kept. When the model is opened, short batches are computed.
        """
        fetched = self.opening + reads * self.waiting
        again = 2 * sum(group.masks for group in work.groups) + 3 * work.tokens * shape.hidden
        written = fetched + streams * shape.layers * number_bytes * again
        return written / machine.fresh + 2.0 * _PROBE_TOKENS * shape.active / machine.flops


_PROBES = 4  # of a model that is opened: see `models.offloading.probed`
_PROBE_TOKENS = 244  # that these compute


def offloaded(
    config: Any, dtype: torch.dtype, memory: Mapping[int | str, int], *, room: int, trust_remote_code: bool = False
) -> Offloaded | None:
    """Return what of a model waits where its weights may take so much `memory` by device; None where all of it fits.

    accelerate places it, as it does when the model is loaded. Embeddings and head are in memory all the same.
    """
    from accelerate import infer_auto_device_map

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    found = decoder_layers(model)
    if found is None:
        raise UnsupportedError("The model's decoder layers are not found", got=type(config).__name__)
    places = infer_auto_device_map(model, dict(memory), no_split_module_classes=model._no_split_modules)
    computing = [place for place in memory if place != "cpu"] or ["cpu"]
    away = [name for name, place in places.items() if place not in computing]
    ends = {id(end.weight) for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None}
    waiting = {
        name: parameter.nbytes
        for name, parameter in model.named_parameters()
        if id(parameter) not in ends and any(not part or f"{name}.".startswith(f"{part}.") for part in away)
    }
    if not waiting:
        return None
    prefix, layers = found
    by_shape: dict[tuple[Any, ...], int] = {}
    for number, layer in enumerate(layers):
        own = [(n, p.shape, p.nbytes) for n, p in layer.named_parameters() if f"{prefix}.{number}.{n}" in waiting]
        by_shape[tuple(own)] = sum(n_bytes for *_, n_bytes in own)
    outside = sum(n_bytes for name, n_bytes in waiting.items() if not name.startswith(f"{prefix}."))
    return Offloaded(
        waiting=sum(waiting.values()),
        largest=max(by_shape.values()),
        opening=min(SAMPLE, sum(waiting.values())) + _PROBES * (outside + sum(by_shape.values())),
        room=room,
    )


_KEY_BYTES = 16 + 4  # stored beside each state: the digest of its tokens, and its target
_TOKEN_BYTES = 4  # the tokens of all requests are in memory, each as it is without sharing
_LOOKED_AT_BYTES = 8 + 8 + 1 + 4  # token ids, a copy of them, whether each is a token, its logit
_AWQ_GRID = 20  # scales that llm-compressor's AWQ tries, one forward pass of the layer each


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the work runs on. Give what a device sustains, not its data sheet's peak."""

    devices: int
    memory: float  # Bytes of one device
    flops: float  # Operations a second of one device
    bandwidth: float  # Bytes a second that one device reads of its own memory; it bounds the writing of answers
    fresh: float  # Bytes a second that are cast into memory which the system gives anew
    disk: float  # Bytes a second of the storage, for all devices together
    price: float | None  # Dollars of one device for an hour

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
    return work.rows * (shape.hidden * number_bytes + _KEY_BYTES)


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
    return weights + _TOKEN_BYTES * work.tokens_unshared + (heads == 2) * head + most


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
        return (2 + _AWQ_GRID) * forward
    if method in ("gptq", "sparsegpt"):
        return 2 * forward + 2.0 * tokens * shape.square_inputs + 4 / 3 * shape.cube_inputs + 2.0 * shape.solve
    return None


_SOLVING_SECONDS = 82e-9  # of GPTQ and SparseGPT, for each weight of a linear layer


def solving_seconds(method: str, shape: ModelShape) -> float:
    """Return the seconds that a GPU takes beside the forward passes to solve for the new weights; 0 for most methods.

    The column loop and the factorisation are in float32 and wait on latency, so that a device's rate in bfloat16 says
    nothing of them. GPTQ's paper (arXiv 2210.17323) has run times of eight models on one A100, 128 samples of 2,048
    tokens: with two forward passes at 125 Tflop/s this constant is off by -13 % to +16 %
    (`tests/unit/test_plan_costs.py`).
    """
    return _SOLVING_SECONDS * (shape.dense + shape.experts) if method in ("gptq", "sparsegpt") else 0.0


def this_machine() -> tuple[float, float, float]:
    """Return this machine's bytes of memory, operations a second in float32, and bytes a second that it reads.

    Measured with a product of two matrices and a sum of 256 MB, each the best of five.
    """
    size = 1024
    matrix, row = torch.ones(size, size), torch.ones(2**26)
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return memory, 2.0 * size**3 / _best(lambda: matrix @ matrix), 4.0 * len(row) / _best(row.sum)


def fresh_bytes() -> float:
    """Return how many bytes a second this machine casts to float32, into memory that the system gives anew.

    That is what fetching a weight takes besides the disk (`models.offloading`): here of 64 MB, the best of five. glibc
    gives blocks of this size back when they are freed, as it gives smaller ones where a model is on the disk.
    """
    stored = torch.ones(1 << 24, dtype=torch.bfloat16)
    return 4.0 * len(stored) / _best(stored.float)


def _best(work: Callable[[], object]) -> float:
    """Return the seconds that this thread computes: what else the machine does meanwhile does not count."""
    work()
    return min(timeit.repeat(work, timer=time.thread_time, number=1, repeat=5))


def answer_seconds(
    shape: ModelShape, answers: GeneratedWork, *, number_bytes: int, batch: int, machine: Machine
) -> float:
    """Return the seconds of one model copy for answers: reading weights and caches bounds it, or the operations.

    A batch of one token each touches at most ``batch`` times the experts that one token uses.
    """
    experts = shape.experts * min(1.0, batch * shape.expert_share)
    weights = answers.steps(batch) * (shape.dense + experts + shape.head)
    reading = number_bytes * (weights + answers.cached * shape.layers * shape.cache_width) / machine.bandwidth
    return max(reading, scoring_operations(shape, answers.workload(batch)) / machine.flops)
