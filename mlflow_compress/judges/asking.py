"""Asks a judge model question by question until its reply can be read. Every paid reply is kept, and asked for once."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from mlflow_compress.errors import AlignmentError, ConfigError, DataError
from mlflow_compress.judges.prompts import REFERENCE_CATEGORIES, Prompt, grading_prompt
from mlflow_compress.reasoning import parted, without_reasoning
from mlflow_compress.records import Generations, Instruction, Judgments
from mlflow_compress.transport.client import Transport
from mlflow_compress.transport.endpoint import EndpointConfig
from mlflow_compress.transport.replies import CUT, FILTERED, NoReply, ReplyCache, content_key
from mlflow_compress.transport.spending import Price, Spending, likely_tokens

_LOW, _HIGH = 1.0, 10.0
_NO_RATING, _OUT_OF_RANGE, _AMBIGUOUS, _QUOTED = "no_rating", "out_of_range", "ambiguous", "quoted"

# Two brackets on each side; spaces and "/10" inside are accepted. A single bracket, as in [1], is a citation.
_RATING = re.compile(r"(?<!\[)\[\[\s*([0-9]+(?:\.[0-9]*)?)\s*(?:/\s*10(?:\.0*)?)?\s*\]\](?!\])")
_VERDICT = re.compile(r"(?<!\[)\[\[\s*([ABC])\s*\]\](?!\])")


# What stands before and after a judge's own mark: a label, or the end of a sentence; then nothing more.
_LEAD = re.compile(r"(?:^|[.!?]|\b(?:rating|score|grade|verdict|decision|judge?ment)(?: is)?\W*)$", re.IGNORECASE)
_END = re.compile(r"[\s.*_]*$")
_LABEL = re.compile(r"(?:(?:rating|score|grade|verdict|decision|judge?ment)(?:is)?:?)?")
_LAST = re.compile(r"\]\][\s.*_]*$")
_CONTEXT = 20  # characters before a mark by which a quotation is known again

# What every kept reply has.
KEPT_FIELDS = ("judgment", "judge", "asked", "finish_reason", "problem", "usage", "endpoint", "likely", "sent")


class ReadGrade(NamedTuple):
    """What was read in a judge's text: a value, or the reason why there is none."""

    value: float | None
    reason: str | None = None


ReadGradeFrom = Callable[[str, Sequence[str]], ReadGrade]
"""Reads a judge's answer, without its reasoning, given the texts that the judge was shown."""


def read_rating(text: str, shown: Sequence[str] = ()) -> ReadGrade:
    """Return the ``[[x]]`` of a judgment, or why there is none.

    Decimals such as ``[[7.5]]`` are ratings, as in FastChat. There are four deviations from FastChat, whose parser
    loses or invents scores in these cases: ``[[ 8 ]]`` and ``[[10/10]]`` are read; a single ``[1]`` is not a score; a
    text without a rating has no score, not -1; and a text with two different ratings is ambiguous (FastChat takes the
    first one, even where the judge only quotes it). The same rating twice is one rating.

    A rating that also stands in question, answer or reference may be quoted from there. There are few such texts (none
    in MT-Bench), and only for them a rating must close the text, as FastChat's prompts ask: ``Rating: [[10]]``, outside
    quotation marks, and not behind the same words as there.

    Reasons are "no_rating", "ambiguous", "quoted", and "out_of_range" for a rating outside 1..10. `shown` are the texts
    that the judge was shown.
    """
    reading = _one_mark(_RATING, text, shown, float)
    return reading if reading.value is None or _LOW <= reading.value <= _HIGH else ReadGrade(None, _OUT_OF_RANGE)


def read_verdict(text: str, shown: Sequence[str] = ()) -> ReadGrade:
    """Return the ``[[A]]``, ``[[B]]`` or ``[[C]]`` of a comparison, or why there is none.

    1 is A, 0 is B, 0.5 is C (a tie). Reasons as in `read_rating`, but for "out_of_range".
    """
    return _one_mark(_VERDICT, text, shown, {"A": 1.0, "B": 0.0, "C": 0.5}.__getitem__)


