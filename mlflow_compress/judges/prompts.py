"""MT-Bench's prompts for single-answer grading.

The wording is that of FastChat's ``llm_judge/data/judge_prompts.jsonl`` (lm-sys/FastChat, Apache License 2.0; prompts
"single-v1", "single-math-v1" and their "-multi-turn" forms), including its spelling mistakes, because scores can only
be compared if they come from the same prompt.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlflow_compress.errors import ConfigError
from mlflow_compress.files import parse_json

REFERENCE_CATEGORIES = frozenset({"math", "reasoning", "coding"})
"""Categories whose answers are graded with a reference answer."""

_SYSTEM = "You are a helpful assistant."

_IMPARTIAL = (
    "Please act as an impartial judge and evaluate the quality of the response provided by an AI assistant to the user "
)
_FACTORS = (
    "Your evaluation should consider factors such as the helpfulness, relevance, accuracy, depth, creativity, and "
    "level of detail of the response."
)
_CORRECTNESS = (
    "Your evaluation should consider correctness and helpfulness. You will be given a reference answer and the "
    "assistant's answer."
)
_SHORT = "Begin your evaluation by providing a short explanation."
_COMPARE = (
    "Begin your evaluation by comparing the assistant's answer with the reference answer. Identify and correct any "
    "mistakes."
)
_RATE = (
    "Be as objective as possible. After providing your explanation, you must rate the response on a scale of 1 to 10 "
    'by strictly following this format: "[[rating]]", for example: "Rating: [[5]]".'
)

_SINGLE = (
    f"[Instruction]\n{_IMPARTIAL}question displayed below. {_FACTORS} {_SHORT} {_RATE}\n\n"
    "[Question]\n{question_1}\n\n"
    "[The Start of Assistant's Answer]\n{answer_1}\n[The End of Assistant's Answer]"
)

_SINGLE_REFERENCE = (
    f"[Instruction]\n{_IMPARTIAL}question displayed below. {_CORRECTNESS} {_COMPARE} {_RATE}\n\n"
    "[Question]\n{question_1}\n\n"
    "[The Start of Reference Answer]\n{reference_1}\n[The End of Reference Answer]\n\n"
    "[The Start of Assistant's Answer]\n{answer_1}\n[The End of Assistant's Answer]"
)

_MULTI_SYSTEM = (
    f"{_IMPARTIAL}question displayed below. {_FACTORS} You evaluation should focus on the assistant's answer to the "
    f"second user question. {_SHORT} {_RATE}\n\n"
)

_MULTI_REFERENCE_SYSTEM = (
    f"{_IMPARTIAL}question. {_CORRECTNESS} You evaluation should focus on the assistant's answer to the second "
    f"question. {_COMPARE} {_RATE}\n\n"
)


def _conversation(who: str, name: str, answer: str) -> str:
    turns = "\n\n".join(f"### User:\n{{question_{t}}}\n\n### {name}:\n{{{answer}_{t}}}" for t in (1, 2))
    return f"<|The Start of {who}|>\n\n{turns}\n\n<|The End of {who}|>"


_MULTI = _conversation("Assistant A's Conversation with User", "Assistant A", "answer")
_MULTI_REFERENCE = f"{_conversation('Reference Answer', 'Reference answer', 'reference')}\n\n\n{_MULTI}"


# What delimits the parts of a prompt, and what a judge's verdict looks like.
_MARKS = re.compile(
    r"(?P<before>\[|<)(?P<after>\|?The (?:Start|End) of )"
    r"|^(?P<turn>### (?:User|Assistant [AB]|Reference answer):)"
    r"|\[(?P<verdict>\[\s*(?:[0-9]+(?:\.[0-9]*)?\s*(?:/\s*10(?:\.0*)?)?|[ABC])\s*\]\])",
    re.MULTILINE,
)


def harmless(answer: str) -> str:
    r"""Return a model's answer in which nothing looks like the end of the answer, or like the judge's verdict.

    A backslash is put into delimiters of the prompt (``[The End of ...]``, ``<|The End of ...|>``, ``### User:`` at the
    start of a line) and into verdicts (``[[10]]``, ``[[A]]``), as Markdown escapes them. So an answer cannot end
    itself, and a judge that quotes it quotes no verdict. Every other answer stays as it is, byte for byte, so its grade
    can be compared with FastChat's.
    """
    return _MARKS.sub(_escaped, answer)


def _escaped(mark: re.Match[str]) -> str:
    if mark["turn"]:
        return "\\" + mark["turn"]
    return f"[\\{mark['verdict']}" if mark["verdict"] else f"{mark['before']}\\{mark['after']}"


@dataclass(frozen=True)
class Prompt:
    """A prompt for the judge."""

    name: str  # FastChat's name of the template
    system: str  # The two messages
    user: str
    # The texts in it that are not ours, as they were given: questions, answers and references
    shown: tuple[str, ...] = ()

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}, {"role": "user", "content": self.user}]


def grading_prompt(
    category: str, turn: int, questions: Sequence[str], answers: Sequence[str], reference: Sequence[str] = ()
) -> Prompt:
    """Return the prompt that grades one answer.

    Turn 0 shows the first question and answer; turn 1 shows both turns, and asks for a grade of the second answer.
    Answers are made `harmless`. `reference` is read only if the category needs it.
    """
    guided = category in REFERENCE_CATEGORIES
    values = {f"question_{t + 1}": questions[t] for t in range(turn + 1)}
    values |= {f"answer_{t + 1}": harmless(answers[t]) for t in range(turn + 1)}
    if guided:
        values |= {f"reference_{t + 1}": reference[t] for t in range(turn + 1)}
    template, system, name = {
        (0, False): (_SINGLE, _SYSTEM, "single-v1"),
        (0, True): (_SINGLE_REFERENCE, _SYSTEM, "single-math-v1"),
        (1, False): (_MULTI, _MULTI_SYSTEM, "single-v1-multi-turn"),
        (1, True): (_MULTI_REFERENCE, _MULTI_REFERENCE_SYSTEM, "single-math-v1-multi-turn"),
    }[(turn, guided)]
    texts = (*questions[: turn + 1], *answers[: turn + 1], *(reference[: turn + 1] if guided else ()))
    return Prompt(name, system, template.format(**values), texts)


_RULES = (
    "Two assistants, A and B, have answered the same user. Decide which answer serves the user better: which is more "
    "correct, more helpful and closer to what was asked. The order of the answers, their length and the assistants' "
    "names do not matter. {focus}Explain your decision in a few sentences. Then end with exactly one verdict: [[A]] if "
    "A is better, [[B]] if B is better, [[C]] if both are equally good."
)
_SECOND = "Judge the answers to the user's second message; the first turn is there for context. "
_GUIDED = "A correct reference answer is given: check both answers against it. "

_QUESTION = "[User Question]\n{question}\n\n"
_REFERENCE = "[The Start of Reference Answer]\n{ref_answer_1}\n[The End of Reference Answer]\n\n"
_ANSWERS = (
    "[The Start of Assistant A's Answer]\n{answer_a}\n[The End of Assistant A's Answer]\n\n"
    "[The Start of Assistant B's Answer]\n{answer_b}\n[The End of Assistant B's Answer]"
)

_REFERENCES = _conversation("Reference Answer", "Reference answer", "ref_answer")
_CONVERSATIONS = "\n\n\n".join(
    _conversation(f"Assistant {x}'s Conversation with User", f"Assistant {x}", f"answer_{x.lower()}") for x in "AB"
)


OURS: Mapping[str, Prompt] = {
    "pair-v2": Prompt("pair-own", _RULES.format(focus=""), _QUESTION + _ANSWERS),
    "pair-v2-multi-turn": Prompt("pair-own-multi-turn", _RULES.format(focus=_SECOND), _CONVERSATIONS),
    "pair-math-v1": Prompt("pair-own-math", _RULES.format(focus=_GUIDED), _QUESTION + _REFERENCE + _ANSWERS),
    "pair-math-v1-multi-turn": Prompt(
        "pair-own-math-multi-turn", _RULES.format(focus=_GUIDED + _SECOND), f"{_REFERENCES}\n\n\n{_CONVERSATIONS}"
    ),
}
"""Our prompts, by FastChat's name of the prompt in whose place they stand."""


