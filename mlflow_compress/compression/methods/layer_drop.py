"""Layer dropping: removes the last layers."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import Field

from mlflow_compress.compression.calibration_tokens import Calibration
from mlflow_compress.compression.layers import save_and_measure
from mlflow_compress.compression.method import CalibratedConfig, CompressionJob, Logits, Method, MethodConfig, register
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.models.source_model import SourceModel

if TYPE_CHECKING:
    import torch


class _LayerRemovalConfig(MethodConfig):
    """Settings of a method that removes decoder layers."""

    layers: int = Field(1, ge=1)  # Number of decoder layers to remove


L = TypeVar("L", bound=_LayerRemovalConfig)


class _LayerRemovalMethod(Method[L]):
    """A method that removes decoder layers; the checkpoint is a plain, shorter model of the same architecture."""

    format = "safetensors"
    runs_in = ("vLLM", "llama.cpp")
    linear_only = False

    def label(self, config: L) -> str:
        return f"{self.name}-{config.layers}"

    def check(self, config: L, source: SourceModel) -> None:
        if config.layers >= source.layers:
            raise ConfigError(
                "More layers would be dropped than may be", allowed=f"1 to {source.layers - 1}", got=config.layers
            )


def decoder_layers(model: Any, source: SourceModel) -> "torch.nn.ModuleList":
    """Return the model's decoder layers: the only list of modules with the model's number of layers."""
    from torch import nn

    candidates = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == source.layers]
    if len(candidates) != 1:
        raise UnsupportedError(
            f"The decoder layers cannot be distinguished from other lists of modules ({len(candidates)} candidates)",
            got=source.architecture,
        )
    return candidates[0]


def _drop_and_save(job: CompressionJob[MethodConfig], model: Any, dropped: Collection[int]) -> Logits:
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


@register
class LayerDrop(_LayerRemovalMethod[_LayerRemovalConfig]):
    """Remove the last decoder layers, as in the pruning curve of "Accuracy is Not All You Need"."""

    name = "layer-drop"
    description = "Removes the last decoder layers"
    reference = "Dutta et al. 2024, https://arxiv.org/abs/2407.09141"
    Config = _LayerRemovalConfig

    def compress(self, job: CompressionJob[_LayerRemovalConfig]) -> Logits:
        depth = job.source.layers
        return _drop_and_save(job, job.source.load(job.device), range(depth - job.config.layers, depth))


class _LayerDropAngularConfig(CalibratedConfig, _LayerRemovalConfig):
    """Settings of `layer-drop-angular`."""


@register
class LayerDropAngular(_LayerRemovalMethod[_LayerDropAngularConfig]):
    """Remove the block of neighbouring layers with the smallest angular distance between its input and its output."""

    name = "layer-drop-angular"
    description = "Removes the block of decoder layers that rotates the hidden states least"
    reference = "Gromov et al. 2025, https://arxiv.org/abs/2403.17887"
    Config = _LayerDropAngularConfig
    needs_calibration = True

    def compress(self, job: CompressionJob[_LayerDropAngularConfig]) -> Logits:
        assert job.calibration is not None
        model = job.source.load(job.device)
        states = _last_token_states(model, decoder_layers(model, job.source), job.calibration)
        distances = block_distances(states, job.config.layers)
        first = int(distances.argmin())
        return _drop_and_save(job, model, range(first, first + job.config.layers))


def block_distances(states: "torch.Tensor", length: int) -> "torch.Tensor":
    """Return the mean angular distance between the input and the output of every block of `length` layers.

    ``d(l) = mean over samples of arccos(cos(x_l, x_{l + length})) / pi``, in [0, 1] (equation 7 of the paper).

    `states` is the residual stream before each layer and after the last, float64, shape (layers + 1, samples, hidden);
    the result has one distance for each first layer of a block, shape (layers + 1 - length,).
    """
    import torch

    cosine = torch.cosine_similarity(states[:-length], states[length:], dim=-1)
    return (cosine.clamp(-1, 1).arccos() / torch.pi).mean(dim=1)


def _last_token_states(model: Any, layers: "torch.nn.ModuleList", calibration: Calibration) -> "torch.Tensor":
    """Return the residual stream at the last token of each sequence; shape as `block_distances` takes it."""
    import torch

    seen: list[list[torch.Tensor]] = [[] for _ in range(len(layers) + 1)]

    def before(index: int) -> Any:
        def keep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            seen[index].append(hidden[:, -1].double().cpu())

        return keep

    def after(_: Any, __: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        seen[-1].append(hidden[:, -1].double().cpu())

    hooks = [layer.register_forward_pre_hook(before(i), with_kwargs=True) for i, layer in enumerate(layers)]
    hooks.append(layers[-1].register_forward_hook(after))
    calibration.run_through(model, hooks)
    return torch.stack([torch.cat(states) for states in seen])
