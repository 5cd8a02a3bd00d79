"""Damages of a model's folder, file by file: entries of older and other libraries, and values and bytes at random."""

import json
import random
import resource
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mlflow_compress.compression import pipeline
from mlflow_compress.compression.method import method_config
from tests.malformed_inputs import CORPUS, NASTY
from tests.malformed_model import TEMPLATE, Damage


def make_compressed(folder: Path, model: Path) -> Path:
    """Write a 4-bit checkpoint of the model, whose configuration says how it is packed."""
    pipeline.compress_model(str(model), "rtn", method_config("rtn", bits=4, group_size=32), [], folder, device="cpu")
    return folder


OLD_FORMS: Mapping[str, tuple[dict[str, Any], ...]] = {
    "config.json": (
        *({"dtype": None, "torch_dtype": name} for name in ("float16", "torch.float16", "fp16", "Float", "", 3)),
        *({"dtype": name} for name in ("float16", "torch.bfloat16", "half", "int8", "float8_e4m3fn", "Tensor", "nn")),
        *(
            {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": scaling}
            for scaling in (
                {"type": "linear", "factor": 2.0},
                {"type": "dynamic", "factor": 2.0},
                {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
                {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
                {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 4},
                {"type": "linear"},
                {"type": "linear", "factor": "2"},
                {"type": "linear", "factor": 0},
                {"type": "nothing", "factor": 2.0},
                {"factor": 2.0},
                {"rope_type": "llama3", "factor": 8.0},
                {},
                [],
                "linear",
            )
        ),
        {"rope_theta": 500000.0, "rope_parameters": None},
        {"num_key_value_heads": None},
        {"head_dim": None},
        {"hidden_act": "gelu_new"},
        {"hidden_act": "silu_"},
        {"architectures": ["LlamaModel"]},
        {"architectures": ["Nothing"]},
        {"architectures": None, "model_type": "llama"},
        {"model_type": "LLaMA"},
        {"model_type": "mistral"},
        {"model_type": "bert"},
        {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}},
        {"_attn_implementation": "flash_attention_2"},
        {"attn_implementation": "nothing"},
        {"attn_logit_softcapping": 30.0},
        {"text_config": {"vocab_size": 5}},
        {"text_config": 7},
        {"quantization_config": {}},
        {"quantization_config": {"quant_method": "nothing"}},
        {"quantization_config": {"quant_method": "awq"}},
        {"quantization_config": {"quant_method": "fp8"}},
        {"quantization_config": {"quant_method": "compressed-tensors"}},
        {"quantization_config": "gptq"},
        {"quantized_cache": {"0": 4}},
        {"quantized_cache": [1]},
        {"native_gguf": True},
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": "false"},
        {"temperature": 0.9, "top_p": 0.6},
        {"use_cache": False},
        {"pad_token_id": -1},
        {"pad_token_id": 10**6},
        {"eos_token_id": [1, 2]},
        {"eos_token_id": "1"},
        {"max_position_embeddings": 16},
        {"max_position_embeddings": 0},
        {"sliding_window": 4},
        {"layer_types": ["full_attention"]},
        {"layer_types": ["sliding_attention", "nothing"]},
        {"return_dict": False},
        {"output_hidden_states": True},
        {"output_attentions": True},
        {"is_encoder_decoder": True},
        {"is_decoder": False},
        {"id2label": {"a": "b"}},
        {"num_labels": "x"},
        {"pruned_heads": {"0": [1]}},
        {"transformers_version": 5},
        {"_name_or_path": 7},
        {"base_model_tp_plan": 3},
        {"pretraining_tp": 2},
        {"attention_dropout": 0.5},
        {"mlp_bias": True},
    ),
    "generation_config.json": (
        {"do_sample": None, "temperature": 0.9, "top_p": 0.6},
        {"do_sample": False, "temperature": 0.9},
        {"do_sample": False, "top_k": 0},
        {"do_sample": False, "typical_p": 0.5},
        {"temperature": 0},
        {"temperature": -1.0},
        {"temperature": "0.9"},
        {"top_p": 2},
        {"num_beams": 4},
        {"num_beams": 4, "early_stopping": "perhaps"},
        {"num_return_sequences": 3},
        {"max_new_tokens": -1},
        {"max_length": "20"},
        {"eos_token_id": 1},
        {"eos_token_id": [[1]]},
        {"eos_token_id": "</s>"},
        {"eos_token_id": [1, "2"]},
        {"eos_token_id": 1.0},
        {"eos_token_id": 1.5},
        {"eos_token_id": True},
        {"eos_token_id": -1},
        {"eos_token_id": [-1, 1]},
        {"eos_token_id": 10**9},
        {"eos_token_id": []},
        {"eos_token_id": [1, 5, 9]},
        {"eos_token_id": {"a": 1}},
        {"cache_implementation": "nothing"},
        {"cache_implementation": "static"},
        {"watermarking_config": {"bias": 2}},
        {"watermarking_config": 3},
        {"compile_config": {"mode": "x"}},
        {"compile_config": 3},
        {"transformers_version": None},
        {"forced_bos_token_id": 4},
        {"begin_suppress_tokens": [1]},
        {"sequence_bias": [[[4], 9.0]]},
        {"bad_words_ids": []},
        {"continuous_batching_config": {"a": 1}},
        {"return_dict_in_generate": True},
    ),
    "tokenizer_config.json": (
        {"tokenizer_class": "LlamaTokenizer"},
        {"tokenizer_class": "LlamaTokenizerFast"},
        {"tokenizer_class": "Nothing"},
        {"tokenizer_class": None},
        {"tokenizer_class": "PreTrainedTokenizer"},
        {"tokenizer_class": "GPT2Tokenizer"},
        {"add_bos_token": False},
        {"add_bos_token": "no"},
        {"add_eos_token": True},
        {"add_prefix_space": True},
        {"legacy": True},
        {"clean_up_tokenization_spaces": True},
        {"bos_token": {"__type": "AddedToken", "content": "<s>"}},
        {"bos_token": {"content": 3}},
        {"bos_token": 0},
        {"eos_token": "new"},
        {"eos_token": None},
        {"pad_token": "</s>"},
        {"model_max_length": "512"},
        {"model_max_length": 0},
        {"model_max_length": -1},
        {"model_max_length": 1e30},
        {"model_max_length": None},
        {"padding_side": "left"},
        {"padding_side": "middle"},
        {"truncation_side": "left"},
        {"added_tokens_decoder": {"0": {"content": "<s>", "special": True}}},
        {"added_tokens_decoder": {"zero": {"content": "<s>"}}},
        {"added_tokens_decoder": {"900": {"content": "far", "special": False}}},
        {"added_tokens_decoder": {"0": "<s>"}},
        {"added_tokens_decoder": []},
        {"additional_special_tokens": ["<a>"]},
        {"additional_special_tokens": "<a>"},
        {"extra_special_tokens": {"x": "<x>"}},
        {"extra_special_tokens": ["<x>"]},
        {"chat_template": "{{ nothing.x.y }}"},
        {"chat_template": "{% for"},
        {"chat_template": [{"name": "default", "template": TEMPLATE}]},
        {"chat_template": {"default": TEMPLATE}},
        {"chat_template": 5},
        {"auto_map": {"AutoTokenizer": ["x.Y", None]}},
        {"fix_mistral_regex": True},
        {"model_input_names": ["input_ids"]},
        {"model_input_names": "input_ids"},
        {"split_special_tokens": True},
        {"backend": "nothing"},
    ),
    "special_tokens_map.json": (
        {"additional_special_tokens": ["<a>", {"content": "<b>"}]},
        {"additional_special_tokens": "<a>"},
        {"eos_token": {"content": "<unk>", "special": True}},
        {"eos_token": 4},
        {"eos_token": None},
        {"bos_token": []},
    ),
    "tokenizer.json": (
        {"model": {"type": "BPE", "vocab": {}, "merges": []}},
        {"model": {"type": "WordLevel", "vocab": {"<unk>": 2}, "unk_token": "<unk>"}},
        {"model": {"type": "Nothing"}},
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}},
        {"normalizer": {"type": "Prepend", "prepend": "x"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},
        {"post_processor": None},
        {"decoder": None},
        {"added_tokens": []},
        {"added_tokens": [{"id": 5, "content": "e"}]},
        {"truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}},
        {"truncation": {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 9}},
        {
            "padding": {
                "strategy": {"Fixed": 9}, "direction": "Left", "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>",
                "pad_to_multiple_of": None,
            }
        },
        {"version": "2.0"},
    ),
}  # fmt: skip
"""Entries of older and other libraries, and those that once failed: of each file, what is put over its values."""


def _changed_value(value: Any, rng: random.Random) -> str:
    """Return JSON in place of a value: a value of another kind, or one that looks like it."""
    text = json.dumps(value)
    kinds = [json.dumps(text), f"[{text}]", f'{{"value": {text}}}', "[" * 60 + text + "]" * 60]
    if isinstance(value, bool):
        kinds += [json.dumps(not value), str(int(value)), json.dumps(str(value))]
    elif isinstance(value, int | float):
        kinds += [str(-value), str(value * 1000 + 1), str(value + 1), str(value + 0.5), str(float(value)), f'"{value}"']
    elif isinstance(value, str):
        kinds += [json.dumps(value.upper()), json.dumps(value + " "), json.dumps(value[:-1]), json.dumps([*value[:9]])]
    elif isinstance(value, list):
        kinds += [
            json.dumps(value * 2),
            json.dumps(value[:-1]),
            json.dumps(dict.fromkeys(map(str, range(3)), text[:9])),
        ]
    elif isinstance(value, dict):
        kinds += [json.dumps(list(value.items())[:50]), json.dumps({name.upper(): one for name, one in value.items()})]
    return rng.choice([*kinds, *NASTY, *NASTY])


def _pieces(text: str) -> Iterator[tuple[str, Callable[[bytes], bytes]]]:
    """Iterate over damages of the bytes."""
    data = text.encode()
    yield "UTF-8 with BOM", lambda _: b"\xef\xbb\xbf" + data
    yield "UTF-16", lambda _: text.encode("utf-16")
    yield "Latin-1", lambda _: text.encode("latin-1", "replace").replace(b"e", b"\xe9", 1)
    yield "list around it", lambda _: b"[" + data + b"]"
    yield "text around it", lambda _: json.dumps(text).encode()
    yield "twice", lambda _: data + data
    yield "trailing comma", lambda _: data.rstrip().removesuffix(b"}") + b",}"
    yield "comment", lambda _: b"// hello\n" + data


def damages(file: str, data: bytes, number: int, seed: int, *, within: str | None = None) -> list[Damage]:
    """Return so many damages of a file. `within`: of this entry of its JSON alone."""
    if file.endswith(".safetensors"):
        length = int.from_bytes(data[:8], "little")
        header, rest = data[8 : 8 + length], data[8 + length :]
        inner = damages(file.removesuffix(".safetensors") + ".json", header, number, seed)
        framed = ((one.data or b"") for one in inner)
        return [
            Damage(file, one.what, len(text).to_bytes(8, "little") + text + rest)
            for one, text in zip(inner, framed, strict=True)
        ]
    rng = random.Random(f"{file} {seed} {within}")
    found: list[Damage] = []
    if within is None:
        found += [Damage(file, "missing", None)]
        found += [Damage(file, f"nobody's: {text[:20]!r}", text) for text in CORPUS]
        found += [Damage(file, what, change(data)) for what, change in _pieces(data.decode())]
    if not file.endswith(".json"):
        while len(found) < number:
            start = rng.randrange(len(data))
            end = min(len(data), start + rng.randrange(1, 30))
            part = rng.choice([data[:start], data[:start] + data[end:], data[:end] + data[start:]])
            flipped = data[:start] + bytes([data[start] ^ rng.randrange(1, 128)]) + data[start + 1 :]
            found.append(Damage(file, f"bytes {start} to {end}", rng.choice([part, flipped])))
        return found[:number]
    value = json.loads(data)
    if within is None:
        for change in OLD_FORMS.get(file, ()):
            changed = {name: one for name, one in {**value, **change}.items() if one is not None or name in value}
            found.append(Damage(file, json.dumps(change)[:90], json.dumps(changed).encode()))
    while len(found) < number:
        at: list[Any] = [] if within is None else [within]
        part = value if within is None else value[within]
        # As often at the top as deep inside: most values of a tokenizer are entries of its vocabulary.
        while isinstance(part, dict | list) and part and (not at or rng.random() < 0.6):
            at.append(rng.choice(list(part)) if isinstance(part, dict) else rng.randrange(len(part)))
            part = part[at[-1]]
        where = "/".join(map(str, at))
        text, kind = _changed_value(part, rng), rng.random()
        if kind < 0.08:
            cut = rng.randrange(len(data))
            found.append(Damage(file, f"cut at {cut}", data[:cut]))
        elif kind < 0.2 and at:
            found.append(Damage(file, f"{where} left out", json.dumps(_without(value, at)).encode()))
        elif kind < 0.25 and at and isinstance(at[-1], str):
            found.append(Damage(file, f"{where} twice", _put(value, at, f'{json.dumps(part)}, "{at[-1]}": {text}')))
        else:
            found.append(Damage(file, f"{where} = {text[:50]}", _put(value, at, text)))
    return found[:number]


def _without(value: Any, at: list[Any]) -> Any:
    if isinstance(value, dict):
        return {
            k: _without(v, at[1:]) if k == at[0] and at[1:] else v for k, v in value.items() if k != at[0] or at[1:]
        }
    return [_without(v, at[1:]) if i == at[0] and at[1:] else v for i, v in enumerate(value) if i != at[0] or at[1:]]


_MARK = "here-stands-the-new-value"


def _put(value: Any, at: list[Any], text: str) -> bytes:
    """Return JSON with a text in place of a value."""
    changed = json.loads(json.dumps(value))
    owner: Any = {"": changed}
    for key, after in zip(["", *at], [*at, None], strict=True):
        if after is None:
            owner[key] = _MARK
        else:
            owner = owner[key]
    changed = _MARK if not at else changed
    return json.dumps(changed).replace(json.dumps(_MARK), text).encode()


def limit_memory(n_bytes: int) -> None:
    """Let this process have no more memory than that: a damaged file may ask for any."""
    resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))
