"""One model on one suite: scoring and generation, as records."""

from __future__ import annotations

from pathlib import Path

from mlflow_compress.records import Generations, RunRecords, TokenDistances, TokenScores
from mlflow_compress.scoring.engine import Scorer
from mlflow_compress.scoring.generate import generate_until
from mlflow_compress.scoring.loading import LoadedModel
from mlflow_compress.scoring.store import StateStore, StateWriter
from mlflow_compress.tasks.suite import Suite

EXACT_TOKENS = 32  # longest answer of a short-generation task


def _exact_answers(loaded: LoadedModel, suite: Suite) -> Generations | None:
    """Generate the first line after every prompt of the exact-match tasks; None where the suite has none."""
    rows = []
    for task in suite.tasks:
        if task.family != "exact":
            continue
        prompts = task.items.column("prompt").tolist()
        texts = generate_until(loaded, prompts, until="\n", max_new_tokens=EXACT_TOKENS)
        for item_id, prompt, text in zip(task.items.column("item_id"), prompts, texts, strict=True):
            n_tokens = len(loaded.tokenizer(text, add_special_tokens=False)["input_ids"])
            row = {"task": task.name, "item_id": item_id, "turn": 0, "sample": 0, "prompt": prompt}
            rows.append({**row, "text": text, "n_tokens": n_tokens})
    return Generations.from_rows(rows) if rows else None


def measure(
    scorer: Scorer,
    suite: Suite,
    *,
    capture: StateWriter | None = None,
    baseline: StateStore | None = None,
    generations: bool = True,
    resume: Path | None = None,
) -> RunRecords:
    """Score a model on everything in the suite.

    Parameters
    ----------
    scorer : Scorer
        The model's scorer.
    suite : Suite
        Tasks and corpora.
    capture : StateWriter, optional
        Receives the head inputs at every scored position (baseline runs).
    baseline : StateStore, optional
        What a baseline run captured; distances are computed against it (variant and noise runs).
    generations : bool
        Whether the short-generation tasks are answered too.
    resume : Path, optional
        Where an interrupted measurement left its results.
    """
    scores, distances = scorer.score(suite.requests, capture=capture, baseline=baseline, resume=resume)
    tokens: list[TokenScores] = []
    token_distances: list[TokenDistances] = []
    for corpus in suite.corpora:
        found, moved = scorer.score_corpus(corpus.name, corpus.text, capture=capture, baseline=baseline, resume=resume)
        tokens.append(found)
        if moved is not None:
            token_distances.append(moved)
    return RunRecords(
        items=suite.items,
        option_scores=scores,
        option_distances=distances,
        token_scores=TokenScores.concat(tokens) if tokens else None,
        token_distances=TokenDistances.concat(token_distances) if token_distances else None,
        generations=_exact_answers(scorer.loaded, suite) if generations else None,
    )
