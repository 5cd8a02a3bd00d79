"""One model's answers, read from plain {"id", "pred", "gold"} rows or from lm-evaluation-harness sample logs."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.item_families import shared_text
from mlflow_compress.metrics.core.estimates import Estimate, PairedDifference, Proportion
from mlflow_compress.metrics.core.metric_inputs import MetricInputs, MetricSettings
from mlflow_compress.metrics.core.requirements import PREDICTIONS
from mlflow_compress.metrics.stats.arrays import Bool, Int
from mlflow_compress.metrics.stats.significance import holm
from mlflow_compress.records import RunRecords


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One model's answer to one item."""

    id: str  # Identifies the item in both files
    pred: Any  # The answer; None where the model gave none (counted apart, never as wrong)
    gold: Any  # The right answer
    # The question and what the model saw, or hashes of them, where known: unequal ones are refused
    item: str | None = None
    prompt: str | None = None
    options: tuple[str, ...] = ()  # The texts that it was chosen from, where known: unequal ones are refused
    # Set where a scorer has decided already: 1 is right, 0 wrong, and a share neither; else ``pred == gold`` decides
    score: float | None = None
    # Whether `pred` is free text: two wrong texts are nearly always different, so that w2w is not counted
    generated: bool = False
    group: str | None = None  # What the item shares with others, such as a passage, where known
    rule: str | None = None  # How the answer was scored, where known: "acc", "acc_norm", "exact_match,strict-match"

    @property
    def is_correct(self) -> bool:
        return bool(self.pred == self.gold) if self.score is None else self.score == 1


def answers_from_rows(rows: Iterable[Mapping[str, Any]]) -> list[Answer]:
    """Read plain rows with `id`, `pred` (null for none), `gold`, and maybe `prompt` and `group`, which items share."""
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
        prompt, group = row.get("prompt"), row.get("group")
        for name, text in (("prompt", prompt), ("group", group)):
            if text is not None and not isinstance(text, str):
                raise DataError(f"Row {number} has a {name} that is no text", got=type(text).__name__)
        pred, gold = (_as_text(row[name], f"Row {number} has a {name}") for name in ("pred", "gold"))
        answers.append(Answer(id=str(row["id"]), pred=pred, gold=gold, prompt=prompt, group=group))
    return answers


def _as_text(value: Any, what: str) -> str | None:
    """Return an answer as text, so that "1" and the numbers 1 and 1.0 are one; of a list, the list of its texts."""
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


def answers_from_harness(rows: Iterable[Mapping[str, Any]], config: Mapping[str, Any] | None = None) -> list[Answer]:
    """Read lm-evaluation-harness 0.4 sample logs (`samples_*.jsonl`), one mapping a line.

    The rule is the first of `acc_norm`, `acc`, `acc_bytes`, `acc_mutual_info` and `exact_match` that a task logs; a log
    without any is refused. What was logged says whether an answer is right. Where a task has several filters, such as
    GSM8K, the first in the file is taken. Hashes of documents and prompts, and the choices, are compared, so other
    shots or templates are refused. Documents of a task with one passage, article or the like are a group.

    Multiple choice: `filtered_resps` holds a (log-likelihood, is_greedy) pair a choice; the answer is the choice that
    the rule takes, and must agree with what was logged where the target is a choice. A task that scores its answers
    by a function of its own (`process_results`), or by shares such as TruthfulQA's MC2, has no such answer.

    - `config`: The task's settings, as `results_*.json` holds them: how the harness joins question and choice.
    """
    kept: dict[str, str | None] = {}
    tasks: dict[str, list[Mapping[str, Any]]] = {}
    for number, row in enumerate(rows, start=1):
        _check_sample(row, f"Row {number} is no harness sample")
        task = row.get("task_name", "")
        if row.get("filter") == kept.setdefault(task, row.get("filter")):
            tasks.setdefault(task, []).append(row)
    return [answer for part in tasks.values() for answer in _answers_of_task(part, config or {})]


