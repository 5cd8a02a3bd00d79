"""GGUF files of Llama-like models: tensor names, writing, and reading headers."""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from mlflow_compress.errors import CheckpointError, UnsupportedError

_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes by type
_STRING, _ARRAY = 8, 9
_SHORTEST = {_STRING: 8, _ARRAY: 12}  # bytes of an empty one
_SHORTEST_ENTRY, _SHORTEST_TENSOR = 13, 24
_MOST_DIMENSIONS, _DEEPEST = 8, 4


@dataclass(frozen=True)
class StoredTensor:
    """Type, shape and size of one tensor in a checkpoint's file."""

    dtype: str  # Element type as its format names it ("BF16", "I32", "Q4_0", ...)
    shape: tuple[int, ...]  # Shape as stored; a packed weight has another shape than the weight itself
    n_bytes: int  # Bytes of its data

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class _Header:
    """A place in a header, behind which a number of bytes is left."""

    def __init__(self, file: BinaryIO, left: int) -> None:
        self._file, self.left, self._order = file, left, "<"

    def skip(self, n_bytes: int) -> None:
        if n_bytes > self.left:
            raise ValueError("the file is cut off, or a length in its header is wrong")
        self._file.seek(n_bytes, 1)
        self.left -= n_bytes

    def number(self, n_bytes: int) -> int:
        if n_bytes > self.left:
            raise ValueError("the file is cut off")
        self.left -= n_bytes
        return int(struct.unpack(self._order + {4: "I", 8: "Q"}[n_bytes], self._file.read(n_bytes))[0])

    def many(self, shortest: int) -> int:
        """Return a number of entries, each of which takes `shortest` bytes or more."""
        n = self.number(8)
        if n * shortest > self.left:
            raise ValueError(f"its header counts {n:,} entries, which the file cannot hold")
        return n

    def start(self) -> None:
        if self._file.read(4) != b"GGUF":
            raise ValueError("it is no GGUF file")
        self.left -= 4
        version = self.number(4)
        if version & 0xFFFF == 0:  # a file of a machine with the other order of bytes
            self._order, version = ">", version >> 24
        if version not in (2, 3):
            raise ValueError(f"its version is {version}")

    def value(self, kind: int, depth: int = 0) -> None:
        if kind in _SCALARS:
            self.skip(_SCALARS[kind])
        elif kind == _STRING:
            self.skip(self.number(8))
        elif kind == _ARRAY and depth < _DEEPEST:
            inner = self.number(4)
            n = self.many(_SCALARS.get(inner) or _SHORTEST.get(inner, 1))
            if inner in _SCALARS:
                self.skip(n * _SCALARS[inner])
            else:
                for _ in range(n):
                    self.value(inner, depth + 1)
        else:
            raise ValueError(f"its header has a value of an unknown type, {kind}")


GGUF_FILE = "model.gguf"

_MODULES = ("model.embed_tokens", "model.norm", "lm_head")
_LAYER_MODULES = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""transformers' names of a Llama-like model's modules (gguf's map also has names of other sources)."""

_MIXTURES = {
    "llama": ("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w2", "w3")),
    "qwen3moe": ("mlp.gate", "mlp.experts", ("gate_proj", "down_proj", "up_proj")),
}
"""Router, experts and matrices of a mixture in its files on hubs, by GGUF's architecture: of Mixtral, and of Qwen3."""


