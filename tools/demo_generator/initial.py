"""The model's starting weights: attention heads that look back and match, set by hand; everything else is random.

From random weights a model with four layers was still at chance after ten million tokens: that a letter stands two
tokens before the option that it names is of use only together with finding that option again, and the other way round,
so that neither is learned first. This start has the parts of that circuit:

- layer 0, heads 0 to 2 look one, two and three tokens back (positions are compared through constant embedding
  channels) and copy what they see into another subspace;
- layer 1, head 0 matches the current token with the copied previous ones (induction), head 1 matches the token three
  back with the options and reads the letter; in later layers head 0 matches like with like and reads the letter.

Training changes all of it.
"""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

CONSTANT = 16
"""Embedding channels with one value for every token: what position heads read."""
LEVEL = 1.7
SUBSPACE = 60
LOOK_BACK_PAIRS = 8
"""Fast rotary pairs that tell neighbouring positions apart."""
SLOW_FROM = 12
"""First rotary pair that turns slowly enough to match content at any distance."""


def _embed(embedding: Tensor, tokenizer: PreTrainedTokenizerFast, dice: torch.Generator) -> None:
    """Fill the embedding; a word with and without its leading blank begin alike."""
    embedding.normal_(0, 1.0, generator=dice)
    words = tokenizer.get_vocab()
    for word, index in sorted(words.items()):
        blank = words.get(f"\u0120{word}")
        if blank is not None:
            embedding[blank] = embedding[index] + 0.3 * torch.randn(embedding.shape[1], generator=dice)
    embedding[:, :CONSTANT] = LEVEL


def _look_back(attention: Any, head: int, distance: int, frequencies: Tensor) -> None:
    """Set queries and keys so that the rotary scores are highest `distance` tokens back, whatever stands there."""
    size = attention.head_dim
    query, key = attention.q_proj.weight, attention.k_proj.weight
    query[head * size : (head + 1) * size] = 0
    key[head * size : (head + 1) * size] = 0
    strength = 3.2 / (CONSTANT * LEVEL)
    for pair in range(LOOK_BACK_PAIRS):
        angle = -distance * frequencies[pair].item()
        row = head * size + pair
        key[row, :CONSTANT] = strength
        query[row, :CONSTANT] = strength * math.cos(angle)
        query[row + size // 2, :CONSTANT] = strength * math.sin(angle)


def _match(attention: Any, head: int, query_basis: Tensor, key_basis: Tensor, scale: float) -> None:
    """Let a head attend to positions whose `key_basis` coordinates equal the query's `query_basis` coordinates."""
    size = attention.head_dim
    half = size // 2
    slow = torch.tensor([*range(SLOW_FROM, half), *range(half + SLOW_FROM, size)])
    for weight, basis in ((attention.q_proj.weight, query_basis), (attention.k_proj.weight, key_basis)):
        weight[head * size : (head + 1) * size] = 0
        weight[head * size + slow] = scale * basis[: len(slow)]


def _copy(attention: Any, head: int, source: Tensor, target: Tensor, gain: float) -> None:
    """Let a head copy what it attends to from one subspace into another."""
    size = attention.head_dim
    rows = slice(head * size, head * size + SUBSPACE)
    attention.v_proj.weight[head * size : (head + 1) * size] = 0
    attention.v_proj.weight[rows] = source
    attention.o_proj.weight[:, head * size : (head + 1) * size] = 0
    attention.o_proj.weight[:, rows] = gain * target.T


@torch.no_grad()
def set_start(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Set the starting weights in place."""
    dice = torch.Generator().manual_seed(seed)
    width = model.config.hidden_size
    embedding = model.model.embed_tokens.weight
    _embed(embedding, tokenizer, dice)
    model.lm_head.weight.copy_(embedding * 0.04)
    model.lm_head.weight[:, :CONSTANT] = 0
    content = torch.linalg.qr(torch.randn(width - CONSTANT, width - CONSTANT, generator=dice))[0]
    basis = torch.zeros(width - CONSTANT, width)
    basis[:, CONSTANT:] = content
    spaces = [basis[SUBSPACE * part : SUBSPACE * (part + 1)] for part in range(4)]
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for weight, spread in (
            (attention.q_proj.weight, 0.03),
            (attention.k_proj.weight, 0.03),
            (attention.v_proj.weight, 0.03),
            (attention.o_proj.weight, 0.01),
            (mlp.gate_proj.weight, 0.05),
            (mlp.up_proj.weight, 0.05),
            (mlp.down_proj.weight, 0.01),
        ):
            weight.normal_(0, spread, generator=dice)
    first, second, *later = [layer.self_attn for layer in model.model.layers]
    frequencies = model.model.rotary_emb.inv_freq
    for head, distance in enumerate((1, 2, 3)):
        _look_back(first, head, distance, frequencies)
        _copy(first, head, spaces[head], spaces[head + 1], 1.0)
    _match(second, 0, spaces[0], spaces[1], 1.2)
    _copy(second, 0, spaces[0], spaces[0], 0.5)
    _match(second, 1, spaces[3], spaces[2], 1.2)
    _copy(second, 1, spaces[2], spaces[1], 0.7)
    for attention in later:
        _match(attention, 0, spaces[2], spaces[2], 0.8)
        _copy(attention, 0, spaces[2], spaces[1], 0.5)
