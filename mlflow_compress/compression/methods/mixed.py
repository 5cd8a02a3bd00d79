"""Mixed precision: every linear layer gets the format that a recipe gives it, in one checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow_compress.compression import gguf_model
from mlflow_compress.compression.backends import llmcompressor_backend as backend
from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest
from mlflow_compress.compression.gguf_model import ForTensors
from mlflow_compress.compression.layers import ForLayers, cast_stored, save_and_measure
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
from mlflow_compress.compression.mixed_recipe import KEPT, LayerFormat, MixedRecipe
from mlflow_compress.errors import CheckpointError, ConfigError, UnsupportedError
from mlflow_compress.files import read_json_object
from mlflow_compress.models import gguf_file, stored_weights
from mlflow_compress.models.checkpoint_config import QUANTIZED_CACHE
from mlflow_compress.models.source_model import SourceModel
from mlflow_compress.paths import started_in

if TYPE_CHECKING:
    import torch

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
    A recipe can name the checkpoints that its layers are taken from: then nothing is quantized again.

    The cache of a layer can be rounded beside that, as by `kv-cache`: only this package reads it then.
    """

    name = "mixed"
    description = "Mixed precision: a format for every layer, by a recipe such as `search` writes"
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
            raise ConfigError("The recipe leaves every layer as it is", allowed="one format or more")
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
                raise UnsupportedError("A recipe has formats of linear layers only", got=f"{name} with embeddings")
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
        if config.content.made and not quantize_each_layer_alone(methods.values(), source):
            raise UnsupportedError(
                "Layers of these methods cannot be taken from other checkpoints",
                allowed="methods of llm-compressor that change one layer at a time, in models without experts",
                got=", ".join(sorted(methods)),
                fix="Take 'made' out of the recipe: then all layers are quantized anew",
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
        if content.made:
            return _put_together(job, content, formats)
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


def quantize_each_layer_alone(methods: Iterable[Method[Any]], source: SourceModel) -> bool:
    """Return whether a layer from a finished checkpoint of such a method is what it was there."""
    return not source.experts and all(isinstance(one, ForLayers) and not one.rescales for one in methods)


def _put_together(job: CompressionJob[MixedConfig], content: MixedRecipe, formats: Mapping[str, LayerFormat]) -> Logits:
    """Take each layer from the finished checkpoint of its format; return the logits of all of them in the baseline.

    So what was measured of the layers is what is stored. Calibrated anew, they would be others: each sees what the
    layers before have become.
    """
    from mlflow_compress.models.loading import LoadConfig, load_model

    if job.offload is not None:
        raise UnsupportedError(
            "Layers are taken from other checkpoints in memory only",
            got="device=balanced",
            fix="Take 'made' out of the recipe: then all layers are quantized anew",
        )
    model = job.source.load(job.device)
    tensors: dict[str, torch.Tensor] = {}
    groups: dict[str, dict[str, Any]] = {}
    described: dict[str, Any] = {}
    for name, one in formats.items():
        folder, layers = _made(job, content.made[name], one), frozenset(content.layers_of(name))
        options = LoadConfig(path=str(folder), device=job.device, trust_remote_code=job.source.trust_remote_code)
        loaded = load_model(options).model
        for layer in layers:
            model.set_submodule(layer, loaded.get_submodule(layer))
        tensors |= stored_weights.read_tensors(folder, layers.__contains__)
        described = read_json_object(folder / "config.json", error=CheckpointError)["quantization_config"]
        (group,) = described["config_groups"].values()
        groups[f"group_{len(groups)}"] = {**group, "targets": sorted(layers)}
    others = job.source.linear.keys() - set(content.layers_of(KEPT))
    tensors |= stored_weights.read_tensors(job.source.folder, lambda module: module not in others)
    job.round_cache(model)
    logits = job.probe.logits(model)
    kinds = {group["format"] for group in groups.values()}
    model.config.quantization_config = {
        **described,
        "config_groups": groups,
        "format": kinds.pop() if len(kinds) == 1 else "mixed-precision",
        "ignore": [*job.source.ignored, *content.layers_of(KEPT)],
    }
    cast_stored(model, job.source.torch_dtype)  # what the configuration says of the other tensors
    model.save_pretrained(job.folder, state_dict=tensors, save_original_format=False)
    job.source.save_others(job.folder)
    return logits


def _made(job: CompressionJob[MixedConfig], name: str, wanted: LayerFormat) -> Path:
    """Return the folder of a finished checkpoint, which must be of this model and format."""
    folder = job.folder.parent / name
    if not folder.is_dir():
        raise ConfigError(
            "The recipe takes layers from a checkpoint that is not there",
            got=str(folder),
            fix=f"Make it ({wanted.method}), or take 'made' out of the recipe: then all layers are quantized anew",
        )
    manifest = CheckpointManifest.read(folder)
    ours = {key: value for key, value in wanted.config.settings().items() if key not in CalibratedConfig.model_fields}
    stored = {key: manifest.settings.get(key) for key in ours}
    same_base = manifest.base_weights_hash == stored_weights.hash_weights(job.source.folder)[1]
    if (manifest.method, stored, same_base) != (wanted.method, json.loads(json.dumps(ours)), True):
        raise ConfigError(
            "The recipe takes layers from a checkpoint of another model or format",
            allowed=f"{wanted.method} {ours} of {job.source.name}",
            got=f"{manifest.method} {stored} of {manifest.base_model}",
        )
    return folder


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
        path = job.folder / gguf_file.FILE
        tensors = gguf_model.tensors_of(model, kind_of)
        gguf_model.save(job, model, gguf.LlamaFileType[file_type], tensors, path)
        return gguf_model.file_logits(job, model, path)
    matrices = {f"{layer}.weight": model.get_submodule(layer).weight for layer in content.layers}
    by_tensor = {gguf_model.gguf_name(name, model.config): kind_of(name, p).name for name, p in matrices.items()}
    return quantized_logits(job, model, file_type, importance or None, pure=True, types=by_tensor)
