"""Settings of generation, the sequences that are generated, and how an answer ends."""

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Settings of generation. The defaults are ConSCompF's."""

    max_new_tokens: int = 128  # Length limit of an answer, in tokens
    temperature: float = 0.7  # Divides the logits; 0 means greedy decoding
    top_k: int = 50  # Only the k most probable tokens can be drawn; 0 means all
    top_p: float = 0.95  # Of these, only the smallest set whose probability reaches p can be drawn; in (0, 1]
    samples: int = 5  # Answers per prompt; 1 for greedy decoding
    seed: int = 42  # Seed of every draw
    batch_rows: int = 64  # Sequences per forward pass

    def __post_init__(self) -> None:
        for name, low in (("max_new_tokens", 1), ("top_k", 0), ("samples", 1), ("seed", 0), ("batch_rows", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}", got=getattr(self, name))
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError("temperature must be 0 or larger, and finite", got=self.temperature)
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError("top_p must lie in (0, 1]", got=self.top_p)
        if self.temperature == 0.0 and self.samples > 1:
            raise ConfigError(
                "Greedy decoding gives one answer per prompt",
                got=self.samples,
                fix="Set samples=1 or a temperature above 0",
            )


def uniforms(seed: int, prompt: str, sample: int, n: int) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) per token of a row: a function of (seed, prompt, sample) and of nothing else.

    So the order of the prompts, the batch size and the other rows cannot change them.
    """
    digest = hashlib.sha256(f"{seed}\n{sample}\n{prompt}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little"))).random(n)


@dataclass(eq=False)
class GenerationRow:
    """One sequence that is being generated."""

    prompt: list[int]  # Token ids of the prompt, and of the text generated so far
    temperature: float  # 0 for greedy
    u: npt.NDArray[np.float64]  # The row's random numbers; empty for greedy decoding; shape (max_new_tokens,)
    tokens: list[int] = field(default_factory=list)
    text: str = ""  # The decoded `tokens`, cut where the answer ends. Empty until then.
    done: bool = False  # Whether the answer is complete
    # The end token that has completed it; empty where a limit or a stop text did
    end: list[int] = field(default_factory=list)
    # The conversation that the prompt is rendered from; empty where it is a text
    messages: tuple[dict[str, str], ...] = ()

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    def restarted(self) -> "GenerationRow":
        """Return the row without any text."""
        return GenerationRow(self.prompt, self.temperature, self.u, messages=self.messages)

    def take(self, other: "GenerationRow") -> None:
        """Take over what was generated for this row elsewhere."""
        self.tokens, self.end, self.text, self.done = other.tokens, other.end, other.text, other.done


@dataclass
class Speed:
    """How fast tokens were generated, summed over calls. What an interrupted call had finished does not count."""

    n_tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """None where nothing was generated."""
        return self.n_tokens / self.seconds if self.n_tokens else None


class Ending:
    """Adds tokens to rows, and completes answers; `finished` is called for each.

    An answer is complete at an end token, which is left out; when its text holds one of `until`, at which the text is
    cut; or at `limit` tokens.
    """

    def __init__(
        self,
        tokenizer: Any,
        end_tokens: Collection[int],
        until: Sequence[str],
        limit: int,
        *,
        finished: Callable[[], Any] = lambda: None,
    ) -> None:
        self.end_tokens = frozenset(end_tokens)
        self._tokenizer = tokenizer
        self._until = until
        self._limit = limit
        self._finished = finished
        # Tokens that are decoded at each step: one per byte, and some that decode to nothing.
        self._window = max((len(end.encode()) for end in until), default=0) + 8

    def add(self, row: GenerationRow, token: int) -> None:
        ended = token in self.end_tokens
        if ended:
            row.end = [token]
        else:
            row.tokens.append(token)
        if ended or self._is_cut(row.tokens) or len(row.tokens) >= self._limit:
            text = self._text(row.tokens)
            row.text = text[: min((text.index(end) for end in self._until if end in text), default=None)]
            row.done = True
            self._finished()

    def _is_cut(self, tokens: Sequence[int]) -> bool:
        """Each step decodes the last tokens only. Their cut may cause a hit: then the complete text is checked."""
        return bool(self._until) and self._holds(tokens[-self._window :]) and self._holds(tokens)

    def _holds(self, tokens: Sequence[int]) -> bool:
        text = self._text(tokens)
        return any(end in text for end in self._until)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
