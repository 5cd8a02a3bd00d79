"""Reads a model's configuration, tokenizer and generation settings. What libraries raise at its files is our error.

Transformers, tokenizers and safetensors raise whatever their own code meets in a file: a `TypeError` at a number that
stands for a text, an `AttributeError` at a dtype that torch does not have. The boundary is `library_errors`.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from mlflow_compress.errors import CheckpointError, DataError, MissingDependencyError, MlflowCompressError, is_no_memory
from mlflow_compress.files import read_json_object

_CONFIG, GENERATION = "config.json", "generation_config.json"
_OF_TOKENIZER = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.json",
)
_SENTENCE = "Question: is it 12,5 %?\n\nAnswer: yes"  # the kinds of characters that pre-tokenizers tell apart
_IN_THEIR_WORDS = (OSError, ValueError, RuntimeError)  # libraries raise these with a sentence; others need their name

T = TypeVar("T")


@contextmanager
def library_errors(what: str, got: object, *, fix: str | None = None) -> Iterator[None]:
    """Within this block a library reads what a user gave, and whatever it raises is a `CheckpointError` with its words.

    - `what`: The beginning of the sentence: "The checkpoint cannot be loaded".
    - `got`, `fix`: As `MlflowCompressError` has them.

    Only such calls belong into the block: what our own code raises there would be blamed on the user's files. Where
    memory ran out no file is at fault, and looking for one would need more of it: that is raised as it is.
    """
    try:
        yield
    except MlflowCompressError:
        raise
    except ImportError as error:
        raise MissingDependencyError(f"The checkpoint's format needs a package: {error}", got=str(got)) from error
    except Exception as error:
        if is_no_memory(error):
            raise
        raise CheckpointError(f"{what}: {_in_words(error)}", got=got, fix=fix) from error
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # of Rust; it is no `Exception`
            if is_no_memory(error):
                raise MemoryError(str(error)) from error
            raise CheckpointError(f"{what}: {error}", got=got, fix=fix) from error
        raise


@contextmanager
def weights_errors(folder: Path, *, trust_remote_code: bool = False) -> Iterator[None]:
    """Within this block a library loads a checkpoint; an error names the file and the field at fault, if one is known.

    A configuration from which no model can be built without its weights, either, is at fault.
    """
    try:
        with library_errors("The checkpoint cannot be loaded", str(folder)):
            yield
    except CheckpointError as error:
        if error.__cause__ is None or trust_remote_code:
            raise
        config = open_config(folder)
        without_weights(config, folder)
        for index in folder.glob("*.safetensors.index.json"):
            _require_object(index)
        if getattr(config, "quantization_config", None) is None:
            raise
        what = "The checkpoint cannot be loaded as quantization_config in its config.json says"
        raise CheckpointError(
            f"{what}: {_in_words(error.__cause__)}", got=str(folder / _CONFIG), fix="Correct that entry"
        ) from error.__cause__


def open_config(where: Path | str, *, trust_remote_code: bool = False) -> Any:
    """Return transformers' configuration of a model's folder, or of a hub id.

    A value that only fails later, such as a dtype that is none, is refused here, and named.
    """
    from transformers import AutoConfig

    def read(model: Path | str) -> Any:
        config = AutoConfig.from_pretrained(
            model, trust_remote_code=trust_remote_code, local_files_only=isinstance(model, Path)
        )
        for part in (config, config.get_text_config(decoder=True)):
            part.to_diff_dict()
            _require_usual(part)
        return config

    return _opened(where, (_CONFIG,), read, trusted=trust_remote_code)


def open_tokenizer(where: Path | str, *, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a model's folder, or of a hub id; it has encoded a sentence and its special tokens."""
    from transformers import AutoTokenizer

    def read(model: Path | str) -> Any:
        tokenizer = AutoTokenizer.from_pretrained(
            model, trust_remote_code=trust_remote_code, local_files_only=isinstance(model, Path)
        )
        tokenizer.decode([*tokenizer(_SENTENCE, verbose=False)["input_ids"], *tokenizer.all_special_ids])
        int(tokenizer.unk_token_id or 0)
        int(tokenizer.model_max_length)
        return tokenizer

    return _opened(where, _OF_TOKENIZER, read, trusted=trust_remote_code)


def open_generation_settings(folder: Path) -> Any | None:
    """Return the settings in a folder's ``generation_config.json``; None where it has no such file.

    Transformers itself takes its defaults for a file that it cannot read, without a word. Settings that it warns of,
    such as a temperature beside ``do_sample: false``, are read: only end tokens of them count here.
    """
    from transformers import GenerationConfig

    def read(model: Path | str) -> Any:
        settings = GenerationConfig.from_pretrained(model, local_files_only=True)
        ends = settings.eos_token_id
        for end in ends if isinstance(ends, list) else [] if ends is None else [ends]:
            if type(end) is not int or end < 0:
                raise ValueError("eos_token_id must be an id, or a list of ids")
        return settings

    return _opened(folder, (GENERATION,), read) if (folder / GENERATION).is_file() else None


