"""Tables and figures' data from the records, and the details behind the headline values."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mlflow_compress.metrics import margins, uncertainty
from mlflow_compress.metrics.core import requirements
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.token_groups import matched
from mlflow_compress.metrics.noise import noise_table
from mlflow_compress.metrics.perplexity import statistics
from mlflow_compress.metrics.stats.arrays import Float, Int
from mlflow_compress.metrics.stats.conformal import SCORES, conformal, coverage_by_class, repeated_splits, split
from mlflow_compress.metrics.stats.corpus_statistics import difference_shape, percentiles
from mlflow_compress.metrics.stats.significance import Flips, count_flips, holm
from mlflow_compress.reasoning import COMPARISONS, answer_span, parted, read_answer
from mlflow_compress.records import MetricResult, RunRecords


def _kl(inputs: MetricInputs) -> Float:
    if inputs.missing(requirements.OPTION_DISTANCES) is None:
        return inputs.distance("kl")
    return np.full(len(inputs.view), np.nan)


@dataclass(frozen=True, eq=False)
class ChangedAnswers:
    """The items whose answer changed, most confident baseline first."""

    rows: Int  # Rows of the items; shape (n_changed,)
    kinds: tuple[str, ...]  # "c2w" (right to wrong), "w2c" (wrong to right) or "w2w" (wrong to another wrong answer)
    margin: Float  # The baseline's margin and the item's KL in nats; NaN where an item has none; shape (n_changed,)
    kl: Float


def changed_answers(inputs: MetricInputs) -> ChangedAnswers:
    """Return the items whose answer the variant changed; none where there are corpora alone."""
    if inputs.baseline.items is None:
        return ChangedAnswers(np.empty(0, dtype=np.int64), (), np.empty(0), np.empty(0))
    view = inputs.view
    b, q = inputs.baseline_predictions, inputs.variant_predictions
    right_b, right_q = b.correct[:, 0], q.correct[:, 0]
    moved = view.chooses & ~right_b & ~right_q & (b.content[:, 0] != q.content[:, 0])
    changed = inputs.scored_by_both & np.isin(view.family, view.graded) & ((right_b != right_q) | moved)
    margin, kl = b.margin[:, 0], _kl(inputs)
    rows = np.flatnonzero(changed)
    rows = rows[np.argsort(-np.nan_to_num(margin[rows], nan=-1.0), kind="stable")]
    kinds = tuple("c2w" if right_b[row] else "w2c" if right_q[row] else "w2w" for row in rows)
    return ChangedAnswers(rows, kinds, margin[rows], kl[rows])


def _chosen_options(inputs: MetricInputs, rows: Int) -> list[dict[str, Any]]:
    """Return some items, with the texts of the right option and of those that both models chose.

    Of an item that is answered behind a thought they are what was concluded; of others that are generated None.
    """
    names = ("task", "item_id", "category", "question", "prompt", "options", "answers")
    models = (inputs.baseline_predictions, inputs.variant_predictions)
    written = [generated_texts(records) for records in (inputs.baseline, inputs.subject)]
    items = []
    for row, item in zip(rows.tolist(), inputs.view.items.table.take(rows).to_pylist(), strict=True):
        places = [item["gold"], *(p.content[row, 0] if p.scored[row, 0] else None for p in models)]
        texts = [item["options"][i] if inputs.view.chooses[row] and i is not None else None for i in places]
        if item["rule"] in COMPARISONS:
            replies = (of_model.get((item["task"], item["item_id"])) for of_model in written)
            texts = [item["answers"][0], *(concluded(item["prompt"], reply, item["rule"]) for reply in replies)]
        chosen = dict(zip(("gold", "baseline", "variant"), texts, strict=True))
        items.append({**{name: item[name] for name in names}, **chosen})
    return items


def items_table(inputs: MetricInputs) -> list[dict[str, Any]]:
    """Return one row per item, in the order of the records; see `Evaluation.items` for the columns."""
    if inputs.baseline.items is None:
        return []
    view, b, q = inputs.view, inputs.baseline_predictions, inputs.variant_predictions
    changed = changed_answers(inputs)
    kinds, kl = dict(zip(changed.rows.tolist(), changed.kinds, strict=True)), _kl(inputs)
    written = {"baseline": generated_texts(inputs.baseline), "variant": generated_texts(inputs.subject)}
    table = _chosen_options(inputs, np.arange(len(view)))
    for row, item in enumerate(table):
        accepted = item.pop("answers")
        if view.rule[row] in COMPARISONS:  # the token limit stands behind the answer
            accepted = accepted[:1]
        if not view.chooses[row]:
            place = (item["task"], item["item_id"])
            item |= {"gold": accepted, **{name: texts.get(place) for name, texts in written.items()}}
        item |= {
            "baseline_correct": bool(b.correct[row, 0]) if b.scored[row, 0] else None,
            "variant_correct": bool(q.correct[row, 0]) if q.scored[row, 0] else None,
            "change": kinds.get(row),
            "kl": _finite(kl[row]),
            "margin_baseline": _finite(b.margin[row, 0]),
            "margin_variant": _finite(q.margin[row, 0]),
        }
    return table


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def generated_texts(records: RunRecords) -> dict[tuple[str, str], str | None]:
    """Return the first generated answer to each item, by task and item."""
    if records.generations is None:
        return {}
    rows = records.generations.where(turn=0, sample=0).table.to_pylist()
    return {(row["task"], row["item_id"]): row["text"] for row in rows}


def concluded(prompt: str, reply: str | None, rule: str) -> str | None:
    """Return the answer behind a thought as it is written; None where there is none, or it cannot be read."""
    answer = "" if reply is None else parted(prompt, reply)[1]
    span = answer_span(answer, rule) if answer else None
    return (read_answer(answer, rule) if answer else None) if span is None else answer[slice(*span)]


def flips_table(inputs: MetricInputs) -> list[dict[str, Any]]:
    """Return one row per item whose answer changed, sorted by the baseline's confidence, highest first.

    `gold`, `baseline` and `variant` are option texts, or what was concluded behind a thought (None for other generated
    answers), `kind` is "c2w", "w2c" or "w2w".
    """
    changed = changed_answers(inputs)
    if not len(changed.rows):
        return []
    rows = zip(_chosen_options(inputs, changed.rows), changed.kinds, changed.margin, changed.kl, strict=True)
    return [
        {
            **{name: item[name] for name in ("task", "item_id", "category", "question")},
            "options": item["options"] or [],
            **{name: item[name] for name in ("gold", "baseline", "variant")},
            "kind": kind,
            "margin_baseline": _finite(margin),
            "kl": _finite(kl),
        }
        for item, kind, margin, kl in rows
    ]


def answers_by_margin(inputs: MetricInputs) -> tuple[margins.Binned, margins.Binned] | None:
    """Return P(answer changed) and P(baseline wrong) by the baseline's margin; None where items were drawn by it."""
    if inputs.missing(requirements.VARIANT, requirements.PREDICTIONS) or inputs.design is not None:
        return None
    b, q = inputs.baseline_predictions, inputs.variant_predictions
    rows = inputs.scored_by_both & np.isin(inputs.view.family, inputs.view.choice) & np.isfinite(b.margin[:, 0])
    if not rows.any():
        return None
    margin, level = b.margin[rows, 0], inputs.settings.level
    changed = margins.share_by_bin(margin, b.content[rows, 0] != q.content[rows, 0], level=level)
    return changed, margins.share_by_bin(margin, ~b.correct[rows, 0], level=level)


