"""Pruning: magnitude, Wanda and SparseGPT set weights of linear layers to zero, and store the zeros."""

from types import SimpleNamespace
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from mlflow_compress.compression.backends import llmcompressor_backend as backend
from mlflow_compress.compression.layers import save_and_measure
from mlflow_compress.compression.method import CalibratedConfig, CompressionJob, Logits, Method, MethodConfig, register
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.models import stored_weights
from mlflow_compress.models.source_model import SourceModel
from mlflow_compress.replaced import replaced

_GROUP, _ZEROS = 4, 2
"""Sizes of the 2:4 pattern: of every four neighbours in a row, two are zero."""


class _PruningConfig(MethodConfig):
    """Settings of a method that sets weights to zero."""

    sparsity: float = Field(0.5, gt=0, lt=1)
    """Share of zeros in each linear layer; head, embeddings and norms stay dense."""
    pattern: Literal["unstructured", "2:4"] = "unstructured"
    """Where zeros may be: anywhere, or exactly two in every four neighbours of a row."""

    @model_validator(mode="after")
    def _require_fixed_sparsity(self) -> Self:
        if self.pattern == "2:4" and self.sparsity != _ZEROS / _GROUP:
            raise ConfigError("The pattern 2:4 has a fixed sparsity", allowed="0.5", got=self.sparsity)
        return self


P = TypeVar("P", bound=_PruningConfig)


class _PruningMethod(Method[P]):
    """A method that sets weights to zero. The zeros are stored, so the files are as large as the base's."""

    format = "safetensors (dense)"
    runs_in = ("vLLM", "llama.cpp")

    def label(self, config: P) -> str:
        return f"{self.name}-{'2of4' if config.pattern == '2:4' else f'{100 * config.sparsity:g}pct'}"

    def check(self, config: P, source: SourceModel) -> None:
        if config.pattern == "2:4":
            for name, (_, in_features) in source.matrices.items():
                if in_features % _GROUP:
                    raise UnsupportedError(
                        f"The pattern 2:4 does not fit the {in_features} input features of {name}",
                        allowed="multiples of 4",
                        got=config.pattern,
                        fix="Use pattern=unstructured",
                    )


@register
class Magnitude(_PruningMethod[_PruningConfig]):
    """Sets the smallest weights of each layer to zero: the control for the other pruning methods."""

    name = "magnitude"
    description = "Magnitude pruning, layer by layer: the control for the pruning methods"
    reference = "Han et al. 2015, https://arxiv.org/abs/1506.02626"
    Config = _PruningConfig
    from_disk = True

    def compress(self, job: CompressionJob[_PruningConfig]) -> Logits:
        from compressed_tensors.offload import update_offload_parameter

        with backend.loaded(job) as model:
            for name in job.source.linear:
                layer = model.get_submodule(name)
                weight = layer.weight.data
                if job.config.pattern == "2:4":
                    groups = weight.view(-1, _GROUP)
                    groups.scatter_(1, groups.abs().topk(_ZEROS, dim=1, largest=False).indices, 0.0)
                else:  # floor(sparsity * n) weights; of equal ones, the first
                    flat = weight.view(-1)
                    order = flat.abs().sort(stable=True).indices
                    flat[order[: int(flat.numel() * job.config.sparsity)]] = 0.0
                if job.offload is not None:
                    update_offload_parameter(layer, "weight", weight)
            return save_and_measure(job, model)


class _WandaConfig(CalibratedConfig, _PruningConfig):
    """Settings of `wanda`."""


@register
class Wanda(_PruningMethod[_WandaConfig]):
    """Sets the weights with the smallest score ``|W_ij| * ||x_j||_2`` in each output row to zero."""

    name = "wanda"
    description = "Wanda pruning: weight times activation norm, row by row"
    reference = "Sun et al. 2024, https://arxiv.org/abs/2306.11695 (llm-compressor WandaPruningModifier)"
    Config = _WandaConfig
    needs_calibration = True
    experts = True
    requires = ("llmcompressor",)

    def compress(self, job: CompressionJob[_WandaConfig]) -> Logits:
        return _pruned(job, "WandaPruningModifier")


class _SparseGptConfig(CalibratedConfig, _PruningConfig):
    """Settings of `sparsegpt`."""

    damping: float = Field(0.01, gt=0, lt=1)  # Added to the Hessian's diagonal, as a fraction of its mean
    block_size: int = Field(128, ge=4)  # Number of columns whose mask is chosen together


@register
class SparseGpt(_PruningMethod[_SparseGptConfig]):
    """Prunes column by column, and corrects each column's error in the columns that follow."""

    name = "sparsegpt"
    description = "SparseGPT pruning: repairs each column's error in the columns that follow"
    reference = "Frantar and Alistarh 2023, https://arxiv.org/abs/2301.00774 (llm-compressor SparseGPTModifier)"
    Config = _SparseGptConfig
    needs_calibration = True
    experts = True
    requires = ("llmcompressor",)

    def compress(self, job: CompressionJob[_SparseGptConfig]) -> Logits:
        backend.load_for_llmcompressor()
        from llmcompressor.modifiers.pruning.sparsegpt import sgpt_sparsify

        config = job.config

        def refuse(*_: object) -> None:
            raise UnsupportedError(
                "SparseGPT's Hessian cannot be inverted", fix="Raise damping or give more calibration samples"
            )

        # The module's only warning is of a Hessian that cannot be inverted, and becomes the identity.
        with replaced(sgpt_sparsify, "logger", SimpleNamespace(warning=refuse), of="llmcompressor 0.14"):
            return _pruned(job, "SparseGPTModifier", dampening_frac=config.damping, block_size=config.block_size)


def modifier_options(job: CompressionJob[_PruningConfig]) -> dict[str, Any]:
    """Return the common options of llm-compressor's pruning modifiers.

    All layers are listed by name. The option ``ignore`` cannot exclude the head, because it compares "lm_head." with
    "lm_head", and the head would be pruned too.
    """
    return {
        "sparsity": job.config.sparsity,
        "mask_structure": "2:4" if job.config.pattern == "2:4" else "0:0",
        "targets": list(job.source.matrices),
    }


def _pruned(job: CompressionJob[_PruningConfig], modifier: str, **settings: float) -> Logits:
    """Run a modifier of llm-compressor; a linear layer with fewer zeros than were asked for is an `UnsupportedError`.

    The backend silently skips a layer that it does not reach when it traces the model.
    """

    def recipe() -> list[object]:
        from llmcompressor.modifiers import pruning

        return [getattr(pruning, modifier)(**modifier_options(job), **settings)]

    logits = backend.run_oneshot(job, recipe)
    matrices = job.source.stored_matrices
    counts = stored_weights.zeros_of_layers(job.folder, matrices)
    for name, (_, in_features) in matrices.items():
        counted = counts.get(name)
        zeros = None if counted is None else counted[0] / counted[1]
        # The backend rounds to a number of columns per row.
        if zeros is None or zeros < job.config.sparsity - 1 / in_features:
            raise UnsupportedError(f"The layer {name} was not pruned", allowed=f"{job.config.sparsity}", got=zeros)
    return logits
