"""Answers of models that think aloud: what is left when the reasoning is taken off, and what it concludes."""

import re
import string
import threading
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

from mlflow_compress.errors import require_extra

# Reasoning between two tags, as chat templates write it: <think>, <thinking>, <thought>, <reasoning>, <seed:think>,
# <|begin_of_thought|>, <|START_THINKING|>, [THINK], ◁think▷ and Gemma's <|channel>thought ... <channel|>.
_TAG = re.compile(
    r"(?P<open><(?:think(?:ing)?|thoughts?|reason(?:ing)?|analysis|seed:think)(?:\s[^<>]*)?(?<!/)>|\[THINK\]|◁think▷"
    r"|<\|(?:begin_of_thought|start_thinking|think)\|>|<\|channel>(?:thought|analysis)\b)"
    r"|(?P<close></(?:think(?:ing)?|thoughts?|reason(?:ing)?|analysis|seed:think)>|\[/THINK\]|◁/think▷"
    r"|<\|(?:end_of_thought|end_thinking|/think)\|>|<channel\|>)",
    re.IGNORECASE,
)
_QUOTES = "`\"'\u201c\u201d\u2018\u2019"

# Reasoning that begins the reply, and the mark of the answer behind it: gpt-oss's channels, the same without the
# special tokens, and Granite's sentences.
_HEADED = (
    (
        re.compile(r"\s*(?:<\|start\|>)?(?:assistant|analysis)?\s*<\|(?:channel|message)\|>"),
        re.compile(r"<\|channel\|>\s*final\b[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"),
    ),
    (re.compile(r"\s*analysis(?=[A-Z\"']|.*assistantfinal)", re.DOTALL), re.compile(r"assistantfinal")),
    (re.compile(r"\s*Here(?:'s| is) my thought process:"), re.compile(r"Here(?:'s| is) my response:")),
)
_END_OF_MESSAGE = re.compile(r"<\|(?:end|return|call|start)\|>")


def without_reasoning(reply: str) -> str:
    """Return a reply without its reasoning.

    Reasoning without an end goes to the end of the reply. A closing tag without an opening one ends reasoning that has
    begun with the reply: such templates write the opening tag into the prompt. A tag in quotation marks or backquotes
    is a word, not a tag.
    """
    for head, answer in _HEADED:
        if head.match(reply):
            last = [*answer.finditer(reply)][-1:]
            return _END_OF_MESSAGE.split(reply[last[0].end() :])[0] if last else ""
    kept, depth, place, opened = "", 0, 0, 0
    for tag in _TAG.finditer(reply):
        if _is_quoted(tag):
            continue
        if not depth:
            kept += reply[place : tag.start()]
        if tag["open"]:
            # A server that writes the template's tag once more, before the model's own, has opened nothing new.
            repeated = depth > 0 and not reply[opened : tag.start()].strip()
            depth, opened = depth + (not repeated), tag.end()
        else:
            kept, depth = kept if depth else "", max(depth - 1, 0)
        place = tag.end()
    return kept if depth else kept + reply[place:]


def _is_quoted(tag: re.Match[str]) -> bool:
    before, after = tag.string[tag.start() - 1 : tag.start()], tag.string[tag.end() : tag.end() + 1]
    return bool(before and after) and before in _QUOTES and after in _QUOTES


OPEN = "<think>"


def parted(prompt: str, reply: str) -> tuple[str, str]:
    """Return thought and answer of a reply. Where the prompt ends with the opening tag, the reply begins in a thought.

    The answer is empty where the thought never ends, or nothing follows it.
    """
    whole = whole_reply(prompt, reply)
    answer = without_reasoning(whole)
    return whole.removesuffix(answer), answer.strip()


def stays_in_thought(prompt: str, reply: str) -> bool:
    """Return whether a thought begins, in the reply or at the end of the prompt, and does not end."""
    return not without_reasoning(f"{whole_reply(prompt, reply)}\nmore").strip()


def whole_reply(prompt: str, reply: str) -> str:
    """Return a reply with the opening tag, where this stands at the end of its prompt."""
    return f"{OPEN}{reply}" if prompt.rstrip().endswith(OPEN) else reply


_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+|/[1-9]\d*)?|-?\.\d+")
_LETTER = re.compile(r"(?<![A-Za-z])[A-H](?![A-Za-z'])")
# What is concluded stands in a box, or behind "answer is", up to the end of the line or of the thought.
_BRACED = r"[^{}]*+"
for _ in range(5):  # braces in braces
    _BRACED = rf"(?:[^{{}}]++|\{{{_BRACED}\}})*+"
_BOX = rf"\\boxed\{{({_BRACED})\}}"
_SEVERAL = re.compile(rf"{_BOX}(?:(?:[\s,;$&{{}}]|\\(?:quad|text|[,;()\[\]])|\b(?:and|or)\b)*{_BOX})+")
_ENDS = r"(?=\s*(?:</|<\||\[/|◁/|$))"
_CONCLUDED = re.compile(rf"{_BOX}|\banswer\s*(?:is\b\s*:?|:)\s*([^\n]*?){_ENDS}", re.I | re.M)


