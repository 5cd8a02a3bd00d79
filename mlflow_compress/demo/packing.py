"""Tokenize the training stream and pack it into rows that all begin with the beginning of a document."""

import itertools
import random
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from .tokenizer import CONTEXT
from .training_text import KINDS, WARM_UP, Maker, documents
from .world import World

STEP_TOKENS = 2048
"""Tokens of one optimizer step: rows of 256 while warming up, then of 512 and of the whole context length."""

LONG_ONE_IN = 4
"""After the warm-up, one step in this many has rows of the whole context length."""


def token_documents(
    world: World, tokenizer: PreTrainedTokenizerFast, stream: str, kinds: Mapping[str, tuple[float, Maker]]
) -> Iterator[list[int]]:
    """Yield tokenized training documents for ever; half of them start with the beginning-of-sequence token."""
    rng = random.Random(f"packing-{world.seed}-{stream}")
    texts = documents(world, stream, kinds=kinds)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    while True:
        drawn = [document for _, document in itertools.islice(texts, 1000)]
        for tokens in tokenizer(drawn)["input_ids"]:
            yield [*([bos] if rng.random() < 0.5 else []), *tokens, eos]


def packed_steps(world: World, tokenizer: PreTrainedTokenizerFast, warm_up_steps: int) -> Iterator[NDArray[np.int64]]:
    """Yield one array of tokens per step for ever, of shape ``(n_rows, length)``."""
    exercises = token_documents(world, tokenizer, "warm-up", WARM_UP)
    texts = token_documents(world, tokenizer, "training", KINDS)
    for step in itertools.count():
        warm = step < warm_up_steps
        length = CONTEXT // 4 if warm else CONTEXT if step % LONG_ONE_IN == 0 else CONTEXT // 2
        rows = []
        for _ in range(STEP_TOKENS // length):
            row: list[int] = []
            while len(row) < length:
                row += next(exercises if warm else texts)
            rows.append(row[:length])
        yield np.asarray(rows, dtype=np.int64)