def _one_mark(pattern: re.Pattern[str], text: str, shown: Sequence[str], value: Callable[[str], float]) -> ReadGrade:
    """Return the one value that the text gives, or the reason why there is none."""
    marks = list(pattern.finditer(text))
    values = {value(mark[1]) for mark in marks}
    if len(values) != 1:
        return ReadGrade(None, _AMBIGUOUS if values else _NO_RATING)
    [rating] = values
    sources = [_words_before(mark) for source in shown for mark in pattern.finditer(source) if value(mark[1]) == rating]
    if sources and not any(_is_own(mark, sources) for mark in marks):
        return ReadGrade(None, _QUOTED)
    return ReadGrade(rating)


def _is_own(mark: re.Match[str], sources: Sequence[str]) -> bool:
    """Return whether a mark that could be quoted is the judge's own: it closes the text, behind other words."""
    line = mark.string[: mark.start()].rpartition("\n")[2].strip("*_#> \t")
    if not _LEAD.search(line) or not _END.match(mark.string, mark.end()):
        return False
    words = _words_before(mark)
    return not any(words.endswith(source) for source in sources if not _LABEL.fullmatch(source))


def _words_before(mark: re.Match[str]) -> str:
    """Return the end of what stands before a mark: lower case, without spaces, Markdown and quotation marks."""
    return re.sub(r"[\s*_#>`\"'\u201c\u201d\u2018\u2019\\]", "", mark.string[: mark.start()].lower())[-_CONTEXT:]


@dataclass(frozen=True)
class Question:
    """One judgment to obtain: a prompt about an item's answer, and which repeat of it."""

    item_id: str
    prompt: Prompt
    repeat: int
    turn: int = 0
    category: str | None = None


@dataclass(frozen=True)
class Judgment:
    """A judge's reply as it was read."""

    value: float | None  # What was read; None if nothing could be
    reason: str | None  # Why there is no value
    text: str  # The last reply with its reasoning, or what went wrong
    judge: str  # The model that answered, and the name of the prompt
    sent: Mapping[str, Any] | None = None  # The settings of the request; None if there was no reply


