"""Synthetic records of two models for the tests of metrics: every family, with known structure and a seed."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings

from mlflow_compress import records
from mlflow_compress.metrics import AnswerEmbeddings, MetricInputs

# Few examples keep the suite quick.
QUICK = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])


def item_of(item_id: object, **columns: Any) -> dict[str, Any]:
    """A row of `Items`: a lettered question with two options, but for the given columns."""
    row: dict[str, Any] = {"task": "t", "item_id": str(item_id), "family": "lettered", "rule": "loglik"}
    row |= {"category": None, "question": "q", "prompt": "p", "options": ["x", "y"], "gold": 0, "answers": None}
    return row | columns


def score_of(item_id: object, option: int, loglik: float | None, **columns: Any) -> dict[str, Any]:
    """A row of `OptionScores`: an option of one letter in the original order, but for the given columns."""
    row = {"task": "t", "item_id": str(item_id), "permutation": 0, "option": option, "content": option}
    return row | {"loglik": loglik, "n_tokens": 1, "n_chars": 1, "n_bytes": 1, "greedy": False} | columns


def generations_of(texts: Mapping[str, Sequence[str]], *, by: str = "sample", **columns: Any) -> records.Generations:
    """Generated answers: of each item its samples, or its turns; the item is the prompt, but for the given columns."""
    rest = {"task": "t", "turn": 0, "sample": 0, "n_tokens": 1}
    of = [(item, place, text) for item, given in texts.items() for place, text in enumerate(given)]
    return records.Generations.from_rows(
        [{**rest, "prompt": item, **columns, "item_id": item, by: place, "text": text} for item, place, text in of]
    )


CATEGORIES = ("physics", "law", "history")
SHUFFLES = ((0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0))
ORDERS = {"lettered": SHUFFLES, "lettered_orders": tuple(itertools.permutations(range(4)))}


def items(n: int = 60, *, n_words: int = 20) -> records.Items:
    """Items of six tasks, `n` a choice task and a fifth of that in all orders; gold cycles through the options."""
    rows: list[dict[str, Any]] = []

    def add(task: str, i: int, family: str, rule: str, options: list[str], **more: Any) -> None:
        gold = i % min(len(options), 4) if options else None
        category = CATEGORIES[i % 3] if family.startswith("lettered") else None
        shown = {"question": f"question {i}", "prompt": f"{task} prompt {i}", "options": options, "answers": []}
        named = {"task": task, "family": family, "rule": rule, "category": category, "gold": gold}
        rows.append(item_of(f"{i:05d}", **{**named, **shown, **more}))

    for i in range(n):
        add("mmlu", i, "lettered", "loglik", [f"text {k}" for k in range(4)])
    for i in range(n):
        add("mmlu_six", i, "lettered_six", "loglik", [f"text {k}" for k in range(6)])
    for i in range(n):
        add("piqa", i, "cloze", "loglik_per_char", ["short", "a longer option"])
    for i in range(n_words):
        add("lambada", i, "last_word", "greedy", ["word"], gold=0)
    for i in range(n_words):
        add("trivia", i, "exact", "exact_match", [], answers=[f"answer {i}", str(i)])
    for i in range(max(n // 5, 2)):
        add("mmlu_orders", i, "lettered_orders", "loglik", [f"text {k}" for k in range(4)])
    return records.Items.from_rows(rows)


def scores(
    table: records.Items, rng: np.random.Generator, *, skill: float, jitter: float, base: dict[Any, float]
) -> records.OptionScores:
    """Option scores: shared noise `base` (keyed by item and content) plus own jitter, the gold raised by `skill`."""
    rows = []
    for item in table.table.to_pylist():
        if item["family"] == "exact":
            continue
        orders = ORDERS.get(item["family"], (tuple(range(len(item["options"]))),))
        for permutation, order in enumerate(orders):
            for option, content in enumerate(order):
                key = (item["task"], item["item_id"], content)
                shared = base.setdefault(key, float(rng.normal()))
                text = item["options"][content]
                lift = skill if content == item["gold"] else 0.0
                value = -8.0 + shared + lift + jitter * float(rng.normal()) - 0.3 * option
                cell = {"task": item["task"], "permutation": permutation, "content": content, "greedy": value > -7.5}
                length = {"n_chars": len(text), "n_bytes": len(text)}
                rows.append(score_of(item["item_id"], option, min(value, -1e-3), **cell, **length))
    return records.OptionScores.from_rows(rows)


def option_distances(table: records.OptionScores, rng: np.random.Generator, scale: float) -> records.OptionDistances:
    """Distances at permutation 0 for every option row."""
    n = len(table.where(permutation=0))
    kl = scale * rng.exponential(size=n)
    columns = {c: table.where(permutation=0).column(c) for c in records.OptionDistances.KEY}
    return records.OptionDistances.from_columns(
        {
            **columns,
            "kl": kl,
            "kl_reverse": kl * 1.1,
            "js": np.minimum(kl / 4, 0.69),
            "tv": np.minimum(np.sqrt(kl / 2), 1.0),
            "same_top": (rng.random(n) > np.minimum(kl, 0.9)).astype(float),
            "top10": np.exp(-kl),
            "rbo10": np.exp(-kl),
        }
    )


def tokens(
    rng: np.random.Generator, *, windows: int = 24, per_window: int = 25, nll: np.ndarray[Any, Any] | None = None
) -> records.TokenScores:
    """Token scores of two corpora; `nll` fixes the values."""
    n = windows * per_window
    nll = rng.exponential(2.0, size=n) if nll is None else nll
    window = np.repeat(np.arange(windows), per_window)
    return records.TokenScores.from_columns(
        {
            "task": ["wiki" if w < windows // 2 else "news" for w in window],
            "item_id": [f"w{w:03d}" for w in window],
            "position": np.tile(np.arange(per_window), windows),
            "target": np.arange(n) % 97,
            "nll": nll,
            "p_target": np.exp(-nll),
            "argmax": np.arange(n) % 89,
            "entropy": np.full(n, 2.0),
        }
    )


def token_distances(scores: records.TokenScores, rng: np.random.Generator, scale: float) -> records.TokenDistances:
    """Distances for every token row."""
    kl = scale * rng.exponential(size=len(scores))
    return records.TokenDistances.from_columns(
        {
            **{c: scores.table.column(c).to_pylist() for c in records.TokenScores.KEY},
            "kl": kl,
            "kl_reverse": kl,
            "js": np.minimum(kl / 4, 0.69),
            "tv": np.minimum(np.sqrt(kl / 2), 1.0),
            "same_top": rng.random(len(scores)) > np.minimum(kl, 0.9),
            "top10": np.exp(-kl),
            "rbo10": np.exp(-kl),
        }
    )


def generations(table: records.Items, rng: np.random.Generator, skill: float) -> records.Generations:
    """One answer an "exact" item, right with probability `skill`, and two sampled answers to five instructions."""
    rows = []
    for item in table.where(family="exact").table.to_pylist():
        text = item["answers"][0] if rng.random() < skill else "something else"
        key = {"task": item["task"], "item_id": item["item_id"], "turn": 0, "sample": 0}
        rows.append({**key, "prompt": item["prompt"], "text": text, "n_tokens": 3})
    words = ("a", "model", "was", "made", "smaller", "and", "kept", "its", "answers")
    for i in range(5):
        for sample in range(2):
            text = " ".join(w for w in words if rng.random() < 0.9)
            key = {"task": "instructions", "item_id": f"i{i}", "turn": 0, "sample": sample}
            rows.append({**key, "prompt": f"instruction {i}", "text": text, "n_tokens": 9})
    return records.Generations.from_rows(rows)


def judgments(rng: np.random.Generator, *, n: int = 12, unread: int = 1) -> records.Judgments:
    """Two turns a question over three categories; the first `unread` judgments have no readable score."""
    rows = []
    for i in range(n):
        for turn in (0, 1):
            score = None if len(rows) < unread else float(rng.integers(3, 11))
            key = {"task": "mt_bench", "item_id": f"q{i}", "turn": turn, "repeat": 0}
            rows.append({**key, "category": CATEGORIES[i % 3], "score": score, "judgment": "", "judge": "test"})
    return records.Judgments.from_rows(rows)


def embeddings(rng: np.random.Generator, *, n: int = 10, k: int = 5, d: int = 16) -> AnswerEmbeddings:
    """Embeddings of a baseline, a close variant and a second sample of the baseline."""
    centre = rng.normal(size=(n, 1, d))
    a, b, c = (centre + spread * rng.normal(size=(n, k, d)) for spread in (0.5, 0.6, 0.5))
    return AnswerEmbeddings("instructions", tuple(f"i{i}" for i in range(n)), a, b, c)


def inputs(n: int = 60, *, seed: int = 0, windows: int = 24, per_window: int = 25) -> MetricInputs:
    """Full inputs: baseline, a variant that moved, a noise run that moved less, and embeddings."""
    rng = np.random.default_rng(seed)
    table = items(n)
    base: dict[Any, float] = {}
    nll = rng.exponential(2.0, size=windows * per_window)

    def run(jitter: float, skill: float, shift: float) -> records.RunRecords:
        return records.RunRecords(
            items=table,
            option_scores=scores(table, rng, skill=skill, jitter=jitter, base=base),
            token_scores=tokens(
                rng, windows=windows, per_window=per_window, nll=nll + shift * rng.random(size=len(nll))
            ),
            generations=generations(table, rng, 0.6),
            judgments=judgments(rng),
        )

    def moved(model: records.RunRecords, scale: float) -> records.RunRecords:
        return replace(
            model,
            option_distances=option_distances(model.option_scores, rng, scale),
            token_distances=token_distances(model.token_scores, rng, scale),
        )

    baseline, variant, noise = run(0.0, 1.5, 0.0), moved(run(0.5, 1.2, 0.1), 0.1), moved(run(0.02, 1.5, 0.001), 0.001)
    return MetricInputs(baseline, variant, noise, embeddings=embeddings(rng))


def in_groups(run: records.RunRecords, per_group: int) -> records.RunRecords:
    """Return the records with every `per_group` items of a task as one group."""
    table = run.items.table
    names = [f"p{int(item) // per_group}" for item in table.column("item_id").to_pylist()]
    place = table.schema.get_field_index("group_id")
    return replace(run, items=records.Items(table.set_column(place, table.schema.field("group_id"), [names])))


def identical(full: MetricInputs) -> MetricInputs:
    """Evidence of a variant that equals its baseline: all distances 0."""
    rng = np.random.default_rng(0)

    def zero(table: Any) -> Any:
        columns = {c: table.table.column(c).to_pylist() for c in table.SCHEMA.names}
        for name in ("kl", "kl_reverse", "js", "tv"):
            columns[name] = np.zeros(len(table))
        for name in ("same_top", "top10", "rbo10"):
            columns[name] = np.ones(len(table), dtype=bool)
        return type(table).from_columns(columns)

    variant = replace(
        full.baseline,
        option_distances=zero(option_distances(full.baseline.option_scores, rng, 0.0)),
        token_distances=zero(token_distances(full.baseline.token_scores, rng, 0.0)),
    )
    given = full.embeddings
    same = AnswerEmbeddings(given.task, given.item_ids, given.baseline, given.baseline) if given is not None else None
    return MetricInputs(full.baseline, variant, variant, embeddings=same, settings=full.settings)
