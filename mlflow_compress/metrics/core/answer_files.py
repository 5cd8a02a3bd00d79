"""One model's answers, read from plain {"id", "pred", "gold"} rows or from lm-evaluation-harness sample logs."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.metrics.stats.arrays import Float


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One model's answer to one item.

    Attributes
    ----------
    id : str
        Identifies the item in both files.
    pred : Any
        The answer; None where the model gave none (counted apart, never as wrong).
    gold : Any
        The right answer.
    item, prompt : str or None
        The question and what the model saw, or hashes of them, where known: unequal ones are refused.
    correct : bool or None
        Set where a scorer has decided already; otherwise ``pred == gold`` decides.
    generated : bool
        Whether `pred` is free text: two wrong texts are nearly always different, so that w2w is not counted.
    rule : str or None
        How the answer was scored, where known: "acc", "acc_norm", "exact_match,strict-match".
    """

    id: str
    pred: Any
    gold: Any
    item: str | None = None
    prompt: str | None = None
    correct: bool | None = None
    generated: bool = False
    rule: str | None = None

    @property
    def is_correct(self) -> bool:
        """Whether the answer is right."""
        return bool(self.pred == self.gold) if self.correct is None else self.correct


def answers_from_rows(rows: Iterable[Mapping[str, Any]]) -> list[Answer]:
    """Read plain rows with `id`, `pred` and `gold` (and, if wanted, `prompt`).

    Raises
    ------
    DataError
        Naming the row and the column that is missing or NaN; a missing answer is null, a gold cannot be missing.
    """
    answers = []
    for number, row in enumerate(rows, start=1):
        missing = [name for name in ("id", "pred", "gold") if name not in row]
        if missing:
            raise DataError(f"Row {number} lacks {', '.join(missing)}", allowed="id, pred, gold", got=str(sorted(row)))
        for name in ("pred", "gold"):
            if row[name] != row[name]:
                raise DataError(f"Row {number} has a NaN as its {name}", fix="Write null where a model gave no answer")
        if row["gold"] is None:
            raise DataError(f"Row {number} has no gold answer", got=str(row["id"]))
        if not isinstance(row["id"], str | int) or isinstance(row["id"], bool) or not str(row["id"]).strip():
            raise DataError(f"Row {number} has no id", allowed="a text that is not empty, or a whole number")
        prompt = row.get("prompt")
        if prompt is not None and not isinstance(prompt, str):
            raise DataError(f"Row {number} has a prompt that is no text", got=type(prompt).__name__)
        pred, gold = (_as_text(row[name], f"Row {number} has a {name}") for name in ("pred", "gold"))
        answers.append(Answer(id=str(row["id"]), pred=pred, gold=gold, prompt=prompt))
    return answers


def _as_text(value: Any, what: str) -> str | None:
    """Return an answer as text, so that the text "1" and the numbers 1 and 1.0 are one answer; None stays None.

    A list of answers is the list of their texts.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float) and math.isfinite(value):
        return str(int(value)) if value == int(value) else repr(value)
    if isinstance(value, list | tuple):
        return json.dumps([_as_text(part, what) for part in value], ensure_ascii=False)
    allowed = "a text, a finite number, true, false, null, or a list of them"
    raise DataError(f"{what} that is no answer", allowed=allowed, got=str(value)[:200])


def answers_from_harness(rows: Iterable[Mapping[str, Any]]) -> list[Answer]:
    """Read lm-evaluation-harness 0.4 sample logs (`samples_*.jsonl`), one mapping a line.

    Parameters
    ----------
    rows : iterable of mapping
        Lines with `doc_id`, `target`, `filtered_resps` and the logged scores.

    Notes
    -----
    Multiple choice: `filtered_resps` holds a (log-likelihood, is_greedy) pair a choice; the answer is the argmax of
    the log-likelihoods, divided by the choices' characters where the harness logs `acc_norm` (PIQA, HellaSwag, ARC),
    and of equal values the lowest index. What was logged says whether it is right, and must agree with the target
    where that is an index. Otherwise the first filtered response is the answer. Where a task has several filters, such
    as GSM8K, the first in the file is taken. Hashes of documents and prompts are compared, so other shots or templates
    are refused.

    Raises
    ------
    DataError
        Naming the row or document that is broken.
    """
    answers = []
    kept: str | None = None
    for number, row in enumerate(rows, start=1):
        _check_sample(row, f"Row {number} is no harness sample")
        kept = row.get("filter") if number == 1 else kept
        if row.get("filter") != kept:
            continue
        responses = row["filtered_resps"]
        chooses = len(responses) > 1 and all(isinstance(r, list | tuple) and len(r) == 2 for r in responses)
        answers.append(_choice(row) if chooses else _scored_text(row))
    return answers


_TEXTS = ("task_name", "filter", "doc_hash", "prompt_hash")
_SCORES = ("acc", "acc_norm", "exact_match")


def _check_sample(row: Mapping[str, Any], what: str) -> None:
    """Refuse a row that lacks a field of the harness's logs, or has one of another type."""
    missing = [name for name in ("doc_id", "target", "filtered_resps") if name not in row]
    if missing:
        raise DataError(f"{what}: it lacks {', '.join(missing)}")
    responses, arguments = row["filtered_resps"], row.get("arguments")
    if not isinstance(responses, list | tuple) or not responses:
        raise DataError(f"{what}: filtered_resps is no list of responses", got=str(responses))
    if not isinstance(row["doc_id"], int | str) or isinstance(row["doc_id"], bool):
        raise DataError(f"{what}: doc_id is no number and no text", got=str(row["doc_id"]))
    if wrong := [name for name in _TEXTS if not isinstance(row.get(name, ""), str)]:
        raise DataError(f"{what}: {wrong[0]} is no text", got=str(row[wrong[0]]))
    if wrong := [name for name in _SCORES if name in row and not _is_score(row[name])]:
        raise DataError(f"{what}: {wrong[0]} is no score from 0 to 1", got=str(row[wrong[0]]))
    if arguments is not None and not (
        isinstance(arguments, dict) and all(isinstance(one, dict) for one in arguments.values())
    ):
        raise DataError(f"{what}: arguments are no objects by name")


