"""Long contexts: needles, chains and copies at several depths of texts that fill a length, and the text itself.

All items of a text share it as their context, so that a model reads each text once. Lengths are in the baseline's own
tokens, and include question and answer.
"""

import json
import random
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from mlflow_compress import demo
from mlflow_compress.config import EMBEDDED, is_endpoint
from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.items.contamination import CalibrationText
from mlflow_compress.items.contamination import words as plain_words
from mlflow_compress.items.named_tasks import TASKS, NamedTask
from mlflow_compress.items.sources.calibration_sets import CALIBRATION_SETS
from mlflow_compress.items.sources.question_files import read_text
from mlflow_compress.items.task import Parts, Task, TaskSettings, item_row, seeded
from mlflow_compress.records import Items, Request

_LONG = "long"
_TEXTS = 20  # per length: as many as an interval needs; `limit` sets another number
NEEDLES, _BINS = 5, 8  # depths of needles and copies; ranges of depth in which the text is scored
_CHAINS, _HOPS = 2, 3
BEGUN, COPIED, _READ = 6, 8, 16  # words: begun again, to be copied, and scored in each range of depth
_LETTERS = "ABCD"
_NAMES = re.findall(
    r"\w+",
    """
    anchor apple basket bell boat bottle bridge candle carpet castle chair clock cloud coat cup desk door drum farm
    feather fence field forest fork garden gate hammer harbour hat horse house inn jar kettle key kitchen ladder lake
    lamp letter mill mirror moon mountain needle orchard oven paper pen pillow plate pond ribbon ring river road roof
    rope saddle shelf ship shoe spoon stable star stone stove street sun table temple tower tree valley village wall
    well wheel window""",
)
_UNIT = re.compile(r"\s*\S.*?(?:(?<=[.!?])(?=\s)|(?=\n\s*\n)|\Z)", re.DOTALL)  # a sentence, with the space before it
_MOST_WORDS = 60  # of a unit; files without sentences have longer ones
_DEFAULT_LONGEST = 32_768


@dataclass(frozen=True)
class Length:
    """One context length."""

    tokens: int

    @classmethod
    def read(cls, text: str) -> "Length":
        """Return the length that a text names: "512", "4k" (4,096)."""
        match = re.fullmatch(r"([1-9]\d{0,8})(k?)", text.strip().lower())
        if match is None:
            raise ConfigError("This is no length of a context", allowed="tokens, as in 512, 4k or 16k", got=text)
        return cls(int(match[1]) * (1024 if match[2] else 1))

    @property
    def name(self) -> str:
        return f"{self.tokens // 1024}k" if self.tokens % 1024 == 0 else str(self.tokens)


def _asked(argument: str) -> Callable[[TaskSettings], Parts]:
    """Return what builds the tasks of "LENGTH,LENGTH", "LENGTH?documents=FILE" or "?documents=FILE"."""
    sizes, mark, option = argument.partition("?")
    name, _, file = option.partition("=")
    if mark and (name != "documents" or not file):
        raise ConfigError("Long contexts have one option", allowed="long:4k,16k?documents=FILE.txt", got=argument)
    lengths = [Length.read(size) for size in sizes.split(",")] if sizes.strip() else []
    if twice := [one.name for one in set(lengths) if lengths.count(one) > 1]:
        raise ConfigError("A context length is named twice", got=twice)
    own = _units(read_text(Path(file))) if mark else None
    return lambda settings: _build(lengths, own, settings)


def _units(text: str) -> list[str]:
    """Return the sentences of a text, each with the white space before it; joined they are the text."""
    units = []
    for sentence in _UNIT.findall(text.strip()):
        parts = re.findall(r"\s*\S+", sentence)
        units += ["".join(parts[at : at + _MOST_WORDS]) for at in range(0, len(parts), _MOST_WORDS)]
    return units


def _bundled(draw: random.Random) -> Iterator[str]:
    """Yield sentences of the embedded corpus without end, its paragraphs in an order that is drawn each time."""
    paragraphs = (demo.DATA_DIR / "corpus.txt").read_text(encoding="utf-8").strip().split("\n\n")
    while True:
        draw.shuffle(paragraphs)
        for paragraph in paragraphs:
            first, *rest = _units(paragraph)
            yield f"\n\n{first.lstrip()}"
            yield from rest


@cache
def _calibration() -> CalibrationText:
    return CalibrationText.of(CALIBRATION_SETS[EMBEDDED]("").plain())


@dataclass(frozen=True, eq=False)
class _Reader:
    """The baseline's tokenizer and context."""

    tokenizer: Any
    most: int  # Tokens

    @classmethod
    def of(cls, model: str) -> "_Reader":
        if is_endpoint(model):
            fix = "Give the baseline's folder or hub id, or leave out long"
            raise ConfigError("Long contexts are counted in the baseline's own tokens", got=model, fix=fix)
        from mlflow_compress.models.identity import max_length
        from mlflow_compress.models.model_files import open_config, open_tokenizer
        from mlflow_compress.models.source_model import resolve_folder

        folder = resolve_folder(str(demo.MODELS.get(model, model)))
        tokenizer = open_tokenizer(folder)
        return cls(tokenizer, max_length(open_config(folder), tokenizer))

    def counts(self, texts: Sequence[str], *, special: bool = True) -> list[int]:
        encoded = self.tokenizer(list(texts), add_special_tokens=special, return_attention_mask=False, verbose=False)
        return [len(ids) for ids in encoded["input_ids"]]


