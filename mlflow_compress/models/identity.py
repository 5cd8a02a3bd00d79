"""Identity of a model: what its numbers depend on besides the text that it reads, by content.

Files count as transformers understands them. So key order, and a default that is written out, change nothing, and what
`save_pretrained` writes again is the same model. What is taken of a model's folder:

- weight files (`checkpoint_config.weight_files`): their names and bytes, in `weights_hash`
- ``config.json``: every field except `CONFIG_LEFT_OUT`, in `weights_hash`
- ``tokenizer.json``, vocabularies, merges, sentencepiece files, ``added_tokens.json``, ``special_tokens_map.json``,
  ``tokenizer_config.json``: the tokenizer that transformers builds of them, all settings of its pipeline and model,
  scores and flags of added tokens among them, in `tokenizer_hash`
- ``chat_template.jinja``, ``additional_chat_templates/``, templates in ``tokenizer_config.json``, and the names of
  special tokens, which templates read: in `rendering_hash`
- ``model_max_length``: in the context length (`max_length`), where ``config.json`` has none
- ``generation_config.json``: end tokens, in `end_tokens`
- ``*.py``: in `scoring.engine_identity`

What is left out, and why:

- `CONFIG_LEFT_OUT` and `_PIPELINE_LEFT_OUT`
- other fields of ``generation_config.json``: answers are generated with our own settings
- ``padding_side``, ``truncation_side``, ``model_input_names``: this package pads and cuts itself
- ``tokenizer_class``, ``backend``, ``auto_map``: what they choose is the tokenizer that is taken
- ``chat_template.json``, ``processor_config.json``: transformers' tokenizers do not read them

A variant must have its baseline's tokenizer (`check_same_tokenizer`), but not its chat template: tools drop it, and the
baseline's renders the prompts of both. Nor its padding token: tools set one to calibrate.
"""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any, Protocol

from mlflow_compress.errors import AlignmentError, CheckpointError
from mlflow_compress.files import read_json_object
from mlflow_compress.hashes import sha256_file, sha256_files
from mlflow_compress.models import checkpoint_config
from mlflow_compress.models.model_files import library_errors

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

    prompt = "Answer:"
    with library_errors("The tokenizer cannot be read", str(folder / "tokenizer.json")):
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
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
        with library_errors("The chat template cannot be read", str(file)):
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


CONFIG_LEFT_OUT = {
    "_name_or_path": "where the model came from",
    "dtype": "an evaluation has the dtype that is computed with",
    "torch_dtype": "the same under its older name",
    "transformers_version": "who wrote the file",
}
"""Fields of ``config.json`` that are not part of a model's identity, each with the reason."""

_PIPELINE_LEFT_OUT = {
    "padding": "this package pads itself",
    "truncation": "this package cuts itself",
    "version": "of the file's layout",
}
"""Entries of ``tokenizer.json`` that are not part of a tokenizer's identity, each with the reason."""


def weights_hash(path: Path | str) -> str:
    """Return the SHA-256 of a checkpoint's weights and configuration (64 hexadecimal digits).

    Hashed are every weight file with its name, in order, and the fields of `config.json`.
    """
    folder = Path(path)
    files = checkpoint_config.weight_files(folder)
    if not files:
        raise CheckpointError("No safetensors weights", got=str(folder))
    total = hashlib.sha256()
    for file, digest in sha256_files(files).items():
        total.update(f"{file.name} {digest}\n".encode())
    total.update(json.dumps(_config_fields(folder), sort_keys=True, default=str).encode())
    return total.hexdigest()


