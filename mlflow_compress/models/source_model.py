"""The model to compress: its folder, its layers, and its size as stored."""

import hashlib
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow_compress.errors import CheckpointError, UnsupportedError, require_extra
from mlflow_compress.files import alone_with, drop_unfinished_folders, staging_folder
from mlflow_compress.hashes import sha256_files
from mlflow_compress.home import home
from mlflow_compress.models import architectures, checkpoint_config, model_files, peft_adapter, stored_weights
from mlflow_compress.models.model_files import GENERATION, weights_errors
from mlflow_compress.models.peft_adapter import ADAPTER
from mlflow_compress.paths import started_in

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

DOWNLOADED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py", "README.md", "LICEN[CS]E*", "NOTICE*"]
"""Files that are downloaded from a hub to be compressed, with their licence; pickles are not."""
_NOT_WEIGHTS = [
    "*.bin", "*.pt", "*.pth", "*.msgpack", "*.h5", "*.onnx", "*.gguf", "original/*", "consolidated*.safetensors"
]  # fmt: skip

_MOST_ELSEWHERE = 0.1
"""Largest share of the layers' weights that may be outside of linear layers (routers, short convolutions)."""


@dataclass(frozen=True, kw_only=True)
class SourceModel:
    """A causal language model on disk, described without loading its weights."""

    name: str  # Folder or hub id, as the user gave it
    folder: Path  # Local folder
    architecture: str  # Class name of the model
    model_type: str  # transformers' name of the architecture's family, for example "llama"
    dtype: str  # Dtype of most stored weights, for example "bfloat16"
    # Linear layers except the language-model head: name to (out_features, in_features), in model order
    linear: dict[str, tuple[int, int]]
    head: str | None  # Name of the language-model head, which no method changes
    # Matrices of the experts of a mixture: the name that each has where an expert is a module of linear layers, to its
    # name in a checkpoint and (out_features, in_features). transformers keeps them in two tensors per layer. Empty
    # where `architectures.linear_experts` cannot take them apart.
    experts: dict[str, tuple[str, tuple[int, int]]]
    # Weights with two or more axes outside of linear layers, embeddings and head: name to number of elements; among
    # them the tensors of the experts
    elsewhere: dict[str, int]
    # Name of the first linear layer whose class is a subclass of `torch.nn.Linear`, as in Falcon
    subclassed: str | None
    layers: int  # Number of decoder layers
    vocabulary: int  # Rows of the input embedding
    max_length: int  # Context length in tokens
    parameters: int  # Number of stored weights; tied weights count once
    trust_remote_code: bool  # Whether the model's own Python code may run

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """All matrices that a method can reach: linear layers, and those of the experts; name to shape."""
        return {**self.linear, **{name: shape for name, (_, shape) in self.experts.items()}}

    @property
    def stored_matrices(self) -> dict[str, tuple[int, int]]:
        """`matrices` by their names in a checkpoint."""
        return {**self.linear, **dict(self.experts.values())}

    @property
    def ignored(self) -> list[str]:
        """Names of linear layers that stay unquantized."""
        return [] if self.head is None else [self.head]

    @property
    def torch_dtype(self) -> "torch.dtype":
        import torch

        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def load(self, device: str, *, dtype: "torch.dtype | None" = None, **options: Any) -> Any:
        """Load the model in evaluation mode; in float32 unless `dtype` is given.

        `options` are further arguments of `from_pretrained`; its `device_map` goes before `device`.
        """
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        from mlflow_compress.models.causality import require_causal  # imports torch

        placed = {} if device == "cpu" or "device_map" in options else {"device_map": {"": device}}
        with weights_errors(self.folder, trust_remote_code=self.trust_remote_code):
            model, info = AutoModelForCausalLM.from_pretrained(
                self.folder,
                dtype=dtype or torch.float32,
                output_loading_info=True,
                trust_remote_code=self.trust_remote_code,
                use_safetensors=True,
                local_files_only=True,
                **placed,
                **options,
            )
        architectures.require_complete(info, self.folder)
        if (self.folder / GENERATION).is_file():
            # `save_others` copies it. Transformers reads settings that contradict each other, and refuses to save them.
            model.generation_config = GenerationConfig()
        model.eval()
        # A model on a disk has no weights here yet, and bitsandbytes saves wrong ones after a pass. The reload check
        # loads what is made of these.
        if not options:
            require_causal(model, self.folder)
        return model

    def configuration(self) -> Any:
        return model_files.open_config(self.folder, trust_remote_code=self.trust_remote_code)

    def tokenizer(self) -> Any:
        return model_files.open_tokenizer(self.folder, trust_remote_code=self.trust_remote_code)

    def save_others(self, folder: Path) -> None:
        """Write what a checkpoint has besides weights and configuration: the tokenizer, and the generation settings.

        These are copied as they are: whether they are good is not decided here.
        """
        self.tokenizer().save_pretrained(folder)
        if (self.folder / GENERATION).is_file():
            shutil.copyfile(self.folder / GENERATION, folder / GENERATION)

    def require_linear(self, method: str, *, with_experts: bool = False, taking_experts: Sequence[str] = ()) -> None:
        """Raise `UnsupportedError` where more than `_MOST_ELSEWHERE` of the layers' weights are not in linear layers.

        `with_experts`: the method takes experts apart, where `experts` has them. `taking_experts`: the methods that do,
        for the message.
        """
        layers = {name.rsplit(".", 2)[0] for name in self.experts} if with_experts else set()
        left = {name: size for name, size in self.elsewhere.items() if name.rpartition(".")[0] not in layers}
        missed = sum(left.values())
        reached = sum(rows * columns for rows, columns in self.linear.values()) + sum(self.elsewhere.values()) - missed
        if missed > _MOST_ELSEWHERE * (reached + missed):
            raise UnsupportedError(
                f"Method {method!r} changes linear layers only, and {missed / (reached + missed):.0%} of the weights "
                f"of this model's layers are elsewhere, as in {max(left, key=left.__getitem__)}",
                got=self.architecture,
                fix=f"Use a method that compresses experts too: {', '.join(taking_experts)}"
                if taking_experts
                else "Use a cast, or give a checkpoint made elsewhere (method=checkpoint)",
            )


