"""ConSCompF: similarity of two models' answers, weighted by the consistency of each model's own answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import DataError
from mlflow_compress.metrics.core.estimates import Mean, pooled
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, Direction, MetricKey, metric
from mlflow_compress.metrics.core.requirements import EMBEDDINGS, VARIANT
from mlflow_compress.metrics.stats.arrays import Float, finite
from mlflow_compress.records import MetricResult

Weighting = Literal["equation4", "reference", "unweighted"]


@dataclass(frozen=True, kw_only=True)
class Similarity:
    """Per-instruction similarity and consistency of two models."""

    cosine: Float  # ``y_i``, cosine of the two mean embeddings; shape (n,)
    consistency_a: Float  # ``c_i`` of each model; shape (n,)
    consistency_b: Float

    @property
    def consistency(self) -> Float:
        """``(c_a + c_b)/2`` per instruction, shape (n,)."""
        return (self.consistency_a + self.consistency_b) / 2.0

    def per_instruction(self, weighting: Weighting = "equation4") -> Float:
        """Return the weighted similarity per instruction, shape (n,).

        "equation4": ``y c + 1 - c``, the paper's. "reference": the same with ``c' = (c - min c)/(max c - min c)``, what
        the authors' code computes and their tables hold; where all consistencies are equal that divides by zero, and
        `c` stays as it is. "unweighted": ``y``.
        """
        c = self.consistency
        if weighting == "unweighted":
            return self.cosine
        if weighting == "reference" and c.max() > c.min():
            c = (c - c.min()) / (c.max() - c.min())
        return 1.0 - c * (1.0 - self.cosine)

    def mean(self, weighting: Weighting = "equation4") -> float:
        """Return the mean over instructions of `per_instruction`."""
        return float(self.per_instruction(weighting).mean())


def _unit(name: str, vectors: Float) -> Float:
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    if (norms == 0.0).any():
        raise DataError(f"{name} hold a zero vector, which has no direction")
    return np.asarray(vectors / norms, dtype=np.float64)


def consistency(embeddings: npt.ArrayLike) -> Float:
    """Mean cosine over the k(k-1)/2 pairs of a model's k answers to each instruction, shape (n,).

    ``sum over pairs of u_a . u_b = (|sum u|² - k)/2`` for unit vectors.

    Parameters
    ----------
    embeddings : array_like, shape (n, k, d)
        Sentence embeddings, any length; k at least 2.
    """
    x = finite("embeddings", embeddings, ndim=3)
    k = x.shape[1]
    if k < 2:
        raise DataError("Consistency needs at least two answers per instruction", got=k)
    total = (_unit("embeddings", x).sum(axis=1) ** 2).sum(axis=-1)
    return np.asarray((total - k) / (k * (k - 1)), dtype=np.float64)


def similarity(a: npt.ArrayLike, b: npt.ArrayLike) -> Similarity:
    """Compare two models' answers to the same instructions.

    Parameters
    ----------
    a, b : array_like, shape (n, k, d)
        Embeddings of each model's k answers; k may differ between the two.

    References
    ----------
    Karev and Xu, "ConSCompF: Consistency-focused Similarity Comparison Framework for Generative Large Language
    Models", equation 4. The published code rescales the consistency first (`Similarity.per_instruction`).
    """
    x, y = finite("embeddings of a", a, ndim=3), finite("embeddings of b", b, ndim=3)
    if (x.shape[0], x.shape[2]) != (y.shape[0], y.shape[2]):
        raise DataError("Both models need embeddings of the same instructions and size", got=f"{x.shape}, {y.shape}")
    mean_x, mean_y = _unit("mean embeddings", x.mean(axis=1)), _unit("mean embeddings", y.mean(axis=1))
    return Similarity(cosine=(mean_x * mean_y).sum(axis=-1), consistency_a=consistency(x), consistency_b=consistency(y))


def principal_components(matrix: npt.ArrayLike, n_components: int = 2) -> Float:
    """Return 2-d coordinates of models from the rows of a similarity matrix by PCA, shape (m, n_components).

    The sign of each component is fixed so that its largest entry is positive, which makes plots repeatable.
    """
    x = finite("similarity matrix", matrix, ndim=2)
    if not 1 <= n_components <= min(x.shape):
        raise DataError("n_components must lie between 1 and the number of models", got=n_components)
    u, s, _ = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
    scores = u[:, :n_components] * s[:n_components]
    peak = np.abs(scores).argmax(axis=0)
    signs = np.where(scores[peak, np.arange(n_components)] < 0.0, -1.0, 1.0)
    return np.asarray(scores * signs, dtype=np.float64)


def _key(name: str, direction: Direction, meaning: str, **more: Any) -> MetricKey:
    return MetricKey(
        name=f"judge/{name}",
        direction=direction,
        low=-1.0,
        high=1.0,
        unit="cosine",
        meaning=meaning,
        unchanged=1.0,
        counted="instructions",
        **more,
    )


SIMILARITY = _key(
    "similarity",
    "higher",
    "ConSCompF similarity of variant and baseline answers, equation 4.",
    label="Similarity of answers",
    headline=140,
    leaderboard=True,
    floor="judge/similarity_floor",
)
UNWEIGHTED = _key("similarity_unweighted", "higher", "Mean cosine of the mean answer embeddings.")
FLOOR = _key("similarity_floor", "neither", "The baseline against its own second sample, equation 4: the best value.")
CONSISTENCY = _key("consistency", "neither", "Mean cosine among the model's own answers to an instruction.")
CONSISTENCY_BASELINE = _key("consistency_baseline", "neither", "The baseline's consistency.")


@METRICS.register("similarity")
@metric(
    keys=(SIMILARITY, UNWEIGHTED, FLOOR, CONSISTENCY, CONSISTENCY_BASELINE),
    requires=(VARIANT, EMBEDDINGS),
    source="ConSCompF, equation 4; the authors' rescaled weighting is `per_instruction('reference')`",
)
def conscompf(inputs: MetricInputs) -> list[MetricResult]:
    """Similarity with its floor; bootstrap over instructions."""
    given = inputs.embeddings
    if given is None or given.variant is None:
        return []
    found = similarity(given.baseline, given.variant)
    values = {
        SIMILARITY: found.per_instruction("equation4"),
        UNWEIGHTED: found.cosine,
        CONSISTENCY: found.consistency_b,
        CONSISTENCY_BASELINE: found.consistency_a,
    }
    if given.baseline_again is not None:
        values[FLOOR] = similarity(given.baseline, given.baseline_again).per_instruction("equation4")
    return pooled(inputs, {key: Mean(of_instruction) for key, of_instruction in values.items()})
