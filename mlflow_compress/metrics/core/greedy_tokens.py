"""Greedy answers of two models to the same prompts: where they part, and both models' scores on the baseline's answer.

The names are those of the divergent token metrics: Deiseroth et al., "Divergent Token Metrics: Measuring degradation to
prune away LLM components - and optimize quantization", arXiv 2311.01544.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.requirements import GREEDY_ANSWERS, GREEDY_DISTANCES, GREEDY_SCORES, VARIANT
from mlflow_compress.metrics.core.token_groups import check_same_targets, matched, token_groups
from mlflow_compress.metrics.stats.arrays import Bool, Float, Int, finite
from mlflow_compress.records import TokenAnswers, TokenScores, align

REQUIRES = (VARIANT, GREEDY_ANSWERS, GREEDY_SCORES, GREEDY_DISTANCES)
SOURCE = "Divergent Token Metrics, arXiv 2311.01544"


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Return the index of the first token that differs, or that only one of the two has; None where both are equal."""
    shared = min(len(ours), len(theirs))
    for index in range(shared):
        if ours[index] != theirs[index]:
            return index
    return None if len(ours) == len(theirs) else shared


@dataclass(frozen=True)
class Forks:
    """Where the variant's greedy answers leave those of the baseline; every array has shape (n_answers,)."""

    time: Int  # Number of the first token that differs, counted from 1. Of equal answers, the number of their tokens.
    differs: Bool  # Whether the two answers differ. Of equal ones it is only known that they last beyond `time`.


def forks(inputs: MetricInputs) -> Forks:
    """Return where the answers part, in the order of the baseline's records.

    Raises
    ------
    AlignmentError
        When the models answered different instructions, or read different prompts.
    """
    assert inputs.baseline.greedy_answers is not None and inputs.variant is not None  # `requires` has been checked
    assert inputs.variant.greedy_answers is not None
    ours, theirs = inputs.baseline.greedy_answers, inputs.variant.greedy_answers
    theirs = type(theirs)(theirs.table.take(pa.array(align(ours, theirs))))
    prompts = zip(ours.table.column("prompt_tokens"), theirs.table.column("prompt_tokens"), strict=True)
    for row, (prompt, other) in enumerate(prompts):
        if prompt != other:
            raise AlignmentError(
                "Baseline and variant answered different prompts",
                got=str(ours.key_rows()[row]),
                fix="Generate both with the same instructions and prompt format",
            )
    tokens = [answers.table.column("tokens").to_pylist() for answers in (ours, theirs)]
    first = [first_difference(a, b) for a, b in zip(*tokens, strict=True)]
    time = [len(a) if fork is None else fork + 1 for a, fork in zip(tokens[0], first, strict=True)]
    return Forks(np.array(time, dtype=np.int64), np.array([fork is not None for fork in first], dtype=bool))


@dataclass(frozen=True)
class AnswerPlaces:
    """Which answer each scored token belongs to, and where it is in it; every array has shape (n_tokens,)."""

    answer: Int  # Row of the answer in the records of answers
    index: Int  # Place in the answer, from 0


def answer_places(answers: TokenAnswers, scores: TokenScores) -> AnswerPlaces:
    """Return the place of each scored token in the answer that it belongs to.

    Raises
    ------
    DataError
        When the scores are not those of every token of these answers.
    """
    token_groups(scores)  # refuses repeated tokens
    row_of = {window: row for row, window in enumerate(answers.windows())}
    windows = scores.column("item_id")
    if missing := sorted(set(windows) ^ set(row_of)):
        raise DataError("Answers and their scores do not belong together", got=missing[:3])
    answer = np.array([row_of[window] for window in windows], dtype=np.int64)
    n_prompt, n_tokens = (
        np.array([len(row) for row in answers.table.column(name).to_pylist()], dtype=np.int64)
        for name in ("prompt_tokens", "tokens")
    )
    index = scores.column("position").astype(np.int64) - n_prompt[answer]
    if (index < 0).any() or (np.bincount(answer, minlength=len(n_tokens)) != n_tokens).any():
        raise DataError("The scores are not those of every token of the answers")
    return AnswerPlaces(answer, index)


@dataclass(frozen=True)
class ForcedTokens:
    """Both models on every token of the baseline's greedy answers; every array has shape (n_tokens,)."""

    places: AnswerPlaces
    kl: Float  # ``KL(P_b || P_q)`` in nats
    divergent: Bool  # Whether the variant's most probable token, or the baseline's own, is not the token of the answer
    divergent_baseline: Bool


def forced_tokens(inputs: MetricInputs) -> ForcedTokens:
    """Return what both models make of the baseline's greedy answers under teacher forcing."""
    run, variant = inputs.baseline, inputs.variant
    assert run.greedy_answers is not None and run.greedy_scores is not None  # `requires` has been checked
    assert variant is not None and variant.greedy_scores is not None and variant.greedy_distances is not None
    ours = run.greedy_scores
    check_same_targets(ours, variant.greedy_scores)
    target = ours.column("target")
    return ForcedTokens(
        answer_places(run.greedy_answers, ours),
        finite("the KL of greedy answers", matched(ours, variant.greedy_distances, "kl")),
        matched(ours, variant.greedy_scores, "argmax") != target,
        ours.column("argmax") != target,
    )