def _config_fields(folder: Path) -> dict[str, Any]:
    """Return the fields of ``config.json``, with transformers' defaults, and the present names of legacy fields.

    The file itself where transformers does not know its type, or where code that comes with it may have other defaults.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    stored = read_json_object(folder / "config.json", error=CheckpointError)
    fields = dict(stored)
    kind = stored.get("model_type")
    if kind in CONFIG_MAPPING_NAMES and "auto_map" not in stored:
        known = CONFIG_MAPPING[kind]
        # It writes infinite numbers as {"__float__": "Infinity"}, and reads them so in this function alone.
        config = known.from_dict(known._dict_from_json_file(folder / "config.json"))
        # transformers reads these two from the file, and does not write them.
        kernels = {name: stored.get(name) for name in ("attn_implementation", "experts_implementation")}
        fields = {**config.to_dict(), **kernels}
    return {name: value for name, value in fields.items() if name not in CONFIG_LEFT_OUT}


def tokenizer_hash(tokenizer: Any) -> str:
    """Return the SHA-256 of everything that decides how text becomes ids, and ids text (64 hexadecimal digits)."""
    return _digest(_behaviour(tokenizer))


def rendering_hash(tokenizer: Any) -> str:
    """Return the SHA-256 of what decides how a conversation becomes text: chat templates, names of special tokens.

    Spaces that are removed from decoded text are part of it too. Some tools write this setting with another default,
    and answers are decoded without it, so it does not make another tokenizer.
    """
    named = [tokenizer.special_tokens_map, tokenizer.all_special_tokens]
    return _digest([tokenizer.chat_template, *named, tokenizer.clean_up_tokenization_spaces])


def end_tokens(folder: Path) -> list[int]:
    """Return the end tokens that a folder's ``generation_config.json`` names, in ascending order."""
    file = folder / "generation_config.json"
    named = read_json_object(file, error=CheckpointError).get("eos_token_id") if file.is_file() else None
    return sorted(named) if isinstance(named, list) else [] if named is None else [named]


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


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
    if parts_b != parts_q:
        part, in_baseline, in_variant = _first_difference(parts_b, parts_q)
        raise AlignmentError(
            f"The tokenizers differ in {part}", allowed=str(in_baseline)[:200], got=str(in_variant)[:200], fix=fix
        )


def _first_difference(one: Any, other: Any, name: str = "") -> tuple[str, Any, Any]:
    """Return the name of the first entry that differs, as "model.byte_fallback", and its two values."""
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = [(str(key), one.get(key), other.get(key)) for key in sorted(one.keys() | other.keys())]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(str(number), *pair) for number, pair in enumerate(zip(one, other, strict=True))]
    else:
        return name, one, other
    key, one, other = next(pair for pair in pairs if pair[1] != pair[2])
    return _first_difference(one, other, f"{name}.{key}" if name else key)


def _behaviour(tokenizer: Any) -> dict[str, Any]:
    parts: dict[str, Any] = {
        "vocab": dict(tokenizer.get_vocab()),
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "special tokens added": [tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)],
        "split_special_tokens": tokenizer.split_special_tokens,
    }
    if not tokenizer.is_fast:
        return {**parts, **_python_behaviour(tokenizer)}
    pipeline = json.loads(tokenizer.backend_tokenizer.to_str())
    model = pipeline["model"]
    if isinstance(model["vocab"], dict):
        del model["vocab"]  # is in the vocabulary above; a list has scores
    return parts | {name: value for name, value in pipeline.items() if name not in _PIPELINE_LEFT_OUT}


_NO_BEHAVIOUR = {  # settings that are elsewhere in the identity, or left out for the reasons above
    "added_tokens_decoder", "additional_special_tokens", "auto_map", "backend", "chat_template",
    "clean_up_tokenization_spaces", "extra_special_tokens", "files_loaded", "is_local", "local_files_only",
    "model_input_names", "model_max_length", "name_or_path", "padding_side", "processor_class", "tokenizer_class",
    "tokenizer_file", "truncation_side",
}  # fmt: skip


def _python_behaviour(tokenizer: Any) -> dict[str, Any]:
    """Return what a tokenizer without a pipeline of the library ``tokenizers`` does: its class, settings and files."""
    left_out = _NO_BEHAVIOUR | set(tokenizer.vocab_files_names) | set(tokenizer.SPECIAL_TOKENS_ATTRIBUTES)
    settings = {name: value for name, value in tokenizer.init_kwargs.items() if name not in left_out}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_vocabulary(folder)  # in its own form, however the files were written before
        files = {path.name: sha256_file(path) for path in Path(folder).iterdir()}
    added = {str(number): token.__getstate__() for number, token in tokenizer.added_tokens_decoder.items()}
    return {"class": type(tokenizer).__name__, "settings": settings, "files": files, "added_tokens": added}
