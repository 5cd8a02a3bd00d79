"""Prompts that compare two answers: our own wording, or FastChat's where the user has its file.

FastChat's are the prompts "pair-v2", "pair-math-v1" and their "-multi-turn" forms of ``judge_prompts.jsonl``. Ours take
the same values and ask for the same verdicts: ``[[A]]``, ``[[B]]``, ``[[C]]`` for a tie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlflow_compress.errors import ConfigError
from mlflow_compress.files.json_text import parse_json
from mlflow_compress.judges.prompts import Prompt, harmless, needs_reference

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


def _conversation(who: str, name: str, answer: str) -> str:
    turns = "\n\n".join(f"### User:\n{{question_{t}}}\n\n### {name}:\n{{{answer}_{t}}}" for t in (1, 2))
    return f"<|The Start of {who}|>\n\n{turns}\n\n<|The End of {who}|>"


_REFERENCES = _conversation("Reference Answer", "Reference answer", "ref_answer")
_CONVERSATIONS = "\n\n\n".join(
    _conversation(f"Assistant {x}'s Conversation with User", f"Assistant {x}", f"answer_{x.lower()}") for x in "AB"
)


@dataclass(frozen=True)
class _Template:
    name: str
    system: str
    user: str


OURS: Mapping[str, _Template] = {
    "pair-v2": _Template("pair-own", _RULES.format(focus=""), _QUESTION + _ANSWERS),
    "pair-v2-multi-turn": _Template("pair-own-multi-turn", _RULES.format(focus=_SECOND), _CONVERSATIONS),
    "pair-math-v1": _Template("pair-own-math", _RULES.format(focus=_GUIDED), _QUESTION + _REFERENCE + _ANSWERS),
    "pair-math-v1-multi-turn": _Template(
        "pair-own-math-multi-turn", _RULES.format(focus=_GUIDED + _SECOND), f"{_REFERENCES}\n\n\n{_CONVERSATIONS}"
    ),
}
"""Our prompts, by FastChat's name of the prompt in whose place they stand."""


def read_pair_prompts(path: Path) -> dict[str, _Template]:
    """Return the pair prompts of FastChat's ``judge_prompts.jsonl``.

    Raises
    ------
    ConfigError
        The file cannot be read, lacks one of the four prompts, or one of them asks for values that there are not.
    """
    found = {}
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            row = parse_json(line, source=f"{path}, line {number}", error=ConfigError)
            if row["name"] in OURS:
                found[row["name"]] = _Template(row["name"], str(row["system_prompt"]), str(row["prompt_template"]))
        values = _values(("", ""), ("", ""), ("", ""), ("", ""))
        for template in found.values():
            template.user.format(**values)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(f"judge_prompts cannot be used: {type(error).__name__}: {error}", got=str(path)) from error
    if missing := sorted(OURS.keys() - found.keys()):
        raise ConfigError("judge_prompts lacks a prompt", allowed=sorted(OURS), got=f"no {missing[0]}")
    return found


def pair_prompt(
    templates: Mapping[str, _Template],
    category: str,
    turn: int,
    questions: Sequence[str],
    first: Sequence[str],
    second: Sequence[str],
    reference: Sequence[str] = (),
) -> Prompt:
    """Return the prompt that compares two answers.

    Parameters
    ----------
    templates : mapping
        `OURS`, or what `read_pair_prompts` returned.
    category : str
        Decides whether the reference answer is shown.
    turn : int
        0 shows the first turn. 1 shows both, and asks about the second.
    questions, first, second, reference : sequence of str
        Texts by turn; `first` is assistant A's. Answers are made `harmless`.
    """
    name = ("pair-math-v1" if needs_reference(category) else "pair-v2") + ("-multi-turn" if turn else "")
    template = templates[name]
    shown = [tuple(texts[: turn + 1]) for texts in (questions, first, second, reference)]
    given = tuple(text for texts in shown for text in texts)
    return Prompt(template.name, template.system, template.user.format(**_values(*shown)), given)


def _values(
    questions: Sequence[str], first: Sequence[str], second: Sequence[str], reference: Sequence[str]
) -> dict[str, str]:
    """Return the values of a template, under FastChat's names."""
    a, b = [harmless(text) for text in first], [harmless(text) for text in second]
    values = {"question": questions[0], "answer_a": a[0], "answer_b": b[0]}
    for t, question in enumerate(questions, start=1):
        values |= {f"question_{t}": question, f"answer_a_{t}": a[t - 1], f"answer_b_{t}": b[t - 1]}
    return values | {f"ref_answer_{t}": text for t, text in enumerate(reference, start=1)}
