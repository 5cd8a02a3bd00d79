"""Lets transformers read a Mixtral from a GGUF file, where it is a Llama with experts."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from transformers import modeling_gguf_pytorch_utils as reading


class LlamaWithExperts(reading.LlamaTensorProcessor, reading.Qwen2MoeTensorProcessor):  # type: ignore[misc]
    """Reads the heads of a Llama, and the experts as those of a Qwen mixture, which have the same names in GGUF."""

    def process(self, weights: Any, name: str, **kwargs: Any) -> Any:
        of_experts = re.fullmatch(self.GGUF_MOE_WEIGHTS_PATTERN, name)
        kind = reading.Qwen2MoeTensorProcessor if of_experts else reading.LlamaTensorProcessor
        return kind.process(self, weights, name, **kwargs)


@cache
def register_mixtral() -> None:
    """Register Mixtral with transformers' GGUF reader (5.17), which knows neither its name nor its experts."""
    name_map = reading.get_gguf_hf_weights_map

    def with_mixtral(hf_model: Any, processor: Any, model_type: str | None = None, *args: Any, **kwargs: Any) -> Any:
        kind = model_type or hf_model.config.model_type
        return name_map(hf_model, processor, "llama" if kind == "mixtral" else kind, *args, **kwargs)

    reading.get_gguf_hf_weights_map = with_mixtral
    reading.TENSOR_PROCESSORS["llama"] = LlamaWithExperts
