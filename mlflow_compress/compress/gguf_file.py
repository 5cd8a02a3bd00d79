"""GGUF files of Llama-like models: the names in them, writing one, and what one holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow_compress.compress.stored import StoredTensor
from mlflow_compress.errors import CheckpointError

FILE = "model.gguf"

_MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def to_gguf_name(name: str) -> str:
    """Return GGUF's name of a parameter: "model.layers.0.self_attn.q_proj.weight" -> "blk.0.attn_q.weight"."""
    module, _, kind = name.rpartition(".")
    if module in _MODEL:
        return f"{_MODEL[module]}.{kind}"
    _, _, index, part = module.split(".", 3)
    return f"blk.{index}.{_LAYER[part]}.{kind}"


def from_gguf_name(name: str) -> str:
    """Return transformers' name of a tensor, the inverse of `to_gguf_name`; unknown names come back as they are."""
    module, _, kind = name.rpartition(".")
    for ours, theirs in _MODEL.items():
        if module == theirs:
            return f"{ours}.{kind}"
    if module.startswith("blk."):
        _, index, part = module.split(".", 2)
        for ours, theirs in _LAYER.items():
            if part == theirs:
                return f"model.layers.{index}.{ours}.{kind}"
    return name


def write(
    path: Path, config: Any, architecture: str, file_type: int, tensors: Mapping[str, tuple[Any, Any]], tokenizer: Any
) -> None:
    """Write a GGUF file.

    Parameters
    ----------
    path : Path
        File to write.
    config : transformers configuration
        Where the sizes come from.
    architecture : str
        As GGUF names it: "llama", "qwen2" or "qwen3".
    file_type : int
        `gguf.LlamaFileType` of the weights.
    tensors : mapping
        GGUF name to raw data and `gguf.GGMLQuantizationType`.
    tokenizer : transformers tokenizer
        Its vocabulary goes into the file where it is a byte-level BPE.
    """
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_vocabulary(writer, tokenizer, config)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {_WORDS % "": "qwen2", _WORDS % "{1,3}": "llama-bpe"}
"""Patterns that split text before the merges, and llama.cpp's names of them."""


def pre_tokenizer_name(settings: Any) -> str | None:
    """Return what llama.cpp calls a tokenizer's way to split text before merging; None where no name is known here.

    Parameters
    ----------
    settings : dict or None
        ``pre_tokenizer`` of a ``tokenizer.json``.
    """
    steps = (settings or {}).get("pretokenizers", [settings or {}])
    kinds = [step.get("type") for step in steps]
    if kinds[-1:] != ["ByteLevel"]:
        return None
    if steps[-1].get("use_regex", True):
        digits = len(steps) == 2 and kinds[0] == "Digits" and steps[0].get("individual_digits")
        return "gpt-2" if len(steps) == 1 else "smollm" if digits else None
    if len(steps) == 2 and kinds[0] == "Split":
        return _SPLITS.get(steps[0].get("pattern", {}).get("Regex"))
    return None


def _add_vocabulary(writer: Any, tokenizer: Any, config: Any) -> None:
    """Add the vocabulary of a byte-level BPE whose way to split text llama.cpp knows, and that does not rewrite it.

    Any other is left out ("no_vocab": the engine takes token ids): llama.cpp would cut texts into other tokens.
    """
    import gguf

    backend = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {}
    split = pre_tokenizer_name(backend.get("pre_tokenizer"))
    rewritten = (backend.get("normalizer") or {"type": "NFC"})["type"] != "NFC"  # NFC leaves composed text as it is
    model = backend.get("model", {})
    # llama.cpp refuses a vocabulary without merges.
    if model.get("type") != "BPE" or not model.get("merges") or split is None or rewritten:
        writer.add_tokenizer_model("no_vocab")
        return
    tokens = {index: token for token, index in tokenizer.get_vocab().items()}
    special = {added["id"] for added in backend["added_tokens"] if added["special"]}
    kinds = gguf.TokenType
    names, types = [], []
    for index in range(config.vocab_size):
        names.append(tokens.get(index, f"[PAD{index}]"))
        known = kinds.CONTROL if index in special else kinds.NORMAL
        types.append(known if index in tokens else kinds.UNUSED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(names)
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    if tokenizer.eos_token_id is not None:
        writer.add_eos_token_id(tokenizer.eos_token_id)
    if tokenizer.unk_token_id is not None:
        writer.add_unk_token_id(tokenizer.unk_token_id)
    writer.add_add_bos_token(tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id])


def architecture(path: Path) -> str:
    """Return what a GGUF file calls its architecture; a broken file is a `CheckpointError`."""
    import gguf

    try:
        return str(gguf.GGUFReader(path).fields["general.architecture"].contents())
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"The weight file cannot be read: {error}", got=str(path)) from error


def read_headers(path: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a GGUF file by transformers' name; a broken file is a `CheckpointError`."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        return {
            from_gguf_name(t.name): StoredTensor(t.tensor_type.name, tuple(map(int, reversed(t.shape))), int(t.n_bytes))
            for t in reader.tensors
        }
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"The weight file cannot be read: {error}", got=str(path)) from error