@dataclass(frozen=True, kw_only=True)
class Asker:
    """Asks one judge model, at temperature 0 where it accepts that. A reply to an equal question is in the cache.

    Every reply is stored before anything else happens, readable or not. So an interrupted run loses at most the calls
    under way, and the replies that a judgment has had count as its attempts in a later run too. Failures, which cost
    nothing, are not stored, and a later run asks again.
    """

    endpoint: EndpointConfig  # Address and key of the judge
    model: str = "gpt-4"  # Name of the judge model
    # Number of replies per judgment until one can be read. After that, the judgment counts as unscored.
    attempts: int = 3
    max_tokens: int = 2048  # Longest judgment, in tokens
    cache: ReplyCache = field(default_factory=lambda: ReplyCache(None))

    def __post_init__(self) -> None:
        if not self.model.strip():
            raise ConfigError("No judge model named", fix="Set judge_model, for example to gpt-4")

    def key(self, question: Question, attempt: int = 0) -> str:
        return content_key(
            base_url=self.endpoint.shown_url,
            model=self.model,
            messages=question.prompt.messages,
            max_tokens=self.max_tokens,
            item_id=question.item_id,
            repeat=question.repeat,
            **({"attempt": attempt} if attempt else {}),
        )

    def ask_all(
        self,
        questions: Sequence[Question],
        read: ReadGradeFrom,
        *,
        spending: Spending | None = None,
    ) -> list[Judgment]:
        """Return the judgment of every question, in order; equal questions are asked once."""
        from tqdm import tqdm

        keys = [self.key(question) for question in questions]
        judgments = {key: self._kept(question, read) for key, question in zip(keys, questions, strict=True)}
        missing = {key: q for key, q in zip(keys, questions, strict=True) if judgments[key] is None}
        if missing:
            with (
                Transport(self.endpoint, spending) as transport,
                tqdm(total=len(missing), desc=self.model, unit="grade", disable=None, leave=False) as bar,
            ):

                async def ask(question: Question) -> Judgment:
                    judgment = await self._ask(transport, question, read)
                    bar.update()
                    return judgment

                judgments.update(zip(missing, transport.for_all(ask, missing.values()), strict=True))
        return [judgment for key in keys if (judgment := judgments[key]) is not None]

    def missing(self, questions: Sequence[Question], read: ReadGradeFrom) -> list[Question]:
        """Return the questions that the cache does not answer, each once."""
        unique = {self.key(question): question for question in questions}
        return [question for question in unique.values() if self._kept(question, read) is None]

    def _kept(self, question: Question, read: ReadGradeFrom) -> Judgment | None:
        """Return the judgment, if kept replies decide it: one can be read, or there were as many as are allowed."""
        judgment = None
        for attempt in range(self.attempts):
            row = self.cache.get(self.key(question, attempt))
            if row is None:
                return None
            judgment = _read(row, read, question.prompt)
            if _is_final(judgment):
                break
        return judgment

    async def _ask(self, transport: Transport, question: Question, read: ReadGradeFrom) -> Judgment:
        """Return the judgment, after at most `attempts` replies, kept ones included."""
        room = self.max_tokens
        judgment: Judgment | None = None
        for attempt in range(self.attempts):
            key = self.key(question, attempt)
            row = self.cache.get(key)
            if row is None:
                reply = await transport.complete(question.prompt.messages, model=self.model, max_tokens=room)
                if isinstance(reply, NoReply):
                    if judgment is not None and reply.reason == "http_400":
                        return judgment  # only the larger room was refused: the reply that was cut off stands
                    return Judgment(None, reply.reason, reply.detail, f"{self.model} {question.prompt.name}")
                row = {
                    "judgment": reply.text,
                    "reasoning": reply.reasoning,
                    "judge": f"{reply.model} {question.prompt.name}",
                    "asked": self.model,
                    "endpoint": self.endpoint.shown_url,
                    "finish_reason": reply.finish_reason,
                    "problem": reply.problem,
                    "usage": asdict(reply.usage) if reply.usage else None,
                    "likely": likely_tokens(question.prompt.messages),
                    "sent": reply.sent,
                }
                self.cache.put(key, row)
            judgment = _read(row, read, question.prompt)
            if _is_final(judgment):
                break
            if judgment.reason == CUT:
                room *= 2
        assert judgment is not None  # attempts >= 1
        return judgment


def _read(row: Mapping[str, Any], read: ReadGradeFrom, prompt: Prompt) -> Judgment:
    """Return the judgment in a kept reply. It is read again each time.

    Reasoning decides nothing, and what it quotes least of all. Where a template opens it in the prompt, reasoning that
    was cut off looks like any other text: a rating in a reply that was cut off must then close it, as the prompts ask.
    """
    said, reasoning = row["judgment"], row["reasoning"]
    answer = without_reasoning(said)
    value, reason = read(answer, prompt.shown)
    unfinished = answer == said and not reasoning and not _LAST.search(said)
    if row["problem"]:
        value, reason = None, row["problem"]
    elif row["finish_reason"] == "length" and (reason == _NO_RATING or unfinished):
        value, reason = None, CUT
    text = f"<think>{reasoning}</think>\n{said}" if reasoning else said
    return Judgment(value, reason, text, row["judge"], row["sent"])


def _is_final(judgment: Judgment) -> bool:
    """Return whether another reply could not help: there is a value, or a filter stands before the model."""
    return judgment.value is not None or judgment.reason == FILTERED


