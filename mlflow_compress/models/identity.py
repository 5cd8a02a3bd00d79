"""Identity of a model: hashes of its weights and tokenizer, its vocabulary size and its context length."""

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

from mlflow_compress.errors import AlignmentError, CheckpointError
from mlflow_compress.files import read_json_object
from mlflow_compress.hashes import sha256_files
from mlflow_compress.models import checkpoint_config

_FALLBACK_LENGTH = 2048  # where neither configuration nor tokenizer has a limit; as in lm-evaluation-harness


class IdentifiedModel(Protocol):
    """Interface of a model whose identity is known: a `LoadedModel`, or a `LightModel` without weights."""

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

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
        """torch.device of the embeddings, or where they would be loaded."""

    @property
    def max_length(self) -> int:
        """Context length in tokens."""

    @property
    def engine(self) -> dict[str, str]:
        """What decides its numbers where another engine runs it; nothing where transformers does."""


_TOKENIZER_FILES = ("*.model", "*.tiktoken", "*.gguf", "tekken.json", "tokenization_*.py", "tokenizer.json", "vocab.*")


def require_tokenizer_files(folder: Path) -> None:
    """Refuse a model's folder without the files of a tokenizer, before torch is imported."""
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise CheckpointError(
            "The model has no tokenizer files",
            allowed="a folder with tokenizer.json, tokenizer.model or vocab.json beside the weights",
            got=str(folder),
            fix="Copy them from where the model comes from",
        )


def require_own_tokens(folder: Path) -> None:
    """Refuse a tokenizer that merges an option's letter into the prompt: no option could be scored."""
    if not (folder / "tokenizer.json").is_file():  # only transformers can read it
        return
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"The tokenizer cannot be read: {error}", got=str(folder / "tokenizer.json")) from error
    prompt = "Answer:"
    n = len(tokenizer.encode(prompt).ids)
    merged = [letter for letter in "ABCD" if len(tokenizer.encode(f"{prompt} {letter}").ids) <= n]
    if merged:
        raise CheckpointError(
            f"The tokenizer merges an option into the prompt: {prompt!r} has as many tokens as '{prompt} {merged[0]}'",
            allowed="a tokenizer that separates text at spaces",
            got=str(folder),
            fix="Evaluate corpora alone, or a model with another tokenizer",
        )


def require_tools_template(folder: Path) -> None:
    """Refuse a model whose chat template does not use `tools`; one whose template is not in a file is not judged."""
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if file.is_file():
        template: object = file.read_text(encoding="utf-8")
    elif config.is_file():
        template = read_json_object(config, error=CheckpointError).get("chat_template") or ""
    else:
        return
    if "tools" not in str(template):
        raise CheckpointError(
            "This model cannot be asked with tools: its chat template shows none",
            allowed="a template that uses the variable `tools`, as model=demo-tools has",
            got=str(folder),
            fix="Take another model, or leave out the tasks with tools",
        )


def max_length(config: Any, tokenizer: Any) -> int:
    """Return a model's context length in tokens, from its configuration or else from its tokenizer."""
    text_config = config.get_text_config(decoder=True)
    for name in ("n_positions", "max_position_embeddings", "n_ctx"):
        length = getattr(text_config, name, None)
        if length:
            return int(length)
    length = int(tokenizer.model_max_length)
    return length if length < 10**9 else _FALLBACK_LENGTH  # tokenizers without a limit say 1e30


def stored_config(config: Any) -> dict[str, Any]:
    """Return a configuration of transformers as plain values, from which `AutoConfig.for_model` makes it again."""
    raw = {"model_type": config.model_type, **config.to_diff_dict()}
    return dict(json.loads(json.dumps(raw, default=str)))


def weights_hash(path: Path | str) -> str:
    """Return the SHA-256 of a checkpoint's weights and configuration (64 hexadecimal digits).

    Hashed are every weight file with its name, in order, and `config.json` without the fields that name versions.
    """
    folder = Path(path)
    files = checkpoint_config.weight_files(folder)
    if not files:
        raise CheckpointError("No safetensors weights", got=str(folder))
    total = hashlib.sha256()
    for file, digest in sha256_files(files).items():
        total.update(f"{file.name} {digest}\n".encode())
    config = read_json_object(folder / "config.json", error=CheckpointError)
    for name in ("transformers_version", "_name_or_path"):
        config.pop(name, None)
    total.update(json.dumps(config, sort_keys=True).encode())
    return total.hexdigest()


def tokenizer_hash(tokenizer: Any) -> str:
    """Return the SHA-256 of everything that decides how text becomes ids (64 hexadecimal digits)."""
    return hashlib.sha256(json.dumps(_behaviour(tokenizer), sort_keys=True).encode()).hexdigest()


def check_same_tokenizer(baseline: IdentifiedModel, variant: IdentifiedModel) -> None:
    """Raise an error where two models have different tokenizers or vocabulary sizes."""
    fix = "Compare with the baseline that this variant was made from"
    if baseline.vocab_size != variant.vocab_size:
        raise AlignmentError(
            "The models have logits of different widths",
            allowed=str(baseline.vocab_size),
            got=variant.vocab_size,
            fix=fix,
        )
    parts_b, parts_q = _behaviour(baseline.tokenizer), _behaviour(variant.tokenizer)
    vocab_b, vocab_q = parts_b.pop("vocab"), parts_q.pop("vocab")
    if vocab_b != vocab_q:
        differ = sorted(t for t in vocab_b.keys() | vocab_q.keys() if vocab_b.get(t) != vocab_q.get(t))
        raise AlignmentError(
            f"The tokenizers give {len(differ)} tokens different ids, first {differ[0]!r}",
            allowed=str(vocab_b.get(differ[0])),
            got=vocab_q.get(differ[0]),
            fix=fix,
        )
    for part in sorted(parts_b.keys() | parts_q.keys()):
        if parts_b.get(part) != parts_q.get(part):
            raise AlignmentError(
                f"The tokenizers differ in {part}",
                allowed=str(parts_b.get(part))[:200],
                got=str(parts_q.get(part))[:200],
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