@dataclass(frozen=True)
class _Question:
    """What is asked at the end of a text."""

    kind: str  # The beginning of its category
    depth: float | None
    asked: str
    options: Sequence[str]
    gold: int


def _lines(draw: random.Random) -> tuple[list[tuple[float, str]], list[_Question]]:
    """Return the needles and chains of one text, each with its depth as a share of the tokens, and the questions."""
    names = draw.sample(_NAMES, NEEDLES + _CHAINS * (_HOPS + 1))
    lines, questions = [], []
    for number in range(NEEDLES):
        depth, name, gold = (number + 0.5) / NEEDLES, names.pop(), draw.randrange(len(_LETTERS))
        lines.append((depth, f"{name}: {_LETTERS[gold]}"))
        questions.append(_Question("needle", depth, f"{name}:", _LETTERS, gold))
    for gold in draw.sample(range(len(_LETTERS)), _CHAINS):
        value = _LETTERS[gold]
        for hop in range(_HOPS + 1):
            name = names.pop()
            lines.append(((hop + draw.random()) / (_HOPS + 1), f"{name} = {value}"))
            value = name
        questions.append(_Question("chain", None, f"{value} =", _LETTERS, gold))
    return sorted(lines, key=itemgetter(0)), questions


def _placed(units: Sequence[str], sizes: Sequence[int], lines: Sequence[tuple[float, str]]) -> tuple[str, list[int]]:
    """Return a text with its lines at their depths, and the characters at which its own sentences begin."""
    ends = list(accumulate(sizes))
    before: dict[int, list[str]] = {}
    for depth, line in lines:
        before.setdefault(bisect_left(ends, depth * ends[-1]), []).append(line)
    text, begins = "", []
    for number, unit in enumerate(units):
        if number in before:
            text += "".join(f"\n\n{line}" for line in before[number])
            unit = f"\n\n{unit.lstrip()}"
        if not text:
            unit = unit.lstrip()
        begins.append(len(text) + len(unit) - len(unit.lstrip()))
        text += unit
    return text.lstrip(), [begin - (len(text) - len(text.lstrip())) for begin in begins]


def _words(text: str, begin: int, n: int) -> str:
    """Return n words of a text from a character on, with the white space between them; fewer at its end."""
    match = re.compile(rf"\S+(?:\s+\S+){{0,{n - 1}}}").match(text, begin)
    return match[0] if match is not None else ""


@dataclass(frozen=True, eq=False)
class _Text:
    """A text of one length, with its questions."""

    text: str
    begins: Sequence[int]  # Characters at which sentences begin
    questions: Sequence[_Question]
    room: int  # Tokens that are left for a question and its answer

    def at(self, depth: float, allowed: Callable[[int], bool]) -> int | None:
        """Return the beginning of the allowed sentence that is nearest to a depth; None where none is allowed."""
        middle = depth * len(self.text)
        return next(filter(allowed, sorted(self.begins, key=lambda begin: abs(begin - middle))), None)


def _text(units: Iterator[str], length: Length, reader: _Reader, draw: random.Random) -> _Text:
    """Return a text that fills a length, with room for its longest question. Sentences that do not fit are left out."""
    lines, questions = _lines(draw)
    taken: list[str] = []
    sizes: list[int] = []
    while sum(sizes) < length.tokens and (some := list(islice(units, 64))):
        taken += some
        sizes += reader.counts(some, special=False)
    # A copy that needs a quarter more than the mean word does is not asked, see `_rows`.
    copied = 1.25 * (BEGUN + COPIED) * sum(sizes) / max(len("".join(taken).split()), 1)
    room = max(int(copied), *reader.counts([f"\n\n{q.asked} {_LETTERS[0]}" for q in questions], special=False))
    wanted = length.tokens - room
    while taken:
        text, begins = _placed(taken, sizes, lines)
        over = reader.counts([text])[0] - wanted
        if over <= 0:
            return _Text(text, begins, questions, room - over)
        while taken and over > 0:  # at least one sentence less
            over -= sizes.pop()
            taken.pop()
    raise DataError("No sentence of the documents fits into the context", got=length.name)


