"""HQQ: rounds to a grid whose zero points minimise a norm that tolerates outliers, without data."""

from typing import TYPE_CHECKING

from pydantic import Field

from mlflow_compress.compression.layers import cast_stored
from mlflow_compress.compression.method import CompressionJob, GroupSize, Logits, Method, MethodConfig, register
from mlflow_compress.errors import UnsupportedError
from mlflow_compress.models.checkpoint_config import HQQ_PACKED

if TYPE_CHECKING:
    import torch

_BETA = 10.0
"""Weight of the penalty. It grows by 1 % per step in the publication, but not in the package's default solver."""


class _HqqConfig(MethodConfig):
    """Settings of `hqq`."""

    bits: int = 4  # Bits per weight
    group_size: GroupSize = 64
    """Number of neighbouring weights of a row that share a scale and a zero point; "channel": one of each per row."""
    norm: float = Field(0.7, gt=0, lt=1)
    """Exponent p of the error's norm, below 1; a smaller p gives outliers less weight."""
    iterations: int = Field(20, ge=1)  # Maximum number of steps of the solver


@register
class Hqq(Method[_HqqConfig]):
    """Half-quadratic quantization, weight only: the scale is the group's range, the zero point is optimised.

    This is our own implementation of the published solver, because checkpoints of the package ``hqq`` cannot be stored
    safely: it saves pickles, and transformers 5.17 reads neither these nor its safetensors. Levels, scales and zero
    points equal those of ``hqq`` 0.2.8 with ``axis=1`` on a CPU. Scales and zero points are stored in float16, as in
    ``hqq``.
    """

    name = "hqq"
    description = "HQQ, weight only and without data: zero points that minimise a norm robust to outliers"
    reference = "Badri and Shaji 2023, https://mobiusml.github.io/hqq_blog/"
    format = "safetensors (hqq_packed)"
    own_format = True
    requires = ("compressed_tensors",)
    Config = _HqqConfig
    supported_bits = (8, 4, 3, 2, 1)

    def compress(self, job: CompressionJob[_HqqConfig]) -> Logits:
        import torch

        from mlflow_compress.models.architectures import own_formats

        config, model = job.config, job.source.load(job.device)
        packed: dict[str, dict[str, torch.Tensor]] = {}
        for name in job.source.linear:
            weight = model.get_submodule(name).weight.detach()
            levels, scale, zero = half_quadratic(weight, config.bits, config.group_size, config.norm, config.iterations)
            packed[name] = own_formats.pack(levels, scale, zero, config.bits)
            if not all(torch.isfinite(part).all() for part in packed[name].values()):
                raise UnsupportedError(
                    f"The weights of {name} are so far from zero that their zero points exceed float16",
                    got=f"{float(zero.abs().max()):.3g}",
                    fix="Use rtn with symmetric=false",
                )
        cast_stored(model, job.source.torch_dtype)
        state = model.state_dict()
        for name, parts in packed.items():
            del state[f"{name}.weight"]
            state |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        model.config.quantization_config = own_formats.OwnFormatConfig(HQQ_PACKED, bits=config.bits).to_dict()
        model.save_pretrained(job.folder, state_dict=state)
        job.source.save_others(job.folder)
        cast_stored(model, torch.float32)
        for name, parts in packed.items():
            weight = model.get_submodule(name).weight
            weight.data.copy_(own_formats.unpack(parts, config.bits, weight.shape[1]))
        return job.probe.logits(model)


def half_quadratic(
    weight: "torch.Tensor", bits: int, group_size: int | str, norm: float = 0.7, iterations: int = 20
) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
    r"""Choose the zero points that minimise :math:`\sum |W - s (W_q - z)|^p`, with :math:`W_q = round(W / s + z)`.

    The error is a separate variable :math:`E` with a quadratic penalty of weight :math:`\beta`. Two steps alternate:
    the shrinkage :math:`E = sign(D) \max(0, |D| - |D|^{p-1} / \beta)` of the present error
    :math:`D`, and :math:`z = mean(W_q - (W - E) / s)` over the group. They end when the mean absolute error of the
    layer no longer falls. As in the package, the last step is used although it was not better.

    `weight` is float32, shape (out_features, in_features), which `group_size` divides; `norm` is :math:`p`. Returned
    are levels from 0 to ``2^bits - 1`` (in the weight's shape), scales and zero points (out_features, groups), all
    float32: the dequantized weight is ``(levels - zero) * scale``.
    """
    import torch

    rows, columns = weight.shape
    groups = weight.reshape(rows, -1, columns if isinstance(group_size, str) else group_size)
    top = 2**bits - 1
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    steps = torch.where(high - low <= 1e-4, 1.0, top / (high - low)).clamp(max=2e4)  # 1 / scale; bounded for float16
    zero = -low * steps
    best = float("inf")
    for _ in range(iterations):
        levels = torch.round(groups * steps + zero).clamp(0, top)
        error = groups - (levels - zero) / steps
        shrunk = error.sign() * (error.abs() - (1.0 / _BETA) * error.abs().pow(norm - 1)).clamp(min=0)
        zero = (levels - (groups - shrunk) * steps).mean(-1, keepdim=True)
        present = float(error.abs().mean())
        if present >= best:
            break
        best = present
    levels = torch.round(groups * steps + zero).clamp(0, top)
    return levels.reshape(rows, columns), 1.0 / steps[..., 0], zero[..., 0]
