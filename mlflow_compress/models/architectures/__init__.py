"""Arguments with which transformers loads every checkpoint, including our own classes and formats, and GGUF files."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow_compress.errors import CheckpointError, require_extra
from mlflow_compress.files import read_json_object
from mlflow_compress.models.architectures import packed_layers

SAFETENSORS, GGUF = "*.safetensors", "*.gguf"

GGUF_NATIVE = "native_gguf"
"""Flag in the ``config.json`` of a GGUF checkpoint; true where llama.cpp computes the logits."""

GGUF_NATIVE_CACHE = "native_gguf_cache"
"""Types of the keys and of the values in llama.cpp's cache, in the same file; 16-bit floats where it is missing."""

OWN_FORMATS = HQQ_PACKED, NOISY_LOGITS = "hqq_packed", "noisy_logits"
"""Values of ``quant_method`` in our own checkpoints (module `own_formats`)."""

QUANTIZED_CACHE = "quantized_cache"
"""Entry of ``config.json``: by the number of a layer, how its keys and values are rounded (module `quantized_cache`).

It is beside the weights' ``quantization_config``, whatever that is. Only this package reads it.
"""

CACHE_IGNORED = "Other loaders, transformers among them, ignore rounded caches without a warning"
"""What is said of a checkpoint with that entry where it is made."""

CACHE_ATTENTION = "sdpa_quantized_cache"
"""Name in transformers of the attention that rounds keys and values as that entry says."""

COMPRESSED_TENSORS = "compressed-tensors"
"""``quant_method`` of the checkpoints that llm-compressor writes."""

_QUANTIZED_EXPERT = re.compile(r"\.experts\.\d+\.\w+\.weight_(packed|scale)$")


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files at the top of a checkpoint, sorted: safetensors, or GGUF where there are none.

    A single GGUF file is a checkpoint too.
    """
    if folder.suffix == ".gguf" and folder.is_file():
        return [folder]
    return sorted(folder.glob(SAFETENSORS)) or sorted(folder.glob(GGUF))


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
        from mlflow_compress.models.architectures.quantized_cache import register_attention  # imports torch

        register_attention()
        options["attn_implementation"] = CACHE_ATTENTION
    return options


def _weight_options(folder: Path, *, trust_remote_code: bool) -> dict[str, Any]:
    settings = _settings(folder)
    if settings.get("model_type") == "sliced_llama":
        from mlflow_compress.models.architectures.sliced_llama import register_sliced_llama

        register_sliced_llama()
    method = quant_method(folder)
    if method in OWN_FORMATS:
        register_formats()
    if method == packed_layers.BITSANDBYTES:
        require_extra(packed_layers.BITSANDBYTES, "bitsandbytes", by=f"The bitsandbytes checkpoint {folder}")
        packed_layers.import_offline()
    files = weight_files(folder)
    if method == COMPRESSED_TENSORS and _has_quantized_experts(files):
        from mlflow_compress.models.architectures import linear_experts  # imports torch

        register_formats()
        return {"use_safetensors": True, **linear_experts.loading_options(folder, trust_remote_code=trust_remote_code)}
    if not files or files[0].suffix != ".gguf":
        packed = packed_layers.gptq_awq_options(folder, method, trust_remote_code=trust_remote_code)
        return {"use_safetensors": True, **packed}
    if is_native_gguf(folder):
        from mlflow_compress.models.architectures import native_gguf

        return native_gguf.loading_options(folder)
    from transformers import AutoConfig

    if settings.get("model_type") == "mixtral":
        from mlflow_compress.models.architectures.mixtral_gguf import register_mixtral

        register_mixtral()
    return {"gguf_file": files[0].name, "config": AutoConfig.from_pretrained(folder, local_files_only=True)}


def attention(folder: Path) -> str | None:
    """Return transformers' name of the attention implementation that a model needs; None: transformers chooses.

    sdpa silently ignores soft-capping (transformers 5.17), so soft-capped models run with "eager".
    """
    return "eager" if _nested(folder, "attn_logit_softcapping") else None


def has_quantized_cache(folder: Path) -> bool:
    """Return whether this package rounds the keys and values of a checkpoint; other engines would not."""
    return bool(_nested(folder, QUANTIZED_CACHE))


def _nested(folder: Path, name: str) -> Any:
    """Return an entry of a checkpoint's ``config.json``, or of the text model's part of it; None without one."""
    settings = _settings(Path(folder))
    return settings.get(name) or (settings.get("text_config") or {}).get(name)


def quant_method(folder: Path) -> str | None:
    """Return the ``quant_method`` in a checkpoint's ``config.json``; None for weights that are not quantized."""
    method = (_settings(Path(folder)).get("quantization_config") or {}).get("quant_method")
    return str(method) if method else None


def is_native_gguf(folder: Path) -> bool:
    """Return whether llama.cpp computes this checkpoint's logits."""
    return bool(_settings(Path(folder)).get(GGUF_NATIVE))


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


def register_formats() -> None:
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


def _settings(folder: Path) -> dict[str, Any]:
    """Return ``config.json`` as a dictionary; empty where it cannot be read, which the loader reports later."""
    try:
        return read_json_object(folder / "config.json", error=CheckpointError)
    except CheckpointError:
        return {}
