"""An encoder behind an OpenAI-compatible endpoint; every vector that was paid for is kept."""

import base64
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from mlflow_compress.errors import ConfigError, JudgeError
from mlflow_compress.judges.encoders.sentence_encoder import EMBEDDED
from mlflow_compress.transport.client import Transport
from mlflow_compress.transport.endpoint import EndpointConfig, whole_address
from mlflow_compress.transport.replies import NoReply, ReplyCache, content_key
from mlflow_compress.transport.spending import Spending

KEY_VARIABLE = "ENCODER_API_KEY"
VECTORS = "embeddings.jsonl"  # file of the cache
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
        """The model and the address, without user and password."""
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
                fix=f"Delete {VECTORS} in the folder of the state, and try again",
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
                fix="What was embedded is kept: the same command again asks only for the rest",
            )


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
    if settings.encoder == EMBEDDED or not settings.encoder.strip():
        raise ConfigError(
            "encoder_base_url needs the name of a model there", got=settings.encoder, fix="Set encoder to its name"
        )
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not key:
        # Not OPENAI_API_KEY: a key is sent to no other address than the one that it was given for.
        fix = f"Set {KEY_VARIABLE}; any word will do where the endpoint asks for no key"
        raise ConfigError("encoder_base_url needs a key", fix=fix)
    endpoint = EndpointConfig(
        base_url=whole_address("encoder_base_url", settings.encoder_base_url),
        key=key,
        timeout=settings.judge_timeout,
        max_retries=settings.judge_max_retries,
        concurrency=settings.judge_concurrency,
        requests_per_minute=settings.judge_requests_per_minute,
        tokens_per_minute=settings.judge_tokens_per_minute,
        what="encoder",
        url_parameter="encoder_base_url",
        model_parameter="encoder",
        key_variable=KEY_VARIABLE,
    )
    return EndpointEncoder(endpoint, settings.encoder, ReplyCache(folder / VECTORS, ("vector", "model")))
