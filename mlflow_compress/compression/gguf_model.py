"""Converts a Llama-like model to the tensors of a GGUF file, and back."""

import shutil
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import numpy as np
from pydantic import model_validator

from mlflow_compress.compression.method import CompressionJob, Logits, Method, MethodConfig
from mlflow_compress.errors import ConfigError, ReloadMismatchError, UnsupportedError
from mlflow_compress.models import gguf_file, stored_weights
from mlflow_compress.models.checkpoint_config import GGUF_NATIVE, GGUF_NATIVE_CACHE
from mlflow_compress.models.source_model import SourceModel

if TYPE_CHECKING:
    import torch

_SHARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def require_whole_context(source: SourceModel) -> None:
    """Raise `UnsupportedError` for a model with sliding-window attention that is shorter than its context."""
    window = getattr(source.configuration(), "sliding_window", None)
    if window is not None and window < source.max_length:
        raise UnsupportedError(
            "Sliding-window attention is not supported here",
            allowed=f"no window, or one of the context's {source.max_length} tokens",
            got=f"sliding_window={window}",
        )


def as_llama(model: Any) -> Any:
    """Return a Llama that computes the same as a Mistral or Qwen2 without sliding windows; it shares the parameters.

    In Qwen2, query, key and value have biases and the output projection has none. A Llama has all four or none, so the
    output projection gets a bias of zero. A Llama is returned as it is, and so is a Mixtral.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if model.config.model_type in _LLAMAS:
        return model
    config, state = model.config, model.state_dict()
    biases = "model.layers.0.self_attn.q_proj.bias" in state
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shared = {name: getattr(config, name) for name in _SHARED}
    with torch.device("meta"):
        llama = LlamaForCausalLM(LlamaConfig(**shared, head_dim=head_dim, attention_bias=biases))
    for name, layer in llama.model.layers.named_modules():
        if biases and name.endswith("o_proj"):
            state[f"model.layers.{name}.bias"] = torch.zeros(layer.out_features, dtype=model.dtype, device=model.device)
    llama.load_state_dict(state, assign=True)
    llama.tie_weights()
    llama.model.rotary_emb = model.model.rotary_emb
    llama.config._attn_implementation = config._attn_implementation
    llama.generation_config = model.generation_config
    return llama.eval()


_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "llama",
    "Qwen3MoeForCausalLM": "qwen3moe",
}
"""GGUF's architecture names, by model class; in GGUF a Mistral is a Llama, and a Mixtral one with experts."""

_LLAMAS = ("llama", "mixtral")
"""`model_type` of what is written as a Llama; others become one first (`as_llama`)."""

EXPERT_TENSORS = (".experts.gate_up_proj", ".experts.down_proj")
"""How the names of transformers' tensors of all experts of a layer end."""

LLAMA_CPP_PACKAGE, LLAMA_CPP_EXTRA = "llama_cpp", "llama-cpp"

_ROPE_FACTORS = "rope_freqs.weight"
"""A tensor that only the file has: llama.cpp divides the rotary frequencies by it."""

_ROUTER = "ffn_gate_inp.weight"

_ROPE_TYPES = ("default", "llama3")

MAX_NATIVE_KL = 0.05
"""Largest mean KL, in nats, of llama.cpp's own logits from those of the dequantized values (see `file_logits`)."""


