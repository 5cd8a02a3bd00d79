"""Mixed precision: every linear layer gets the format that a recipe gives it, in one checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow_compress.compression import gguf_model
from mlflow_compress.compression.backends import llmcompressor_backend as backend
from mlflow_compress.compression.gguf_model import ForTensors
from mlflow_compress.compression.layers import ForLayers, save_and_measure
from mlflow_compress.compression.method import (
    METHODS,
    CalibratedConfig,
    CompressionJob,
    Logits,
    Method,
    method_config,
    register,
)
from mlflow_compress.compression.methods.gguf import Gguf
from mlflow_compress.compression.methods.gguf_k import quantized_logits
from mlflow_compress.compression.methods.kv_cache import KvCache, KvCacheConfig, quantized_cache
from mlflow_compress.compression.mixed_recipe import LayerFormat, MixedRecipe
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.models import gguf_file
from mlflow_compress.models.checkpoint_config import QUANTIZED_CACHE
from mlflow_compress.models.source_model import SourceModel
from mlflow_compress.paths import started_in

if TYPE_CHECKING:
    pass

RECIPE_FILE = "mixed_recipe.json"
"""The recipe's copy in the checkpoint."""


class MixedConfig(CalibratedConfig):
    """Settings of `mixed`."""

    recipe: str = ""  # JSON file with the format of every layer: see `docs/how-to/search.md`

    @cached_property
    def content(self) -> MixedRecipe:
        """The recipe, read from its file once."""
        if not self.recipe:
            raise ConfigError(
                "Method 'mixed' needs a recipe", allowed="a JSON file", fix="Give method_args=recipe=FILE"
            )
        return MixedRecipe.read(Path(started_in()) / Path(self.recipe).expanduser())  # stages run in other folders

    @cached_property
    def formats(self) -> dict[str, LayerFormat]:
        shared = {name: getattr(self, name) for name in CalibratedConfig.model_fields}
        return self.content.parsed(shared)

    @cached_property
    def caches(self) -> dict[int, KvCacheConfig]:
        """Settings of the cache of every layer that has one."""
        configs = {layer: method_config(KvCache.name, **settings) for layer, settings in self.content.cache.items()}
        if wrong := [layer for layer in configs if not layer.isdecimal()]:
            raise ConfigError("The recipe has a cache of an unknown layer", allowed="numbers from 0", got=wrong[0])
        return {int(layer): config for layer, config in configs.items() if isinstance(config, KvCacheConfig)}

    def settings(self) -> dict[str, Any]:
        """Return the settings, with the hash of the recipe's content in place of its path."""
        content = hashlib.sha256(self.content.text.encode()).hexdigest() if self.recipe else ""
        return {**super().settings(), "recipe": content}


