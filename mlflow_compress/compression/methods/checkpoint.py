"""A checkpoint made by another tool: copied, checked by reloading, and recorded like any other."""

import re
import shutil
from pathlib import Path

from mlflow_compress.compression import gguf_model, reload_check
from mlflow_compress.compression.method import CompressionJob, Logits, Method, register
from mlflow_compress.errors import CheckpointError, ConfigError, UnsupportedError
from mlflow_compress.models import architectures, checkpoint_config, stored_weights
from mlflow_compress.models import source_model as source_module
from mlflow_compress.models.model_files import open_config
from mlflow_compress.models.source_model import SourceModel

_CODE, GGUF_ENDING = "*.py", ".gguf"


class _CheckpointConfig(gguf_model.GgufFileConfig):
    """Settings of `checkpoint`."""

    checkpoint: str = ""
    """Folder or hub id of a compressed version of the base, in any format that transformers loads, or a GGUF file."""

    @property
    def path(self) -> Path:
        """Local path: a folder, or a single GGUF file; a hub id is downloaded."""
        if not self.checkpoint:
            raise ConfigError(
                "Method 'checkpoint' needs a checkpoint",
                allowed="a folder, a hub id or a GGUF file",
                fix="Give checkpoint=FOLDER",
            )
        file = Path(self.checkpoint).expanduser()
        if file.suffix == GGUF_ENDING and not file.is_dir():
            if not file.is_file():
                raise CheckpointError("The GGUF file does not exist", got=self.checkpoint)
            return file.resolve()
        return source_module.local_model_folder(self.checkpoint)


@register
class Checkpoint(Method[_CheckpointConfig]):
    """Evaluates a checkpoint that another tool has compressed, with the same records as every method.

    The files are copied, so that later changes of the original have no effect. `seconds` and memory are those of
    copying and loading: nothing is known about the compression.
    """

    name = "checkpoint"
    description = (
        "A checkpoint compressed elsewhere, in any format that transformers loads, or a GGUF file: "
        "`-P checkpoint=FOLDER`"
    )
    reference = "https://huggingface.co/docs/transformers/quantization/overview"
    format = "as it came"
    linear_only = False
    Config = _CheckpointConfig

    def label(self, config: _CheckpointConfig) -> str:
        """Return ``checkpoint-NAME``, with the folder's, the hub id's or the file's last part."""
        name = re.sub(r"[^A-Za-z0-9.]+", "-", Path(config.checkpoint).name.removesuffix(GGUF_ENDING)) or "none"
        return f"{self.name}-{name}{config.native_label}"

    def packages(self, config: _CheckpointConfig) -> tuple[tuple[str, ...], str | None]:
        return (
            ((gguf_model.LLAMA_CPP_PACKAGE,), gguf_model.LLAMA_CPP_EXTRA) if config.native else super().packages(config)
        )

    def fingerprint(self, config: _CheckpointConfig) -> str:
        """Return the hash of the checkpoint's weight files: the folder's content may change."""
        return stored_weights.hash_weights(config.path)[1]

    def check(self, config: _CheckpointConfig, source: SourceModel) -> None:
        folder = config.path
        if folder.suffix == GGUF_ENDING:
            gguf_model.require_version(source, folder)
            return
        if config.native:
            raise UnsupportedError("llama.cpp computes GGUF files only", allowed="a .gguf file", got=config.checkpoint)
        # Reports a missing extra before any work.
        architectures.loading_options(folder, trust_remote_code=source.trust_remote_code)
        tensors = stored_weights.read_headers(folder)
        variant = open_config(folder, trust_remote_code=source.trust_remote_code).get_text_config()
        base = source.configuration().get_text_config()
        if variant.vocab_size != base.vocab_size:
            raise UnsupportedError(
                "The checkpoint has another vocabulary than the base, so their predictions cannot be compared",
                allowed=str(base.vocab_size),
                got=variant.vocab_size,
                fix="Give the base that it was made from as model=FOLDER",
            )
        if not stored_weights.bytes_of_layers(tensors, source.linear):
            raise UnsupportedError(
                "The checkpoint stores none of the base's linear layers under their names",
                allowed=f"names such as {next(iter(source.linear))}",
                got=next(iter(tensors), "no tensors"),
            )

    def compress(self, job: CompressionJob[_CheckpointConfig]) -> Logits:
        """Copy the files, and return the logits of the original."""
        folder = job.config.path
        if folder.suffix == GGUF_ENDING:
            return gguf_model.adopt(job, folder)
        patterns = [*source_module.DOWNLOADED, checkpoint_config.GGUF]
        left = {"compression.json", *checkpoint_config.unused_weights(folder)}
        for path in sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file()):
            if path.name not in left and (job.source.trust_remote_code or not path.match(_CODE)):
                shutil.copyfile(path, job.folder / path.name)
        if not (job.folder / "tokenizer_config.json").exists():
            job.source.tokenizer().save_pretrained(job.folder)
        model = reload_check.load_checkpoint(folder, device=job.device, trust_remote_code=job.source.trust_remote_code)
        return job.probe.logits(model)
