"""What an evaluation depends on besides tasks: every field of every file that transformers reads, by content.

Each field of a model's folder is edited in place. The identity is then another one, or opening the model fails, or the
field is in `NO_EFFECT` with the reason. The form in which a tool writes the files changes nothing.
"""

import copy
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoTokenizer,
    CTRLTokenizer,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    PreTrainedTokenizerFast,
)

import mlflow_compress as mc
from mlflow_compress import demo
from mlflow_compress.engines.interface import ModelRequest
from mlflow_compress.engines.local import LocalEngine
from mlflow_compress.errors import AlignmentError
from mlflow_compress.models.identity import CONFIG_LEFT_OUT, check_same_tokenizer, tokenizer_hash
from mlflow_compress.models.loading import LoadConfig, open_light
from tests.unit.scoring_models import TEXT, build_model

SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"


def unigram() -> Tokenizer:
    """Like sentencepiece's: scores, a normalizer, and spaces as marks."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("``", '"')])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Like Llama 2's: a BPE whose unknown characters become bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=[*SPECIAL, *(f"<0x{i:02X}>" for i in range(256))], show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def byte_level() -> Tokenizer:
    """Like Llama 3's: merges of bytes, behind a regular expression."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(r"\w+|\s|[^\w\s]", behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


_SHAPE: dict[str, Any] = {"vocab_size": 340, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
LLAMA = LlamaConfig(
    **_SHAPE,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=64,
    rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
)
GPT2 = GPT2Config(**_SHAPE, n_embd=16, n_layer=1, n_head=2, n_positions=64)
KINDS: dict[str, tuple[Callable[[], Tokenizer], Any]] = {
    "byte level, Llama": (byte_level, LLAMA),
    "byte fallback, Llama": (byte_fallback, LLAMA),
    "unigram, GPT-2": (unigram, GPT2),
}


def write(folder: Path, tokenizer: Tokenizer, config: Any) -> Path:
    """Write a model with every file that transformers reads, present ones and those of older versions."""
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.add_tokens([AddedToken("flour mill", lstrip=True)])
    fast.chat_template = {"default": TEMPLATE, "tool_use": TEMPLATE + "{{ tools }}"}
    build_model(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    GenerationConfig(eos_token_id=[2], temperature=0.7, do_sample=True, pad_token_id=2).save_pretrained(folder)
    legacy = {
        "bos_token": {"content": "<s>", "lstrip": False, "rstrip": False, "normalized": False},
        "pad_token": "</s>",
    }
    (folder / "special_tokens_map.json").write_text(json.dumps(legacy))
    (folder / "added_tokens.json").write_text(json.dumps({"sheep hill": len(fast)}))
    return folder


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    build, config = KINDS[request.param]
    return write(tmp_path_factory.mktemp("model") / "m", build(), config)


def identity(folder: Path) -> dict[str, object]:
    return LocalEngine().open(ModelRequest(address=str(folder))).identity


Place = tuple[str | int, ...]
LONG = 20  # entries of one object, of which the first, the middle and the last are edited


def edits(content: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Return the place of every value of a JSON document, and another value."""
    if isinstance(content, dict | list) and content:
        keys = list(content) if isinstance(content, dict) else list(range(len(content)))
        for key in keys if len(keys) <= LONG else (keys[0], keys[len(keys) // 2], keys[-1]):
            yield from edits(content[key], (*place, key))
    elif isinstance(content, bool):
        yield place, not content
    elif isinstance(content, int):
        yield place, content + 2
    elif isinstance(content, float):
        yield place, content * 2 + 1
    elif isinstance(content, str):
        yield place, {"silu": "relu", "gelu_new": "relu"}.get(content, f"{content}x")
    else:
        yield place, ["<s>"] if content == [] else 1


def edited(content: Any, place: Place, value: Any) -> Any:
    content = copy.deepcopy(content)
    inside = content
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    return content


NO_EFFECT = {
    **{f"config.json {name}$": why for name, why in CONFIG_LEFT_OUT.items()},
    "generation_config.json (?!eos)": "answers are generated with our own settings, and its end tokens",
    "tokenizer.json version": "of the file's layout",
    "tokenizer.json .* type$": "the library knows a part by its fields too",
    "tokenizer.json added_tokens .* id$": "tokens that the vocabulary has keep its ids, others get the next ones",
    "tokenizer.json added_tokens .* special$": "named tokens, such as <s>, are special in any case",
    "added_tokens.json": "the same: of a token that is new",
    "special_tokens_map.json bos_token (lstrip|normalized|rstrip)": "tokenizer.json goes before it",
    "tokenizer_config.json bos_token": "special_tokens_map.json goes before it",
    "tokenizer_config.json (backend|tokenizer_class)": "the tokenizer that they choose is taken",
    "tokenizer_config.json model_max_length": "the configuration has the context length",
}


def what_it_does(folder: Path) -> list[Any]:
    """Return how a folder's tokenizer reads texts, and what it writes."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [TEXT, f"<s>The  flour mill</s> {SPECIAL[-1]} sheep hill\n ``èﬁ", "ABC" + TEXT[::-1]]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": texts[1]}], tokenize=False)
    return [ids, [tokenizer.decode(i, skip_special_tokens=skip) for i in ids for skip in (True, False)], chat]


@pytest.mark.ci
def test_every_field_of_every_file_is_part_of_the_identity_or_has_a_reason(folder: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "copy"))
    before, does = identity(copied), what_it_does(copied)
    assert before == identity(folder)
    unnoticed: set[str] = set()
    for file in sorted(copied.rglob("*.json*")):
        stored = json.loads(file.read_text())
        for place, value in edits(stored):
            file.write_text(json.dumps(edited(stored, place, value)))
            try:
                after = identity(copied)
            except BaseException as error:  # noqa: BLE001 - a wrong file is refused; the tokenizers library panics
                assert not isinstance(error, KeyboardInterrupt)
                continue
            if after == before:
                unnoticed.add(" ".join([file.name, *map(str, place)]))
                assert what_it_does(copied) == does, unnoticed
        file.write_text(json.dumps(stored))
    for file in copied.rglob("*.jinja"):
        template = file.read_text()
        file.write_text(f"{template} ")
        assert identity(copied) != before, file.name
        file.write_text(template)
    assert identity(copied) == before
    without_reason = {name for name in unnoticed if not any(re.match(known, name) for known in NO_EFFECT)}
    assert not without_reason, "\n".join(sorted(without_reason))


EDITS: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    # Of the field's bug reports:
    "a tokenizer that ignores merges": (
        "byte level, Llama", "tokenizer.json", lambda c: c["model"].update(ignore_merges=True)
    ),
    # Others of the kind:
    "scores": ("unigram, GPT-2", "tokenizer.json", lambda c: c["model"]["vocab"][-1].__setitem__(1, -1.0)),
    "unk": ("unigram, GPT-2", "tokenizer.json", lambda c: c["model"].update(unk_id=3)),
    "byte fallback": ("byte fallback, Llama", "tokenizer.json", lambda c: c["model"].update(byte_fallback=False)),
    "fused unknowns": ("byte fallback, Llama", "tokenizer.json", lambda c: c["model"].update(fuse_unk=False)),
    "flags of added tokens": (
        "byte level, Llama", "tokenizer.json", lambda c: c["added_tokens"][-1].update(single_word=True)
    ),
    "how ids become text": (
        "unigram, GPT-2", "tokenizer.json", lambda c: c["decoder"].update(prepend_scheme="never")
    ),
    "special tokens in text": (
        "byte level, Llama", "tokenizer_config.json", lambda c: c.update(split_special_tokens=True)
    ),
    "end tokens": ("byte level, Llama", "generation_config.json", lambda c: c.update(eos_token_id=[2, 3])),
    "positions": (
        "byte level, Llama", "config.json", lambda c: c["rope_parameters"].update(rope_theta=9000.0)
    ),
    "attention": ("byte level, Llama", "config.json", lambda c: c.update(attn_implementation="eager")),
    "an entry that transformers does not know": ("unigram, GPT-2", "config.json", lambda c: c.update(own=1)),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_in_place_is_another_identity(name: str, tmp_path: Path) -> None:
    kind, file_name, edit = EDITS[name]
    build, config = KINDS[kind]
    folder = write(tmp_path / "m", build(), config)
    before = open_light(LoadConfig(path=str(folder)))
    known = identity(folder)
    content = json.loads((folder / file_name).read_text())
    edit(content)
    (folder / file_name).write_text(json.dumps(content))
    assert identity(folder) != known
    after = open_light(LoadConfig(path=str(folder)))
    if file_name == "tokenizer.json":
        with pytest.raises(AlignmentError, match=r"differ in (model|added_tokens|decoder)\."):
            check_same_tokenizer(before, after)
    elif file_name == "generation_config.json":
        check_same_tokenizer(before, after)


def shuffled(content: Any) -> Any:
    """Return a JSON document with the entries of its objects in the reverse order."""
    if isinstance(content, dict):
        return {key: shuffled(value) for key, value in reversed(content.items())}
    return [shuffled(value) for value in content] if isinstance(content, list) else content


def test_a_rewrite_is_the_same_model_and_the_same_tokenizer(folder: Path, tmp_path: Path) -> None:
    before, copied = identity(folder), Path(shutil.copytree(folder, tmp_path / "copy"))
    AutoTokenizer.from_pretrained(folder).save_pretrained(copied)
    AutoConfig.from_pretrained(folder).save_pretrained(copied)
    GenerationConfig.from_pretrained(folder).save_pretrained(copied)
    assert identity(copied) == before
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        content = shuffled(json.loads((copied / name).read_text()))
        if name == "tokenizer.json":  # an object's order is the vocabulary's there, and not another tokenizer
            assert isinstance(content["model"]["vocab"], dict | list)
        (copied / name).write_text(json.dumps(content, indent=3))
    assert identity(copied) == before


@pytest.mark.parametrize("model", demo.MODELS.values(), ids=demo.MODELS)
def test_embedded_models_that_transformers_writes_again_are_the_same(model: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(model, tmp_path / "copy"))
    AutoTokenizer.from_pretrained(model).save_pretrained(copied)
    AutoConfig.from_pretrained(model).save_pretrained(copied)
    assert identity(copied) == identity(model)


def test_an_infinite_number_is_the_same_in_both_forms(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", byte_level(), LLAMA)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attention_dropout": -math.inf}))
    before = identity(folder)
    AutoConfig.from_pretrained(folder).save_pretrained(folder)
    assert '"__float__": "-Infinity"' in file.read_text()
    assert identity(folder) == before


