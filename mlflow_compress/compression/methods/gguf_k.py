"""llama.cpp's K-quants, written by its own quantizer: 2 to 6 bits in blocks of 256, with types that differ by layer."""

import ctypes
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import numpy as np
from pydantic import model_validator

from mlflow_compress.compression import gguf_model
from mlflow_compress.compression.calibration_tokens import Calibration
from mlflow_compress.compression.gguf_model import ForTensors
from mlflow_compress.compression.method import CalibratedConfig, CompressionJob, Logits, Setting, register
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.models import gguf_file

if TYPE_CHECKING:
    import torch

_MIXES = {6: ("M",), 5: ("M", "S"), 4: ("M", "S"), 3: ("L", "M", "S"), 2: ("M",)}
_PURE = "pure"


class _KQuantConfig(gguf_model.QuantizingGgufConfig):
    """Settings of the K-quant methods."""

    bits: int = 4  # Bits of most weights; `Q4_K_M` is 4 bits with mix M
    mix: Literal["L", "M", "S", "pure"] = "M"
    """How many sensitive layers get more bits: large, medium or small. Q6_K and Q2_K have only one mix. "pure": none.
    A recipe with formats for single layers, such as `search` makes, has pure ones only."""

    @model_validator(mode="after")
    def _require_mix(self) -> Self:
        mixes = (*_MIXES.get(self.bits, (self.mix,)), _PURE)
        if self.mix not in mixes:
            raise ConfigError(f"There is no {self.bits}-bit K-quant of this mix", allowed=mixes, got=self.mix)
        return self

    @property
    def type_name(self) -> str:
        """llama.cpp's name of the type, for example ``Q4_K_M``; of pure files that of mix M."""
        mix = "M" if self.mix == _PURE else self.mix
        return f"Q{self.bits}_K" if len(_MIXES[self.bits]) == 1 else f"Q{self.bits}_K_{mix}"


K = TypeVar("K", bound=_KQuantConfig)


class _KQuantMethod(ForTensors[K]):
    """Base of both methods: transformers computes with the dequantized values; with `native`, llama.cpp computes."""

    block = 256
    experts = True
    supported_bits = tuple(_MIXES)
    requires = (gguf_model.LLAMA_CPP_PACKAGE,)
    extra = gguf_model.LLAMA_CPP_EXTRA
    for_single_layers: ClassVar[Mapping[str, Setting]] = {"mix": _PURE}

    def label(self, config: K) -> str:
        """Return ``gguf-q4_k_m``; ``-all``: embeddings and head too; ``-native``: computed by llama.cpp."""
        kind = f"Q{config.bits}_K-{_PURE}" if config.mix == _PURE else config.type_name
        kind = f"{self.name.removesuffix('-k')}-{kind.lower()}"
        return f"{kind}{'-all' if config.embeddings else ''}{config.native_label}"

    def tensor_type(self, config: K) -> str:
        if config.mix != _PURE:
            raise ConfigError("A format for single layers cannot mix types", allowed=f"mix={_PURE}", got=config.mix)
        return f"Q{config.bits}_K"

    def file_type(self, config: K) -> str:
        return f"MOSTLY_{config.type_name}"

    def compress(self, job: CompressionJob[K]) -> Logits:
        model = gguf_model.load_llama_like(job.source, job.device)
        importance = self.importance(job, model)
        return quantized_logits(job, model, self.file_type(job.config), importance, pure=job.config.mix == _PURE)


@register
class GgufK(_KQuantMethod[_KQuantConfig]):
    """Q6_K to Q2_K: blocks of 16 or 32 with 4- to 8-bit scales, in super-blocks of 256; all channels count alike."""

    name = "gguf-k"
    description = "llama.cpp's GGUF with K-quants (Q6_K, Q5_K_M, Q4_K_M, ...), written by llama.cpp itself"
    reference = "https://github.com/ggml-org/llama.cpp/pull/1684 (llama_model_quantize)"
    Config = _KQuantConfig


class _GgufImatrixConfig(CalibratedConfig, _KQuantConfig):
    """Settings of `gguf-imatrix`."""


