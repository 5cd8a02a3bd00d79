"""Models that decode elsewhere, and the choice between them and a model in this process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol, cast

from mlflow_compress.scoring.generation.decoding import decode
from mlflow_compress.scoring.generation.generation_rows import AnsweringModel, CausalLM, GenerationRow, Speed
from mlflow_compress.scoring.generation.sampling import GenerationConfig


class RemoteCausalLM(AnsweringModel, Protocol):
    """Interface of a model that is not in this process, and decodes where it is (`cluster.remote_model`)."""

    def decode(
        self,
        rows: Sequence[GenerationRow],
        config: GenerationConfig,
        *,
        until: Sequence[str],
        end_tokens: Collection[int],
        label: str,
        after_shard: Callable[[], None] = lambda: None,
        speed: Speed | None = None,
    ) -> None:
        """Generate the answers of all rows in place, as `decoding.decode` does."""


AnyCausalLM = CausalLM | RemoteCausalLM


def decoder(loaded: AnyCausalLM) -> Callable[..., None]:
    """Return what decodes with this model: the model itself where it is elsewhere, `decode` in this process."""
    elsewhere = getattr(type(loaded), "decode", None)
    return partial(decode, cast(CausalLM, loaded)) if elsewhere is None else partial(elsewhere, loaded)
