"""Mixtures of experts in llm-compressor: linear layers while it works, and what is saved afterwards.

llm-compressor's `load_context` takes experts apart while it loads some architectures. It needs the model alone from
`from_pretrained`, without the list of missing weights that we check, and it changes transformers' table of conversions
for every later load in the process. So we use the function that it uses for all other architectures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlflow_compress.errors import UnsupportedError

if TYPE_CHECKING:
    import torch


def take_apart(model: Any) -> None:
    """Replace each layer's experts by modules of linear layers with the same weights.

    Raises
    ------
    UnsupportedError
        llm-compressor does not know the form of these experts.
    """
    from llmcompressor.modeling.moe.linearize import linearize_moe

    try:
        linearize_moe(model)
    except (ValueError, RuntimeError, AttributeError, TypeError, LookupError) as error:
        raise UnsupportedError(
            f"llm-compressor cannot take this model's experts apart: {error}", got=type(model).__name__
        ) from error


def prepare_to_save(model: Any) -> None:
    """Set the names under which transformers stores the experts; experts that are not quantized are fused again.

    A checkpoint has the same names in both cases: one for each matrix of each expert, as its architecture stores them.
    """
    from llmcompressor.modeling.moe.linearize import repack_moe

    from mlflow_compress.models.architectures.linear_experts import one_by_one  # imports torch

    if any(hasattr(module, "quantization_scheme") for module in model.modules()):
        model._weight_conversions = one_by_one(model._weight_conversions)
    else:
        repack_moe(model)


def token_counter(unused: list[str]) -> Any:
    """Return a modifier that fills `unused` with the experts to which the router sends no calibration token.

    llm-compressor calibrates every expert on all tokens, so such an expert is calibrated too, but on the inputs of the
    others.
    """
    import torch
    from llmcompressor.modeling.moe.linearize import get_linearized_moes
    from llmcompressor.modifiers import Modifier

    counts: dict[str, torch.Tensor] = {}

    class ExpertTokenCounter(Modifier):  # type: ignore[misc]
        """Counts in the calibration pass alone: the library switches the hooks of modifiers off for all others."""

        def on_initialize(self, state: Any, **kwargs: Any) -> bool:
            return True

        def on_calibration_start(self, state: Any, event: Any, **kwargs: Any) -> None:
            for name, experts in get_linearized_moes(state.model):
                counts[name] = torch.zeros(experts.num_experts, dtype=torch.long)
                self.register_hook(experts, self._hook(name), "forward_pre", with_kwargs=True)

        @staticmethod
        def _hook(name: str) -> Any:
            def count(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
                chosen = named["top_k_index"] if "top_k_index" in named else arguments[1]
                counts[name] += torch.bincount(chosen.flatten().cpu(), minlength=len(counts[name]))

            return count

        def on_calibration_end(self, state: Any, event: Any, **kwargs: Any) -> None:
            self.remove_hooks()
            unused.extend(
                f"{name}.{n}" for name, seen in counts.items() for n in (seen == 0).nonzero().flatten().tolist()
            )

    return ExpertTokenCounter()
