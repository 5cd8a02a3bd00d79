"""The manifest of a compressed checkpoint, `compression.json`: method, base, sizes and hashes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from mlflow_compress import atomic
from mlflow_compress.errors import CheckpointError
from mlflow_compress.models import stored_weights

MANIFEST_FILE = "compression.json"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """Record of one compression. It is written last, so that an unfinished folder has none."""

    method: str
    """Registered name of the method."""
    label: str
    """Short name of the variant, for example ``awq-4bit-g128``."""
    settings: dict[str, Any]
    """The method's settings."""
    format: str
    """Checkpoint format."""
    base_model: str
    """Folder or hub id that was compressed."""
    base_weights_hash: str
    """SHA-256 over the base's weight files."""
    base_size_bytes: int
    """Bytes of the base's stored tensors."""
    base_parameters: int
    """Number of weights in the base; tied weights count once."""
    base_dtype: str
    """Dtype of most of the base's weights, and of everything that is not quantized."""
    calibration: dict[str, int | str] | None
    """samples, length, tokens and SHA-256 of the token ids; None where the method needs no text."""
    size_bytes: int
    """Bytes of the stored tensors."""
    size_ratio: float
    """base_size_bytes / size_bytes: how many times smaller the checkpoint is."""
    bits_per_weight: float
    """8 x bytes of everything stored for the linear layers' weights (packed values, scales, zero points, states) /
    number of weights in the base's linear layers. Language-model head, embeddings, norms and biases do not count."""
    bits_per_weight_model: float
    """8 x size_bytes / base_parameters: the same for the complete model, including everything that is not quantized."""
    sparsity: float | None
    """Share of exact zeros in the linear layers' weights; None where they are stored packed."""
    seconds: float
    """Time of the compression, including loading and saving, without the reload check."""
    peak_memory_bytes: int
    """Peak memory of the compression."""
    peak_memory_kind: str
    """"cuda", "rss" or "rss_process": see `memory.Peak`."""
    device: str
    """Device of the compression."""
    library_versions: dict[str, str]
    """Versions of Python and of the installed libraries that take part."""
    weight_files: dict[str, str]
    """SHA-256 of every weight file."""
    probe_sha256: str
    """SHA-256 of the stored reload probe."""
    reload: dict[str, float]
    """Results of the reload check: see `probe.ReloadReport`."""

    def write(self, folder: Path) -> Path:
        """Write the manifest atomically and return its path."""
        path = folder / MANIFEST_FILE
        text = json.dumps({"version": VERSION, **asdict(self)}, indent=2, sort_keys=True)
        atomic.write(path, f"{text}\n".encode())
        return path

    @classmethod
    def read(cls, folder: Path, *, verify: bool = True) -> Self:
        """Return a checkpoint's manifest, after a check that the weights are those that it describes.

        Parameters
        ----------
        folder : Path
            The checkpoint.
        verify : bool
            Compare the SHA-256 of every weight file, which reads them all.

        Raises
        ------
        CheckpointError
            The manifest is missing or broken, or a weight file is missing, new or changed.
        """
        path = Path(folder) / MANIFEST_FILE
        if not path.is_file():
            raise CheckpointError(
                "The folder is not a finished compressed checkpoint: compression.json is missing", got=str(folder)
            )
        manifest = cls._parse(path)
        if verify:
            manifest._verify(Path(folder))
        return manifest

    @classmethod
    def _parse(cls, path: Path) -> Self:
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"The manifest cannot be read: {error}", got=str(path)) from error
        names = {f.name for f in fields(cls)}
        if not isinstance(stored, dict) or stored.get("version") != VERSION or names != stored.keys() - {"version"}:
            raise CheckpointError("The manifest is broken or of another version", allowed=str(VERSION), got=str(path))
        return cls(**{name: stored[name] for name in names})

    def _verify(self, folder: Path) -> None:
        found = {path.name for path in stored_weights.weight_files(folder)}
        if found != self.weight_files.keys():
            raise CheckpointError(
                "The checkpoint's weight files are not those of its manifest",
                allowed=sorted(self.weight_files),
                got=", ".join(sorted(found)),
            )
        for name, digest in self.weight_files.items():
            if stored_weights.sha256_file(folder / name) != digest:
                raise CheckpointError("A weight file has changed since it was written", got=str(folder / name))
