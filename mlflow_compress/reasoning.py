"""Answers of models that think aloud: what is left when the reasoning is taken off."""

import re

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