CacheType = Literal["f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
_FLOAT_CACHE = ("f16", "f16")


class GgufFileConfig(MethodConfig):
    """Settings of every method whose checkpoint is a GGUF file."""

    native: bool = False
    """Let llama.cpp compute the logits whenever the checkpoint is evaluated, on the CPU (extra `llama-cpp`)."""
    type_k: CacheType = "f16"  # With native: llama.cpp's type of the keys in its cache, as in ``--cache-type-k``
    type_v: CacheType = "f16"  # The same of the values

    @model_validator(mode="after")
    def _require_native(self) -> Self:
        if not self.native and self.cache_types != _FLOAT_CACHE:
            raise ConfigError(
                "Only llama.cpp has a cache of these types",
                allowed="type_k and type_v f16, or native=true",
                got=", ".join(self.cache_types),
                fix="Give native=true, or use method kv-cache, which simulates a quantized cache",
            )
        return self

    @property
    def cache_types(self) -> tuple[CacheType, CacheType]:
        return self.type_k, self.type_v

    @property
    def native_label(self) -> str:
        """The end of a label: ``-native``, or ``-native-kq8_0-vq4_0`` where the cache is quantized."""
        types = "" if self.cache_types == _FLOAT_CACHE else f"-k{self.type_k}-v{self.type_v}"
        return f"-native{types}" if self.native else ""


class QuantizingGgufConfig(GgufFileConfig):
    """Settings of every method that quantizes to GGUF."""

    embeddings: bool = False  # Quantize the embeddings and the head too, as in files made by llama.cpp


G = TypeVar("G", bound=QuantizingGgufConfig)


class ForTensors(Method[G]):
    """A method that gives all linear layers types of GGUF by itself, or some of them for `mixed`."""

    format = "gguf"
    runs_in = ("llama.cpp",)
    block: ClassVar[int]
    """Neighbouring weights of a row that a block holds; llama.cpp would give other types to incomplete ones."""

    @abstractmethod
    def tensor_type(self, config: G) -> str:
        """Return the GGUF type of a layer with these settings: "Q4_K". Settings that mix types are a `ConfigError`."""

    @abstractmethod
    def file_type(self, config: G) -> str:
        """Return llama.cpp's name of a file with these settings: "MOSTLY_Q4_K_M"."""

    def importance(self, job: CompressionJob[Any], model: Any) -> dict[str, np.ndarray[Any, Any]] | None:
        """Return the importance of each input channel of each tensor, by GGUF name; None where all are equal."""
        return None

    def check(self, config: G, source: SourceModel) -> None:
        _require_known_architecture(source, self.block)


def _require_known_architecture(source: SourceModel, block: int) -> None:
    """Raise `UnsupportedError` for unknown architectures, scaled positions, and rows that are not complete blocks."""
    if source.architecture not in _ARCHITECTURES:
        raise UnsupportedError(
            "The names of this architecture's tensors in GGUF are not known here",
            allowed=sorted(_ARCHITECTURES),
            got=source.architecture,
        )
    for name, (_, in_features) in source.matrices.items():
        if in_features % block:
            raise UnsupportedError(
                f"GGUF's blocks do not divide the {in_features} input features of {name}",
                allowed=f"multiples of {block}",
                got=in_features,
            )
    require_whole_context(source)
    _require_llama_cpps_mixture(source)
    rope = (getattr(source.configuration(), "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _ROPE_TYPES:
        raise UnsupportedError(
            "GGUF files of models whose positions are scaled in this way are not written here",
            allowed=_ROPE_TYPES,
            got=rope,
        )


def _require_llama_cpps_mixture(source: SourceModel) -> None:
    """Raise `UnsupportedError` for a Qwen3 mixture that llama.cpp would compute as another function."""
    config = source.configuration()
    if _ARCHITECTURES[source.architecture] != "qwen3moe":
        return
    if not config.norm_topk_prob:
        raise UnsupportedError(
            "llama.cpp makes the weights of a token's experts sum to 1, and this model does not",
            allowed="norm_topk_prob true",
            got="norm_topk_prob false in config.json",
            fix="Use gptq, awq or rtn, which vLLM serves",
        )
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        raise UnsupportedError(
            "In GGUF, every layer of this architecture has experts",
            allowed="mlp_only_layers [] and decoder_sparse_step 1",
            got=f"{config.mlp_only_layers} and {config.decoder_sparse_step}",
        )


def load_llama_like(source: SourceModel, device: str) -> Any:
    """Load the base in float32 for evaluation, as the architecture that it is in GGUF."""
    model = source.load(device)
    return as_llama(model) if _ARCHITECTURES[source.architecture] == "llama" else model


def plain_kind(dtype: str) -> Callable[[Any], Any]:
    """Return a function that gives the GGUF type of an unquantized parameter: the base's own, float32 for 1-d ones."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    stored = {"float32": kinds.F32, "bfloat16": kinds.BF16, "float16": kinds.F16}[dtype]
    return lambda parameter: stored if parameter.ndim > 1 else kinds.F32


def interleave_heads(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Return a Llama query or key weight in GGUF's row order.

    In GGUF, rotary positions rotate neighbouring rows; in transformers, the two halves of a head.

    `weight` has the shape (heads * head_dim, ...); rows may be packed. `heads` is the number of query heads, or of key
    heads for a key weight.
    """
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def deinterleave_heads(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Return the weight in transformers' row order: the inverse of `interleave_heads`."""
    rows = weight.shape[0]
    return weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _interleaved_heads(name: str, config: Any) -> int | None:
    """Return the number of heads of a parameter whose rows GGUF interleaves; None for all others."""
    module = name.rpartition(".")[0]
    if config.model_type not in _LLAMAS or not module.endswith(("q_proj", "k_proj")):
        return None
    return int(config.num_attention_heads if module.endswith("q_proj") else config.num_key_value_heads)


def gguf_name(name: str, config: Any) -> str:
    """Return GGUF's name of a parameter of a model with this configuration (see `load_llama_like`)."""
    architecture = "llama" if config.model_type in _LLAMAS else config.model_type.replace("_", "")
    return gguf_file.to_gguf_name(name, architecture=architecture, n_layers=config.num_hidden_layers)


def _stored_parts(name: str, parameter: "torch.Tensor", config: Any) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield what GGUF stores of a parameter, by its names there: views of its data.

    All experts of a layer have three tensors of shape (experts, out_features, in_features) there, and two in
    transformers, which keeps gate and up one after the other. Anything else is one tensor.
    """
    layer = name.rpartition(".")[0]
    if name.endswith(EXPERT_TENSORS[0]):
        for matrix, part in zip(("gate_proj", "up_proj"), parameter.data.chunk(2, dim=1), strict=True):
            yield gguf_name(f"{layer}.{matrix}.weight", config), part
    else:
        yield gguf_name(f"{name}.weight" if name.endswith(EXPERT_TENSORS[1]) else name, config), parameter.data


def tensors_of(model: Any, kind_of: Callable[[str, Any], Any]) -> dict[str, tuple[Any, Any]]:
    """Return a model's tensors as `gguf_file.write` takes them.

    Parameters are read as float32. `kind_of` gives the `gguf.GGMLQuantizationType` of a parameter's name and value.
    """
    import gguf
    import torch

    tensors: dict[str, tuple[Any, Any]] = {}
    for name, parameter in model.named_parameters():
        heads = _interleaved_heads(name, model.config)
        for stored, part in _stored_parts(name, parameter, model.config):
            # llama.cpp's own converter keeps routers in float32.
            kind = gguf.GGMLQuantizationType.F32 if stored.endswith(_ROUTER) else kind_of(name, parameter)
            data = gguf.quants.quantize(part.float().cpu().numpy(), kind)
            tensors[stored] = (data if heads is None else interleave_heads(data, heads), kind)
    # The divisors of the rotary frequencies, shape (head_dim / 2,); 1 without scaling.
    rotary = model.model.rotary_emb.inv_freq.float().cpu()
    exponents = torch.arange(len(rotary), dtype=torch.float64) / len(rotary)
    plain = model.config.rope_parameters["rope_theta"] ** -exponents
    factors = (plain / rotary.double()).float().numpy()
    if not np.allclose(factors, 1.0):
        tensors[_ROPE_FACTORS] = (factors, gguf.GGMLQuantizationType.F32)
    return tensors


def file_logits(job: CompressionJob[GgufFileConfig], model: Any, path: Path) -> Logits:
    """Return a file's logits on the probe: of its dequantized values, or llama.cpp's own if the job is `native`."""
    import gguf
    import torch

    values = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    for name, parameter in model.named_parameters():
        heads = _interleaved_heads(name, model.config)
        for stored, part in _stored_parts(name, parameter, model.config):
            value = values[stored] if heads is None else deinterleave_heads(values[stored], heads)
            part.copy_(torch.from_numpy(value).reshape(part.shape))
    logits = job.probe.logits(model)
    if not job.config.native:
        return logits
    from mlflow_compress.compression.probe import compare_logits
    from mlflow_compress.models.architectures.native_gguf import open_native

    native = job.probe.logits(open_native(job.folder))
    # A quantized cache moves the logits by itself, so the file is compared without it.
    quantized = job.config.cache_types != _FLOAT_CACHE
    kl = compare_logits(
        logits, job.probe.logits(open_native(job.folder, _FLOAT_CACHE)) if quantized else native
    ).kl_mean
    if kl > MAX_NATIVE_KL:
        raise ReloadMismatchError(
            "llama.cpp's logits differ too much from those of the dequantized file",
            allowed=f"a mean KL up to {MAX_NATIVE_KL} nats on random tokens",
            got=f"{kl:.3g}",
        )
    return native


def _save_configuration(job: CompressionJob[GgufFileConfig], model: Any) -> None:
    """Write the configuration, generation settings and tokenizer of a checkpoint."""
    model.config.dtype = job.source.torch_dtype
    if job.config.native:
        setattr(model.config, GGUF_NATIVE, True)
        if job.config.cache_types != _FLOAT_CACHE:
            setattr(model.config, GGUF_NATIVE_CACHE, list(job.config.cache_types))
    model.config.save_pretrained(job.folder)
    model.generation_config.save_pretrained(job.folder)
    job.source.save_others(job.folder)


def save(
    job: CompressionJob[GgufFileConfig],
    model: Any,
    file_type: Any,
    tensors: Mapping[str, tuple[Any, Any]],
    path: Path,
) -> None:
    """Write the GGUF file, the configuration and the tokenizer."""
    _save_configuration(job, model)
    name, tokenizer = _ARCHITECTURES[job.source.architecture], job.source.tokenizer()
    gguf_file.write_gguf(path, model.config, name, file_type, tensors, tokenizer)


def adopt(job: CompressionJob[GgufFileConfig], file: Path) -> Logits:
    """Copy another tool's GGUF file, write the base's configuration and tokenizer, and return the file's logits."""
    model, path = load_llama_like(job.source, job.device), job.folder / gguf_file.GGUF_FILE
    shutil.copyfile(file, path)
    _save_configuration(job, model)
    return file_logits(job, model, path)


def require_version(source: SourceModel, file: Path) -> None:
    """Raise `UnsupportedError` where a file is not a version of the base: other architecture, tensors or shapes."""
    _require_known_architecture(source, block=1)
    kind, wanted = gguf_file.architecture(file), _ARCHITECTURES[source.architecture]
    if kind != wanted:
        raise UnsupportedError("The GGUF file is of another architecture than the base", allowed=wanted, got=kind)
    in_file = {name: t.shape for name, t in stored_weights.read_headers(file).items() if name != _ROPE_FACTORS}
    in_base = {
        name: t.shape for name, t in stored_weights.read_headers(source.folder).items() if not name.endswith("inv_freq")
    }
    if source.configuration().tie_word_embeddings:
        in_base.pop("lm_head.weight", None)  # some checkpoints store it twice
    differ = sorted(name for name in in_file.keys() | in_base.keys() if in_file.get(name) != in_base.get(name))
    if differ:
        first = differ[0]
        raise UnsupportedError(
            f"The GGUF file and the base differ in {len(differ)} tensors, the first of them {first}",
            allowed=str(in_base.get(first, "none")),
            got=str(in_file.get(first, "none")),
            fix="Give the base that it was made from as model=FOLDER",
        )


def write_plain(source: SourceModel, path: Path) -> None:
    """Write the model as GGUF; matrices keep their dtype, vectors are float32."""
    import gguf

    _require_known_architecture(source, block=1)
    model, name = load_llama_like(source, "cpu"), _ARCHITECTURES[source.architecture]
    plain = plain_kind(source.dtype)
    tensors = tensors_of(model, lambda _, parameter: plain(parameter))
    kind = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16"}[source.dtype]
    gguf_file.write_gguf(path, model.config, name, gguf.LlamaFileType[kind], tensors, source.tokenizer())