def _number(text: str) -> str | None:
    found = _NUMBER.search(text)
    return None if found is None else str(Fraction(found[0].replace(",", "")))


def _letter(text: str) -> str | None:
    found = _LETTER.search(text)
    return None if found is None else found[0]


def _text(text: str) -> str | None:
    return " ".join(text.casefold().translate(str.maketrans("", "", string.punctuation)).split()) or None


@cache
def _math_verify() -> Any:
    require_extra("math", "math_verify", by="compare=math")
    import math_verify

    return math_verify


def _seconds() -> int | None:
    """Return how long math-verify may work on one formula. It stops itself by a signal, which threads do not get."""
    return 5 if threading.current_thread() is threading.main_thread() else None


@lru_cache(maxsize=1 << 14)
def _parsed(formula: str) -> list[Any]:
    """Return what math-verify makes of a formula, with or without marks of math around it; empty if it is none."""
    marked = any(mark in formula for mark in ("$", r"\(", r"\["))
    text = formula if marked else rf"\boxed{{{formula}}}"
    return list(_math_verify().parse(text, parsing_timeout=_seconds()))


def _math(text: str) -> str | None:
    formula = text.strip().removesuffix(".")  # of a sentence; math-verify would not find "12." to be 12
    return formula if _parsed(formula) else None


_READERS: Mapping[str, Callable[[str], str | None]] = {
    "number": _number,
    "letter": _letter,
    "text": _text,
    "math": _math,
}
COMPARISONS = tuple(_READERS)
"""How answers are compared: as numbers (1,200 is 1200.0, and 3/4 is 0.75), by a letter from A to H, as text without
case, punctuation and repeated blanks, or as formulas by math-verify (the extra `math`)."""


def read_gold(answer: str, compare: str) -> str | None:
    """Return a right answer, which stands alone, as `read_answer` would return it; None where it cannot be read."""
    return _math(answer) if compare == "math" else read_answer(answer, compare)


def agree(gold: str | None, other: str | None, compare: str) -> bool:
    """Return whether what was read is the right answer. Formulas are compared by math-verify, the right one first."""
    if compare != "math" or gold == other or gold is None or other is None:
        return gold == other
    return _verified(gold, other)


@lru_cache(maxsize=1 << 14)
def _verified(gold: str, other: str) -> bool:
    return bool(_math_verify().verify(_parsed(gold), _parsed(other), timeout_seconds=_seconds()))


def conclusions(text: str, compare: str) -> Iterator[str]:
    """Yield what a text concludes, in a form in which equal answers are equal: boxed, or behind "answer is"."""
    for begin, end in conclusion_spans(text, compare):
        read = _READERS[compare](text[begin:end])
        assert read is not None
        yield read


def conclusion_spans(text: str, compare: str) -> Iterator[tuple[int, int]]:
    """Yield the first character of each of `conclusions`, and the one behind it."""
    for found in _CONCLUDED.finditer(text):
        begin, end = found.span(1 if found[1] is not None else 2)
        if _READERS[compare](text[begin:end]) is not None:
            yield begin, end


def read_answer(answer: str, compare: str) -> str | None:
    """Return an answer in a form in which equal answers are equal; None where it cannot be read.

    It is the last conclusion, if there is one; else the last number, the only letter, the whole text, or what
    math-verify finds. It also reads boxes that nothing but "and" or a comma parts: they are one set. Equal formulas may
    be written differently: see `agree`.
    """
    if compare == "math":
        spans, boxes = [*conclusion_spans(answer, compare)], [*_SEVERAL.finditer(answer)]
        if not spans:
            return _found_formula(answer)
        if boxes and spans[-1][0] < boxes[-1].end() and boxes[-1].start() < spans[-1][1]:
            return _found_formula(boxes[-1][0])
    span = answer_span(answer, compare)
    return None if span is None else _READERS[compare](answer[slice(*span)])


def _found_formula(answer: str) -> str | None:
    found = _math_verify().parse(answer, parsing_timeout=_seconds())
    return str(found[-1]) if found else None


def answer_span(answer: str, compare: str) -> tuple[int, int] | None:
    """Return the first character of what `read_answer` reads, and the one behind it; None where it cannot be read.

    Also where math-verify has found a formula that stands there in another form.
    """
    concluded, pattern = [*conclusion_spans(answer, compare)], {"number": _NUMBER, "letter": _LETTER}.get(compare)
    if compare == "math" and not concluded:
        formula = _found_formula(answer)
        at = -1 if formula is None else answer.rfind(formula)
        return None if formula is None or at < 0 else (at, at + len(formula))
    if pattern is None:
        whole = (0, len(answer)) if _text(answer) else None
        return concluded[-1] if concluded else whole
    if concluded:
        found = pattern.search(answer, *concluded[-1])
        assert found is not None
        return found.span()
    places = [*pattern.finditer(answer)]
    if not places or (compare == "letter" and len({found[0] for found in places}) > 1):
        return None
    return places[-1].span()
