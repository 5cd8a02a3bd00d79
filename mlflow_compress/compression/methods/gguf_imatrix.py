"""llama.cpp's K-quants with an importance matrix: errors are weighted by the activations of their channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlflow_compress.compression import gguf_model
from mlflow_compress.compression.backends.llama_cpp_backend import KQuantConfig, KQuantMethod
from mlflow_compress.compression.method import CalibratedConfig, CompressionJob, register

if TYPE_CHECKING:
    import numpy as np
    import torch

    from mlflow_compress.compression.calibration_tokens import Calibration


@dataclass(frozen=True, kw_only=True)
class GgufImatrixConfig(CalibratedConfig, KQuantConfig):
    """Settings of `gguf-imatrix`."""

    def __post_init__(self) -> None:
        """Run the checks of both base classes."""
        CalibratedConfig.__post_init__(self)
        KQuantConfig.__post_init__(self)


@register
class GgufImatrix(KQuantMethod):
    """K-quants whose grids minimise ``sum_j E[x_j^2] (w_j - q_j)^2``, the expectation over the calibration text."""

    name = "gguf-imatrix"
    description = "llama.cpp's K-quants with an importance matrix from the calibration text"
    reference = "https://github.com/ggml-org/llama.cpp/pull/4861 (imatrix)"
    Config = GgufImatrixConfig
    needs_calibration = True

    def importance(self, job: CompressionJob, model: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Return the mean square of each input channel of every linear layer, by GGUF name."""
        assert job.calibration is not None
        found = mean_squares(model, list(job.source.linear), job.calibration)
        names = {name: gguf_model.gguf_name(f"{name}.weight", model.config) for name in found}
        return {names[name]: values.float().numpy() for name, values in found.items()}


def mean_squares(model: Any, layers: list[str], calibration: Calibration) -> dict[str, torch.Tensor]:
    """Return the mean over all calibration tokens of each input channel's square, float64, shape (in_features,)."""
    sums: dict[str, torch.Tensor] = {}

    def add(name: str) -> Any:
        def hook(_: Any, args: tuple[torch.Tensor, ...]) -> None:
            squares = args[0].double().square().flatten(0, -2).sum(0).cpu()
            sums[name] = sums[name] + squares if name in sums else squares

        return hook

    hooks = [model.get_submodule(name).register_forward_pre_hook(add(name)) for name in layers]
    calibration.run_through(model, hooks)
    return {name: total / calibration.ids.size for name, total in sums.items()}
