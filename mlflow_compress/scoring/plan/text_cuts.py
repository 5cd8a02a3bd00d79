"""Where a tokenizer lets text be cut: the ids of the pieces, one after the other, are those of the whole text."""

import json
import re
from functools import lru_cache
from itertools import pairwise, product
from typing import Any

ANCHOR = "x"
"""Stands before a piece that does not begin a text, so that nothing is added as at the beginning of a text."""

_LETTER_AND_BLANK = re.compile("[A-Za-z][ \n▁ĠĊ]")  # blanks as texts and vocabularies write them
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
# One of each kind of character that pre-tokenizers tell apart
_AROUND = ("", "a", "Z", "7", "é", "中", " ", "\n", "\t", ".", "'s", "_", "\u0301")
_BY_CHARACTER = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer", "ByteLevel"}
_AT_THE_ENDS = {"Prepend", "Strip"}  # a piece ends with a letter, and begins with one or with the text


@lru_cache(maxsize=4)
def has_cuts(tokenizer: Any) -> bool:
    """Return whether a tokenizer's texts may be cut between an ASCII letter and the blank or line break behind it.

    They may where nothing reaches over such a cut: no entry of a BPE vocabulary (and so no merge) and no added token
    holds a letter with a blank behind it, or takes blanks away behind a letter; the normalizer changes characters one
    by one, or the ends of a text. Then the tokenizer itself is asked, with each kind of character around a cut. Where
    this is not known there are no cuts: a unigram model sums scores over a whole text, and a tokenizer in Python, or a
    normalizer's pattern, can do anything.
    """
    if not tokenizer.is_fast:
        return False
    stored = json.loads(tokenizer.backend_tokenizer.to_str())
    model, vocabulary = stored["model"], tokenizer.get_vocab()
    if model["type"] == "BPE":
        if model.get("dropout") or not vocabulary.keys() >= _LETTERS:
            return False
        if any(_LETTER_AND_BLANK.search(entry) for entry in vocabulary):
            return False
    elif model["type"] not in ("WordPiece", "WordLevel") or not _makes_words(tokenizer.backend_tokenizer):
        return False
    added = stored["added_tokens"]
    if any(_LETTER_AND_BLANK.search(f"{one['content']}{' ' if one['rstrip'] else ''}") for one in added):
        return False
    return _is_local(stored["normalizer"]) and _is_seen(tokenizer)


def _makes_words(backend: Any) -> bool:
    """Return whether words end at every blank."""
    if backend.pre_tokenizer is None:
        return False
    return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str("a b\n\nc")] == ["a", "b", "c"]


def _is_local(normalizer: dict[str, Any] | None) -> bool:
    if normalizer is None:
        return True
    if normalizer["type"] == "Sequence":
        return all(map(_is_local, normalizer["normalizers"]))
    if normalizer["type"] == "Replace":
        return not _LETTER_AND_BLANK.search(normalizer["pattern"].get("String", "a "))
    return normalizer["type"] in _BY_CHARACTER | _AT_THE_ENDS


def _is_seen(tokenizer: Any) -> bool:
    """Return whether the pieces of short texts have the ids of the texts."""
    lefts = ["".join(parts) for parts in product(_AROUND, "aZ")]
    rights = ["".join(parts) for parts in product((" ", "\n\n"), _AROUND, ("", "a", " ", "."))]

    def ids(texts: list[str]) -> list[list[int]]:
        return list(tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])

    anchor = ids([ANCHOR])[0]
    behind = ids([ANCHOR + right for right in rights])
    pieces = [left + right[len(anchor) :] for left, right in product(ids(lefts), behind)]
    return ids(["".join(parts) for parts in product(lefts, rights)]) == pieces


def paragraphs(text: str) -> list[str]:
    """Cut a text before each empty line that has a letter before it, and at the last possible cut of all.

    So texts that begin alike share all pieces but the last ones, and a text shares all but its last piece with each of
    its continuations.
    """
    ends, found = [0], text.find("\n\n")
    while found != -1:
        if text[found - 1 : found] in _LETTERS:
            ends.append(found)
        found = text.find("\n\n", found + 1)
    last = len(text)
    while (last := max(text.rfind(" ", ends[-1] + 1, last), text.rfind("\n", ends[-1] + 1, last))) != -1:
        if text[last - 1] in _LETTERS:
            ends.append(last)
            break
    return [text[begin:end] for begin, end in pairwise([*ends, len(text)])]
