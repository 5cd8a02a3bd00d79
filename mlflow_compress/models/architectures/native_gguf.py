"""A GGUF checkpoint whose logits llama.cpp computes, with the interface of a transformers model."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from mlflow_compress.errors import CheckpointError, require_extra
from mlflow_compress.models.checkpoint_config import GGUF_NATIVE, GGUF_NATIVE_CACHE
from mlflow_compress.models.model_files import open_config
from mlflow_compress.transport.json_process import JsonProcess

WORKER = Path(__file__).with_name("llama_cpp_worker.py")


@strict
class NativeGgufConfig(PreTrainedConfig):  # type: ignore[misc]
    """The settings that scoring and generation read; everything else is in the GGUF file."""

    model_type = GGUF_NATIVE
    vocab_size: int = 0
    num_hidden_layers: int = 0
    max_position_embeddings: int = 0
    native_gguf_cache: list[str] | None = None


class NativeGgufForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """Logits of llama.cpp on the CPU: activations rounded to 8 bits in quantized products, keys and values in 16 bits.

    All settings but the cache's types are the defaults of llama.cpp's own programs, including flash attention where it
    is available. This
    object holds no weights: llama.cpp maps the file into a separate process, which ends with this object. Every row of
    a batch is decoded as a sequence of its own, without its padding.
    """

    config_class = NativeGgufConfig

    def __init__(self, config: NativeGgufConfig, file: Path) -> None:
        super().__init__(config)
        self.place = nn.Embedding(1, 1)  # gives device and dtype
        self.engine = _Engine(file, config.native_gguf_cache or ())
        self._grows = False
        if self.engine.vocabulary != config.vocab_size:
            raise CheckpointError(
                "The file has another vocabulary than config.json",
                allowed=str(config.vocab_size),
                got=self.engine.vocabulary,
            )

    @classmethod
    def from_pretrained(cls, folder: Any, *, config: Any, output_loading_info: bool = False, **_: Any) -> Any:
        """Open a checkpoint's file. Device and dtype arguments are ignored: llama.cpp has its own."""
        model = cls(config, next(iter(sorted(Path(folder).glob("*.gguf"))))).eval()
        model.name_or_path = config.name_or_path = str(folder)
        return (model, {"missing_keys": set(), "mismatched_keys": set()}) if output_loading_info else model

    def get_input_embeddings(self) -> nn.Module:
        """Return a placeholder on the device that token ids must be on."""
        return self.place

    def get_output_embeddings(self) -> None:
        """Return None: the head is llama.cpp's."""

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> CausalLMOutput:
        """Return float32 logits, shape (rows, tokens, vocabulary), 0 where the mask is.

        Zeros of `attention_mask` are at the beginning or end of a row. `past_key_values` other than None are a
        `NotImplementedError`: llama.cpp manages its caches itself. `logits_to_keep`: last positions to return; 0: all.
        """
        if past_key_values is not None or (attention_mask is not None and attention_mask.ndim != 2):
            raise NotImplementedError("llama.cpp keeps its caches itself and takes no mask")
        ids = input_ids.cpu().numpy()
        real = np.ones_like(ids, bool) if attention_mask is None else attention_mask.cpu().numpy().astype(bool)
        wanted = real.copy()
        wanted[:, : -logits_to_keep if logits_to_keep else 0] = False
        out = torch.zeros((*wanted.shape, self.config.vocab_size))
        out[torch.from_numpy(wanted)] = self.engine.logits(
            [row[r] for row, r in zip(ids, real, strict=True)],
            [np.flatnonzero(a[r]) for a, r in zip(wanted, real, strict=True)],
            reuse=self._grows,
        )
        return CausalLMOutput(logits=out[:, -logits_to_keep:] if logits_to_keep else out)

    def logits_at(self, sequences: Sequence[Any], rows: Sequence[Any]) -> torch.Tensor:
        """Return float32 logits at the positions `rows` of each sequence, in order, shape (k, vocabulary)."""
        return self.engine.logits(sequences, rows, reuse=False)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with transformers' search and llama.cpp's caches, which recognise the prefix of each row."""
        self._grows = True
        try:
            return super().generate(*args, **{**kwargs, "use_cache": False})
        finally:
            self._grows = False


class _Engine(JsonProcess):
    """Client of the worker process `llama_cpp_worker`."""

    ended = "ended"  # after "llama.cpp"

    def __init__(self, file: Path, cache_types: Sequence[str]) -> None:
        super().__init__([sys.executable, "-P", str(WORKER), str(file), str(torch.get_num_threads()), *cache_types])
        self._file, self._busy = str(file), False
        self.vocabulary = int(self._answer(None)[0]["vocabulary"])

    def logits(self, sequences: Sequence[Any], wanted: Sequence[Any], *, reuse: bool) -> torch.Tensor:
        """Return the logits at the wanted positions of each sequence, float32, shape (k, vocabulary)."""
        if self._busy:  # the next output would be the answer to an earlier request
            raise CheckpointError("llama.cpp was interrupted while it answered", fix="Load the checkpoint again")
        self._busy = True
        question = {"sequences": [s.tolist() for s in sequences], "wanted": [w.tolist() for w in wanted]}
        _, raw = self._answer({**question, "reuse": reuse})
        self._busy = False
        return torch.from_numpy(np.frombuffer(raw, np.float32).reshape(-1, self.vocabulary).copy())

    def _answer(self, question: dict[str, Any] | None) -> tuple[dict[str, Any], bytes]:
        """Return what the process answers; an error, or its end, is a `CheckpointError`."""
        answer, raw = self.ask(question)
        if "error" in answer:
            raise CheckpointError(f"llama.cpp {answer['error']}", got=self._file)
        return answer, raw


def loading_options(folder: Path) -> dict[str, Any]:
    """Return the arguments of `AutoModelForCausalLM.from_pretrained` for a checkpoint that llama.cpp computes."""
    require_extra("llama-cpp", "llama_cpp", by=f"The checkpoint {folder}, which is computed by llama.cpp,")
    AutoConfig.register(GGUF_NATIVE, NativeGgufConfig, exist_ok=True)
    AutoModelForCausalLM.register(NativeGgufConfig, NativeGgufForCausalLM, exist_ok=True)
    base = open_config(folder)
    names = (
        "vocab_size",
        "num_hidden_layers",
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
    values = {name: getattr(base, name) for name in names}
    cache = getattr(base, GGUF_NATIVE_CACHE, None)
    return {"config": NativeGgufConfig(**values, native_gguf_cache=cache, tie_word_embeddings=False)}


def open_native(folder: Path, cache_types: Sequence[str] | None = None) -> Any:
    """Open a checkpoint with transformers; `cache_types` go before those in its configuration."""
    options = loading_options(folder)
    if cache_types is not None:
        options["config"].native_gguf_cache = list(cache_types)
    return AutoModelForCausalLM.from_pretrained(folder, **options)