def own_sampling(folder: Path) -> dict[str, Any]:
    """Return temperature, top_k and top_p as far as a folder's ``generation_config.json`` states them."""
    file = folder / GENERATION
    settings = read_json_object(file, error=CheckpointError) if file.is_file() else {}
    stated = {n: settings[n] for n in ("temperature", "top_k", "top_p") if settings.get(n) is not None}
    for name, value in stated.items():
        if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else int | float):
            got = f"{json.dumps(value)[:100]} in {file}"
            raise CheckpointError(f"{name} of the model's generation settings is no number", got=got)
    if stated.get("temperature") == 0:
        raise CheckpointError(
            "Several answers cannot be drawn with the model's own temperature",
            allowed="more than 0",
            got=f"0 in {file}",
            fix="Write the temperature that its card recommends into that file",
        )
    return stated


def without_weights(config: Any, folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Return the model that a folder's configuration describes on the meta device, without memory for its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    def build(where: Path | str) -> Any:
        described = config if where == folder else open_config(where, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(described, trust_remote_code=trust_remote_code)

    what = "describes no causal language model that loads"
    return _opened(folder, (_CONFIG,), build, trusted=trust_remote_code, what=what)


def render_template(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Return messages as text, in the tokenizer's chat template; what that raises is a `CheckpointError`."""
    where = f"chat_template.jinja or in chat_template of tokenizer_config.json, in {tokenizer.name_or_path}"
    first = messages[0] if messages else None
    with library_errors("The tokenizer's chat template fails", first, fix=f"Correct it: it is in {where}"):
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))


def _opened(
    where: Path | str,
    files: Sequence[str],
    read: Callable[[Path | str], T],
    *,
    trusted: bool = False,
    what: str = "cannot be read",
) -> T:
    """Return what `read` makes of a folder or of a hub id. Its errors name the file of `files` and the field at fault.

    These are the ones without which the rest can be read. A model's own code (`trusted`) is not run again to find them.
    """
    folder = Path(where).expanduser()
    there = [name for name in files if (folder / name).is_file()]
    for name in there:
        if name.endswith(".json") and name != "tokenizer.json":  # a large one, whose library is as strict
            _require_object(folder / name)
    try:
        with library_errors(f"{', '.join(there) or 'The model'} {what}", str(where)):
            return read(folder if folder.is_dir() else str(where))
    except CheckpointError as error:
        if error.__cause__ is None or trusted or not there:
            raise
        file, field = _culprit(folder, there, read)
        words = _in_words(error.__cause__)
        if file is None:
            raise
        if field is None:
            fix = "Correct it, or get it again from where the model comes from"
            raise CheckpointError(f"{file} {what}: {words}", got=str(folder / file), fix=fix) from error.__cause__
        raise CheckpointError(
            f"{file} {what}, because of its field {field!r}: {words}",
            got=f"{json.dumps(read_json_object(folder / file)[field])[:100]} in {folder / file}",
            fix="Correct this field; without it, the file could be used",
        ) from error.__cause__


def _culprit(folder: Path, files: Sequence[str], read: Callable[[Path | str], object]) -> tuple[str | None, str | None]:
    """Return the file, and its field, without which `read` takes a folder; None for what cannot be told."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch)
        for path in folder.iterdir():
            (copy / path.name).symlink_to(path.resolve())

        def is_read() -> bool:
            try:
                with library_errors("", ""):
                    read(copy)
            except MlflowCompressError:
                return False
            return True

        for name in files:
            (copy / name).unlink()
            with suppress(DataError):
                fields = read_json_object(folder / name) if name.endswith(".json") else {}
                for field in fields:
                    (copy / name).write_text(json.dumps({one: fields[one] for one in fields if one != field}))
                    if is_read():
                        return name, field
                    (copy / name).unlink()
            if is_read():
                return name, None
            (copy / name).symlink_to((folder / name).resolve())
    return (files[0], None) if len(files) == 1 else (None, None)


def _require_object(file: Path) -> None:
    try:
        read_json_object(file)
    except DataError as error:
        fix = "Get the file again from where the model comes from"
        raise CheckpointError(f"{file.name} cannot be read: {error}", got=str(file), fix=fix) from error


_MOST_LAYERS = 10_000  # to build more takes minutes, and a slip of the keyboard would take all memory
_USUAL = {"return_dict": True, "output_attentions": False}  # other values change what a model returns, not its numbers


def _require_usual(config: Any) -> None:
    import torch

    dtype = getattr(config, "dtype", None)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {dtype!r}")
    for name, usual in _USUAL.items():
        if getattr(config, name, usual) not in (usual, None):
            raise ValueError(f"{name} must be {json.dumps(usual)}, as it is where it is left out")
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and not 0 < layers <= _MOST_LAYERS:
        raise ValueError(f"num_hidden_layers must be from 1 to {_MOST_LAYERS}")


def _in_words(error: BaseException) -> str:
    """Return what a library says, with the name of the error where that alone is no sentence."""
    said = str(error).strip()
    is_sentence = isinstance(error, _IN_THEIR_WORDS) or type(error).__module__.startswith("jinja2.")
    return said if is_sentence and said else f"{type(error).__name__}: {said}"
