"""Converts a Llama-like model to the tensors of a GGUF file, and back."""

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
"""GGUF's architecture names, by model class; in GGUF a Mistral is a Llama."""

PACKAGE, EXTRA = "llama_cpp", "llama-cpp"

ROPE_FACTORS = "rope_freqs.weight"
"""A tensor that only the file has: llama.cpp divides the rotary frequencies by it."""

ROPE_TYPES = ("default", "llama3")

MAX_NATIVE_KL = 0.05
"""Largest mean KL, in nats, of llama.cpp's own logits from those of the dequantized values (see `file_logits`)."""


@dataclass(frozen=True, kw_only=True)
class BaseGgufConfig(MethodConfig):
    """Settings of every method that writes GGUF."""

    native: bool = False
    """Let llama.cpp compute the logits whenever the checkpoint is evaluated, on the CPU (extra `llama-cpp`)."""


def require_known(source: SourceModel, block: int) -> None:
    """Raise `UnsupportedError` for unknown architectures, scaled positions, and rows that are not complete blocks."""
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
    """Load the base in float32 for evaluation, as the architecture that it is in GGUF."""
    model = job.source.load(job.device)
    return llama_like.as_llama(model) if ARCHITECTURES[job.source.architecture] == "llama" else model


def plain_kind(dtype: str) -> Callable[[Any], Any]:
    """Return a function that gives the GGUF type of an unquantized parameter: the base's own, float32 for 1-d ones."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    own = {"float32": kinds.F32, "bfloat16": kinds.BF16, "float16": kinds.F16}[dtype]
    return lambda parameter: own if parameter.ndim > 1 else kinds.F32


def interleave_heads(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Return a Llama query or key weight in GGUF's row order.

    In GGUF, rotary positions rotate neighbouring rows; in transformers, the two halves of a head.

    Parameters
    ----------
    weight : numpy.ndarray
        Shape (heads * head_dim, ...); rows may be packed.
    heads : int
        Number of query heads, or of key heads for a key weight.
    """
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def deinterleave_heads(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Return the weight in transformers' row order: the inverse of `interleave_heads`."""
    rows = weight.shape[0]
    return weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def interleaved_heads(name: str, config: Any) -> int | None:
    """Return the number of heads of a parameter whose rows GGUF interleaves; None for all others."""
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
        Returns the `gguf.GGMLQuantizationType` of a parameter, given its name and the parameter.
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
    """Return the divisors of the rotary frequencies, float32, shape (head_dim / 2,); 1 without scaling."""
    import torch

    rotary = model.model.rotary_emb.inv_freq.float().cpu()
    exponents = torch.arange(len(rotary), dtype=torch.float64) / len(rotary)
    plain = model.config.rope_parameters["rope_theta"] ** -exponents
    return (plain / rotary.double()).float().numpy()


def load_values(model: Any, path: Path) -> None:
    """Set a model's parameters to the dequantized values of a file."""
    import gguf
    import torch

    values = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    for name, parameter in model.named_parameters():
        value, heads = values[gguf_name(name, model.config)], interleaved_heads(name, model.config)
        if heads is not None:
            value = deinterleave_heads(value, heads)
        parameter.data.copy_(torch.from_numpy(value).reshape(parameter.shape))


def file_logits(job: CompressionJob, model: Any, path: Path) -> torch.Tensor:
    """Return a file's logits on the probe: of its dequantized values, or llama.cpp's own if the job is `native`.

    Raises
    ------
    ReloadMismatchError
        llama.cpp's logits differ from those of the dequantized values by more than its rounding explains.
    """
    load_values(model, path)
    logits = job.probe.logits(model)
    if not job.config.native:
        return logits
    from mlflow_compress.compression.probe import compare
    from mlflow_compress.models.architectures.native_gguf import open_native

    native = job.probe.logits(open_native(job.folder))
    kl = compare(logits, native).kl_mean
    if kl > MAX_NATIVE_KL:
        raise ReloadMismatchError(
            "llama.cpp's logits differ too much from those of the dequantized file",
            allowed=f"a mean KL up to {MAX_NATIVE_KL} nats on random tokens",
            got=f"{kl:.3g}",
        )
    return native


def save_configuration(job: CompressionJob, model: Any) -> Any:
    """Write the configuration, generation settings and tokenizer of a checkpoint; return the tokenizer."""
    tokenizer = job.source.tokenizer()
    model.config.dtype = job.source.torch_dtype
    if job.config.native:
        setattr(model.config, GGUF_NATIVE, True)
    for part in (model.config, model.generation_config, tokenizer):
        part.save_pretrained(job.folder)
    return tokenizer


def save(job: CompressionJob, model: Any, file_type: Any, tensors: Mapping[str, tuple[Any, Any]], path: Path) -> None:
    """Write the GGUF file, the configuration and the tokenizer."""
    tokenizer = save_configuration(job, model)
    gguf_file.write(path, model.config, ARCHITECTURES[job.source.architecture], file_type, tensors, tokenizer)


def adopt(job: CompressionJob, file: Path) -> torch.Tensor:
    """Copy another tool's GGUF file, write the base's configuration and tokenizer, and return the file's logits."""
    model, path = load(job), job.folder / gguf_file.FILE
    shutil.copyfile(file, path)
    save_configuration(job, model)
    return file_logits(job, model, path)


def require_version(source: SourceModel, file: Path) -> None:
    """Raise `UnsupportedError` where a file is not a version of the base: other architecture, tensors or shapes."""
    from transformers import AutoConfig

    require_known(source, block=1)
    kind, wanted = gguf_file.architecture(file), ARCHITECTURES[source.architecture]
    if kind != wanted:
        raise UnsupportedError("The GGUF file is of another architecture than the base", allowed=wanted, got=kind)
    in_file = {name: t.shape for name, t in stored_weights.read_headers(file).items() if name != ROPE_FACTORS}
    in_base = {
        name: t.shape for name, t in stored_weights.read_headers(source.folder).items() if not name.endswith("inv_freq")
    }
    if AutoConfig.from_pretrained(source.folder, local_files_only=True).tie_word_embeddings:
        in_base.pop("lm_head.weight", None)  # some checkpoints store it twice
    differ = sorted(name for name in in_file.keys() | in_base.keys() if in_file.get(name) != in_base.get(name))
    if differ:
        first = differ[0]
        raise UnsupportedError(
            f"The GGUF file and the base differ in {len(differ)} tensors, the first of them {first}",
            allowed=str(in_base.get(first, "none")),
            got=str(in_file.get(first, "none")),
            fix="Give the base that it was made from as -P model=...",
        )
