"""The numbers of a model that decide its cost, counted on a model without memory for its weights."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from mlflow_compress.errors import CheckpointError

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a causal language model.

    Attributes
    ----------
    parameters : int
        All weights; tied weights count once.
    dense : int
        Weights of the layers' matrices that every token is multiplied with.
    experts : int
        Weights of all routed experts together; 0 without a mixture.
    expert_share : float
        Share of the experts that one token uses.
    head : int
        Weights of the language-model head.
    hidden, vocabulary : int
    layers : int
    attention_width : int
        Multiply-adds of one layer's attention for one pair of tokens: over all heads, the width of queries plus that of
        values.
    cache_width : int
        Numbers that the cache of keys and values holds, per token and layer.
    max_length : int
        Context in tokens.
    square_inputs : float
        Sum of in_features squared over the linear layers that one token goes through (what the Hessians cost it).
    cube_inputs, solve : int
        Sums of in_features cubed, and of out_features times in_features squared (what solving with the Hessian costs).
    """

    parameters: int
    dense: int
    experts: int
    expert_share: float
    head: int
    hidden: int
    vocabulary: int
    layers: int
    attention_width: int
    cache_width: int
    max_length: int
    square_inputs: float
    cube_inputs: int
    solve: int

    @property
    def active(self) -> float:
        """Weights of the layers' matrices that one token is multiplied with."""
        return self.dense + self.experts * self.expert_share


def model_shape(config: Any, *, max_length: int, trust_remote_code: bool = False) -> ModelShape:
    """Return the shape of the model that a configuration describes.

    Layers whose attention looks at a window only are counted as if it saw everything, so that the cost is an upper
    bound. State-space layers are not counted apart.

    Raises
    ------
    CheckpointError
        The configuration is not that of a causal language model.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, ImportError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"The configuration is not that of a causal language model: {error}") from error
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
        max_length=max_length,
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