def estimate(asker: Asker, questions: Sequence[Question], read: ReadGradeFrom, prices: Mapping[str, Price]) -> str:
    """Return a sentence: how many judgments are kept, how many calls are made, and their tokens and cost, about.

    Tokens follow from the kept replies of the same model at the same endpoint, whatever their language: what they took
    beside what was likely. Without any, a prompt has its likely tokens, and a reply counts as long as it may be.
    """
    model, here = asker.model, (asker.model, asker.endpoint.shown_url)
    past = [row for row in asker.cache.values() if (row["asked"], row["endpoint"]) == here and row["usage"]]
    missing = asker.missing(questions, read)
    n_unique = len({asker.key(question) for question in questions})
    said = f"[judge] {model}: {n_unique} judgments, {n_unique - len(missing)} of them kept"
    if not missing:
        return f"{said}; no calls"
    prompt = sum(likely_tokens(question.prompt.messages) for question in missing)
    if past:
        prompt *= sum(row["usage"]["prompt"] for row in past) / sum(row["likely"] for row in past)
        per_reply = sum(row["usage"]["completion"] for row in past) / len(past)
        basis = f"as in {len(past):,} kept replies"
    else:
        per_reply = asker.max_tokens
        basis = "with replies as long as they may be"
    completion = per_reply * len(missing)
    price = prices.get(model)
    cost = f", cost {price.of(prompt, completion):.4g}" if price else ""
    return (
        f"{said}; {len(missing):,} calls: about {prompt:,.0f} prompt tokens and {completion:,.0f} tokens of replies"
        f"{cost} ({basis}; retries of unreadable replies not counted)"
    )


def gradings(instructions: Sequence[Instruction], answers: Generations, *, repeats: int = 1) -> list[Question]:
    """Return the gradings of sample 0 of every turn of every instruction.

    Each answer is graded `repeats` times, because judges are not deterministic even at temperature 0. Math, reasoning
    and coding need reference answers.
    """
    texts = shown_answers(answers)
    return [
        Question(item.item_id, prompt, repeat, turn, item.category)
        for item in instructions
        for said in [answers_to(item, texts)]
        for turn in range(len(item.turns))
        for prompt in [grading_prompt(item.category, turn, item.turns, said, references(item))]
        for repeat in range(repeats)
    ]


def shown_answers(answers: Generations) -> dict[tuple[str, int], str]:
    """Return what judges read of first samples, by item id and turn: of a model that thinks, the answer alone.

    It is empty where the thought does not end.
    """
    prompts = answers.first_samples("prompt")
    shown = {}
    for key, text in answers.first_samples().items():
        thought, answer = parted(prompts[key], text)
        shown[key] = answer if thought else text
    return shown


def answers_to(item: Instruction, texts: dict[tuple[str, int], str]) -> list[str]:
    """Return the answer of each turn; a missing one is an `AlignmentError`."""
    turns = range(len(item.turns))
    if missing := [turn for turn in turns if (item.item_id, turn) not in texts]:
        raise AlignmentError("An instruction lacks an answer", got=f"{item.item_id}, turn {missing[0]}")
    return [texts[item.item_id, turn] for turn in turns]


def references(item: Instruction) -> Sequence[str]:
    """Return the reference answer of each turn, where the category needs them; missing ones are a `DataError`."""
    there = [text for text in item.reference if text.strip()]
    if item.category in REFERENCE_CATEGORIES and len(there) < len(item.turns):
        raise DataError(
            f"Instruction {item.item_id} has no reference answers, and MT-Bench needs them for {item.category}",
            fix="Add 'reference' (a text per turn) to the instruction file",
        )
    return item.reference


def records(questions: Sequence[Question], judgments: Sequence[Judgment], *, task: str) -> Judgments:
    """Return the records of the judgments, one row per question."""
    rows: list[dict[str, Any]] = [
        {
            "task": task,
            "item_id": one.item_id,
            "turn": one.turn,
            "repeat": one.repeat,
            "category": one.category,
            "score": judgment.value,
            "reason": judgment.reason,
            "judgment": judgment.text,
            "judge": judgment.judge,
        }
        for one, judgment in zip(questions, judgments, strict=True)
    ]
    return Judgments.from_rows(rows)
