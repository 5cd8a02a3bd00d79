"""Tokenize a stream of training documents and pack it into rows that all begin with the beginning of a document."""

import itertools
import random
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from .training_text import Kinds, documents
from .world import World


def token_documents(world: World, tokenizer: PreTrainedTokenizerFast, stream: str, kinds: Kinds) -> Iterator[list[int]]:
    """Yield tokenized training documents for ever; half of them start with the beginning-of-sequence token."""
    rng = random.Random(f"packing-{world.seed}-{stream}")
    texts = documents(world, stream, kinds=kinds)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    while True:
        drawn = [document for _, document in itertools.islice(texts, 1000)]
        for tokens in tokenizer(drawn)["input_ids"]:
            yield [*([bos] if rng.random() < 0.5 else []), *tokens, eos]


def packed(stream: Iterator[list[int]], lengths: tuple[int, ...], step_tokens: int) -> Iterator[NDArray[np.int64]]:
    """Yield one array of tokens per step for ever, of shape ``(n_rows, length)``; the lengths take turns."""
    for length in itertools.cycle(lengths):
        rows = []
        for _ in range(step_tokens // length):
            row: list[int] = []
            while len(row) < length:
                row += next(stream)
            rows.append(row[:length])
        yield np.asarray(rows, dtype=np.int64)