def _answers_of_task(rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[Answer]:
    is_choice = all(map(_are_pairs, rows)) and any(len(row["filtered_resps"]) > 1 for row in rows)
    rule = _rule(rows, ("acc_norm", "acc", "acc_bytes", "acc_mutual_info") if is_choice else ("exact_match", "acc"))
    scores = [float(row[rule]) for row in rows]
    chosen = None
    if is_choice and not config.get("process_results") and {0.0, 1.0}.issuperset(scores):
        chosen = _chosen(rows, rule, config)
    kind = rows[0].get("filter", "none")
    answers = []
    for number, (row, score) in enumerate(zip(rows, scores, strict=True)):
        document, task = row.get("doc"), row.get("task_name", "")
        text = shared_text(document) if isinstance(document, dict) else None
        answers.append(
            Answer(
                id=_identity(row),
                pred=str(row["filtered_resps"][0]) if chosen is None else chosen[number],
                gold=str(row["target"]),
                item=row.get("doc_hash"),
                prompt=row.get("prompt_hash"),
                options=tuple(_continuations(row)) if is_choice else (),
                score=score,
                generated=chosen is None,
                group=None if text is None else f"{task}/{text}",
                rule=rule if kind == "none" else f"{rule},{kind}",
            )
        )
    return answers


_TEXTS = ("task_name", "filter", "doc_hash", "prompt_hash")
_SCORES = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match")


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
    scores = {name: row[name] for name in _SCORES if name in row}
    if wrong := [name for name, score in scores.items() if not isinstance(score, int | float) or not 0 <= score <= 1]:
        raise DataError(f"{what}: {wrong[0]} is no score from 0 to 1", got=str(row[wrong[0]]))
    if arguments is not None and not (
        isinstance(arguments, dict) and all(isinstance(one, dict) for one in arguments.values())
    ):
        raise DataError(f"{what}: arguments are no objects by name")


def _identity(row: Mapping[str, Any]) -> str:
    return f"{row.get('task_name', '')}/{row['doc_id']}".lstrip("/")


def _are_pairs(row: Mapping[str, Any]) -> bool:
    """Return whether each response is a log-likelihood and whether the text is the most likely one."""
    return all(
        isinstance(pair, list | tuple) and len(pair) == 2 and str(pair[1]) in ("True", "False")
        for pair in row["filtered_resps"]
    )


def _rule(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return the first of the names under which the rows have a score."""
    rule = next((name for name in names if name in rows[0]), None)
    lacking = next((row for row in rows if rule not in row), None)
    if rule is None or lacking is not None:
        logged = (lacking or rows[0]).get("metrics")
        by = f", scored by {', '.join(map(str, logged))}" if isinstance(logged, list) and logged else ""
        raise DataError(
            f"A harness sample has no {' or '.join(names) if rule is None else rule}",
            allowed="logs of tasks by one of these rules, by which an answer is right or wrong",
            got=f"{_identity(lacking or rows[0])}{by}",
        )
    return rule


def _continuations(row: Mapping[str, Any]) -> list[str]:
    """Return the text that was scored of each response; "" where the log does not hold it."""
    arguments = row.get("arguments") or {}
    return [
        str(arguments.get(f"gen_args_{number}", {}).get("arg_1") or "") for number in range(len(row["filtered_resps"]))
    ]


def _chosen(rows: Sequence[Mapping[str, Any]], rule: str, config: Mapping[str, Any]) -> list[int] | None:
    """Return the choice of each row by the rule; it must be right where that was logged.

    None where the log leaves open which one it is: `acc_norm` and `acc_bytes` divide by the length of a choice, which
    the log holds behind the delimiter that the task puts before it. Without the task's settings, every delimiter is
    tried with which the scores follow.
    """
    delimiters = [""]
    if rule in ("acc_norm", "acc_bytes"):
        texts = [text for row in rows for text in _continuations(row)]
        blanks = [texts[0][:end] for end in range(len(texts[0]) - len(texts[0].lstrip()) + 1)]
        own = config.get("target_delimiter")
        # In a chat template the harness leaves the delimiter out.
        delimiters = [own, ""] if own else [blank for blank in blanks if all(text.startswith(blank) for text in texts)]
    ways: list[list[int]] = []
    wrong = None
    for delimiter in delimiters:
        choices = [_choice(row, rule, delimiter) for row in rows]
        pairs = zip(rows, choices, strict=True)
        first = next((pair for pair in pairs if not _follows(*pair, rule, delimiter)), None)
        wrong = wrong or first
        if first is None and choices not in ways:
            ways.append(choices)
    if not ways and wrong is not None:
        raise DataError(
            f"The logged {rule} of a harness sample does not follow from its log-likelihoods",
            got=f"{_identity(wrong[0])}: choice {wrong[1]}, target {wrong[0]['target']}",
            fix="Give sample logs as the harness wrote them, beside their results_*.json: it says how a task scores",
        )
    return ways[0] if len(ways) == 1 or config else None


def _follows(row: Mapping[str, Any], choice: int, rule: str, delimiter: str) -> bool:
    """Return whether the logged score is that of the choice. True where the target is no choice, as of Winogrande."""
    target, texts = str(row["target"]), _continuations(row)
    golds = []
    if re.fullmatch(r"\d+|\[\d+(, \d+)*\]", target):  # an index, or several that are right
        golds.append({int(index) for index in re.findall(r"\d+", target)})
    named = {number for number, text in enumerate(texts) if text.removeprefix(delimiter) == target}
    if named and len(set(texts)) > 1:  # one text behind several questions is the target of each
        golds.append(named)
    return not golds or any((choice in gold) == (row[rule] == 1) for gold in golds)


def _choice(row: Mapping[str, Any], rule: str, delimiter: str) -> int:
    """Return the choice that the rule takes, of equal ones the first."""
    try:
        values = np.array([float(pair[0]) for pair in row["filtered_resps"]])
    except (TypeError, ValueError) as error:
        raise DataError("A harness sample holds a log-likelihood that is no number", got=_identity(row)) from error
    if not np.isfinite(values).all():
        raise DataError("A harness sample holds a NaN or infinite log-likelihood", got=_identity(row))
    if "acc_mutual_info" in row:  # the unconditional log-likelihoods are behind the others
        if len(values) % 2:
            raise DataError("A harness sample lacks an unconditional log-likelihood", got=_identity(row))
        values, unconditional = np.split(values, 2)
        if rule == "acc_mutual_info":
            values = values - unconditional
    if rule in ("acc", "acc_mutual_info"):
        return int(values.argmax())
    texts = _continuations(row)[: len(values)]
    if not all(texts) or (len(set(texts)) == 1 and len(texts) > 1):
        raise DataError(
            "A harness sample lacks the choices that its log-likelihoods are divided by", got=_identity(row)
        )
    choices = [text.removeprefix(delimiter) for text in texts]
    lengths = [len(text if rule == "acc_norm" else text.encode()) for text in choices]
    return int((values / np.maximum(lengths, 1)).argmax())


_COMPARED = {
    "item": "question",
    "gold": "gold",
    "prompt": "prompt",
    "options": "choices",
    "rule": "scoring rule",
    "group": "group",
}


def _pairs(baseline: Sequence[Answer], variant: Sequence[Answer]) -> list[tuple[Answer, Answer]]:
    """Return both models' answers by item; lists that do not describe the same items are an `AlignmentError`."""
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
    return [(answer, q[name]) for name, answer in b.items()]


def _summary(before: Bool, after: Bool, changed: Bool | None, groups: Int, *, n_unscored: int) -> dict[str, Any]:
    """Return the numbers of items that both models answered; arrays have shape (n,), `changed` is of answers."""
    difference = PairedDifference.of(before, after, groups)
    between_wrong = None if changed is None else ~before & ~after & changed
    flipped = before != after
    shares: dict[str, tuple[Estimate | None, float]] = {
        "accuracy_baseline": (Proportion.of(before, groups), 1.0),
        "accuracy_variant": (Proportion.of(after, groups), 1.0),
        "accuracy_delta": (difference, 1.0),
        "flips_pct": (Proportion.of(flipped, groups), 100.0),
        "all_flips_pct": (None if between_wrong is None else Proportion.of(flipped | between_wrong, groups), 100.0),
    }
    settings = MetricSettings()
    results = {name: (None, None) if of is None else of.at(settings, factor) for name, (of, factor) in shares.items()}
    return {
        "n": difference.n,
        "n_groups": len(np.unique(groups)),
        "n_unscored": n_unscored,
        "c2w": difference.lost,
        "w2c": difference.gained,
        "w2w": None if between_wrong is None else int(between_wrong.sum()),
        **{name: value for name, (value, _) in results.items()},
        "mcnemar_p": difference.p_value.value,
        "level": settings.level,
        **{f"{name}_interval": None if ends is None else list(ends) for name, (_, ends) in results.items()},
    }


def compare_answers(baseline: Sequence[Answer], variant: Sequence[Answer]) -> dict[str, Any]:
    """Return the flips family, both accuracies, McNemar's p and intervals; ready for JSON.

    Accuracies and their difference are shares, flips percent. `w2w` and `all_flips_pct` are None for generated answers:
    two wrong texts are nearly always different. Intervals and p-value are over groups of items where the files name
    them (an item without one is its own); an interval is None for fewer than `FEWEST_GROUPS` of them.
    """
    pairs = _pairs(baseline, variant)
    scored = [(a, b) for a, b in pairs if a.pred is not None and b.pred is not None]
    if not scored:
        raise DataError("No item has an answer from both models")
    if any(answer.score not in (None, 0, 1) for pair in scored for answer in pair):
        means = (f"{100 * np.mean([answer.score for answer in side]):.2f} %" for side in zip(*scored, strict=True))
        raise DataError(
            f"The {scored[0][0].rule} of these logs is a share: no answer is right or wrong, and none flips",
            got=f"means of {' and '.join(means)}, {len(scored)} items",
            fix="Give logs of tasks whose answers are right or wrong",
        )
    # Whether answers of any type are equal is asked of themselves, never of numpy, which would cast them.
    moved = np.array([a.pred != b.pred for a, b in scored])
    chosen = not any(a.generated or b.generated for a, b in scored)
    before, after = (np.array([answer.is_correct for answer in side]) for side in zip(*scored, strict=True))
    codes: dict[tuple[str, bool], int] = {}
    groups = [codes.setdefault((a.id, False) if a.group is None else (a.group, True), len(codes)) for a, _ in scored]
    summary = _summary(before, after, moved if chosen else None, np.array(groups), n_unscored=len(pairs) - len(scored))
    rules = sorted({a.rule for a in baseline if a.rule is not None})
    return {**summary, "rule": ", ".join(rules) or None}


def compare_records(baseline: RunRecords, variant: RunRecords) -> dict[str, Any]:
    """Return the same from two runs' records, pooled over multiple choice, and for each task under `tasks`.

    Where no task is multiple choice, the pooled values are over all answered items and without `w2w`. Every task also
    has `mcnemar_p_holm`, its p-value after Holm's correction for the number of tasks.
    """
    if baseline.draws is not None or variant.draws is not None:
        raise DataError(
            "The items of these records were drawn with unequal probabilities, and not every item was scored",
            fix="Compare the metrics of their evaluations, which are weighted, or evaluate both with items=all",
        )
    inputs = MetricInputs(baseline, variant)
    reason = inputs.missing(PREDICTIONS)
    if reason is not None:
        raise DataError("The records cannot be compared", got=reason)
    view = inputs.view

    def counted(rows: Int) -> dict[str, Any] | None:
        both = rows[inputs.scored_by_both[rows]]
        if not len(both):
            return None
        b, q = inputs.baseline_predictions, inputs.variant_predictions
        changed = b.content[both, 0] != q.content[both, 0] if view.chooses[both].all() else None
        right = b.correct[both, 0], q.correct[both, 0]
        return _summary(*right, changed, view.group[both], n_unscored=len(rows) - len(both))

    whole = counted(np.flatnonzero(np.isin(view.family, inputs.headline_families)))
    if whole is None:
        raise DataError("No item has a prediction from both models")
    tasks = {s.task: counted(s.rows) for s in inputs.subsets(view.graded, categories=())}
    summaries = {task: summary for task, summary in tasks.items() if summary is not None}
    adjusted = holm([summary["mcnemar_p"] for summary in summaries.values()])
    for summary, p in zip(summaries.values(), adjusted, strict=True):
        summary["mcnemar_p_holm"] = float(p)
    return {**whole, "tasks": summaries}
