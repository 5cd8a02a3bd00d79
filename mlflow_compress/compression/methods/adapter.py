"""A fine-tuned adapter (LoRA, DoRA, ...) merged into its base, to see how far the tuning has moved the model."""

import re
from pathlib import Path

from mlflow_compress.compression.layers import save_and_measure
from mlflow_compress.compression.method import CompressionJob, Logits, Method, MethodConfig, register
from mlflow_compress.errors import CheckpointError, ConfigError, DataError, UnsupportedError
from mlflow_compress.hashes import sha256_file
from mlflow_compress.models import peft_adapter, stored_weights
from mlflow_compress.models.source_model import SourceModel
from mlflow_compress.paths import started_in


class _AdapterConfig(MethodConfig):
    """Settings of `adapter`."""

    adapter: str = ""
    """Folder that peft has saved."""

    other_base: bool = False
    """Merge although the adapter names another base than the model."""

    @property
    def folder(self) -> Path:
        """The folder, with its configuration and its weights in safetensors."""
        if not self.adapter:
            raise ConfigError("Method 'adapter' needs an adapter", allowed="a folder", fix="Give adapter=FOLDER")
        folder = Path(started_in()) / Path(self.adapter).expanduser()  # stages run in other folders
        peft_adapter.require_adapter(folder)
        return folder.resolve()


@register
class Adapter(Method[_AdapterConfig]):
    """Merge an adapter by peft, in the base's dtype. The checkpoint is a plain model, which can be compressed further.

    It is a variant of the base as any other: distances say how far the tuning has moved it.
    """

    name = "adapter"
    description = "A peft adapter (LoRA, DoRA, ...) merged into its base: `-P method_args=adapter=FOLDER`"
    reference = "Hu et al. 2022, https://arxiv.org/abs/2106.09685; https://huggingface.co/docs/peft"
    format = "safetensors"
    runs_in = ("vLLM", "llama.cpp")
    linear_only = False
    requires = ("peft",)
    extra = "adapters"
    Config = _AdapterConfig

    def label(self, config: _AdapterConfig) -> str:
        """Return ``adapter-NAME``, with the folder's last part."""
        return f"{self.name}-{re.sub(r'[^A-Za-z0-9.]+', '-', Path(config.adapter).name) or 'none'}"

    def fingerprint(self, config: _AdapterConfig) -> str:
        """Return the hashes of the adapter's files: the folder's content may change."""
        return "".join(sha256_file(config.folder / name) for name in peft_adapter.ADAPTER_FILES)

    def check(self, config: _AdapterConfig, source: SourceModel) -> None:
        base = peft_adapter.base_of(config.folder)
        if not (config.other_base or _is_of(base, source)):
            raise UnsupportedError(
                "The adapter was trained on another base",
                allowed=f"model={base}",
                got=source.name,
                fix="If both are the same model under two names, add other_base=true to method_args",
            )

    def compress(self, job: CompressionJob[_AdapterConfig]) -> Logits:
        model = job.source.load(job.device, dtype=job.source.torch_dtype)
        return save_and_measure(job, peft_adapter.merge(model, job.config.folder))


def _is_of(base: str, source: SourceModel) -> bool:
    """Return whether an adapter's base is the model: by name, or by the weights where the name is a folder here."""
    if base in (source.name, str(source.folder)):
        return True
    if Path(base).is_dir():
        try:
            return stored_weights.hash_weights(Path(base))[1] == stored_weights.hash_weights(source.folder)[1]
        except (CheckpointError, DataError):
            return False
    return Path(base).name == Path(source.name).name
