"""Mixtures of experts with a linear layer for each matrix of each expert, as quantized checkpoints store them.

transformers keeps all experts of a layer in two tensors of floats, and expands quantized experts into them while it
loads. There it cannot round activations (`fp8`), stops at zero points and at 8-bit integers, and leaves Mixtral's
router in another dtype. The loader here puts linear layers in the place of these tensors, which compressed-tensors
treats like all others. The files stay as they are: named and packed as other engines expect them.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer
from transformers.utils.quantization_config import CompressedTensorsConfig

from mlflow_compress.errors import CheckpointError
from mlflow_compress.models.architectures.packed_layers import decompress
from mlflow_compress.models.checkpoint_config import COMPRESSED_TENSORS

QUANT_METHOD = "compressed_tensors_linear_experts"
"""Name of the loader here in transformers' table of formats; files keep their own."""

MATRICES = ("gate_proj", "up_proj", "down_proj")
_MERGED = re.compile(r"\.experts\.\*\.(\w+)\.weight$")


class _LinearExpert(nn.Module):
    """One expert: ``down(act(gate(x)) * up(x))``."""

    def __init__(self, hidden: int, width: int, activation: nn.Module) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)
        self.activation = activation

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gated: torch.Tensor = self.activation(self.gate_proj(hidden_states)) * self.up_proj(hidden_states)
        out: torch.Tensor = self.down_proj(gated)
        return out


class LinearExperts(nn.ModuleList):
    """All experts of a layer, in the place of transformers' module `fused`; the weights are new."""

    def __init__(self, fused: Any) -> None:
        count, hidden, width = fused.down_proj.shape
        super().__init__(_LinearExpert(hidden, width, fused.act_fn) for _ in range(count))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts; an expert computes the tokens that chose it, and no others.

        `hidden_states`: shape (tokens, hidden); `top_k_index`, `top_k_weights`: shape (tokens, experts per token).
        """
        total = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self):
            tokens, places = torch.where(top_k_index == number)
            if len(tokens):
                weighted = expert(hidden_states[tokens]) * top_k_weights[tokens, places, None]
                total.index_add_(0, tokens, weighted.to(total.dtype))
        return total


def fused_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name and the module of every layer's experts whose function `LinearExperts` can compute."""
    for name, module in model.named_modules():
        gate_up, down = (getattr(module, part, None) for part in ("gate_up_proj", "down_proj"))
        if not (isinstance(gate_up, nn.Parameter) and isinstance(down, nn.Parameter) and gate_up.ndim == 3):
            continue
        count, doubled, hidden = gate_up.shape
        plain = down.shape == (count, hidden, doubled // 2) and {n for n, _ in module.named_parameters()} == {
            "gate_up_proj",
            "down_proj",
        }
        if plain and _gates_plainly(module):
            yield name, module


def _gates_plainly(experts: Any) -> bool:
    """Return whether ``act_fn(gate) * up`` is the whole gate: no clipping, no interleaved columns."""
    from transformers.integrations.moe import _default_apply_gate

    return (
        getattr(type(experts), "_apply_gate", None) is _default_apply_gate
        and getattr(experts, "is_concatenated", False)
        and isinstance(getattr(experts, "act_fn", None), nn.Module)
    )


def one_by_one(conversions: Iterable[Any]) -> list[Any] | None:
    """Return transformers' conversions from stored to loaded names, but with a name for each expert.

    What merged the experts of a layer becomes a renaming of each. None: the architecture stores its experts together.
    """
    unchanged: list[Any] = []
    names: dict[str, str] = {}
    for conversion in conversions:
        matches = [_MERGED.search(pattern) for pattern in conversion._original_source_patterns]
        if not isinstance(conversion, WeightConverter) or not all(matches):
            unchanged.append(conversion)
            continue
        stored = [match[1] for match in matches if match]
        target = conversion._original_target_patterns[0]
        names |= dict(zip(stored, MATRICES[:2] if target.endswith("gate_up_proj") else MATRICES[2:], strict=False))
    if sorted(names.values()) != sorted(MATRICES):
        return None
    renamed = [
        WeightRenaming(rf"\.experts\.(\d+)\.{stored}\.", rf".experts.\1.{matrix}.")
        for stored, matrix in names.items()
        if stored != matrix
    ]
    return [*unchanged, *renamed]


def stored_experts(model: Any) -> dict[str, tuple[str, tuple[int, int]]]:
    """Return every matrix of every expert, by its name in a model with linear experts.

    `model` has fused experts, and may be on the meta device. The value is the layer's name in a checkpoint, and
    (out_features, in_features). Empty for a model without experts, and for one whose experts have another form, or are
    stored together.
    """
    layers = list(fused_experts(model))
    conversions = one_by_one(get_model_conversion_mapping(model, add_legacy=False)) if layers else None
    if conversions is None:
        return {}
    back = [c.reverse_transform() for c in conversions[::-1] if isinstance(c, WeightRenaming)]
    matrices: dict[str, tuple[str, tuple[int, int]]] = {}
    for layer, experts in layers:
        count, hidden, width = experts.down_proj.shape
        for number in range(count):
            for matrix in MATRICES:
                name = f"{layer}.{number}.{matrix}"
                stored = rename_source_key(f"{name}.weight", back, [], reverse=True)[0].removesuffix(".weight")
                matrices[name] = stored, ((hidden, width) if matrix == "down_proj" else (width, hidden))
    return matrices


class LinearExpertsConfig(CompressedTensorsConfig):  # type: ignore[misc]
    """The settings of compressed-tensors, which transformers gives to `LinearExpertsQuantizer`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "quant_method": COMPRESSED_TENSORS})
        self.quant_method = QUANT_METHOD


class LinearExpertsQuantizer(CompressedTensorsHfQuantizer):  # type: ignore[misc]
    """transformers' loader of compressed-tensors, with linear experts."""

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        if not stored_experts(model):
            raise CheckpointError("Quantized experts of this architecture cannot be loaded", got=type(model).__name__)
        for name, experts in list(fused_experts(model)):
            model.set_submodule(name, LinearExperts(experts))
        super()._process_model_before_weight_loading(model, **kwargs)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        """Give what is not quantized the model's dtype, and let the first forward unpack weights in it.

        transformers leaves parameters with another name than in the file (Mixtral's router) in the file's dtype, and
        the library unpacks weights in that of their scales, or bfloat16. A product of two dtypes fails.
        """
        super()._process_model_after_weight_loading(model, **kwargs)
        in_float32 = {*model._keep_in_fp32_modules, *model._keep_in_fp32_modules_strict}
        for name, module in model.named_modules():
            if not (hasattr(module, "quantization_scheme") or in_float32 & set(name.split("."))):
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.to(model.dtype)
        if hasattr(model, "ct_decompress_hook"):
            self.compressor.remove_decompression_hook(model)
            model.ct_decompress_hook = model.register_forward_pre_hook(_unpack)

    def update_weight_conversions(self, weight_conversions: Sequence[Any]) -> list[Any]:
        """Return the conversions of names; packed weights stay packed, as in every linear layer."""
        return one_by_one(weight_conversions) or list(weight_conversions)


def _unpack(model: Any, _: Any) -> None:
    decompress(model)