def _rows(number: int, one: _Text, length: Length, reader: _Reader) -> Iterator[tuple[dict[str, Any], str, list[str]]]:
    """Yield the items of a text: columns, context and options (with what is before them)."""

    def row(kind: str, category: str, family: str, rule: str, **columns: Any) -> dict[str, Any]:
        named = {"id": f"{number} {kind}", "category": category, "group_id": str(number)}
        return item_row(f"{_LONG}_{length.name}", family, rule, named, **columns)

    for place, asked in enumerate(one.questions):
        category = asked.kind if asked.depth is None else f"{asked.kind} at {100 * asked.depth:.0f} %"
        columns = {"question": asked.asked, "options": list(asked.options), "gold": asked.gold}
        yield (
            row(f"{asked.kind}{place}", category, "long_needle", "loglik", **columns),
            f"{one.text}\n\n{asked.asked}",
            [f" {option}" for option in asked.options],
        )
    for place in range(NEEDLES):
        depth = (place + 0.5) / NEEDLES

        def is_unique(begin: int) -> bool:
            begun, complete = _words(one.text, begin, BEGUN), _words(one.text, begin, BEGUN + COPIED)
            fits = reader.counts([f"\n\n{complete}"], special=False)[0] <= one.room
            whole = len(complete.split()) == BEGUN + COPIED and fits
            # Calibration on the embedded text must stay allowed.
            return whole and one.text.count(begun) == 1 and not _calibration().holds(plain_words(complete))

        start = one.at(depth, is_unique)
        if start is not None:
            begun = _words(one.text, start, BEGUN)
            rest = _words(one.text, start, BEGUN + COPIED)[len(begun) :]
            columns = {"question": begun, "options": [rest.strip()], "gold": 0}
            category = f"copy at {100 * depth:.0f} %"
            yield row(f"copy{place}", category, "long_copy", "greedy", **columns), f"{one.text}\n\n{begun}", [rest]
    for place in range(_BINS):
        low, high = place / _BINS, (place + 1) / _BINS
        begin = one.at((low + high) / 2, lambda begin: begin > 0)
        if begin is not None and low <= begin / len(one.text) < high:
            context, words = one.text[:begin].rstrip(), _words(one.text, begin, _READ)
            rest = one.text[len(context) : begin] + words
            before = reader.counts([context])[0]
            columns = {"question": "", "options": [words], "gold": None}
            category = f"text {100 * low:.0f}-{100 * high:.0f} %"
            yield row(f"text@{before}", category, "long_text", "loglik", **columns), context, [rest]


def _task(texts: Sequence[_Text], length: Length, reader: _Reader) -> Task:
    name = f"{_LONG}_{length.name}"
    items, requests = [], []
    for number, one in enumerate(texts):
        for columns, context, options in _rows(number, one, length, reader):
            items.append({**columns, "prompt": context})
            requests += [
                Request.of(name, columns["item_id"], context, option, option.strip(), place)
                for place, option in enumerate(options)
            ]
    return Task(name=name, family="long_needle", items=Items.from_rows(items), requests=tuple(requests))


def _build(lengths: Sequence[Length], own: Sequence[str] | None, settings: TaskSettings) -> Parts:
    reader = _Reader.of(settings.model or "demo")
    # A third of a text at most is needles and links of chains.
    lines = "\n\n".join(line for _, line in _lines(random.Random(0))[0])
    shortest = 3 * reader.counts([lines])[0]
    if not lengths:  # the largest power of two, its half and its quarter
        most = 1 << (min(reader.most, _DEFAULT_LONGEST).bit_length() - 1)
        lengths = [Length(size) for size in (most // 4, most // 2, most) if size >= shortest]
    wrong = [one.tokens for one in lengths if not shortest <= one.tokens <= reader.most]
    if wrong or not lengths:
        raise ConfigError(
            "The baseline cannot read a context of this length, or it is too short for needles",
            allowed=f"{shortest:,} to {reader.most:,} tokens ({Length(reader.most).name})",
            got=wrong or reader.most,
        )
    wanted = settings.limit or _TEXTS
    sizes = reader.counts(own, special=False) if own is not None else []
    tasks = []
    for length in lengths:
        n = wanted if own is None else min(wanted, sum(sizes) // length.tokens)
        if own is not None and not n:
            raise DataError(
                "The documents are shorter than the context",
                allowed=f"{length.tokens:,} tokens or more",
                got=sum(sizes),
                fix="Name a longer file, or a smaller length",
            )
        texts = []
        for number in range(n):
            draw = seeded(settings, _LONG, length.tokens, number)
            if own is None:
                units = _bundled(draw)
            else:  # Texts do not overlap
                start = bisect_left(list(accumulate(sizes, initial=0)), number * sum(sizes) / n)
                units = iter(own[start:])
            texts.append(_text(units, length, reader, draw))
        tasks.append(_task(texts, length, reader))
    return Parts(tasks=tuple(tasks))


def _definition() -> bytes:
    numbers = [NEEDLES, _BINS, _CHAINS, _HOPS, BEGUN, COPIED, _READ, _LETTERS, _NAMES, _MOST_WORDS]
    return json.dumps(numbers).encode() + (demo.DATA_DIR / "corpus.txt").read_bytes()


TASKS.register(_LONG)(
    NamedTask(
        source="embedded, or a file: `long:4k,16k?documents=FILE.txt`",
        licence="Apache-2.0, or the user's",
        items=f"of each length {_TEXTS} texts (`-P limit=`) with {NEEDLES} needles, {_CHAINS} chains, "
        f"{NEEDLES} copies, and KL in {_BINS} depths",
        shots="",
        rule="argmax of the letter's log-likelihood; every token of a copy is greedy",
        definition=_definition,
        build=lambda settings, shots: _build([], None, settings),
        argument=_asked,
    )
)
