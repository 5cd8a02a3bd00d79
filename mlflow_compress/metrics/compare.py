"""Compare two models from predictions alone: record sets, harness sample logs, or plain {"id", "pred", "gold"} rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.metrics.evidence import Evidence
from mlflow_compress.metrics.flips import Flips, count_flips
from mlflow_compress.metrics.intervals import paired_difference, wilson
from mlflow_compress.metrics.view import ANSWERED, CHOICE
from mlflow_compress.records import RunRecords


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
    prompt : str or None
        What the model saw, or a hash of it, where known: unequal prompts are refused.
    correct : bool or None
        Set where a scorer has decided already (generated answers); otherwise ``pred == gold`` decides.
    """

    id: str
    pred: Any
    gold: Any
    prompt: str | None = None
    correct: bool | None = None

    @property
    def is_correct(self) -> bool:
        """Whether the answer is right."""
        return self.pred == self.gold if self.correct is None else self.correct


def answers_from_rows(rows: Iterable[Mapping[str, Any]]) -> list[Answer]:
    """Read plain rows with `id`, `pred` and `gold` (and, if wanted, `prompt`).

    Raises
    ------
    DataError
        Naming the row and the column that is missing.
    """
    answers = []
    for number, row in enumerate(rows, start=1):
        missing = [name for name in ("id", "pred", "gold") if name not in row]
        if missing:
            raise DataError(f"Row {number} lacks {', '.join(missing)}", allowed="id, pred, gold", got=str(sorted(row)))
        answers.append(Answer(id=str(row["id"]), pred=row["pred"], gold=row["gold"], prompt=row.get("prompt")))
    return answers


def answers_from_harness(rows: Iterable[Mapping[str, Any]], *, per_char: bool = False) -> list[Answer]:
    """Read lm-evaluation-harness sample logs (`samples_*.jsonl`), one mapping a line.

    Parameters
    ----------
    rows : iterable of mapping
        Lines with `doc_id`, `target`, `filtered_resps` and, for generated answers, `exact_match` or `acc`.
    per_char : bool
        Divide log-likelihoods by the choice's characters (the harness's acc_norm) instead of taking the sums (acc).

    Notes
    -----
    Multiple choice: `filtered_resps` holds a (log-likelihood, is_greedy) pair a choice, the argmax is the answer, and
    of equal values the lowest index. Otherwise the first filtered response is the answer and the logged score says
    whether it is right. The prompt's hash is compared, so other shots or templates are refused.
    """
    answers = []
    for number, row in enumerate(rows, start=1):
        try:
            responses, target = row["filtered_resps"], row["target"]
            identity = f"{row.get('task_name', '')}/{row['doc_id']}".lstrip("/")
        except KeyError as error:
            raise DataError(f"Row {number} is no harness sample: it lacks {error}") from error
        prompt = row.get("prompt_hash")
        if len(responses) > 1 and all(isinstance(r, Sequence) and len(r) == 2 for r in responses):
            values = np.array([float(r[0]) for r in responses])
            if not np.isfinite(values).all():
                raise DataError("A harness sample holds a NaN or infinite log-likelihood", got=identity)
            if per_char:
                values = values / _choice_lengths(row, len(values))
            answers.append(Answer(id=identity, pred=int(values.argmax()), gold=int(target), prompt=prompt))
            continue
        scored = [row[name] for name in ("exact_match", "acc") if name in row]
        if not scored:
            raise DataError("A harness sample of a generated answer has no exact_match or acc", got=identity)
        answers.append(
            Answer(
                id=identity, pred=str(responses[0]), gold=str(target), prompt=prompt, correct=float(scored[0]) == 1.0
            )
        )
    return answers