def kl_values(inputs: MetricInputs) -> Float:
    """Return the KL of every multiple-choice item in nats, shape (n_scored,); none where items were drawn."""
    if inputs.baseline.items is None or inputs.design is not None:
        return np.empty(0)
    kl = _kl(inputs)[np.isin(inputs.view.family, inputs.view.choice)]
    return np.asarray(kl[np.isfinite(kl)], dtype=np.float64)


def token_kl_values(inputs: MetricInputs) -> Float:
    """Return the KL of every corpus token in nats, in record order; empty without corpus records."""
    if inputs.variant is None or inputs.variant.token_distances is None:
        return np.empty(0)
    return np.asarray(inputs.variant.token_distances.column("kl"), dtype=np.float64)


def flips_by_category(inputs: MetricInputs) -> dict[tuple[str, str | None], Flips]:
    """Return the flips of every (task, category), and of tasks without categories; none where items were drawn."""
    if inputs.missing(requirements.VARIANT, requirements.PREDICTIONS) or inputs.design is not None:
        return {}
    view, b, q = inputs.view, inputs.baseline_predictions, inputs.variant_predictions
    by_part: dict[tuple[str, str | None], Flips] = {}
    for subset in inputs.subsets(view.graded, categories=view.choice):
        rows = subset.rows[inputs.scored_by_both[subset.rows]]
        if subset.task is not None and len(rows):
            answers = (b.content[rows, 0], q.content[rows, 0]) if view.chooses[rows].all() else (None, None)
            by_part[subset.task, subset.category] = count_flips(b.correct[rows, 0], q.correct[rows, 0], *answers)
    divided = {task for task, category in by_part if category is not None}
    return {part: flips for part, flips in by_part.items() if part[1] is not None or part[0] not in divided}


_LETTERS = "ABCDEF"


