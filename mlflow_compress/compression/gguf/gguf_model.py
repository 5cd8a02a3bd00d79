"""A Llama-like model as the tensors of a GGUF file, and back."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow_compress.compression.gguf import llama_like
from mlflow_compress.compression.method import MethodConfig
from mlflow_compress.errors import ReloadMismatchError, UnsupportedError
from mlflow_compress.models import gguf_file, stored_weights
from mlflow_compress.models.architectures import GGUF_NATIVE
from mlflow_compress.models.source_model import SourceModel

if TYPE_CHECKING:
    import numpy as np
    import torch

    from mlflow_compress.compression.method import CompressionJob

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Model classes whose tensors and settings are known, and what GGUF calls them; it knows a Mistral as a Llama."""

PACKAGE, EXTRA = "llama_cpp", "llama-cpp"

ROPE_FACTORS = "rope_freqs.weight"
"""A tensor of the file only: by what llama.cpp divides the rotary frequencies."""

ROPE_TYPES = ("default", "llama3")

MAX_NATIVE_KL = 0.05
"""Nats between llama.cpp's own logits and those of the file's values, on random tokens (see `measure`)."""


@dataclass(frozen=True, kw_only=True)
class BaseGgufConfig(MethodConfig):
    """What all methods that write GGUF can be told."""

    native: bool = False
    """Let llama.cpp itself compute wherever the checkpoint is evaluated, on the CPU (extra `llama-cpp`)."""


def require_known(source: SourceModel, block: int) -> None:
    """Refuse architectures without a known mapping, scaled positions, and rows that are no whole blocks."""
    if source.architecture not in ARCHITECTURES:
        raise UnsupportedError(
            "The names of this architecture's tensors in GGUF are not known here",
            allowed=sorted(ARCHITECTURES),
            got=source.architecture,
        )
    for name, (_, in_features) in source.linear.items():
        if in_features % block:
            raise UnsupportedError(
                f"GGUF's blocks do not divide the {in_features} input features of {name}",
                allowed=f"multiples of {block}",
                got=in_features,
            )
    llama_like.require_whole_context(source)
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source.folder, local_files_only=True)
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in ROPE_TYPES:
        raise UnsupportedError(
            "GGUF files of models whose positions are scaled in this way are not written here",
            allowed=ROPE_TYPES,
            got=rope,
        )


def load(job: CompressionJob) -> Any:
    """Load the base for evaluation in float32, as the architecture by which GGUF knows it."""
    model = job.source.load(job.device)
    return llama_like.as_llama(model) if ARCHITECTURES[job.source.architecture] == "llama" else model