def test_defaults_and_older_names_are_the_same_configuration(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", byte_level(), LLAMA)
    before, file = identity(folder), folder / "config.json"
    content = json.loads(file.read_text())
    for name in ("attention_bias", "hidden_act", "mlp_bias", "rms_norm_eps", "tie_word_embeddings"):
        del content[name]  # each has its default
    rope = content.pop("rope_parameters")
    content |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"rope_type": "linear", "factor": rope["factor"]},
        "torch_dtype": content.pop("dtype"),
    }
    file.write_text(json.dumps(content))
    assert identity(folder) == before
    content["rope_scaling"] = {"type": "linear", "factor": rope["factor"]}
    file.write_text(json.dumps(content))
    older = identity(folder)
    AutoConfig.from_pretrained(folder).save_pretrained(folder)
    assert identity(folder) == older


def test_the_context_length_of_a_tokenizer_counts_where_the_configuration_has_none(tmp_path: Path) -> None:
    config = MambaConfig(**_SHAPE, hidden_size=16, num_hidden_layers=1, state_size=4)
    folder = write(tmp_path / "m", byte_level(), config)
    before, file = identity(folder), folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": 77}))
    assert identity(folder)["max_length"] == 77 != before["max_length"]


def test_a_tokenizer_written_in_python_counts_by_its_files(tmp_path: Path) -> None:
    vocabulary = {token: number for number, token in enumerate(["<unk>", "a", "b", "a</w>", "b</w>", "ab</w>", "b@@"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b</w>\n")
    CTRLTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")).save_pretrained(tmp_path / "1")

    def read() -> CTRLTokenizer:
        return CTRLTokenizer.from_pretrained(tmp_path / "1")

    before = tokenizer_hash(read())
    read().save_pretrained(tmp_path / "1")
    (tmp_path / "1" / "vocab.json").write_text(json.dumps(shuffled(vocabulary), indent=2))
    assert tokenizer_hash(read()) == before
    (tmp_path / "1" / "merges.txt").write_text("#version: 0.2\nb a</w>\n")
    assert tokenizer_hash(read()) != before


def test_a_tool_may_drop_the_template_and_set_a_padding_token(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", byte_level(), LLAMA)
    copied = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copied / "chat_template.jinja").unlink()
    file = copied / "special_tokens_map.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pad_token": "<|end|>"}))
    base, variant = open_light(LoadConfig(path=str(folder))), open_light(LoadConfig(path=str(copied)))
    check_same_tokenizer(base, variant)
    assert tokenizer_hash(base.tokenizer) == tokenizer_hash(variant.tokenizer)
    assert identity(folder)["chat_template"] != identity(copied)["chat_template"]


@pytest.mark.ci
def test_after_an_edit_in_place_numbers_are_those_of_a_fresh_store(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", byte_level(), LLAMA)
    item = {"category": "c", "choices": ["flour", "salt", "iron", "wool"], "answer": 0}
    items = [{**item, "id": str(n), "question": f"What does the baker buy on day {n}?"} for n in range(6)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))

    def evaluated(store: str) -> mc.Evaluation:
        made = mc.compress(str(folder), "fp16", store=str(tmp_path / store))
        return mc.evaluate(made, tasks=str(tmp_path / "q.jsonl"), num_fewshot=0, store=str(tmp_path / store))

    assert not evaluated("used").baseline_found
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["merges"] = content["model"]["merges"][::-1]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    again, fresh = evaluated("used"), evaluated("fresh")
    assert not again.baseline_found
    in_used, in_fresh = ([(r.name, r.task, r.category, r.value) for r in one.results] for one in (again, fresh))
    assert in_used == in_fresh
