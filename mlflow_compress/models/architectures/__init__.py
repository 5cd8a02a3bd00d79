"""Arguments with which transformers loads every checkpoint, including our own classes and formats, and GGUF files."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mlflow_compress.errors import CheckpointError, require_extra
from mlflow_compress.models.architectures import packed_layers
from mlflow_compress.models.checkpoint_config import (
    COMPRESSED_TENSORS,
    OWN_FORMATS,
    has_quantized_cache,
    is_native_gguf,
    quant_method,
    read_settings,
    weight_files,
)

_QUANTIZED_EXPERT = re.compile(r"\.experts\.\d+\.\w+\.weight_(packed|scale)$")


def loading_options(folder: Path, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Return the arguments of `AutoModelForCausalLM.from_pretrained` that a checkpoint's files ask for.

    Where needed, this also registers our own model classes, formats and attention with transformers. A rounded cache
    of keys and values is an attention implementation, so that it goes with weights of any format. The configuration of
    a GGUF file is the ``config.json`` next to it, which is more complete than the file. Its weights are expanded to
    floats; if the configuration has the flag `GGUF_NATIVE`, llama.cpp computes instead (`native_gguf`). GPTQ and AWQ
    files use the plain torch kernel, whose layers `packed_layers.expand` then replaces, as it does with those of
    bitsandbytes on a CPU. Quantized experts stay linear layers (`linear_experts`).
    """
    options = _weight_options(Path(folder), trust_remote_code=trust_remote_code)
    if has_quantized_cache(folder):
        from mlflow_compress.models.architectures import quantized_cache  # imports torch

        quantized_cache.register_attention()
        options["attn_implementation"] = quantized_cache.CACHE_ATTENTION
    return options


def _weight_options(folder: Path, *, trust_remote_code: bool) -> dict[str, Any]:
    settings = read_settings(folder)
    if settings.get("model_type") == "sliced_llama":
        from mlflow_compress.models.architectures.sliced_llama import register_sliced_llama

        register_sliced_llama()
    method = quant_method(folder)
    if method in OWN_FORMATS:
        _register_formats()
    if method == packed_layers.BITSANDBYTES:
        require_extra(packed_layers.BITSANDBYTES, "bitsandbytes", by=f"The bitsandbytes checkpoint {folder}")
        packed_layers.import_offline()
    from transformers import AutoConfig

    files = weight_files(folder)
    if not files or files[0].suffix != ".gguf":
        changed = {}
        if method == COMPRESSED_TENSORS and _has_quantized_experts(files):
            from mlflow_compress.models.architectures import linear_experts  # imports torch

            _register_formats()
            changed = {"quant_method": linear_experts.QUANT_METHOD}
        elif method in packed_layers.KERNELS:
            require_extra(packed_layers.EXTRA, *packed_layers.PACKAGES, by=f"The GPTQ or AWQ checkpoint {folder}")
            changed = {"backend": packed_layers.KERNELS[method]}
        if not changed:
            return {"use_safetensors": True}
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        config.quantization_config |= changed
        return {"use_safetensors": True, "config": config}
    if is_native_gguf(folder):
        from mlflow_compress.models.architectures import native_gguf

        return native_gguf.loading_options(folder)
    if settings.get("model_type") == "mixtral":
        _register_mixtral()
    return {"gguf_file": files[0].name, "config": AutoConfig.from_pretrained(folder, local_files_only=True)}


@cache
def _register_mixtral() -> None:
    """Let transformers' GGUF reader (5.17) take a Mixtral, which is a Llama with experts there.

    It knows neither its name nor its experts. They are read as those of a Qwen mixture, which have the same names.
    """
    from transformers import modeling_gguf_pytorch_utils as reading

    name_map = reading.get_gguf_hf_weights_map

    class LlamaWithExperts(reading.LlamaTensorProcessor, reading.Qwen2MoeTensorProcessor):  # type: ignore[misc]
        def process(self, weights: Any, name: str, **kwargs: Any) -> Any:
            of_experts = re.fullmatch(self.GGUF_MOE_WEIGHTS_PATTERN, name)
            kind = reading.Qwen2MoeTensorProcessor if of_experts else reading.LlamaTensorProcessor
            return kind.process(self, weights, name, **kwargs)

    def with_mixtral(hf_model: Any, processor: Any, model_type: str | None = None, *args: Any, **kwargs: Any) -> Any:
        kind = model_type or hf_model.config.model_type
        return name_map(hf_model, processor, "llama" if kind == "mixtral" else kind, *args, **kwargs)

    reading.get_gguf_hf_weights_map = with_mixtral
    reading.TENSOR_PROCESSORS["llama"] = LlamaWithExperts


def require_complete(info: Mapping[str, Any], folder: Path) -> None:
    """Raise `CheckpointError` where a checkpoint has no values for some parameters: transformers makes them random.

    `info` is what `from_pretrained` returns with ``output_loading_info=True``.
    """
    broken = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if broken:
        raise CheckpointError(
            f"The checkpoint has no values for {len(broken)} parameters of the model",
            got=f"{', '.join(broken[:3])} in {folder}",
        )


def _register_formats() -> None:
    """Register our own formats with transformers' loader; a second call changes nothing."""
    from transformers.quantizers import auto

    from mlflow_compress.models.architectures import linear_experts
    from mlflow_compress.models.architectures.own_formats import QUANTIZERS, OwnFormatConfig

    formats = {name: (OwnFormatConfig, quantizer) for name, quantizer in QUANTIZERS.items()}
    experts = (linear_experts.LinearExpertsConfig, linear_experts.LinearExpertsQuantizer)
    for name, (config, quantizer) in {**formats, linear_experts.QUANT_METHOD: experts}.items():
        if name not in auto.AUTO_QUANTIZER_MAPPING:
            auto.register_quantization_config(name)(config)
            auto.register_quantizer(name)(quantizer)


def _has_quantized_experts(files: list[Path]) -> bool:
    """Return whether weight files hold quantized matrices of single experts, which their headers say."""
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="np") as source:
            if any(map(_QUANTIZED_EXPERT.search, source.keys())):
                return True
    return False
