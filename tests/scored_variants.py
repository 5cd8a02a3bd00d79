"""Variants by hand, for the tests of the scoreboard."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mlflow_compress.decide.scoreboard import SERVING, ScoredVariant
from mlflow_compress.decide.separation import ItemScores
from mlflow_compress.records import MetricResult

VLLM = "vLLM 0.32.0 (eager)"


def scores(correct: Sequence[float], kl: Sequence[float], groups: Sequence[int] | None = None) -> ItemScores:
    """Return the scores of items that are numbered, each alone by default; the baseline has all of them right."""
    n = len(correct)
    return ItemScores(
        np.array(["task"] * n, dtype=object),
        np.array([str(i) for i in range(n)], dtype=object),
        np.asarray(correct, dtype=np.float64),
        np.asarray(kl, dtype=np.float64),
        1.0 - np.asarray(correct, dtype=np.float64),
        np.arange(n) if groups is None else np.asarray(groups),
    )


def variant(
    name: str,
    *,
    kl: float | None = None,
    size: float | None = None,
    more: dict[str, float] | None = None,
    **fields: Any,
) -> ScoredVariant:
    """Return a variant with these values; what is not given was not measured."""
    values = {**({} if kl is None else {"distance/kl_mean": kl}), **(more or {})}
    return ScoredVariant(
        name=name,
        method=fields.pop("method", name.partition("-")[0]),
        results={key: MetricResult(key, value, n=100) for key, value in values.items()},
        sizes={} if size is None else {"size/bytes": size},
        **fields,
    )


def served(name: str, kl: float, size: float, speedup: float, memory: float) -> ScoredVariant:
    """Return a variant that was timed in vLLM; its speedup has an interval, its memory has none."""
    decode, prefill, peak = SERVING
    one = variant(name, kl=kl, size=size, more={prefill: 1.1, peak: memory}, runtime=VLLM)
    ratio = MetricResult(decode, speedup, speedup - 0.1, speedup + 0.1, n=5)
    return replace(one, results={**one.results, decode: ratio})
