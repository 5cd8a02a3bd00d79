"""What plain transformers must be told to load a checkpoint: model classes and formats of our own, and GGUF files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow_compress.errors import CheckpointError
from mlflow_compress.models.architectures import bnb_4bit, gptq_awq

SAFETENSORS, GGUF = "*.safetensors", "*.gguf"

GGUF_NATIVE = "native_gguf"
"""What the ``config.json`` of a GGUF checkpoint says true of where llama.cpp is to compute it."""

OWN_FORMATS = ("hqq_packed", "noisy_logits", "quantized_cache")
"""What our checkpoints name as ``quant_method`` in their configuration; a module here is behind each."""


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files at the top of a checkpoint, sorted: safetensors, or GGUF where there are none.

    A GGUF file by itself is a checkpoint too.
    """
    if folder.suffix == ".gguf" and folder.is_file():
        return [folder]
    return sorted(folder.glob(SAFETENSORS)) or sorted(folder.glob(GGUF))


def loading_options(folder: Path, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Return the arguments of `AutoModelForCausalLM.from_pretrained` that a checkpoint's files ask for.

    Our own model classes and formats become known to transformers on the way. A GGUF file takes its configuration from
    the ``config.json`` beside it, which says more than the file; its weights are expanded to plain floats, or, where
    that says so, llama.cpp itself computes (`native_gguf`). GPTQ and AWQ files ask for the plain kernel, whose layers
    `expand` then replaces, as it does with bitsandbytes' on a CPU.

    Raises
    ------
    MissingDependencyError
        The checkpoint is a GPTQ or AWQ file or for llama.cpp to compute, and the extra that does it is not installed.
    """
    folder = Path(folder)
    settings = _settings(folder)
    if settings.get("model_type") == "sliced_llama":
        from mlflow_compress.models.architectures.sliced_llama import register

        register()
    method = quant_method(folder)
    if method in OWN_FORMATS:
        register_formats()
    if method == bnb_4bit.QUANT_METHOD:
        bnb_4bit.import_offline()
    files = weight_files(folder)
    if not files or files[0].suffix != ".gguf":
        packed = gptq_awq.loading_options(folder, method, trust_remote_code=trust_remote_code)
        return {"use_safetensors": True, **packed}
    if is_native_gguf(folder):
        from mlflow_compress.models.architectures import native_gguf

        return native_gguf.loading_options(folder)
    from transformers import AutoConfig

    return {"gguf_file": files[0].name, "config": AutoConfig.from_pretrained(folder, local_files_only=True)}


def attention(folder: Path) -> str | None:
    """Return the attention kernel that a model folder asks for, as transformers names it; None leaves it its choice.

    Soft-capped attention is silently dropped by sdpa (transformers 5.17): such models run eager.
    """
    settings = _settings(Path(folder))
    nested = [settings, settings.get("text_config") or {}]
    return "eager" if any(part.get("attn_logit_softcapping") for part in nested) else None


def quant_method(folder: Path) -> str | None:
    """Return the format of a checkpoint's quantized weights as its ``config.json`` names it; None for plain weights."""
    method = (_settings(Path(folder)).get("quantization_config") or {}).get("quant_method")
    return str(method) if method else None


def is_native_gguf(folder: Path) -> bool:
    """Return whether llama.cpp itself computes this checkpoint."""
    return bool(_settings(Path(folder)).get(GGUF_NATIVE))


def expand(model: Any) -> None:
    """Replace packed layers, whose kernels would round activations as the processor decides, by plain linear ones.

    These are GPTQ's and AWQ's, and on a CPU those of bitsandbytes with 4 bits. The new ones hold what the file means.
    """
    gptq_awq.expand(model)
    bnb_4bit.expand(model)


def require_complete(info: Mapping[str, Any], folder: Path) -> None:
    """Raise `CheckpointError` where a checkpoint leaves parameters without values: transformers makes up random ones.

    Parameters
    ----------
    info : mapping
        What `from_pretrained` says with ``output_loading_info=True``.
    folder : Path
        The checkpoint, for the message.
    """
    broken = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if broken:
        raise CheckpointError(
            f"The checkpoint leaves {len(broken)} parameters of the model without values",
            got=f"{', '.join(broken[:3])} in {folder}",
        )


def register_formats() -> None:
    """Make transformers' loader know our own formats; a second call changes nothing."""
    from transformers.quantizers import auto

    from mlflow_compress.models.architectures.hqq_packed import HqqPackedConfig, HqqPackedQuantizer
    from mlflow_compress.models.architectures.noisy_logits import NoisyLogitsConfig, NoisyLogitsQuantizer
    from mlflow_compress.models.architectures.quantized_cache import QuantizedCacheConfig, QuantizedCacheQuantizer

    classes = (
        (HqqPackedConfig, HqqPackedQuantizer),
        (NoisyLogitsConfig, NoisyLogitsQuantizer),
        (QuantizedCacheConfig, QuantizedCacheQuantizer),
    )
    for name, (config, quantizer) in zip(OWN_FORMATS, classes, strict=True):
        if name not in auto.AUTO_QUANTIZER_MAPPING:
            auto.register_quantization_config(name)(config)
            auto.register_quantizer(name)(quantizer)


def _settings(folder: Path) -> dict[str, Any]:
    """Return ``config.json``; a folder without a readable one is left for the loader to complain about."""
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}