def plain_kind(dtype: str) -> Callable[[Any], Any]:
    """Return which type an unquantized parameter has: the base's own, but float32 for norms and biases."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    own = {"float32": kinds.F32, "bfloat16": kinds.BF16, "float16": kinds.F16}[dtype]
    return lambda parameter: own if parameter.ndim > 1 else kinds.F32


def interleave_heads(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Reorder the rows of a Llama query or key weight: GGUF rotates neighbours, transformers the two halves of a head.

    Parameters
    ----------
    weight : numpy.ndarray
        Shape (heads * head_dim, ...); rows may be packed.
    heads : int
        Query heads, or key heads for the key.
    """
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def deinterleave_heads(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undo `interleave_heads`."""
    rows = weight.shape[0]
    return weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def interleaved_heads(name: str, config: Any) -> int | None:
    """Return the number of heads of a parameter whose rows GGUF interleaves, None for all others."""
    module = name.rpartition(".")[0]
    if config.model_type != "llama" or not module.endswith(("q_proj", "k_proj")):
        return None
    return int(config.num_attention_heads if module.endswith("q_proj") else config.num_key_value_heads)


def gguf_name(name: str, config: Any) -> str:
    """Return GGUF's name of a parameter of a model with this configuration (see `load`)."""
    return gguf_file.to_gguf_name(name, architecture=config.model_type, n_layers=config.num_hidden_layers)


def tensors_of(model: Any, kind_of: Callable[[str, Any], Any]) -> dict[str, tuple[Any, Any]]:
    """Return a model's tensors as `gguf_file.write` takes them.

    Parameters
    ----------
    model : transformers model
        Its parameters are read as float32.
    kind_of : callable
        Gets a parameter's name and itself; returns its `gguf.GGMLQuantizationType`.
    """
    import gguf
    import numpy as np

    tensors: dict[str, tuple[Any, Any]] = {}
    for name, parameter in model.named_parameters():
        kind, heads = kind_of(name, parameter), interleaved_heads(name, model.config)
        data = gguf.quants.quantize(parameter.data.float().cpu().numpy(), kind)
        tensors[gguf_name(name, model.config)] = (data if heads is None else interleave_heads(data, heads), kind)
    factors = rope_factors(model)
    if not np.allclose(factors, 1.0):
        tensors[ROPE_FACTORS] = (factors, gguf.GGMLQuantizationType.F32)
    return tensors


def rope_factors(model: Any) -> Any:
    """Return by what llama.cpp divides each rotary frequency; float32, shape (head_dim / 2,), 1 without scaling."""
    import torch

    rotary = model.model.rotary_emb.inv_freq.float().cpu()
    exponents = torch.arange(len(rotary), dtype=torch.float64) / len(rotary)
    plain = model.config.rope_parameters["rope_theta"] ** -exponents
    return (plain / rotary.double()).float().numpy()


def load_values(model: Any, path: Path) -> None:
    """Give a model's parameters the values that a file's blocks mean."""
    import gguf
    import torch

    values = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    for name, parameter in model.named_parameters():
        value, heads = values[gguf_name(name, model.config)], interleaved_heads(name, model.config)
        if heads is not None:
            value = deinterleave_heads(value, heads)
        parameter.data.copy_(torch.from_numpy(value).reshape(parameter.shape))


def measure(job: CompressionJob, model: Any, path: Path) -> torch.Tensor:
    """Return the probe's logits of a written file: of the values that it means, or llama.cpp's own.

    Raises
    ------
    ReloadMismatchError
        llama.cpp's own are further from those of the values than its rounding of activations could bring them.
    """
    load_values(model, path)
    logits = job.probe.logits(model)
    if not job.config.native:
        return logits
    from mlflow_compress.compression.probe import compare
    from mlflow_compress.models.architectures.native_gguf import open_native

    native = job.probe.logits(open_native(job.folder))
    apart = compare(logits, native).kl_mean
    if apart > MAX_NATIVE_KL:
        raise ReloadMismatchError(
            "llama.cpp computes something else than the values in its file mean",
            allowed=f"a mean KL up to {MAX_NATIVE_KL} nats on random tokens",
            got=f"{apart:.3g}",
        )
    return native


def describe(job: CompressionJob, model: Any) -> Any:
    """Write what transformers needs beside a checkpoint's file, configuration and tokenizer; return the tokenizer."""
    tokenizer = job.source.tokenizer()
    model.config.dtype = job.source.torch_dtype
    if job.config.native:
        setattr(model.config, GGUF_NATIVE, True)
    for part in (model.config, model.generation_config, tokenizer):
        part.save_pretrained(job.folder)
    return tokenizer


def save(job: CompressionJob, model: Any, file_type: Any, tensors: Mapping[str, tuple[Any, Any]], path: Path) -> None:
    """Write the file and what stands beside it."""
    tokenizer = describe(job, model)
    gguf_file.write(path, model.config, ARCHITECTURES[job.source.architecture], file_type, tensors, tokenizer)


def adopt(job: CompressionJob, file: Path) -> torch.Tensor:
    """Copy a file that another tool wrote, put the base's configuration and tokenizer beside it, and measure it."""
    model, path = load(job), job.folder / gguf_file.FILE
    shutil.copyfile(file, path)
    describe(job, model)
    return measure(job, model, path)


def require_version(source: SourceModel, file: Path) -> None:
    """Refuse a file that does not hold a version of the base: another architecture, other tensors, other shapes."""
    from transformers import AutoConfig

    require_known(source, block=1)
    kind, wanted = gguf_file.architecture(file), ARCHITECTURES[source.architecture]
    if kind != wanted:
        raise UnsupportedError("The GGUF file is of another architecture than the base", allowed=wanted, got=kind)
    theirs = {name: t.shape for name, t in stored_weights.read_headers(file).items() if name != ROPE_FACTORS}
    ours = {
        name: t.shape for name, t in stored_weights.read_headers(source.folder).items() if not name.endswith("inv_freq")
    }
    if AutoConfig.from_pretrained(source.folder, local_files_only=True).tie_word_embeddings:
        ours.pop("lm_head.weight", None)  # some stores hold it twice
    differ = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    if differ:
        first = differ[0]
        raise UnsupportedError(
            f"The GGUF file and the base differ in {len(differ)} tensors, the first of them {first}",
            allowed=str(ours.get(first, "none")),
            got=str(theirs.get(first, "none")),
            fix="Give the base that it was made from as -P model=...",
        )
