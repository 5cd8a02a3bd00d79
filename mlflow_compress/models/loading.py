"""Loads a Hugging Face causal LM with its tokenizer, or opens it without its weights."""

import contextlib
import io
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from mlflow_compress.errors import CheckpointError, ConfigError, UnsupportedError
from mlflow_compress.models import architectures, checkpoint_config, model_files, offloading
from mlflow_compress.models.architectures import packed_layers
from mlflow_compress.models.causality import require_causal
from mlflow_compress.models.identity import max_length, stored_config, weights_hash
from mlflow_compress.models.length_regimes import forget_longer_sequences
from mlflow_compress.models.memory_alignment import align_weights, rounding_identity
from mlflow_compress.models.model_files import library_errors, weights_errors
from mlflow_compress.models.placement import BALANCED, placement, room_for_states
from mlflow_compress.models.source_model import resolve_folder
from mlflow_compress.replaced import replaced

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """Which model to open, and how."""

    path: str  # Folder, or id on the Hugging Face hub
    dtype: str = "float32"  # "float32", "bfloat16", "float16", or "auto" for the checkpoint's own
    # "auto" (a GPU if there is one, else the CPU), "cuda", "balanced" (spread over all GPUs, then the host's memory,
    # then the disk, by accelerate), or a torch device such as "cuda:1"
    device: str = "auto"
    # With "balanced": most memory by device, such as {"cpu": "2GiB", "0": "70GiB"}, for weights and, of the host's, a
    # quarter for hidden states between layers. Embeddings and head come on top where they do not fit.
    max_memory: Mapping[str, str] = field(default_factory=dict)
    # With "balanced": where offloaded weights are kept that the checkpoint does not have as they are needed; None: the
    # system's folder for temporary files
    offload_dir: str | None = None
    trust_remote_code: bool = False  # Allow code that comes with the checkpoint

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError("Unknown dtype", allowed=DTYPES, got=self.dtype)


class _OpenedModel(ABC):
    """The identity of a model that transformers reads, with its weights in memory or without."""

    tokenizer: Any
    path: Path  # The local folder (for a hub id, its local snapshot)
    device: torch.device  # Device of the embeddings, or where they would be

    @abstractmethod
    def configuration(self) -> Any:
        """Return the model's configuration."""

    @property
    def vocab_size(self) -> int:
        return int(self.configuration().get_text_config(decoder=True).vocab_size)

    @property
    def max_length(self) -> int:
        return max_length(self.configuration(), self.tokenizer)

    @cached_property
    def weights(self) -> str:
        """`weights_hash` of the folder, computed once, because it reads all weight files."""
        return weights_hash(self.path)

    @property
    def engine(self) -> dict[str, str]:
        """What decides its numbers where another engine runs it: nothing, transformers does."""
        return {}

    @property
    def rounding(self) -> dict[str, str]:
        """What decides the last bits of its numbers (see `memory_alignment.rounding_identity`)."""
        return rounding_identity(self.device)

    @property
    def stored_config(self) -> dict[str, Any]:
        """The configuration as a baseline store keeps it: the head's own code is rebuilt from it."""
        return stored_config(self.configuration())


@dataclass(frozen=True)
class LoadedModel(_OpenedModel):
    """A model in eval mode with its tokenizer.

    Its weights are aligned in memory (`align_weights`), and its numbers do not depend on what it has computed before
    (`forget_longer_sequences`).
    """

    model: Any
    tokenizer: Any
    path: Path  # The local folder (for a hub id, its local snapshot)
    dtype: torch.dtype  # Dtype of the parameters that are not quantized
    device: torch.device  # Device of the embeddings
    config: LoadConfig | None = None  # With which it was loaded; None for a model that exists only in memory

    def __post_init__(self) -> None:
        align_weights(self.model)
        forget_longer_sequences(self.model)

    def configuration(self) -> Any:
        return self.model.config


