"""Arguments with which transformers loads every checkpoint, including our own classes and formats, and GGUF files."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mlflow_compress.errors import CheckpointError, require_extra
from mlflow_compress.models import stored_weights
from mlflow_compress.models.architectures import packed_layers
from mlflow_compress.models.checkpoint_config import (
    COMPRESSED_TENSORS,
    OWN_FORMATS,
    QUANTIZED_CACHE,
    cache_settings,
    has_quantized_cache,
    is_native_gguf,
    quant_method,
    read_settings,
    weight_files,
)
from mlflow_compress.models.gguf_file import StoredTensor
from mlflow_compress.models.model_files import library_errors, open_config

_COMPRESSED = "compressed"  # the ``quantization_status`` of quantized tensors
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

        with library_errors(f"config.json cannot be read, because of its field {QUANTIZED_CACHE!r}", str(folder)):
            for settings in cache_settings(folder).values():
                quantized_cache.QuantizedCache.of_settings(settings)
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
    files = weight_files(folder)
    if not files or files[0].suffix != ".gguf":
        changed: dict[str, Any] = {}
        if method == COMPRESSED_TENSORS and files:
            tensors = stored_weights.read_headers(folder)
            label = settings["quantization_config"]
            status = _status_by_layout(tensors, label.get("quantization_status"))
            if status == _COMPRESSED:
                _require_format(label, tensors, folder)
            if status != label.get("quantization_status"):
                changed["quantization_status"] = status
            if any(map(_QUANTIZED_EXPERT.search, tensors)):
                from mlflow_compress.models.architectures import linear_experts  # imports torch

                _register_formats()
                changed["quant_method"] = linear_experts.QUANT_METHOD
        elif method in packed_layers.KERNELS:
            require_extra(
                packed_layers.GPTQMODEL_EXTRA,
                *packed_layers.GPTQMODEL_PACKAGES,
                by=f"The GPTQ or AWQ checkpoint {folder}",
            )
            changed = {"backend": packed_layers.KERNELS[method]}
        if not changed:
            return {"use_safetensors": True}
        config = open_config(folder, trust_remote_code=trust_remote_code)
        config.quantization_config |= changed
        return {"use_safetensors": True, "config": config}
    if is_native_gguf(folder):
        from mlflow_compress.models.architectures import native_gguf

        return native_gguf.loading_options(folder)
    if settings.get("model_type") == "mixtral":
        _register_mixtral()
    return {"gguf_file": files[0].name, "config": open_config(folder)}


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


def _status_by_layout(tensors: Mapping[str, StoredTensor], labelled: str | None) -> str | None:
    """Return the ``quantization_status`` with which transformers reads the quantized layers of these files right.

    transformers (5.17) reads quantized values as weights unless the label is "compressed", and multiplies weights by
    their scales if it is. The label that the files have is kept where it fits the tensors.
    """
    weights = [name.removesuffix("_scale") for name in tensors if name.endswith(".weight_scale")]
    if not weights:
        return labelled
    if any(name not in tensors or tensors[name].dtype not in stored_weights.STORED_DTYPES for name in weights):
        return _COMPRESSED
    return "frozen" if labelled == _COMPRESSED else labelled


def _require_format(label: Mapping[str, Any], tensors: Mapping[str, StoredTensor], folder: Path) -> None:
    """Refuse a format that packs weights where they are not packed, and the other way around.

    transformers would look for tensors of other names, and make the missing ones random or fail in doing so. It goes by
    the format of each group, or what the group's scheme suggests, and not by that of the complete checkpoint.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.config import CompressionFormat
    from compressed_tensors.quantization import QuantizationConfig
    from torch import nn

    names: dict[str, str] = {}  # by format, the name of the tensor that holds the weight
    with library_errors(
        "The checkpoint cannot be read as quantization_config in its config.json says",
        str(folder / "config.json"),
        fix="Correct that entry",
    ):
        groups = QuantizationConfig.model_validate(label).config_groups
    for scheme in groups.values():
        if scheme.weights is not None:
            kind = str(CompressionFormat(scheme.format or infer_module_format(nn.Linear, scheme)).value)
            params = BaseCompressor.get_value_from_registry(kind).compression_param_names(scheme)
            names[kind] = "weight_packed" if "weight_packed" in params else "weight"
    layers = [name.removesuffix("weight_scale") for name in tensors if name.endswith(".weight_scale")]
    for layer in layers:
        stored = "weight_packed" if f"{layer}weight_packed" in tensors else "weight"
        if names and stored not in names.values():
            raise CheckpointError(
                f"The quantized layers are not stored as the checkpoint's format says: the first has a {stored!r}",
                allowed=", ".join(f"{name!r} for {kind}" for kind, name in names.items()),
                got=f"{layer}{stored} in {folder}",
                fix="Correct `format` in the config_groups of config.json's quantization_config",
            )