def _choice_lengths(row: Mapping[str, Any], n: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    arguments = row.get("arguments") or {}
    texts = [arguments.get(f"gen_args_{i}", {}).get("arg_1") for i in range(n)]
    if any(not text for text in texts):
        raise DataError("A harness sample lacks the choices that its log-likelihoods are divided by", got=row["doc_id"])
    # The harness counts the choice without its leading delimiter, a space.
    return np.array([max(len(str(text).removeprefix(" ")), 1) for text in texts], dtype=np.float64)


def check_same_answers(baseline: Sequence[Answer], variant: Sequence[Answer]) -> None:
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
    for name in ("gold", "prompt"):
        differing = [i for i in b if getattr(b[i], name) != getattr(q[i], name)]
        if differing:
            raise AlignmentError(
                f"Baseline and variant differ in the {name} of {len(differing)} item(s)",
                got=differing[0],
                fix="Evaluate both with the same tasks, shots and prompt format",
            )


def _summary(found: Flips, *, level: float, n_unscored: int) -> dict[str, Any]:
    n, n_variant = found.n, found.n_correct + found.w2c - found.c2w
    percent = [100.0 * bound for bound in wilson(found.c2w + found.w2c, n, level=level)]
    all_flips = found.all_flips
    return {
        "n": n,
        "accuracy_baseline": found.n_correct / n,
        "accuracy_variant": n_variant / n,
        "accuracy_delta": found.accuracy_delta,
        "c2w": found.c2w,
        "w2c": found.w2c,
        "w2w": found.w2w,
        "flips_pct": 100.0 * found.flips,
        "all_flips_pct": None if all_flips is None else 100.0 * all_flips,
        "mcnemar_p": found.mcnemar_p,
        "n_unscored": n_unscored,
        "level": level,
        "accuracy_baseline_interval": list(wilson(found.n_correct, n, level=level)),
        "accuracy_variant_interval": list(wilson(n_variant, n, level=level)),
        "accuracy_delta_interval": list(paired_difference(found.w2c, found.c2w, n, level=level)),
        "flips_pct_interval": percent,
        "all_flips_pct_interval": None
        if found.w2w is None
        else [100.0 * bound for bound in wilson(found.c2w + found.w2c + found.w2w, n, level=level)],
    }


def compare_answers(baseline: Sequence[Answer], variant: Sequence[Answer], *, level: float = 0.95) -> dict[str, Any]:
    """Return the flips family, both accuracies, McNemar's p and intervals; ready for JSON.

    Keys: `n, accuracy_baseline, accuracy_variant, accuracy_delta` (shares), `c2w, w2c, w2w` (counts), `flips_pct,
    all_flips_pct` (percent), `mcnemar_p`, `n_unscored`, `level` and `..._interval` of each. `w2w` and `all_flips_pct`
    are None where a scorer decided about generated answers: two wrong texts are nearly always different.

    Raises
    ------
    AlignmentError
        When ids, golds or prompts differ.
    """
    check_same_answers(baseline, variant)
    other = {a.id: a for a in variant}
    pairs = [(a, other[a.id]) for a in baseline]
    scored = [(a, b) for a, b in pairs if a.pred is not None and b.pred is not None]
    if not scored:
        raise DataError("No item has an answer of both models")
    # Labels become codes, so that answers of any type compare by equality and never by numpy's casting.
    index: dict[str, int] = {}
    codes = np.array([[index.setdefault(repr(a.pred), len(index)) for a in pair] for pair in scored])
    chosen = all(a.correct is None and b.correct is None for a, b in scored)
    found = count_flips(
        [a.is_correct for a, _ in scored],
        [b.is_correct for _, b in scored],
        codes[:, 0] if chosen else None,
        codes[:, 1] if chosen else None,
    )
    return _summary(found, level=level, n_unscored=len(pairs) - len(scored))


def compare_records(baseline: RunRecords, variant: RunRecords, *, level: float = 0.95) -> dict[str, Any]:
    """Return the same from two runs' records, pooled over multiple choice, and for each task under `tasks`.

    Where no task is multiple choice, the pooled values are over all answered items and without `w2w`.
    """
    evidence = Evidence(baseline, variant)
    reason = evidence.missing("predictions")
    if reason is not None:
        raise DataError("The records cannot be compared", got=reason)
    view = evidence.view

    def part(rows: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, Any] | None:
        both = rows[evidence.scored_by_both[rows]]
        if not len(both):
            return None
        b, q = evidence.baseline_predictions, evidence.variant_predictions
        answers = (b.content[both, 0], q.content[both, 0]) if view.chooses[both].all() else (None, None)
        found = count_flips(b.correct[both, 0], q.correct[both, 0], *answers)
        return _summary(found, level=level, n_unscored=len(rows) - len(both))

    pooled = np.flatnonzero(np.isin(view.family, CHOICE))
    if not len(pooled):
        pooled = np.flatnonzero(np.isin(view.family, ANSWERED))
    whole = part(pooled)
    if whole is None:
        raise DataError("No item has a prediction of both models")
    tasks = {p.task: part(p.rows) for p in evidence.parts(ANSWERED, categories=())}
    return {**whole, "tasks": {task: found for task, found in tasks.items() if found is not None}}
