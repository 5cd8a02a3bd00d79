"""Synthetic text that models wrote themselves, added to the records of `metric_records`: greedy answers and traces."""

from dataclasses import replace
from typing import Any

import numpy as np

from mlflow_compress import records
from mlflow_compress.metrics import AnswerSamples, MetricInputs
from mlflow_compress.records import ServingMemory, Timings
from tests import metric_records

N_PROMPT = 3


def answers(kind: Any, rng: np.random.Generator, *, n: int, samples: int = 1, task: str = "instructions") -> Any:
    """Answers of 3 to 11 tokens to `n` prompts; those to the odd prompts begin with two tokens of reasoning."""
    rows: list[dict[str, Any]] = []
    for i in range(n):
        for sample in range(samples):
            tokens = rng.integers(0, 50, size=3 + (5 * i + 2 * sample) % 9).tolist()
            thought = {"reasoning_begin": 0, "reasoning_end": 2} if i % 2 else {}
            key = {"task": task, "item_id": f"p{i}", "sample": sample, "prompt_tokens": [1, 2, i]}
            rows.append({**key, "tokens": tokens, "text": "", **thought})
    return kind.from_rows(rows)


def scores(kind: Any, of: records.TokenAnswers, rng: np.random.Generator, *, moved: float) -> Any:
    """Scores of the answers' tokens; a share `moved` of them is not the most probable one."""
    rows = []
    for window, row in zip(of.windows(), of.table.to_pylist(), strict=True):
        for place, token in enumerate(row["tokens"]):
            nll = float(rng.exponential(1.0))
            key = {"task": row["task"], "item_id": window, "position": N_PROMPT + place, "target": token}
            top = token + int(rng.random() < moved)
            rows.append({**key, "nll": nll, "p_target": np.exp(-nll), "argmax": top, "entropy": 1.0})
    return kind.from_rows(rows)


def distances(kind: Any, of: records.TokenScores, rng: np.random.Generator, scale: float) -> Any:
    """Distances at the same tokens; with scale 0 those of equal models."""
    n = len(of)
    kl = scale * rng.exponential(size=n)
    same = {"same_top": np.ones(n, dtype=bool), "top10": np.exp(-kl), "rbo10": np.exp(-kl)}
    values = {
        "kl": kl,
        "kl_reverse": kl,
        "js": np.minimum(kl / 4, 0.69),
        "tv": np.minimum(np.sqrt(kl / 2), 1.0),
        **same,
    }
    return kind.from_columns({**{c: of.table.column(c).to_pylist() for c in records.TokenScores.KEY}, **values})


def with_written(found: MetricInputs, *, moved: bool = True) -> MetricInputs:
    """Return the inputs with greedy answers, and with traces as a further corpus, of a variant that moved or did not."""
    rng = np.random.default_rng(7)
    share = 0.8 if moved else 0.0
    greedy, traces = (
        answers(records.GreedyAnswers, rng, n=12),
        answers(records.Traces, rng, n=6, samples=2, task="traces"),
    )
    on_greedy, on_traces = (
        scores(records.GreedyScores, greedy, rng, moved=0.0),
        scores(records.TokenScores, traces, rng, moved=0.0),
    )
    rows = greedy.table.to_pylist()
    for row in rows:
        row["tokens"][2] += int(rng.random() < share)

    def added(run: records.RunRecords, *, scale: float | None) -> records.RunRecords:
        run = replace(run, traces=traces, token_scores=records.TokenScores.concat([run.token_scores, on_traces]))
        if scale is None:
            return replace(run, greedy_answers=greedy, greedy_scores=on_greedy)
        more = distances(records.TokenDistances, on_traces, rng, scale)
        return replace(
            run,
            token_distances=records.TokenDistances.concat([run.token_distances, more]),
            greedy_answers=records.GreedyAnswers.from_rows(rows),
            greedy_scores=scores(records.GreedyScores, greedy, rng, moved=0.2) if moved else on_greedy,
            greedy_distances=distances(records.GreedyDistances, on_greedy, rng, scale),
        )

    return replace(
        found,
        baseline=added(found.baseline, scale=None),
        variant=added(found.variant, scale=0.1 if moved else 0.0),
        noise=added(found.noise, scale=0.001 if moved else 0.0),
    )


def timings(seconds: float) -> Timings:
    """Three rounds of five steps for each batch; with equal `seconds` the same, so that models can be equal."""
    rng = np.random.default_rng(3)
    rows = []
    for batch in (1, 8):
        for repeat in range(3):
            ends = np.cumsum(seconds * rng.uniform(0.9, 1.1, size=5))
            key = {"batch": batch, "repeat": repeat, "prompt_tokens": 32}
            rows += [{**key, "step": step, "seconds": float(at)} for step, at in enumerate(ends)]
    return Timings.from_rows(rows)


def memory(peak_mib: int) -> ServingMemory:
    """One process with this peak."""
    peak = peak_mib * 2**20
    return ServingMemory.from_rows([{"process": 0, "resident_bytes": peak // 2, "peak_bytes": peak}])


def with_timings(found: MetricInputs, *, moved: bool = True) -> MetricInputs:
    """The inputs with the times of both models, and the memory that they took."""
    mine = {"timings": timings(0.01), "serving_memory": memory(50)}
    theirs = {"timings": timings(0.02), "serving_memory": memory(200)}
    return replace(
        found, baseline=replace(found.baseline, **theirs), variant=replace(found.variant, **(mine if moved else theirs))
    )


def with_samples(found: MetricInputs, *, moved: bool = True) -> MetricInputs:
    """The inputs with two sampled answers of each model to 24 questions; some of them loop, end early, or are empty."""
    said = ("A short answer.", "It is blue. " * 5, "", "```\ncode", "\u041d\u0435\u0442.", "Yes.")

    def answers(step: int) -> records.Generations:
        rows = []
        for i in range(24):
            for sample in range(2):
                text = said[(step * i + sample) % len(said)]
                key = {"task": "instructions", "item_id": f"i{i}", "turn": 0, "sample": sample}
                rows.append({**key, "prompt": f"question {i}", "text": text, "n_tokens": 1 + len(text) // 4})
        return records.Generations.from_rows(rows)

    first = answers(1)
    questions = {f"i{i}": f"question {i}" for i in range(24)}
    return replace(found, samples=AnswerSamples(first, answers(5) if moved else first, questions, 16, answers(7)))


def inputs(n: int = 60) -> MetricInputs:
    """Full inputs, with everything that any metric reads."""
    return with_samples(with_timings(with_written(metric_records.inputs(n))))


def identical(n: int = 60) -> MetricInputs:
    """The same of a variant that equals its baseline."""
    same = with_written(metric_records.identical(metric_records.inputs(n)), moved=False)
    return with_samples(with_timings(same, moved=False), moved=False)