def load_model(config: LoadConfig) -> LoadedModel:
    """Load a checkpoint of any format that transformers reads (compressed-tensors, bitsandbytes, ...)."""
    from transformers import AutoModelForCausalLM

    folder = _model_folder(config.path)
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    placed, kernel = placement(config.device, config.max_memory), checkpoint_config.attention(folder)
    if "cpu" in placed.get("max_memory", {}):
        placed["max_memory"]["cpu"] -= room_for_states(config.max_memory)
    kept_on_disk = offloading.offload_folder(config.offload_dir) if config.device == BALANCED else None
    if kept_on_disk is not None:
        placed["offload_folder"] = kept_on_disk.name
    trusted = config.trust_remote_code
    options = architectures.loading_options(folder, trust_remote_code=trusted)
    if "config" not in options:
        model_files.open_config(folder, trust_remote_code=trusted)
    tokenizer = model_files.open_tokenizer(folder, trust_remote_code=trusted)
    model_files.open_generation_settings(folder)
    waiting = _integers_without_initial_values() if kept_on_disk is not None else contextlib.nullcontext()
    with weights_errors(folder, trust_remote_code=trusted), _bars_on_terminals_only(), waiting:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype or "auto",
            output_loading_info=True,
            **options,
            **({"attn_implementation": kernel} if kernel else {}),
            **placed,
            trust_remote_code=trusted,
            local_files_only=True,
        )

    architectures.require_complete(info, folder)
    if kept_on_disk is not None and not offloading.is_offloaded(model):
        kept_on_disk = None  # everything fits: the folder is removed
    if kept_on_disk is not None:
        if (method := checkpoint_config.quant_method(folder)) not in offloading.OFFLOADED_FORMATS:
            raise UnsupportedError(
                "A checkpoint of this format must fit into memory",
                allowed="plain and compressed-tensors weights",
                got=f"{method} in {folder}",
                fix="Raise max_memory, or use another device",
            )
        offloading.return_freed_memory()
    with _bars_on_terminals_only():
        # compressed-tensors would unpack in a hook of the model's forward, but scoring calls body and head separately.
        # The kernels of gptqmodel and bitsandbytes would round activations.
        with_hooks = offloading.is_offloaded(model)
        if packed_layers.decompress(model):
            from compressed_tensors.offload import remove_dispatch, to_accelerate

            if with_hooks:
                buffers = [
                    (module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()
                ]
                to_accelerate(model)
                for module, name, buffer in buffers:  # some are in no file: an embedding's scale (Gemma 3)
                    if buffer is not None and module._buffers[name].is_meta:
                        module._buffers[name] = buffer
            else:
                remove_dispatch(model, onload_tensors=True)
                _remove_idle_forwards(model)
        packed_layers.check_decompressed(model, folder)
        packed_layers.expand(model)
    if dtype is not None:
        # Quantizers leave some parameters in the checkpoint's dtype (GPT-NeoX's head), and a product of two dtypes
        # fails.
        for parameter in model.parameters():
            if parameter.dtype in (torch.float32, torch.bfloat16, torch.float16):
                parameter.data = parameter.data.to(dtype)
    if kept_on_disk is not None:
        offloading.finish(model, dtype, kept_on_disk)
    model.eval()
    _log_once("bitsandbytes.autograd._functions")  # it warns at every int8 product of a float32 model
    require_causal(model, folder)
    return LoadedModel(model, tokenizer, folder, model.dtype, model.get_input_embeddings().weight.device, config)


@dataclass(frozen=True)
class LightModel(_OpenedModel):
    """The identity of a model, as a `LoadedModel` has it, without weights in memory; it cannot score."""

    model_config: Any
    tokenizer: Any
    path: Path  # The local folder (for a hub id, its local snapshot)
    dtype: torch.dtype  # Dtype that parameters which are not quantized would have
    device: torch.device  # Device on which the embeddings would be
    config: LoadConfig  # With which `load_model` loads the model

    def configuration(self) -> Any:
        return self.model_config


def open_light(config: LoadConfig) -> LightModel:
    """Open a model without its weights, from its configuration, its tokenizer and the headers of its weight files."""
    folder = _model_folder(config.path)
    trusted = config.trust_remote_code
    device = placement(config.device, config.max_memory)["device_map"]
    model_config = architectures.loading_options(folder, trust_remote_code=trusted).get("config")
    if model_config is None:
        model_config = model_files.open_config(folder, trust_remote_code=trusted)
    tokenizer = model_files.open_tokenizer(folder, trust_remote_code=trusted)
    model_files.open_generation_settings(folder)
    with library_errors("The checkpoint cannot be read", str(folder)):
        dtype = _stored_dtype(model_config, folder) if config.dtype == "auto" else getattr(torch, config.dtype)
    # Where `from_pretrained` would put the embeddings; "auto" fills the first GPU first.
    first = "cuda:0" if torch.cuda.is_available() else "cpu"
    first = device[""] if isinstance(device, dict) else first
    return LightModel(model_config, tokenizer, folder, dtype, torch.device(first), config)


def _stored_dtype(model_config: Any, folder: Path) -> torch.dtype:
    """Return the dtype that transformers uses for "auto": the configuration's, else that of the first stored float."""
    named = getattr(model_config, "dtype", None)
    if isinstance(named, torch.dtype):
        return named
    for file in checkpoint_config.weight_files(folder):
        if file.suffix == ".gguf":
            return torch.get_default_dtype()  # its weights are expanded to floats
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                tensor: torch.Tensor = tensors.get_tensor(name)  # memory-mapped: its bytes are not read
                if tensor.is_floating_point():
                    return tensor.dtype
    raise CheckpointError("The checkpoint holds no floating-point weights", got=str(folder))


def _model_folder(path: str) -> Path:
    """Return the local folder of a checkpoint that holds a configuration and weights (see `resolve_folder`)."""
    folder = resolve_folder(path)
    if not (folder / "config.json").is_file() or not checkpoint_config.weight_files(folder):
        raise CheckpointError(
            "Not a model folder",
            allowed="config.json and safetensors or GGUF weights",
            got=str(folder),
            fix="Check the path",
        )
    return folder


def _remove_idle_forwards(model: torch.nn.Module) -> None:
    """Let layers whose plain weights are all that was quantized be called as their class is.

    compressed-tensors asks at each call what it is to round: 4 % of a small model's seconds.
    """
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None and scheme.input_activations is None and scheme.output_activations is None:
            vars(module).pop("forward", None)


@contextlib.contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    """Within this block, hide the libraries' progress bars unless the output is a terminal."""
    with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
        yield


def _integers_without_initial_values() -> contextlib.AbstractContextManager[None]:
    """Within this block, integer weights that wait on the disk, such as those of `w8a8`, are loaded.

    transformers takes weights that wait for missing ones, and draws initial values for them, which torch refuses for
    integers.
    """
    from transformers import PreTrainedModel

    initialize = PreTrainedModel.initialize_weights

    def all_but_integers(model: Any) -> None:
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                parameter._is_hf_initialized = True
        initialize(model)

    return replaced(PreTrainedModel, "initialize_weights", all_but_integers, of="transformers 5")


@cache
def _log_once(name: str) -> None:
    """Let a logger pass each message only once."""
    seen: set[object] = set()

    def is_new(record: logging.LogRecord) -> bool:
        new = record.msg not in seen
        seen.add(record.msg)
        return new

    logging.getLogger(name).addFilter(is_new)
