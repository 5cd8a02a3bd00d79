"""The script and the language of a text."""

import unicodedata
from collections import Counter
from collections.abc import Collection
from functools import cache, lru_cache
from typing import Any

# Scripts that one language mixes
_SCRIPTS = {"HIRAGANA": "CJK", "KATAKANA": "CJK", "IDEOGRAPHIC": "CJK"}

_SURE = 0.8
"""A text's language is known if the classifier gives it this probability."""

_MOST_READ = 1000
"""Characters of a text from which its language is told."""

_A_GUESS = 0.3  # The largest probability of any language where nothing speaks for one, as in "42", is below


@cache
def _script(letter: str) -> str:
    name = unicodedata.name(letter, "").partition(" ")[0].partition("-")[0]
    return _SCRIPTS.get(name, name)


def script(text: str) -> str | None:
    """Return the script of most letters of a text, by the first word of their Unicode names; None without letters."""
    if text.isascii():
        return "LATIN" if any(map(str.isalpha, text)) else None
    counts = Counter(_script(c) for c in unicodedata.normalize("NFKC", text) if c.isalpha())
    return max(counts, key=counts.__getitem__) if counts else None


@cache
def classifier() -> Any:
    """Return py3langid's classifier, of the languages with a code of two letters; it is loaded once."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    classifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    # The others are dialects, which would share the probability of their language, and "no language".
    classifier.set_languages([code for code in classifier.labels if len(code) == 2])
    return classifier


@lru_cache(maxsize=2**15)  # all questions of MMLU, which the variants of a sweep share
def _most_probable(text: str) -> tuple[str, float]:
    code, probability = classifier().classify(text)
    return code, probability


def language(text: str) -> str | None:
    """Return the language of a text as an ISO 639 code; None where it is not sure, as of most texts of a few words.

    It is that of the first `_MOST_READ` characters, by py3langid's naive Bayes classifier over byte n-grams (Lui and
    Baldwin, "langid.py", ACL 2012).
    """
    code, probability = _most_probable(text[:_MOST_READ])
    return code if probability >= _SURE else None


def is_in_none_of(text: str, codes: Collection[str]) -> bool:
    """Return whether a text is surely in another language than these, even where it is not sure in which."""
    read = text[:_MOST_READ]
    code, probability = _most_probable(read)
    if probability < _A_GUESS or code in codes:  # alone it has more than all of `codes` may have
        return False
    return float(sum(p for code, p in classifier().rank(read) if code in codes)) <= 1.0 - _SURE
