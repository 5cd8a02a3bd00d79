"""Layer dropping by angular distance: removes the block whose output has nearly the same direction as its input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlflow_compress.compression.method import CalibratedConfig, CompressionJob, register
from mlflow_compress.compression.shared.layer_removal import (
    LayerRemovalConfig,
    LayerRemovalMethod,
    decoder_layers,
    drop_and_save,
)

if TYPE_CHECKING:
    import torch

    from mlflow_compress.compression.calibration_tokens import Calibration


@dataclass(frozen=True, kw_only=True)
class LayerDropAngularConfig(CalibratedConfig, LayerRemovalConfig):
    """Settings of `layer-drop-angular`."""

    def __post_init__(self) -> None:
        """Run the checks of both base classes."""
        CalibratedConfig.__post_init__(self)
        LayerRemovalConfig.__post_init__(self)


@register
class LayerDropAngular(LayerRemovalMethod):
    """Remove the block of neighbouring layers with the smallest angular distance between its input and its output."""

    name = "layer-drop-angular"
    description = "Removes the block of decoder layers that turns the hidden states least"
    reference = "Gromov et al. 2025, https://arxiv.org/abs/2403.17887"
    Config = LayerDropAngularConfig
    needs_calibration = True

    def compress(self, job: CompressionJob) -> torch.Tensor:
        """Measure every block of ``layers`` layers on the calibration set, and remove the one that changes least."""
        assert job.calibration is not None
        model = job.source.load(job.device)
        states = last_token_states(model, decoder_layers(model, job.source), job.calibration)
        distances = block_distances(states, job.config.layers)
        first = int(distances.argmin())
        return drop_and_save(job, model, range(first, first + job.config.layers))


def block_distances(states: torch.Tensor, length: int) -> torch.Tensor:
    """Return the mean angular distance between the input and the output of every block of `length` layers.

    ``d(l) = mean over samples of arccos(cos(x_l, x_{l + length})) / pi``, in [0, 1] (equation 7 of the paper).

    Parameters
    ----------
    states : torch.Tensor
        float64, shape (layers + 1, samples, hidden): the residual stream before each layer and after the last.
    length : int
        Layers in a block.

    Returns
    -------
    torch.Tensor
        float64, shape (layers + 1 - length,): one distance for each first layer of a block.
    """
    import torch

    cosine = torch.cosine_similarity(states[:-length], states[length:], dim=-1)
    return (cosine.clamp(-1, 1).arccos() / torch.pi).mean(dim=1)


def last_token_states(model: Any, layers: torch.nn.ModuleList, calibration: Calibration) -> torch.Tensor:
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