def _is_score(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1


def _identity(row: Mapping[str, Any]) -> str:
    return f"{row.get('task_name', '')}/{row['doc_id']}".lstrip("/")


def _logged(row: Mapping[str, Any], names: Sequence[str]) -> tuple[str, bool]:
    """Return the first of the scores that the row has, named as the harness names it, and whether it is 1."""
    for name in names:
        if name in row:
            kind = row.get("filter", "none")
            return name if kind == "none" else f"{name},{kind}", float(row[name]) == 1.0
    raise DataError(f"A harness sample has no {' or '.join(names)}", got=_identity(row))


def _choice(row: Mapping[str, Any]) -> Answer:
    try:
        values = np.array([float(pair[0]) for pair in row["filtered_resps"]])
    except (TypeError, ValueError) as error:
        raise DataError("A harness sample holds a log-likelihood that is no number", got=_identity(row)) from error
    if "acc_mutual_info" in row:  # the unconditional log-likelihoods stand behind the others
        values = values[: len(values) // 2]
    if not np.isfinite(values).all():
        raise DataError("A harness sample holds a NaN or infinite log-likelihood", got=_identity(row))
    rule, correct = _logged(row, ("acc_norm", "acc"))
    if rule.startswith("acc_norm"):
        values = values / _choice_lengths(row, len(values))
    pred = int(values.argmax())
    # The target is the index of the right choice but for tasks such as Winogrande, where it is a text.
    target = str(row["target"])
    if target.isdecimal() and (pred == int(target)) != correct:
        raise DataError(
            f"The logged {rule} of a harness sample does not follow from its log-likelihoods",
            got=f"{_identity(row)}: choice {pred}, target {target}",
            fix="Give sample logs as the harness wrote them",
        )
    return Answer(
        id=_identity(row),
        pred=pred,
        gold=target,
        item=row.get("doc_hash"),
        prompt=row.get("prompt_hash"),
        correct=correct,
        rule=rule,
    )


def _scored_text(row: Mapping[str, Any]) -> Answer:
    rule, correct = _logged(row, ("exact_match", "acc"))
    return Answer(
        id=_identity(row),
        pred=str(row["filtered_resps"][0]),
        gold=str(row["target"]),
        item=row.get("doc_hash"),
        prompt=row.get("prompt_hash"),
        correct=correct,
        generated=True,
        rule=rule,
    )


def _choice_lengths(row: Mapping[str, Any], n: int) -> Float:
    arguments = row.get("arguments") or {}
    texts = [arguments.get(f"gen_args_{i}", {}).get("arg_1") for i in range(n)]
    if any(not text for text in texts):
        raise DataError(
            "A harness sample lacks the choices that its log-likelihoods are divided by", got=_identity(row)
        )
    # The harness counts the choice without its leading delimiter, a space.
    return np.array([max(len(str(text).removeprefix(" ")), 1) for text in texts], dtype=np.float64)


_COMPARED = {"item": "question", "gold": "gold", "prompt": "prompt", "rule": "scoring rule"}


def check_same_questions(baseline: Sequence[Answer], variant: Sequence[Answer]) -> None:
    """Refuse two lists that do not describe the same items.

    Raises
    ------
    AlignmentError
        Naming the repeated, missing or differing ids.
    """
    tables = []
    for side, answers in (("baseline", baseline), ("variant", variant)):
        if not answers:
            raise DataError(f"The {side} holds no answers")
        table = {a.id: a for a in answers}
        if len(table) != len(answers):
            repeated = Counter(a.id for a in answers).most_common(1)[0][0]
            raise AlignmentError(f"The {side} holds an id twice", got=repeated)
        tables.append(table)
    b, q = tables
    if b.keys() != q.keys():
        only_b, only_q = sorted(b.keys() - q.keys()), sorted(q.keys() - b.keys())
        raise AlignmentError(
            f"Baseline and variant hold different items: {len(only_b)} only in the baseline {only_b[:3]}, "
            f"{len(only_q)} only in the variant {only_q[:3]}",
            fix="Evaluate both on the same tasks, limit and seed",
        )
    for name, what in _COMPARED.items():
        differing = [i for i in b if getattr(b[i], name) != getattr(q[i], name)]
        if differing:
            raise AlignmentError(
                f"Baseline and variant differ in the {what} of {len(differing)} item(s)",
                got=differing[0],
                fix="Evaluate both with the same tasks, shots and prompt format",
            )
