"""The manifest of a compressed checkpoint, `compression.json`: method, base, sizes and hashes."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from mlflow_compress import files as atomic
from mlflow_compress.errors import CheckpointError
from mlflow_compress.files import dataclass_of, read_json_object
from mlflow_compress.formats import upgraded
from mlflow_compress.hashes import sha256_file, sha256_files
from mlflow_compress.models import stored_weights

MANIFEST_FILE = "compression.json"
MANIFEST_VERSION = 3
_READ = {".json", ".jinja", ".model", ".txt", ".py", ".safetensors"}  # suffixes that loaders look for


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """Record of one compression. It is written last, so that an unfinished folder has none."""

    method: str  # Registered name of the method
    label: str  # Short name of the variant, for example ``awq-4bit-g128``
    settings: dict[str, Any]  # The method's settings
    format: str  # Checkpoint format
    # Who can serve it: some of `config.declarations.Target`; none: only this package reads it. None where nobody knows
    served_by: list[str] | None = None
    base_model: str  # Folder or hub id that was compressed
    base_weights_hash: str  # SHA-256 over the base's weight files
    base_size_bytes: int  # Bytes of the base's stored tensors
    base_parameters: int  # Number of weights in the base; tied weights count once
    base_dtype: str  # Dtype of most of the base's weights, and of everything that is not quantized
    calibration: dict[str, int | str | list[str]] | None
    """samples, length, tokens and SHA-256 of the token ids; None where the method needs no text. For a mixture also
    `experts_without_tokens`, to which the router sent none; they were calibrated on the tokens of the others."""
    size_bytes: int  # Bytes of the stored tensors
    size_ratio: float  # base_size_bytes / size_bytes: how many times smaller the checkpoint is
    bits_per_weight: float
    """8 x bytes of everything stored for the linear layers' weights (packed values, scales, zero points, states) /
    number of weights in the base's linear layers, those of experts among them. Language-model head, embeddings, norms
    and biases do not count."""
    bits_per_weight_model: float
    """8 x size_bytes / base_parameters: the same for the complete model, including everything that is not quantized."""
    # Bytes of the keys and values of one token, of the checkpoint and of the base, scales included; None where unknown
    cache_bytes_per_token: float | None
    base_cache_bytes_per_token: float | None
    sparsity: float | None  # Share of exact zeros in the linear layers' weights; None where they are stored packed
    base_sparsity: float | None = None  # The same share in the base; None where `sparsity` is None or 0
    seconds: float  # Time of the compression, including loading and saving, without the reload check
    # Processor time of the same, also that of processes which it started and which ended
    processor_seconds: float
    peak_memory_bytes: int  # Peak memory of the compression
    peak_memory_kind: str  # "cuda", "rss" or "rss_process": see `pipeline.Peak`
    device: str  # Device of the compression
    library_versions: dict[str, str]  # Versions of Python and of the installed libraries that take part
    weight_files: dict[str, str]  # SHA-256 of every weight file
    other_files: dict[str, str]  # SHA-256 of every other file: configuration, tokenizer, chat template, reload probe
    probe_sha256: str  # SHA-256 of the stored reload probe
    reload: dict[str, float | bool]  # Results of the reload check: see `probe.ReloadReport`

    def write(self, folder: Path) -> Path:
        path = folder / MANIFEST_FILE
        text = json.dumps({"version": MANIFEST_VERSION, **asdict(self)}, indent=2, sort_keys=True)
        atomic.write(path, f"{text}\n".encode())
        return path

    @property
    def cache_ratio(self) -> float | None:
        """How many times smaller its cache of keys and values is than the base's; None where one is not known."""
        if self.cache_bytes_per_token is None or self.base_cache_bytes_per_token is None:
            return None
        return self.base_cache_bytes_per_token / self.cache_bytes_per_token

    @classmethod
    def read(cls, folder: Path, *, verify: bool = True, again: bool = False) -> Self:
        """Return a checkpoint's manifest, after a check that the files are those that it describes.

        `verify` compares the SHA-256 of every file; `again` reads files whose SHA-256 is known, too.
        """
        path = Path(folder) / MANIFEST_FILE
        if not path.is_file():
            raise CheckpointError(
                "The folder is not a finished compressed checkpoint: compression.json is missing", got=str(folder)
            )
        stored = read_json_object(path, error=CheckpointError)
        fix = "Compress the model again, into another folder or after deleting this one"
        found = stored.get("version")
        stored = upgraded(MANIFEST_FILE, stored, found, MANIFEST_VERSION, got=str(path), error=CheckpointError, fix=fix)
        manifest = dataclass_of(stored, path, cls, error=CheckpointError, ignore=("version",))
        if verify:
            manifest._verify(Path(folder), again)
        return manifest

    def _verify(self, folder: Path, again: bool) -> None:
        stored = {path.name for path in stored_weights.weight_files(folder)}
        if stored != self.weight_files.keys():
            raise CheckpointError(
                "The checkpoint's weight files are not those of its manifest",
                allowed=sorted(self.weight_files),
                got=", ".join(sorted(stored)),
            )
        for path, digest in sha256_files((folder / name for name in self.weight_files), again=again).items():
            if self.weight_files[path.name] != digest:
                raise CheckpointError("A weight file has changed since it was written", got=str(path))
        others = _other_files(folder)
        if missing := sorted(self.other_files.keys() - others):
            raise CheckpointError("A file of the checkpoint is missing", got=str(folder / missing[0]))
        for name in others:
            if name not in self.other_files and Path(name).suffix in _READ:
                raise CheckpointError(
                    "The checkpoint has a file that is not in its manifest, and that could change the model",
                    got=str(folder / name),
                    fix="Move it elsewhere",
                )
        for name, digest in self.other_files.items():
            if sha256_file(folder / name) != digest:
                raise CheckpointError(
                    "A file of the checkpoint has changed since it was written", got=str(folder / name)
                )


def _other_files(folder: Path) -> set[str]:
    """Return the names of all files of a checkpoint besides weights and manifest, hidden ones excepted."""
    weights = {path.name for path in stored_weights.weight_files(folder)}
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    hidden = {name for name in names if any(part.startswith((".", "__")) for part in name.split("/"))}
    return names - weights - hidden - {MANIFEST_FILE}


def hash_others(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file besides weights and manifest, by its name within the folder."""
    return {name: sha256_file(folder / name) for name in sorted(_other_files(folder))}


def hash_read(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of the files besides weights that loaders read: settings, tokenizer, templates, code."""
    names = sorted(name for name in _other_files(folder) if Path(name).suffix in _READ - {".safetensors"})
    return {name: sha256_file(folder / name) for name in names}