def resolve(model: str, *, trust_remote_code: bool = False) -> SourceModel:
    """Find a model (folder or hub id) and describe it."""
    from torch import nn

    from mlflow_compress.models.architectures.linear_experts import stored_experts  # imports torch

    folder = local_model_folder(model)
    if stored_weights.weight_files(folder)[0].suffix != ".safetensors":
        raise UnsupportedError(
            "The model is a GGUF file", got=model, fix="Give the full-precision safetensors checkpoint"
        )
    tensors = stored_weights.read_headers(folder)
    config = model_files.open_config(folder, trust_remote_code=trust_remote_code)
    model_files.open_generation_settings(folder)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError("The model is already quantized", got=model, fix="Give the full-precision checkpoint")
    skeleton = model_files.without_weights(config, folder, trust_remote_code=trust_remote_code)
    linear, head, elsewhere = _weights(skeleton)
    experts = stored_experts(skeleton) if elsewhere else {}
    if not linear:
        where = f": its weights are elsewhere, as in {next(iter(elsewhere))}" if elsewhere else ""
        raise UnsupportedError(f"The model has no linear layers to compress{where}", got=type(skeleton).__name__)
    text_config = config.get_text_config()
    return SourceModel(
        name=model,
        folder=folder,
        architecture=type(skeleton).__name__,
        model_type=config.model_type,
        dtype=stored_weights.main_dtype(tensors),
        linear=linear,
        head=head,
        experts=experts,
        elsewhere=elsewhere,
        subclassed=next((name for name in linear if type(skeleton.get_submodule(name)) is not nn.Linear), None),
        layers=int(text_config.num_hidden_layers),
        vocabulary=int(skeleton.get_input_embeddings().weight.shape[0]),
        max_length=int(getattr(text_config, "max_position_embeddings", None) or 2048),
        parameters=sum(t.elements for t in tensors.values()),
        trust_remote_code=trust_remote_code,
    )


def local_model_folder(model: str) -> Path:
    """Return the folder of a model that can be compressed (see `resolve_folder`)."""
    folder = resolve_folder(model, allow=DOWNLOADED)
    if not (folder / "config.json").is_file():
        raise CheckpointError("The folder holds no model: config.json is missing", got=str(folder))
    return folder.resolve()