@register
class GgufImatrix(_KQuantMethod[_GgufImatrixConfig]):
    """K-quants whose grids minimise ``sum_j E[x_j^2] (w_j - q_j)^2``, the expectation over the calibration text."""

    name = "gguf-imatrix"
    description = "llama.cpp's K-quants with an importance matrix from the calibration text"
    reference = "https://github.com/ggml-org/llama.cpp/pull/4861 (imatrix)"
    Config = _GgufImatrixConfig
    needs_calibration = True

    def importance(self, job: CompressionJob[Any], model: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Return the mean square of each input channel of every linear layer, by GGUF name."""
        assert job.calibration is not None
        means, unused = mean_squares(model, list(job.source.linear), job.calibration)
        job.experts_without_tokens.extend(unused)
        names = {name: gguf_model.gguf_name(f"{name}.weight", model.config) for name in means}
        return {names[name]: values.flatten().float().numpy() for name, values in means.items()}


def mean_squares(
    model: Any, layers: list[str], calibration: Calibration
) -> "tuple[dict[str, torch.Tensor], list[str]]":
    """Return the mean over the calibration tokens of each input channel's square, by layer, and experts without tokens.

    Float64, shape (in_features,). All experts of a layer are one entry, shape (experts, in_features), each a mean over
    the tokens that the router sent to it; 1 for an expert without tokens, so that its channels count alike.
    """
    import torch

    from mlflow_compress.models.architectures.linear_experts import fused_experts

    sums: dict[str, torch.Tensor] = {}
    tokens: dict[str, torch.Tensor] = {}  # how many each layer has seen, or each expert of it

    def add(name: str, number: int, inputs: "torch.Tensor", n_rows: int = 1) -> None:
        rows = inputs.flatten(0, -2)
        if name not in sums:
            sums[name] = torch.zeros((n_rows, rows.shape[-1]), dtype=torch.float64)
            tokens[name] = torch.zeros(n_rows, dtype=torch.float64)
        sums[name][number] += rows.double().square().sum(0).cpu()
        tokens[name][number] += len(rows)

    def of_layer(name: str) -> Any:
        return lambda _, args: add(name, 0, args[0])

    def of_experts(name: str) -> Any:
        def hook(experts: Any, args: "tuple[torch.Tensor, ...]") -> None:
            hidden, chosen = args[:2]
            for number in range(len(experts.down_proj)):
                inputs = hidden[(chosen == number).any(-1)]
                gate, up = (inputs @ half.T for half in experts.gate_up_proj[number].chunk(2))
                for matrix, read in (("gate", inputs), ("up", inputs), ("down", experts.act_fn(gate) * up)):
                    add(f"{name}.{matrix}_proj", number, read, len(experts.down_proj))

        return hook

    hooks = [model.get_submodule(name).register_forward_pre_hook(of_layer(name)) for name in layers]
    mixtures = list(fused_experts(model))
    hooks += [module.register_forward_pre_hook(of_experts(name)) for name, module in mixtures]
    calibration.run_through(model, hooks)
    reached = {name: tokens[f"{name}.down_proj"].tolist() for name, _ in mixtures}
    unused = [f"{name}.{number}" for name, counts in reached.items() for number, n in enumerate(counts) if n == 0]
    means = {name: torch.where((n := tokens[name][:, None]) > 0, total / n, 1.0) for name, total in sums.items()}
    return {name: values[0] if len(values) == 1 else values for name, values in means.items()}, unused


def quantized_logits(
    job: CompressionJob[gguf_model.QuantizingGgufConfig],
    model: Any,
    file_type: str,
    importance: Mapping[str, np.ndarray[Any, Any]] | None,
    *,
    pure: bool,
    types: Mapping[str, str] = MappingProxyType({}),
) -> Logits:
    """Write a model of `gguf_model.load_llama_like`, let llama.cpp quantize the file, and return the new file's logits.

    - `file_type`: Name of a member of `gguf.LlamaFileType`.
    - `importance`: The importance matrix: float32, shape (in_features,), by GGUF tensor name.
    - `pure`: Give no layer another type than the file's.
    - `types`: GGUF types of single tensors by their names: ``{"blk.0.attn_q.weight": "Q6_K"}``.
    """
    import gguf
    import llama_cpp

    path, plain = job.folder / gguf_file.GGUF_FILE, gguf_model.plain_kind(job.source.dtype)
    tensors = gguf_model.tensors_of(model, lambda _, parameter: plain(parameter))
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.pure = int(gguf.LlamaFileType[file_type]), pure
    if not job.config.embeddings:  # otherwise llama.cpp chooses the types of both
        settings.token_embedding_type, settings.quantize_output_tensor = int(tensors["token_embd.weight"][1]), False
    if importance is not None:
        entries = (llama_cpp.llama_model_imatrix_data * (len(importance) + 1))()  # one without a name marks the end
        for entry, (name, values) in zip(entries, importance.items(), strict=False):
            numbers = np.ascontiguousarray(values, dtype=np.float32)
            entry.name, entry.size = name.encode(), numbers.size
            entry.data = (ctypes.c_float * numbers.size)(*numbers)
        settings.imatrix = entries
    if types:
        overrides = (llama_cpp.llama_model_tensor_override * (len(types) + 1))()  # the end has no pattern
        for override, (name, kind) in zip(overrides, types.items(), strict=False):
            override.pattern, override.type = f"^{re.escape(name)}$".encode(), int(gguf.GGMLQuantizationType[kind])
        settings.tt_overrides = overrides
    with tempfile.TemporaryDirectory(dir=job.folder) as scratch:
        full = Path(scratch) / gguf_file.GGUF_FILE
        gguf_model.save(job, model, gguf.LlamaFileType.ALL_F32, tensors, full)
        if llama_cpp.llama_model_quantize(str(full).encode(), str(path).encode(), ctypes.byref(settings)) != 0:
            raise UnsupportedError("llama.cpp could not quantize the model", got=file_type)
    return gguf_model.file_logits(job, model, path)
