"""Text that prompts share is tokenized once: the ids of pieces are those of the whole text, whatever the tokenizer."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mlflow_compress import demo
from mlflow_compress.errors import DataError
from mlflow_compress.records import Request
from mlflow_compress.scoring.plan.encoding import Encoder
from mlflow_compress.scoring.plan.text_cuts import has_cuts, paragraphs

# The patterns of GPT-2, Llama 3, Qwen 2.5, o200k (gpt-oss) and DeepSeek V3, as their tokenizer.json has them.
LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_2 = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = (demo.DATA_DIR / "corpus.txt").read_text()[:60_000].split("\n\n")


def fast(backend: Tokenizer, **names: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def trained(backend: Tokenizer, trainer: Any) -> Tokenizer:
    backend.train_from_iterator([*TEXT, *map(chr, range(32, 127)), "é 中\n\n\tA."], trainer)
    return backend


def byte_level(pattern: str | None, *, bos: bool = False, prefix_space: bool = False) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(ignore_merges=pattern == LLAMA_3))
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=pattern is None)
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, level])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained(backend, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"]))
    if bos:
        template = {"single": "<s> $A", "pair": "<s> $A $B", "special_tokens": [("<s>", 0)]}
        backend.post_processor = processors.TemplateProcessing(**template)
    return fast(backend, bos_token="<s>", eos_token="</s>")


def sentencepiece_bpe(*, prefix: bool, appends: bool = False) -> PreTrainedTokenizerFast:
    """Return what Llama 2's tokenizer is: no pre-tokenizer, blanks rewritten, unknown characters as bytes."""
    steps = [normalizers.Prepend("▁")] if prefix else []
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trained(learned, trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", "<s>", "</s>"]))
    model = learned.to_str()
    backend = Tokenizer.from_str(model.replace('"byte_fallback":false', '"byte_fallback":true'))
    backend.pre_tokenizer = None
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    backend.add_tokens([f"<0x{byte:02X}>" for byte in range(256)])
    if appends:
        template = {"single": "<s> $A </s>", "pair": "$A $B", "special_tokens": [("<s>", 1), ("</s>", 2)]}
        backend.post_processor = processors.TemplateProcessing(**template)
    return fast(backend, bos_token="<s>", eos_token="</s>")


def metaspace(scheme: str, *, split: bool) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True)
    trained(backend, trainers.BpeTrainer(vocab_size=500, special_tokens=["<s>", "</s>"]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    return fast(backend, bos_token="<s>", eos_token="</s>")


def wordpiece() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trained(backend, trainers.WordPieceTrainer(vocab_size=500, special_tokens=["[UNK]", "[CLS]", "[SEP]"]))
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return fast(backend, unk_token="[UNK]", bos_token="[CLS]", eos_token="[SEP]")


def normalized(*steps: Any) -> PreTrainedTokenizerFast:
    tokenizer = byte_level(LLAMA_3)
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(list(steps))
    return tokenizer


def with_added(*tokens: AddedToken, pattern: str | None = LLAMA_3) -> PreTrainedTokenizerFast:
    tokenizer = byte_level(pattern)
    tokenizer.add_tokens(list(tokens))
    return tokenizer


def unigram() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trained(backend, trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", special_tokens=["<unk>", "<s>"]))
    return fast(backend, bos_token="<s>")


def over_words() -> PreTrainedTokenizerFast:
    """Return a BPE without a pre-tokenizer, whose merges go over blanks."""
    backend = trained(Tokenizer(models.BPE()), trainers.BpeTrainer(vocab_size=900, special_tokens=["<s>"]))
    return fast(backend, bos_token="<s>")


def words() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return fast(trained(backend, trainers.WordLevelTrainer(special_tokens=["[UNK]", "[B]"])), bos_token="[B]")


def pattern_over_blanks() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words take the blank behind them along."""
    backend = Tokenizer(models.BPE())
    take = pre_tokenizers.Split(Regex(r"\p{L}+\s?|[^\p{L}]"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([take, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return fast(trained(backend, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet)))


MADE: dict[str, tuple[Callable[[], PreTrainedTokenizerFast], bool]] = {
    "GPT-2": (lambda: byte_level(None), True),
    "GPT-2, blank first": (lambda: byte_level(None, prefix_space=True), True),
    "Llama 3": (lambda: byte_level(LLAMA_3, bos=True), True),
    "Qwen 2.5": (lambda: byte_level(QWEN_2), True),
    "o200k": (lambda: byte_level(O200K), True),
    "DeepSeek V3": (lambda: byte_level(DEEPSEEK, bos=True), True),
    "Llama 2": (lambda: sentencepiece_bpe(prefix=True), True),
    "Llama 2 that appends an EOS": (lambda: sentencepiece_bpe(prefix=True, appends=True), True),
    "Gemma": (lambda: sentencepiece_bpe(prefix=False), True),
    "Metaspace, first": (lambda: metaspace("first", split=False), True),
    "Metaspace, always": (lambda: metaspace("always", split=True), True),
    "Metaspace, never": (lambda: metaspace("never", split=True), True),
    "WordPiece": (wordpiece, True),
    "NFKC and lower case": (lambda: normalized(normalizers.NFKC(), normalizers.Lowercase()), True),
    "NFD without accents": (lambda: normalized(normalizers.NFD(), normalizers.StripAccents()), True),
    "stripped": (lambda: normalized(normalizers.Strip()), True),
    "added tokens": (lambda: with_added(AddedToken("<|im_end|>"), AddedToken("ab", single_word=True)), True),
    "an added token that takes blanks before it": (lambda: with_added(AddedToken("<m>", lstrip=True)), True),
    "an added token over a cut": (lambda: with_added(AddedToken("a b")), False),
    "an added token over a line": (lambda: with_added(AddedToken("<|end\n\nof|>")), False),
    "an added token that takes blanks behind it": (lambda: with_added(AddedToken("ab", rstrip=True)), False),
    "merges over words": (over_words, False),
    "words with their blank": (pattern_over_blanks, False),
    "a normalizer's pattern": (lambda: normalized(normalizers.Replace(Regex("a +"), "b")), False),
    "a normalizer over a cut": (lambda: normalized(normalizers.Replace("a b", "c")), False),
    "unigram": (unigram, False),
    "words": (words, True),
}


@cache
def made(name: str) -> PreTrainedTokenizerFast:
    return MADE[name][0]()


PIECES = [
    "a",
    "Z",
    "ab",
    "the",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\n\n\n",
    "\t",
    ".",
    ":",
    "'s",
    "7",
    "123",
    "é",
    "中",
    "́",
    "_",
]
PIECES += ["<s>", "</s>", "<|im_end|>", "<m>", " a b ", "\r\n", " ", "▁", "x", "<|end\n\nof|>", "Question", " Answer:"]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=14).map("".join)


def encoders(name: str) -> tuple[Encoder, Encoder]:
    """Return an encoder, and one that tokenizes whole texts."""
    cutting, whole = Encoder(made(name), 10_000), Encoder(made(name), 10_000)
    whole._has_cuts = False
    return cutting, whole


@pytest.mark.parametrize("name", MADE)
def test_which_tokenizers_have_cuts(name: str) -> None:
    assert has_cuts(made(name)) == MADE[name][1]


@pytest.mark.parametrize("name", MADE)
@given(st.lists(texts, min_size=1, max_size=3), st.booleans())
def test_the_ids_of_pieces_are_those_of_the_text(name: str, strings: list[str], special: bool) -> None:
    cutting, whole = encoders(name)
    for ours, wanted in zip(cutting.ids(strings, special=special), whole.ids(strings, special=special), strict=True):
        np.testing.assert_array_equal(ours, wanted)


@pytest.mark.parametrize("name", MADE)
@given(texts.filter(str.strip), st.sampled_from((" A", " the", "\nB", " \n\n ab", "中")))
def test_the_tokens_of_an_option_are_those_of_the_whole_text(name: str, context: str, continuation: str) -> None:
    def tokens(encoder: Encoder) -> Any:
        try:
            return [(e.inputs.tolist(), e.targets.tolist()) for e in encoder._encode(requests).values()]
        except DataError as refused:  # an option that merges into its prompt
            return str(refused)

    cutting, whole = encoders(name)
    requests = [Request.of("t", "i", context, continuation, continuation), Request.of("t", "i", context, " xy", "xy")]
    assert tokens(cutting) == tokens(whole)


@given(texts)
def test_paragraphs_are_the_text(text: str) -> None:
    pieces = paragraphs(text)
    assert "".join(pieces) == text and all(pieces[1:])
    assert all(left[-1].isascii() and left[-1].isalpha() for left in pieces[:-1])
    assert all(right[0] in " \n" for right in pieces[1:])


def test_a_shared_beginning_is_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, handed = made("Llama 3"), []
    original = type(tokenizer).__call__
    monkeypatch.setattr(type(tokenizer), "__call__", lambda self, t, **o: handed.extend(t) or original(self, t, **o))
    shots = "\n\n".join(f"Question {number}\nA. one\nB. two\nAnswer: A" for number in range(5))
    has_cuts(tokenizer)
    encoder, handed[:] = Encoder(tokenizer, 10_000), []
    requests = [
        Request.of("t", f"{item}", f"{shots}\n\nQuestion of item {item}\nA. yes\nB. no\nAnswer:", f" {letter}", letter)
        for item in range(20)
        for letter in "AB"
    ]
    encoder._encode(requests)
    assert sum(map(len, handed)) < len(shots) + 20 * 100


def test_a_tokenizer_in_python_has_no_cuts() -> None:
    class Slow:
        is_fast = False

    assert not has_cuts(Slow())