def resolve_folder(path: str, *, allow: list[str] | None = None) -> Path:
    """Return the local folder of a checkpoint; a hub id is downloaded, or taken from the local cache.

    In place of an adapter's folder it is that of its base with the adapter merged into it.
    """
    folder = _downloaded(path, allow)
    if not (folder / ADAPTER).is_file():
        return folder
    if any(folder.glob("model*.safetensors")):
        raise CheckpointError(
            "The folder has a model and an adapter, which transformers applies where peft is installed and ignores "
            "elsewhere",
            allowed="a model alone, or an adapter alone",
            got=str(folder / ADAPTER),
            fix=f"Move the adapter's files elsewhere, {ADAPTER} among them",
        )
    return _merged_folder(folder)


def _merged_folder(folder: Path) -> Path:
    """Return the folder of an adapter's model: its base with the adapter merged into it, in the base's dtype.

    It is made once, and found again by the contents of all files of both. The tokenizer is the base's.
    """
    require_extra("adapters", "peft", by="A model that is an adapter")
    peft_adapter.require_adapter(folder)
    base, merging = peft_adapter.base_of(folder), f"{peft_adapter.BASE_FIELD} of {folder / ADAPTER}"
    if (Path(base) / ADAPTER).is_file():
        raise UnsupportedError("The base of the adapter is an adapter", allowed=f"a model as {merging}", got=base)
    try:
        base_folder = local_model_folder(base)
    except CheckpointError as error:
        raise CheckpointError(
            f"The base of the adapter cannot be opened: {str(error).rstrip('.')}",
            fix=f"Correct {merging}, or give the base as the model, and the adapter with method=adapter",
        ) from error
    if "auto_map" in checkpoint_config.read_settings(base_folder):
        raise UnsupportedError(
            "The base of the adapter brings code along, and an adapter given as a model is merged without any",
            got=base,
            fix="Compress the base with method=adapter and model_args=trust_remote_code=true, and give the checkpoint",
        )
    unused = checkpoint_config.unused_weights(base_folder)
    files = [path for path in sorted(base_folder.iterdir()) if path.is_file() and path.name not in unused]
    hashes = sha256_files([*files, *(folder / name for name in peft_adapter.ADAPTER_FILES)])
    contents = "".join(f"{path.name}\0{digest}\n" for path, digest in hashes.items())
    key = hashlib.sha256(f"{metadata.version('peft')}\n{contents}".encode()).hexdigest()[:16]
    merged = home("") / "merged" / key
    if merged.is_dir():
        return merged
    merged.parent.mkdir(parents=True, exist_ok=True)
    with alone_with(merged.with_suffix(".lock")):
        if not merged.is_dir():  # another process may have made it while this one waited
            drop_unfinished_folders(merged)
            logger.info("Merging the adapter %s into its base %s, once: %s", folder, base, merged)
            source = resolve(base)
            model = peft_adapter.merge(source.load("cpu", dtype=source.torch_dtype), folder)
            with staging_folder(merged) as new:
                model.save_pretrained(new)
                source.save_others(new)
    return merged


def _downloaded(path: str, allow: list[str] | None) -> Path:
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    fix = f"Give a hub id such as org/name, or a folder; a relative one was looked for in {started_in()}"
    if folder.is_absolute() or path.startswith(".") or path.count("/") > 1:
        raise CheckpointError("No such model folder", got=path, fix=fix)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=allow, ignore_patterns=_NOT_WEIGHTS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"The model is neither a folder nor a hub id that can be reached: {error}", got=path, fix=fix
        ) from error


def _weights(skeleton: Any) -> tuple[dict[str, tuple[int, int]], str | None, dict[str, int]]:
    from torch import nn

    output = skeleton.get_output_embeddings()
    linear: dict[str, tuple[int, int]] = {}
    head, elsewhere = None, {}
    for name, module in skeleton.named_modules():
        if module is output:
            head = name
        elif isinstance(module, nn.Linear):
            linear[name] = (module.out_features, module.in_features)
        elif not isinstance(module, nn.Embedding):
            for part, parameter in module.named_parameters(prefix=name, recurse=False):
                if parameter.ndim > 1:
                    elsewhere[part] = parameter.numel()
    return linear, head, elsewhere
