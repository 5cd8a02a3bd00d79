"""Converts models with Llama's computation and another name (Mistral, Qwen2) to a Llama."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlflow_compress.errors import UnsupportedError

if TYPE_CHECKING:
    from mlflow_compress.models.source_model import SourceModel

_SHARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def require_whole_context(source: SourceModel) -> None:
    """Raise `UnsupportedError` for a model with sliding-window attention that is shorter than its context."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        source.folder, trust_remote_code=source.trust_remote_code, local_files_only=True
    )
    window = getattr(config, "sliding_window", None)
    if window is not None and window < source.max_length:
        raise UnsupportedError(
            "Sliding-window attention is not supported here",
            allowed=f"no window, or one of the context's {source.max_length} tokens",
            got=f"sliding_window={window}",
        )


def as_llama(model: Any) -> Any:
    """Return a Llama that computes the same as a Mistral or Qwen2 without sliding windows; it shares the parameters.

    In Qwen2, query, key and value have biases and the output projection has none. A Llama has all four or none, so the
    output projection gets a bias of zero. A Llama is returned as it is.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if model.config.model_type == "llama":
        return model
    config, state = model.config, model.state_dict()
    biases = "model.layers.0.self_attn.q_proj.bias" in state
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shared = {name: getattr(config, name) for name in _SHARED}
    with torch.device("meta"):
        llama = LlamaForCausalLM(LlamaConfig(**shared, head_dim=head_dim, attention_bias=biases))
    for name, layer in llama.model.layers.named_modules():
        if biases and name.endswith("o_proj"):
            state[f"model.layers.{name}.bias"] = torch.zeros(layer.out_features, dtype=model.dtype, device=model.device)
    llama.load_state_dict(state, assign=True)
    llama.tie_weights()
    llama.model.rotary_emb = model.model.rotary_emb
    llama.config._attn_implementation = config._attn_implementation
    llama.generation_config = model.generation_config
    return llama.eval()
