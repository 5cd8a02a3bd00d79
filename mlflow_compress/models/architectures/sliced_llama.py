"""Llama with a rotated and narrower residual stream between its blocks: the architecture that SliceGPT makes."""

import copy
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


@strict
class SlicedLlamaConfig(LlamaConfig):  # type: ignore[misc]
    """Llama's configuration, and the width of the sliced residual stream.

    ``hidden_size`` stays the original width: the norms divide by it, and the head reads it.
    """

    model_type = "sliced_llama"
    sliced_size: int = 4096


class ScalelessRMSNorm(nn.Module):
    """``x / sqrt(sum(x^2) / full_size + eps)``: RMSNorm of the original width; its scale is in the next layers."""

    def __init__(self, full_size: int, eps: float) -> None:
        super().__init__()
        self.full_size, self.eps = full_size, eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise over the last axis, in float32 at least."""
        wide = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        mean_square = wide.square().sum(-1, keepdim=True) / self.full_size
        return (wide * torch.rsqrt(mean_square + self.eps)).to(hidden_states.dtype)


class SlicedLlamaDecoderLayer(LlamaDecoderLayer):  # type: ignore[misc]
    """A Llama layer on `sliced_size` channels; each of its two residual connections has a matrix.

    The last layer returns the original width.
    """

    def __init__(self, config: SlicedLlamaConfig, layer_idx: int) -> None:
        inner = copy.deepcopy(config)
        inner.hidden_size = config.sliced_size
        super().__init__(inner, layer_idx)
        self.self_attn.config = config
        last = layer_idx == config.num_hidden_layers - 1
        width = config.hidden_size if last else config.sliced_size
        if last:
            self.mlp.down_proj = nn.Linear(config.intermediate_size, width, bias=config.mlp_bias)
        self.input_layernorm = ScalelessRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = ScalelessRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn_shortcut = nn.Linear(config.sliced_size, config.sliced_size, bias=False)
        self.mlp_shortcut = nn.Linear(config.sliced_size, width, bias=False)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Run attention and MLP; each residual connection is multiplied by its shortcut matrix."""
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = self.attn_shortcut(hidden_states) + attended
        fed: torch.Tensor = self.mlp(self.post_attention_layernorm(hidden_states))
        shortcut: torch.Tensor = self.mlp_shortcut(hidden_states)
        return shortcut + fed


class SlicedLlamaModel(LlamaModel):  # type: ignore[misc]
    """The body: embeddings and layers have the sliced width, the final norm the original width."""

    config_class = SlicedLlamaConfig
    _no_split_modules = ["SlicedLlamaDecoderLayer"]  # noqa: RUF012

    def __init__(self, config: SlicedLlamaConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.sliced_size, self.padding_idx)
        self.layers = nn.ModuleList(SlicedLlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = ScalelessRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()


class SlicedLlamaForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """The causal language model; its head is never tied to the embeddings, which are narrower."""

    config_class = SlicedLlamaConfig
    _tied_weights_keys: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, config: SlicedLlamaConfig) -> None:
        super().__init__(config)
        self.model = SlicedLlamaModel(config)
        self.post_init()


def register_sliced_llama() -> None:
    """Register the architecture with `AutoConfig` and `AutoModelForCausalLM`; a second call changes nothing."""
    AutoConfig.register("sliced_llama", SlicedLlamaConfig, exist_ok=True)
    AutoModelForCausalLM.register(SlicedLlamaConfig, SlicedLlamaForCausalLM, exist_ok=True)