@cache
def _name_map(architecture: str, n_layers: int) -> Any:
    """Return gguf's map from module names to GGUF names; an unknown architecture is a KeyError."""
    import gguf

    known = {name: member for member, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(known[architecture], n_layers)


def to_gguf_name(name: str, *, architecture: str, n_layers: int) -> str:
    """Return GGUF's name of a parameter: "model.layers.0.self_attn.q_proj.weight" -> "blk.0.attn_q.weight".

    `architecture` is GGUF's name of it ("llama", "qwen2", ...).
    """
    gguf_name = _name_map(architecture, n_layers).get_name(name, (".weight", ".bias"))
    if gguf_name is None:
        raise UnsupportedError(f"GGUF has no name for a parameter of a {architecture} model", got=name)
    return str(gguf_name)


def from_gguf_names(architecture: str, n_layers: int) -> dict[str, str]:
    """Return the inverse map for modules: "blk.0.attn_q" -> "model.layers.0.self_attn.q_proj".

    What holds all experts of a layer has the name of one, with "{}" in the place of its number.
    """
    names = _name_map(architecture, n_layers)
    router, experts, matrices = _MIXTURES.get(architecture, ("", "", ()))
    in_layers = {module: module for module in _LAYER_MODULES}
    if router:
        in_layers["mlp.gate"] = router
        of_all = ("gate_proj", "down_proj", "up_proj")
        in_layers |= {f"mlp.experts.{a}": f"{experts}.{{}}.{b}" for a, b in zip(of_all, matrices, strict=True)}
    modules = {names.get_name(module): module for module in _MODULES}
    for index in range(n_layers):
        layer = f"model.layers.{index}."
        modules |= {names.get_name(layer + module): layer + name for module, name in in_layers.items()}
    modules.pop(None, None)  # a module that this architecture does not have
    return modules


def write_gguf(
    path: Path, config: Any, architecture: str, file_type: int, tensors: Mapping[str, tuple[Any, Any]], tokenizer: Any
) -> None:
    """Write a GGUF file.

    `architecture` is as GGUF names it: "llama", "qwen2", "qwen3" or "qwen3moe"; `file_type` is the weights'
    `gguf.LlamaFileType`; `tensors` are raw data and `gguf.GGMLQuantizationType` by GGUF name. The tokenizer's
    vocabulary is written where it is a byte-level BPE.
    """
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if n_experts := getattr(config, "num_local_experts", 0):
        writer.add_expert_count(n_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        writer.add_expert_feed_forward_length(width)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_vocabulary(writer, tokenizer, config)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {_WORDS % "": "qwen2", _WORDS % "{1,3}": "llama-bpe"}
"""llama.cpp's names of the patterns that split text before the merges."""


def pre_tokenizer_name(settings: Any) -> str | None:
    """Return llama.cpp's name of a tokenizer's pre-tokenizer; None where it is not known here.

    `settings` is ``pre_tokenizer`` of a ``tokenizer.json``.
    """
    steps = (settings or {}).get("pretokenizers", [settings or {}])
    kinds = [step.get("type") for step in steps]
    if kinds[-1:] != ["ByteLevel"] or steps[-1].get("add_prefix_space", False):
        return None
    if steps[-1].get("use_regex", True):
        digits = len(steps) == 2 and kinds[0] == "Digits" and steps[0].get("individual_digits")
        return "gpt-2" if len(steps) == 1 else "smollm" if digits else None
    if len(steps) == 2 and kinds[0] == "Split":
        return _SPLITS.get(steps[0].get("pattern", {}).get("Regex"))
    return None


def _is_byte_level(backend: Mapping[str, Any]) -> bool:
    """Return whether a ``tokenizer.json`` is a byte-level BPE with merges: llama.cpp refuses one without."""
    settings, model = backend.get("pre_tokenizer") or {}, backend.get("model", {})
    last = settings.get("pretokenizers", [settings])[-1]
    return bool(model.get("type") == "BPE" and model.get("merges") and last.get("type") == "ByteLevel")


def _backend(tokenizer: Any) -> dict[str, Any]:
    """Return the contents of a tokenizer's ``tokenizer.json``; empty for one in Python."""
    backend: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {}
    return backend


def text_warning(tokenizer: Any) -> str | None:
    """Return what a GGUF file with this tokenizer must not be used for; None where llama.cpp takes text as it does."""
    backend = _backend(tokenizer)
    if not _is_byte_level(backend):
        kind = backend.get("model", {}).get("type", "a tokenizer in Python")
        return (
            f"The GGUF file has no vocabulary, because this tokenizer is no byte-level BPE (it is {kind}): it is for "
            "token ids in a library only, and llama-server ends at the first request"
        )
    normalizer = (backend.get("normalizer") or {"type": "NFC"})["type"]
    if normalizer != "NFC":  # NFC does not change composed text
        cause = f"rewrites text before it splits it (normalizer {normalizer})"
    elif pre_tokenizer_name(backend["pre_tokenizer"]) is None:
        cause = "splits text in a way that llama.cpp has no name for"
    else:
        return None
    return (
        f"llama.cpp tokenizes some texts differently, because this tokenizer {cause}: send token ids to llama-server, "
        "as a list in `prompt`"
    )


def _add_vocabulary(writer: Any, tokenizer: Any, config: Any) -> None:
    """Add the vocabulary of a byte-level BPE; any other is omitted ("no_vocab").

    Where llama.cpp tokenizes text differently, the file's description says so (`text_warning`); token ids are right,
    and so is the text of generated tokens.
    """
    import gguf

    backend = _backend(tokenizer)
    if warning := text_warning(tokenizer):
        writer.add_description(warning)
    if not _is_byte_level(backend):
        writer.add_tokenizer_model("no_vocab")
        return
    tokens = {index: token for token, index in tokenizer.get_vocab().items()}
    special = {added["id"] for added in backend["added_tokens"] if added["special"]}
    kinds = gguf.TokenType
    names = [tokens.get(index, f"[PAD{index}]") for index in range(config.vocab_size)]
    known = {index: kinds.CONTROL if index in special else kinds.NORMAL for index in tokens}
    types = [known.get(index, kinds.UNUSED) for index in range(config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer_name(backend["pre_tokenizer"]) or "default")
    writer.add_token_list(names)
    writer.add_token_types(types)
    merges = backend["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for kind in ("bos", "eos", "unk"):
        if (number := getattr(tokenizer, f"{kind}_token_id")) is not None:
            getattr(writer, f"add_{kind}_token_id")(number)
    writer.add_add_bos_token(tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id])


def architecture(path: Path) -> str:
    """Return the architecture that a GGUF file names; a broken file is a `CheckpointError`."""
    return _open(path)[1]


def read_gguf_headers(path: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a GGUF file by transformers' name; a broken file is a `CheckpointError`.

    A tensor without a parameter in transformers keeps GGUF's name. Experts are told apart, as in files on hubs.
    """
    reader, kind = _open(path)
    try:
        n_layers = int(reader.fields[f"{kind}.block_count"].contents())
        if not 0 < n_layers <= len(reader.tensors):
            what = f"The file says that it has {n_layers:,} layers, and holds {len(reader.tensors)} tensors"
            raise CheckpointError(what, got=str(path))
        modules = from_gguf_names(kind, n_layers)
    except KeyError as error:
        raise CheckpointError(f"The file's tensors cannot be named: {error} is unknown", got=str(path)) from error
    except (ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(f"The file's tensors cannot be named: {error}", got=str(path)) from error
    tensors = {}
    for tensor in reader.tensors:
        module, _, part = tensor.name.rpartition(".")
        shape = tuple(map(int, reversed(tensor.shape)))
        name, kind_of_block = f"{modules.get(module, module)}.{part}", tensor.tensor_type.name
        if "{}" not in name:
            tensors[name] = StoredTensor(kind_of_block, shape, int(tensor.n_bytes))
            continue
        for number in range(shape[0]):
            tensors[name.format(number)] = StoredTensor(kind_of_block, shape[1:], int(tensor.n_bytes) // shape[0])
    return tensors


def _open(path: Path) -> tuple[Any, str]:
    import gguf

    try:
        # A length or a count in the header that does not fit into the file is refused.
        with path.open("rb") as file:
            header = _Header(file, path.stat().st_size)
            header.start()
            n_tensors, n_entries = header.many(_SHORTEST_TENSOR), header.many(_SHORTEST_ENTRY)
            for _ in range(n_entries):
                header.value(_STRING)
                header.value(header.number(4))
            for _ in range(n_tensors):
                header.value(_STRING)
                n_dimensions = header.number(4)
                if n_dimensions > _MOST_DIMENSIONS:
                    raise ValueError(f"a tensor has {n_dimensions} dimensions")
                header.skip(8 * n_dimensions + 4 + 8)
        reader = gguf.GGUFReader(path)
        return reader, str(reader.fields["general.architecture"].contents())
    except (OSError, ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise CheckpointError(f"The weight file cannot be read: {error}", got=str(path)) from error
