"""Removes decoder layers; used by the layer-drop methods."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlflow_compress.compression.method import CompressionJob, Method, MethodConfig, require_at_least
from mlflow_compress.compression.shared.dense import save_and_measure
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.models.source_model import SourceModel

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class LayerRemovalConfig(MethodConfig):
    """Settings of a method that removes decoder layers."""

    layers: int = 1
    """Number of decoder layers to remove."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for less than one layer."""
        require_at_least("layers", self.layers, 1)


class LayerRemovalMethod(Method):
    """A method that removes decoder layers; the checkpoint is a plain, shorter model of the same architecture."""

    format = "safetensors"
    runs_in = ("vLLM", "llama.cpp")
    linear_only = False

    def label(self, config: Any) -> str:
        """Return ``layer-drop-2``."""
        return f"{self.name}-{config.layers}"

    def check(self, config: Any, source: SourceModel) -> None:
        """Raise `ConfigError` if no layer would remain."""
        if config.layers >= source.layers:
            raise ConfigError(
                "More layers would be dropped than may be", allowed=f"1 to {source.layers - 1}", got=config.layers
            )


def decoder_layers(model: Any, source: SourceModel) -> torch.nn.ModuleList:
    """Return the model's decoder layers: the only list of modules with the model's number of layers."""
    from torch import nn

    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == source.layers]
    if len(found) != 1:
        raise UnsupportedError(
            f"The decoder layers cannot be distinguished from other lists of modules ({len(found)} candidates)",
            got=source.architecture,
        )
    return found[0]


def drop_and_save(job: CompressionJob, model: Any, dropped: Collection[int]) -> torch.Tensor:
    """Remove decoder layers and their entries in the configuration, save, and return the logits on the probe.

    The configuration records the numbers of the removed layers as ``dropped_layers``.
    """
    from torch import nn

    layers = decoder_layers(model, job.source)
    remaining = [index for index in range(len(layers)) if index not in dropped]
    config = model.config.get_text_config()
    for name, value in list(config.to_dict().items()):
        is_per_layer = isinstance(value, list) and len(value) == len(layers)  # for example layer_types
        if is_per_layer and name != "architectures" and not name.endswith("_token_id"):
            setattr(config, name, [value[index] for index in remaining])
    config.num_hidden_layers = len(remaining)
    config.dropped_layers = sorted(dropped)
    parent, name = next((m, n) for m in model.modules() for n, child in m.named_children() if child is layers)
    setattr(parent, name, nn.ModuleList(layers[index] for index in remaining))
    for position, layer in enumerate(getattr(parent, name)):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):  # its index in a cache of keys and values
                module.layer_idx = position
    return save_and_measure(job, model)
