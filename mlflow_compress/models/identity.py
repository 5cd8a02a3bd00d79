"""Whose weights and tokenizer these are, for models whose weights are loaded and for those known from their files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

from mlflow_compress.errors import AlignmentError, CheckpointError
from mlflow_compress.models import architectures

_FALLBACK_LENGTH = 2048  # where neither configuration nor tokenizer knows, as lm-evaluation-harness


class TokenizedModel(Protocol):
    """What decides which tokens a model reads, and how wide its logits are."""

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""


class IdentifiedModel(TokenizedModel, Protocol):
    """What evaluations must know of a model without running it: a `LoadedModel` or a `light.LightModel`."""

    @property
    def path(self) -> Path:
        """The folder that was read."""

    @property
    def weights(self) -> str:
        """`weights_hash` of that folder."""

    @property
    def dtype(self) -> Any:
        """torch.dtype of the parameters that are not quantized."""

    @property
    def device(self) -> Any:
        """torch.device on which the embeddings are, or would be."""

    @property
    def max_length(self) -> int:
        """Most tokens the model reads at once."""


def vocab_size(config: Any) -> int:
    """Return the width of the logits that a model's configuration names."""
    return int(config.get_text_config(decoder=True).vocab_size)


def max_length(config: Any, tokenizer: Any) -> int:
    """Return the most tokens that a model reads at once, by its configuration or else by its tokenizer."""
    text_config = config.get_text_config(decoder=True)
    for name in ("n_positions", "max_position_embeddings", "n_ctx"):
        length = getattr(text_config, name, None)
        if length:
            return int(length)
    length = int(tokenizer.model_max_length)
    return length if length < 10**9 else _FALLBACK_LENGTH  # tokenizers without a limit say 1e30


def weights_hash(path: Path | str) -> str:
    """Return the SHA-256 of a checkpoint's weights and configuration (64 hexadecimal digits).

    Every weight file goes in with its name, in order, and `config.json` without the fields that name versions.
    """
    folder = Path(path)
    files = architectures.weight_files(folder)
    if not files:
        raise CheckpointError("No safetensors weights", got=str(folder))
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as source:
            total.update(f"{file.name} {hashlib.file_digest(source, 'sha256').hexdigest()}\n".encode())
    config = json.loads((folder / "config.json").read_text())
    for name in ("transformers_version", "_name_or_path"):
        config.pop(name, None)
    total.update(json.dumps(config, sort_keys=True).encode())
    return total.hexdigest()


def tokenizer_hash(tokenizer: Any) -> str:
    """Return the SHA-256 of everything that decides how text becomes ids (64 hexadecimal digits)."""
    return hashlib.sha256(json.dumps(_behaviour(tokenizer), sort_keys=True).encode()).hexdigest()


def check_same_tokenizer(baseline: TokenizedModel, variant: TokenizedModel) -> None:
    """Refuse to compare two models that read different tokens.

    Raises
    ------
    AlignmentError
        Naming the first difference: width of the logits, a token's id, a special token, or another part.
    """
    fix = "Compare with the baseline that this variant was made from"
    if baseline.vocab_size != variant.vocab_size:
        raise AlignmentError(
            "The models have logits of different widths",
            allowed=str(baseline.vocab_size),
            got=variant.vocab_size,
            fix=fix,
        )
    ours, theirs = _behaviour(baseline.tokenizer), _behaviour(variant.tokenizer)
    vocab_b, vocab_q = ours.pop("vocab"), theirs.pop("vocab")
    if vocab_b != vocab_q:
        differ = sorted(t for t in vocab_b.keys() | vocab_q.keys() if vocab_b.get(t) != vocab_q.get(t))
        raise AlignmentError(
            f"The tokenizers give {len(differ)} tokens different ids, first {differ[0]!r}",
            allowed=str(vocab_b.get(differ[0])),
            got=vocab_q.get(differ[0]),
            fix=fix,
        )
    for part in sorted(ours.keys() | theirs.keys()):
        if ours.get(part) != theirs.get(part):
            raise AlignmentError(
                f"The tokenizers differ in {part}",
                allowed=str(ours.get(part))[:200],
                got=str(theirs.get(part))[:200],
                fix=fix,
            )


def _behaviour(tokenizer: Any) -> dict[str, Any]:
    parts: dict[str, Any] = {
        "vocab": dict(tokenizer.get_vocab()),
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "special tokens added": [tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)],
    }
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        # Truncation and padding change with every use; added tokens are in the vocabulary.
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            parts[part] = backend.get(part)
        parts["merges"] = [m if isinstance(m, str) else " ".join(m) for m in backend["model"].get("merges") or []]
    else:
        parts["class"] = type(tokenizer).__name__
    return parts
