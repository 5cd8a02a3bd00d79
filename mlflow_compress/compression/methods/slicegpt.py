"""SliceGPT: rotates the residual stream to its principal components, block by block, and removes the smallest."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from mlflow_compress.compression import gguf_model as llama_like
from mlflow_compress.compression.layers import save_and_measure
from mlflow_compress.compression.method import CalibratedConfig, CompressionJob, Logits, Method, register
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.models.source_model import SourceModel

if TYPE_CHECKING:
    import torch

_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")


class _SliceGptConfig(CalibratedConfig):
    """Settings of `slicegpt`."""

    slicing: float = Field(0.25, ge=0, lt=1)
    """Share of the residual stream's channels to remove (the paper's "sparsity"); 0 only rotates."""
    round_to: int = Field(8, ge=1)  # The remaining width is a multiple of this

    def width(self, hidden_size: int) -> int:
        """Return the remaining width of `hidden_size` channels; with slicing 0 all remain."""
        if self.slicing == 0:
            return hidden_size
        return int((1 - self.slicing) * hidden_size) // self.round_to * self.round_to


@register
class SliceGpt(Method[_SliceGptConfig]):
    """Principal components per block, computed on the outputs of the blocks already sliced, as in the authors' code.

    The checkpoint has our own model class (`mlflow_compress.models.architectures.sliced_llama`), which this package
    registers itself; elsewhere, call its `register` before `from_pretrained`. Each layer has two shortcut matrices.
    They count in `size_bytes` and `bits_per_weight_model`, but not in `bits_per_weight` (linear layers only).
    """

    name = "slicegpt"
    description = "SliceGPT: rotates the residual stream to its principal components and cuts off the smallest"
    reference = "Ashkboos et al. 2024, https://arxiv.org/abs/2401.15024 (own implementation)"
    format = "safetensors (sliced_llama)"
    own_format = True
    Config = _SliceGptConfig
    needs_calibration = True

    def label(self, config: _SliceGptConfig) -> str:
        return f"{self.name}-{100 * config.slicing:g}pct"

    def check(self, config: _SliceGptConfig, source: SourceModel) -> None:
        if source.architecture not in _ARCHITECTURES:
            raise UnsupportedError(
                "SliceGPT is implemented for Llama and for models with the same computation",
                allowed=_ARCHITECTURES,
                got=source.architecture,
            )
        llama_like.require_whole_context(source)
        hidden_size = next(iter(source.linear.values()))[1]
        if config.width(hidden_size) < 1:
            raise ConfigError(
                f"slicing leaves nothing of {hidden_size} channels in multiples of {config.round_to}",
                got=config.slicing,
                fix="Lower slicing or round_to",
            )

    def compress(self, job: CompressionJob[_SliceGptConfig]) -> Logits:
        assert job.calibration is not None
        model = llama_like.as_llama(job.source.load(job.device))
        batches = [batch["input_ids"].to(model.device) for batch in job.calibration.loader()]
        return save_and_measure(job, sliced(model, batches, job.config.width(model.config.hidden_size)))


def sliced(model: Any, batches: "Sequence[torch.Tensor]", width: int) -> Any:
    """Return a Llama model, rotated and sliced to `width` channels.

    When the scales of the norms are moved into the layers after them, a rotation ``Q`` of the residual stream commutes
    with the norm, so ``W Q`` computes on the rotated stream what ``W`` computed before. Every block has its own ``Q``:
    the eigenvectors of the second moment ``sum x x^T`` of its input, largest first. The residual connection between two
    blocks becomes ``Q_next^T Q``. Removing columns of each ``Q`` slices; keeping all of them changes nothing.

    `model` is modified: do not use it afterwards. `batches` are token ids, each of shape (sequences, length).
    """
    import torch

    from mlflow_compress.models.architectures.sliced_llama import SlicedLlamaConfig, SlicedLlamaForCausalLM

    full, dtype, body = model.config.hidden_size, model.dtype, model.model
    settings = {k: v for k, v in model.config.to_dict().items() if k not in ("model_type", "architectures")}
    config = SlicedLlamaConfig(**{**settings, "tie_word_embeddings": False, "sliced_size": width})
    config._attn_implementation = model.config._attn_implementation
    result = SlicedLlamaForCausalLM(config).to(device=model.device, dtype=dtype).eval()
    result.generation_config = model.generation_config
    with torch.no_grad():
        states = [body.embed_tokens(ids) for ids in batches]
        contexts = [_context(model, hidden) for hidden in states]
        basis = principal_directions(states)
        result.model.embed_tokens.weight.data = _rotated(body.embed_tokens.weight, into=basis[:, :width])
        states = [_rotated(hidden, into=basis[:, :width]) for hidden in states]
        basis = basis[:, :width]
        for index, (old, new) in enumerate(zip(body.layers, result.model.layers, strict=True)):
            last = index == len(body.layers) - 1
            states, basis = _slice_layer(old, new, states, contexts, basis, width, full if last else width)
        scaled = model.lm_head.weight.double() * body.norm.weight.double()
        result.lm_head.weight.data = _rotated(scaled, into=basis).to(dtype)
    return result


def _slice_layer(
    old: Any,
    new: Any,
    states: "list[torch.Tensor]",
    contexts: list[dict[str, Any]],
    basis: "torch.Tensor",
    width: int,
    width_out: int,
) -> "tuple[list[torch.Tensor], torch.Tensor]":
    """Fill one layer; return its outputs in the basis of the next layer, and that basis, shape (full, width_out)."""
    attention, mlp = new.self_attn, new.mlp
    for name in ("q_proj", "k_proj", "v_proj"):
        _fill_input_layer(getattr(attention, name), getattr(old.self_attn, name), old.input_layernorm.weight, basis)
    attention.o_proj = old.self_attn.o_proj  # writes the unrotated stream until its basis is known
    middle = [
        attention(hidden_states=new.input_layernorm(x), **context)[0] + _rotated(x, into=basis.T)
        for x, context in zip(states, contexts, strict=True)
    ]
    between = principal_directions(middle)[:, :width]
    _rotate_output_layer(attention.o_proj, between)
    new.attn_shortcut.weight.data = (between.T @ basis).to(states[0].dtype)

    for name in ("gate_proj", "up_proj"):
        _fill_input_layer(getattr(mlp, name), getattr(old.mlp, name), old.post_attention_layernorm.weight, between)
    mlp.down_proj = old.mlp.down_proj
    cut = [_rotated(x, into=between) for x in middle]
    outputs = [mlp(new.post_attention_layernorm(x)) + _rotated(x, into=between.T) for x in cut]
    after = principal_directions(outputs)[:, :width_out]
    _rotate_output_layer(mlp.down_proj, after)
    new.mlp_shortcut.weight.data = (after.T @ between).to(states[0].dtype)
    return [_rotated(x, into=after) for x in outputs], after


def principal_directions(batches: "Sequence[torch.Tensor]") -> "torch.Tensor":
    """Return the eigenvectors of ``sum x x^T`` as columns, largest eigenvalue first; float64, shape (n, n)."""
    import torch

    n = batches[0].shape[-1]
    moment = torch.zeros(n, n, dtype=torch.float64, device=batches[0].device)
    for batch in batches:
        rows = batch.reshape(-1, n).double()
        moment += rows.T @ rows
    vectors: torch.Tensor = torch.linalg.eigh(moment).eigenvectors
    return vectors.flip(-1)


def _rotated(rows: "torch.Tensor", *, into: "torch.Tensor") -> "torch.Tensor":
    """Return ``rows @ into``, computed in float64, in the dtype of the rows: of a weight, or of states."""
    return (rows.double() @ into).to(rows.dtype)


def _fill_input_layer(new: Any, old: Any, scale: "torch.Tensor", basis: "torch.Tensor") -> None:
    """Fill a layer that reads the residual stream: multiply its columns by the norm's scale and the rotation."""
    new.weight.data = (old.weight.double() * scale.double() @ basis).to(old.weight.dtype)
    if old.bias is not None:
        new.bias.data = old.bias.data


def _rotate_output_layer(layer: Any, basis: "torch.Tensor") -> None:
    """Rotate the rows of a layer that writes to the residual stream, in place."""
    layer.weight.data = (basis.T @ layer.weight.double()).to(layer.weight.dtype)
    layer.out_features = basis.shape[1]
    if layer.bias is not None:
        layer.bias.data = (basis.T @ layer.bias.double()).to(layer.bias.dtype)


def _context(model: Any, hidden: "torch.Tensor") -> dict[str, Any]:
    """Return the layers' inputs other than the hidden states of one batch: positions and the causal mask."""
    import torch
    from transformers.masking_utils import create_causal_mask

    positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
    mask = create_causal_mask(
        config=model.config, inputs_embeds=hidden, attention_mask=None, past_key_values=None, position_ids=positions
    )
    return {"attention_mask": mask, "position_embeddings": model.model.rotary_emb(hidden, position_ids=positions)}