def conformal_table(inputs: MetricInputs, *, n_splits: int = 100) -> list[dict[str, Any]]:
    """Return one row per six-option task (prompt method), model and score; empty without such tasks.

    Values are those of the test items on the split of `split_seed`. `splits` has mean and central interval over
    `n_splits` random ones: how much a value depends on the split. The mean of a model's `uacc` is `uncertainty/uacc`.
    """
    if inputs.missing(requirements.family("lettered_six"), requirements.OPTION_SCORES):
        return []
    table, s = [], inputs.settings
    tails = [(1 - s.level) / 2, (1 + s.level) / 2]
    for subset in inputs.view.subsets(("lettered_six",), categories=()):
        rows = uncertainty.scored_rows(inputs, subset)
        if len(rows) < 2:
            continue
        gold, seed = inputs.view.gold[rows], uncertainty.split_seed(inputs, rows)
        share, groups = s.calibration_share, uncertainty.split_groups(inputs, rows)
        calibration, test = split(len(gold), seed=seed, calibration_share=share, groups=groups)

        for model in uncertainty.models_of(inputs):
            p = uncertainty.six_probabilities(inputs, model, rows)
            answers = p[test].argmax(axis=1)
            for score in SCORES:
                result = conformal(p, gold, calibration=calibration, test=test, score=score, alpha=s.alpha)
                runs = repeated_splits(
                    p, gold, score, n_splits=n_splits, seed=seed, alpha=s.alpha, calibration_share=share, groups=groups
                )
                by_class = coverage_by_class(result, gold[test])
                table.append(
                    {
                        "task": subset.task,
                        "model": model,
                        "score": score,
                        "split_seed": seed,
                        "n": len(test),
                        "threshold": result.threshold if math.isfinite(result.threshold) else None,
                        **{name: getattr(result, name) for name in ("accuracy", "set_size", "coverage", "uacc")},
                        "coverage_by_class": {_LETTERS[c]: covered for c, covered in by_class.items()},
                        "dont_know_pct": 100.0 * float((answers == uncertainty.DONT_KNOW).mean()),
                        "none_of_these_pct": 100.0 * float((answers == uncertainty.NONE_OF_THESE).mean()),
                        "splits": {
                            name: {"mean": float(x.mean()), "interval": np.quantile(x, tails).tolist()}
                            for name, x in runs.items()
                        },
                    }
                )
    return table


def corpus_table(inputs: MetricInputs) -> list[dict[str, Any]]:
    """Return each corpus's `CorpusStatistics`, and the `DifferenceShape` of its tokens as `differences`."""
    if inputs.missing(requirements.TOKEN_SCORES, requirements.TOKEN_DISTANCES) or inputs.variant is None:
        return []
    base, variant, distances = (
        inputs.baseline.token_scores,
        inputs.variant.token_scores,
        inputs.variant.token_distances,
    )
    assert base is not None and variant is not None and distances is not None  # not missing
    table = []
    for task in sorted(set(base.table.column("task").unique().to_pylist())):
        b, q, d = base.where(task=task), variant.where(task=task), distances.where(task=task)
        row = asdict(statistics(b, q, d))
        for name in ("kl_percentiles", "dp_percentiles"):
            row[name] = {f"{100 * level:g}": value for level, value in row[name].items()}
        shape = asdict(difference_shape(b.column("nll"), matched(b, q, "nll")))
        lists = {name: shape[name].tolist() for name in ("edges", "counts")}
        table.append({"task": task, **row, "differences": {**shape, **lists}})
    return table


def _bins(bins: margins.Binned | None) -> list[dict[str, float | None]]:
    columns = asdict(bins) if bins is not None else {}
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    return [{n: None if x != x else x for n, x in zip(columns, row, strict=True)} for row in rows]


def divergence_table(inputs: MetricInputs) -> dict[str, Any]:
    """Return percentiles of the choice items' KL, and means by the baseline's confidence, of items and of tokens."""
    kl = kl_values(inputs) if inputs.missing(requirements.ITEMS) is None else np.empty(0)
    has_items = len(kl) > 0 and inputs.missing(requirements.OPTION_SCORES) is None
    return {
        "item_percentiles": {f"{100 * level:g}": x for level, x in percentiles(kl).items()} if len(kl) else {},
        "by_margin": _bins(margins.kl_by_confidence(inputs) if has_items else None),
        "by_probability": _bins(margins.token_kl_by_confidence(inputs)),
    }


def details(inputs: MetricInputs, results: Sequence[MetricResult]) -> dict[str, Any]:
    """Return the details of one evaluation, as values that JSON can store."""
    raw = {
        r.task: r.value for r in results if r.name == "quality/mcnemar_p" and r.task is not None and r.category is None
    }
    return {
        "noise_floor": noise_table(inputs, results),
        "divergence": divergence_table(inputs),
        "conformal": conformal_table(inputs),
        "corpus": corpus_table(inputs),
        "mcnemar_p_holm": dict(zip(raw, holm(list(raw.values())).tolist(), strict=True)) if raw else {},
    }
