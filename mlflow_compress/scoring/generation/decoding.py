"""Decodes many sequences in batches and in stages, so that a few long answers do not keep a full batch running.

After each stage the finished rows leave the batch, and the others continue from their own text. Every stage is twice as
long as the one before. transformers' greedy search does the decoding, with our sampler in place of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from mlflow_compress.scoring.generation.sampling import GenerationConfig, RowSampler

_FIRST_STAGE = 32  # tokens of the first stage


class CausalLM(Protocol):
    """Interface of a loaded model (`models.loading.LoadedModel`), as far as generation uses it."""

    @property
    def model(self) -> Any:
        """The transformers model."""

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""

    @property
    def device(self) -> Any:
        """Device of the embeddings."""

    @property
    def max_length(self) -> int:
        """Context length in tokens."""

    @property
    def weights(self) -> str:
        """Hash of its weights."""

    @property
    def dtype(self) -> Any:
        """torch.dtype of its weights."""


@dataclass(eq=False)
class GenerationRow:
    """One sequence that is being generated.

    Attributes
    ----------
    prompt, tokens : list of int
        Token ids of the prompt, and of the text generated so far.
    temperature : float
        0 for greedy.
    u : numpy.ndarray, shape (max_new_tokens,)
        The row's random numbers; empty for greedy decoding.
    text : str
        The decoded `tokens`, cut where the answer ends.
    done : bool
        Whether the answer is complete.
    """

    prompt: list[int]
    temperature: float
    u: npt.NDArray[np.float64]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    done: bool = False


def decode(
    loaded: CausalLM,
    rows: Sequence[GenerationRow],
    config: GenerationConfig,
    *,
    until: Sequence[str] = (),
    end_tokens: Collection[int] = (),
    label: str = "generate",
    after_batch: Callable[[], None] = lambda: None,
) -> None:
    """Generate tokens for every row until it is done, in place. Rows that are already done stay as they are.

    A row is done at an end token (the checkpoint's, the tokenizer's, or one of `end_tokens`), when its text holds
    one of `until`, or at `config.max_new_tokens`. `label` names the progress bar. `after_batch` is called after each
    batch of each stage.
    """
    from tqdm import tqdm

    ends = _end_tokens(loaded) | set(end_tokens)
    stage, grown = _FIRST_STAGE, 0
    with (
        _own_settings(loaded, ends),
        torch.inference_mode(),
        tqdm(total=len(rows), desc=label, unit="answer", disable=None, leave=False) as bar,
    ):
        waiting = [row for row in rows if not row.done]
        bar.update(len(rows) - len(waiting))
        while waiting:
            step = min(stage, config.max_new_tokens - grown)
            waiting.sort(key=lambda row: len(row.prompt) + len(row.tokens))
            for start in range(0, len(waiting), config.batch_rows):
                batch = waiting[start : start + config.batch_rows]
                _grow(loaded, batch, config, step, ends, until)
                bar.update(sum(row.done for row in batch))
                after_batch()
            grown, stage = grown + step, 2 * stage
            waiting = [row for row in waiting if not row.done]


def _grow(
    loaded: CausalLM,
    batch: Sequence[GenerationRow],
    config: GenerationConfig,
    step: int,
    ends: set[int],
    until: Sequence[str],
) -> None:
    """Add up to `step` tokens to every row of one left-padded batch."""
    length = max(len(row.prompt) + len(row.tokens) for row in batch)
    ids = torch.zeros((len(batch), length), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(batch):
        sequence = row.prompt + row.tokens
        ids[i, length - len(sequence) :] = torch.tensor(sequence)
        mask[i, length - len(sequence) :] = 1
    extra: dict[str, Any] = {}
    if any(row.temperature > 0 for row in batch):
        u = np.zeros((len(batch), config.max_new_tokens))
        for i, row in enumerate(batch):
            u[i, : len(row.u)] = row.u
        sampler = RowSampler(
            u,
            [row.temperature for row in batch],
            [len(row.tokens) for row in batch],
            prompt_length=length,
            config=config,
            device=loaded.device,
        )
        extra["logits_processor"] = [sampler]
    if until:
        extra["stopping_criteria"] = [_Until(loaded.tokenizer, batch, until, prompt_length=length)]
    out = loaded.model.generate(
        input_ids=ids.to(loaded.device), attention_mask=mask.to(loaded.device), max_new_tokens=step, **extra
    )
    for row, new in zip(batch, out[:, length:].tolist(), strict=True):
        _accept(loaded.tokenizer, row, new, config.max_new_tokens, ends, until)


def _accept(
    tokenizer: Any, row: GenerationRow, new: Sequence[int], limit: int, ends: set[int], until: Sequence[str]
) -> None:
    """Append tokens up to an end token, cut the text at the first of `until`, and set `done`."""
    for token in new:
        if token in ends:
            row.done = True
            break
        row.tokens.append(token)
    row.text = _text(tokenizer, row.tokens)
    if _holds(row.text, until):
        shortest = next(n for n in range(1, len(row.tokens) + 1) if _holds(_text(tokenizer, row.tokens[:n]), until))
        del row.tokens[shortest:]  # the batch may have gone on for other rows
        row.text = row.text[: min(row.text.index(end) for end in until if end in row.text)]
        row.done = True
    row.done = row.done or len(row.tokens) >= limit


def _holds(text: str, until: Sequence[str]) -> bool:
    return any(end in text for end in until)


def _text(tokenizer: Any, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class _Until:
    """Stopping criterion: a row is finished when its new text contains one of several strings."""

    def __init__(
        self, tokenizer: Any, batch: Sequence[GenerationRow], until: Sequence[str], *, prompt_length: int
    ) -> None:
        self._tokenizer = tokenizer
        self._before = [list(row.tokens) for row in batch]
        self._until = until
        self._window = (
            max(len(end.encode()) for end in until) + 8
        )  # tokens that are decoded: one per byte, and some that decode to nothing
        self._prompt_length = prompt_length
        self._found = [False] * len(batch)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        for i, new in enumerate(input_ids[:, self._prompt_length :].tolist()):
            if not self._found[i]:
                tokens = self._before[i] + new
                # Each step decodes the last tokens only. Their cut may cause a hit: then the complete text is checked.
                self._found[i] = _holds(_text(self._tokenizer, tokens[-self._window :]), self._until) and (
                    _holds(_text(self._tokenizer, tokens), self._until)
                )
        return torch.tensor(self._found, device=input_ids.device)


def _end_tokens(loaded: CausalLM) -> set[int]:
    """Return the end tokens of the checkpoint and of its tokenizer."""
    named = getattr(loaded.model.generation_config, "eos_token_id", None)
    ends = set(named if isinstance(named, list) else [] if named is None else [named])
    if loaded.tokenizer.eos_token_id is not None:
        ends.add(loaded.tokenizer.eos_token_id)
    return ends


@contextmanager
def _own_settings(loaded: CausalLM, ends: set[int]) -> Iterator[None]:
    """Within this block, replace the checkpoint's generation settings, which `generate` would merge into ours."""
    from transformers import GenerationConfig as Settings

    original = loaded.model.generation_config
    # Padding is where the mask is 0, or after an end token: any id will do.
    loaded.model.generation_config = Settings(eos_token_id=sorted(ends) or None, pad_token_id=min(ends, default=0))
    try:
        yield
    finally:
        loaded.model.generation_config = original