@register
class Mixed(Method[MixedConfig]):
    """Several formats in one checkpoint: config groups of compressed-tensors, or types of tensors in a GGUF file.

    Methods of llm-compressor can be combined, but for `awq`, which rescales neighbouring layers together. The layers
    of one method are quantized in one pass: `gptq` sees what the layers before have become, whatever their format.
    Methods that write GGUF can be combined with each other; K-quants are written by llama.cpp's own quantizer.

    The cache of a layer can be rounded beside that, as by `kv-cache`: only this package reads it then.
    """

    name = "mixed"
    description = "Mixed precision: one format per layer, from a recipe such as `search` writes"
    reference = "https://github.com/vllm-project/llm-compressor (config groups); arXiv 2411.17525 for the idea"
    format = "compressed-tensors (mixed-precision)"
    Config = MixedConfig
    runs_in = ("vLLM (8 and 4 bit)", "llama.cpp (gguf formats)")
    by_class = True
    needs_calibration = True
    requires = ("llmcompressor",)

    def label(self, config: MixedConfig) -> str:
        """Return ``mixed-NAME``, with the name of the recipe's file."""
        return f"{self.name}-{re.sub(r'[^A-Za-z0-9.]+', '-', Path(config.recipe).stem) or 'none'}"

    def format_of(self, config: MixedConfig) -> str:
        """Return GGUF, or the format of compressed-tensors that all config groups have, or that of mixed formats."""
        stored_formats = {METHODS.get(one.method).format_of(one.config) for one in config.formats.values()}
        stored = self.format if len(stored_formats) > 1 else stored_formats.pop() if stored_formats else "safetensors"
        return f"{stored}, {QUANTIZED_CACHE}" if config.caches else stored

    def packed(
        self, config: MixedConfig, layers: Mapping[str, tuple[int, int]]
    ) -> list[tuple[int, int | str, Mapping[str, tuple[int, int]]]]:
        return [
            part
            for name, one in config.formats.items()
            for part in METHODS.get(one.method).packed(
                one.config, {layer: layers[layer] for layer in config.content.layers_of(name) if layer in layers}
            )
        ]

    def rounds(self, config: MixedConfig) -> bool:
        return any(METHODS.get(one.method).rounds(one.config) for one in config.formats.values())

    def check(self, config: MixedConfig, source: SourceModel) -> None:
        config.content.require_layers(source.linear)
        if not config.formats and not config.caches:
            raise ConfigError("The recipe changes no layer", allowed="one format or more")
        if wrong := [layer for layer in config.caches if layer >= source.layers]:
            raise ConfigError(
                "The recipe has a cache of an unknown layer", allowed=f"0 to {source.layers - 1}", got=wrong[0]
            )
        for cache in config.caches.values():
            METHODS.get(KvCache.name).check(cache, source)
        if config.caches and any(getattr(one.config, "native", False) for one in config.formats.values()):
            raise UnsupportedError("llama.cpp does not round the caches of a recipe", got="native=true")
        methods = {one.method: METHODS.get(one.method) for one in config.formats.values()}
        for name, one in config.formats.items():
            method = methods[one.method]
            other_backend = getattr(one.config, "backend", "llmcompressor") != "llmcompressor"
            if other_backend or not isinstance(method, ForLayers | ForTensors):
                raise UnsupportedError(
                    f"Method {one.method!r} cannot be applied to some layers only",
                    allowed=[key for key, known in METHODS.items() if isinstance(known, ForLayers | ForTensors)],
                    got=name,
                )
            method.require_backend(one.config)

            if getattr(one.config, "embeddings", False):
                raise UnsupportedError("A recipe has formats for linear layers only", got=f"{name} with embeddings")
            layers = {layer: source.linear[layer] for layer in config.content.layers_of(name)}
            method.check(one.config, replace(source, linear=layers))
            if isinstance(method, ForTensors):
                method.tensor_type(one.config)
        tensors = [name for name, method in methods.items() if isinstance(method, ForTensors)]
        alone = [name for name, method in methods.items() if getattr(method, "rescales", name in tensors)]
        if alone and len(methods) > 1 and len(tensors) < len(methods):
            raise UnsupportedError(
                f"Method {alone[0]!r} cannot share a checkpoint with other methods",
                got=", ".join(sorted(methods)),
                fix="Give formats of one method, such as awq:3,awq:4, or of GGUF only",
            )
        per_format = ("bits", "group_size", "symmetric", "scheme", "activations")
        seen: dict[str, tuple[str, dict[str, Any]]] = {}
        for name, one in config.formats.items():
            shared = {key: value for key, value in one.config.settings().items() if key not in per_format}
            first, expected = seen.setdefault(one.method, (name, shared))
            if shared != expected:
                raise ConfigError(
                    f"Formats of {one.method!r} differ in more than {', '.join(per_format)}",
                    allowed=f"as in {first}: {expected}",
                    got=shared,
                )

    def compress(self, job: CompressionJob[MixedConfig]) -> Logits:
        """Quantize every layer in its format, and keep a copy of the recipe in the checkpoint."""
        content, formats = job.config.content, job.config.formats
        content.write(job.folder / RECIPE_FILE)
        caches = {layer: quantized_cache(cache, job.source) for layer, cache in job.config.caches.items()}
        job = replace(job, caches=caches)
        if not formats:
            model = job.source.load(job.device)
            job.round_cache(model)
            return save_and_measure(job, model)
        if any(isinstance(METHODS.get(one.method), ForTensors) for one in formats.values()):
            return _as_gguf(job, content, formats)
        methods = {one.method: METHODS.get(one.method) for one in formats.values()}
        if not any(method.needs_calibration for method in methods.values()):
            job = replace(job, calibration=None)
        with contextlib.ExitStack() as guards:
            for method in methods.values():
                assert isinstance(method, ForLayers)  # `check`
                guards.enter_context(method.guarded())
            rescales = any(getattr(method, "rescales", False) for method in methods.values())
            return backend.run_oneshot(job, lambda: _modifiers(job.source, content, formats), rescales=rescales)


def _modifiers(source: SourceModel, content: MixedRecipe, formats: dict[str, LayerFormat]) -> list[object]:
    together: list[object] = []
    for method_name in sorted({one.method for one in formats.values()}):
        method = METHODS.get(method_name)
        assert isinstance(method, ForLayers)
        mine = {name: one for name, one in formats.items() if one.method == method_name}
        layers = {layer for name in mine for layer in content.layers_of(name)}
        schemes = {
            re.sub(r"\W", "_", name): method.scheme(one.config, content.layers_of(name)) for name, one in mine.items()
        }
        others = [layer for layer in source.linear if layer not in layers]
        together += method.modifiers(next(iter(mine.values())).config, source, schemes, [*source.ignored, *others])
    return together


def _as_gguf(job: CompressionJob[Any], content: MixedRecipe, formats: dict[str, LayerFormat]) -> Logits:
    """Write a GGUF file with a type for every tensor, and return its logits."""
    import gguf

    first: Any = next(iter(formats.values())).config
    job = replace(job, config=first)
    model = gguf_model.load_llama_like(job.source, job.device)
    plain = gguf_model.plain_kind(job.source.dtype)
    types: dict[str, str] = {}  # by parameter
    importance: dict[str, Any] = {}  # by GGUF's name
    file_types: Counter[str] = Counter()
    for name, one in formats.items():
        method = METHODS.get(one.method)
        assert isinstance(method, ForTensors)  # `check`
        mine = [f"{layer}.weight" for layer in content.layers_of(name)]
        types |= dict.fromkeys(mine, method.tensor_type(one.config))
        file_types[method.file_type(one.config)] += len(mine)
        if weighted := method.importance(job, model):
            names = {gguf_model.gguf_name(parameter, model.config) for parameter in mine}
            importance |= {tensor: values for tensor, values in weighted.items() if tensor in names}
    file_type = file_types.most_common(1)[0][0]
    job.round_cache(model)

    def kind_of(name: str, parameter: Any) -> Any:
        return gguf.GGMLQuantizationType[types[name]] if name in types else plain(parameter)

    if all(one.method == Gguf.name for one in formats.values()):
        path = job.folder / gguf_file.GGUF_FILE
        tensors = gguf_model.tensors_of(model, kind_of)
        gguf_model.save(job, model, gguf.LlamaFileType[file_type], tensors, path)
        return gguf_model.file_logits(job, model, path)
    matrices = {f"{layer}.weight": model.get_submodule(layer).weight for layer in content.layers}
    by_tensor = {gguf_model.gguf_name(name, model.config): kind_of(name, p).name for name, p in matrices.items()}
    return quantized_logits(job, model, file_type, importance or None, pure=True, types=by_tensor)