def read_pair_prompts(path: Path) -> dict[str, Prompt]:
    """Return the pair prompts of FastChat's ``judge_prompts.jsonl``."""
    prompts = {}
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            row = parse_json(line, source=f"{path}, line {number}", error=ConfigError)
            if row["name"] in OURS:
                prompts[row["name"]] = Prompt(row["name"], str(row["system_prompt"]), str(row["prompt_template"]))
        values = _values(("", ""), ("", ""), ("", ""), ("", ""))
        for template in prompts.values():
            template.user.format(**values)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"judge_args: prompts cannot be used: {type(error).__name__}: {error}", got=str(path)
        ) from error
    if missing := sorted(OURS.keys() - prompts.keys()):
        raise ConfigError("judge_args: prompts lacks a prompt", allowed=sorted(OURS), got=f"no {missing[0]}")
    return prompts


def pair_prompt(
    templates: Mapping[str, Prompt],
    category: str,
    turn: int,
    questions: Sequence[str],
    first: Sequence[str],
    second: Sequence[str],
    reference: Sequence[str] = (),
) -> Prompt:
    """Return the prompt that compares two answers; `first` is assistant A's.

    Turn 0 shows the first turn; turn 1 shows both, and asks about the second. Answers are made `harmless`.
    """
    name = ("pair-math-v1" if category in REFERENCE_CATEGORIES else "pair-v2") + ("-multi-turn" if turn else "")
    template = templates[name]
    shown = [tuple(texts[: turn + 1]) for texts in (questions, first, second, reference)]
    parts = tuple(text for texts in shown for text in texts)
    return Prompt(template.name, template.system, template.user.format(**_values(*shown)), parts)


def _values(
    questions: Sequence[str], first: Sequence[str], second: Sequence[str], reference: Sequence[str]
) -> dict[str, str]:
    a, b = [harmless(text) for text in first], [harmless(text) for text in second]
    values = {"question": questions[0], "answer_a": a[0], "answer_b": b[0]}
    for t, question in enumerate(questions, start=1):
        values |= {f"question_{t}": question, f"answer_a_{t}": a[t - 1], f"answer_b_{t}": b[t - 1]}
    return values | {f"ref_answer_{t}": text for t, text in enumerate(reference, start=1)}
