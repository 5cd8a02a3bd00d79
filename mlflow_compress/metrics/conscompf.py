"""ConSCompF: similarity of two models' answers, weighted by the consistency of each model's own answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.metrics.core.estimates import Number, pooled
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import keys_of, metric
from mlflow_compress.metrics.core.requirements import EMBEDDINGS, GENERATIONS, VARIANT, package
from mlflow_compress.metrics.stats.arrays import Float, finite
from mlflow_compress.metrics.stats.correlation import pearson, spearman
from mlflow_compress.metrics.text import answer_pairs, rouge_l
from mlflow_compress.records import MetricResult

Weighting = Literal["equation4", "reference", "unweighted"]


@dataclass(frozen=True, kw_only=True)
class Similarity:
    """Per-instruction similarity and consistency of two models."""

    cosine: Float  # ``y_i``, cosine of the two mean embeddings; shape (n,)
    consistency_a: Float  # ``c_i`` of each model; shape (n,)
    consistency_b: Float

    @property
    def _consistency(self) -> Float:
        """``(c_a + c_b)/2`` per instruction, shape (n,)."""
        return (self.consistency_a + self.consistency_b) / 2.0

    def per_instruction(self, weighting: Weighting = "equation4") -> Float:
        """Return the weighted similarity per instruction, shape (n,).

        "equation4": ``y c + 1 - c``, the paper's. "reference": the same with ``c' = (c - min c)/(max c - min c)``, what
        the authors' code computes and their tables hold; where all consistencies are equal that divides by zero, and
        `c` stays as it is. "unweighted": ``y``.
        """
        c = self._consistency
        if weighting == "unweighted":
            return self.cosine
        if weighting == "reference" and c.max() > c.min():
            c = (c - c.min()) / (c.max() - c.min())
        return 1.0 - c * (1.0 - self.cosine)

    def mean(self, weighting: Weighting = "equation4") -> float:
        return float(self.per_instruction(weighting).mean())


def _unit(name: str, vectors: Float) -> Float:
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    if (norms == 0.0).any():
        raise DataError(f"{name} hold a zero vector, which has no direction")
    return np.asarray(vectors / norms, dtype=np.float64)


def consistency(embeddings: npt.ArrayLike) -> Float:
    """Mean cosine over the k(k-1)/2 pairs of a model's k answers to each instruction, shape (n,).

    ``sum over pairs of u_a . u_b = (|sum u|² - k)/2`` for unit vectors.

    - `embeddings` (n, k, d): Sentence embeddings, any length; k at least 2.
    """
    x = finite("embeddings", embeddings, ndim=3)
    k = x.shape[1]
    if k < 2:
        raise DataError("Consistency needs at least two answers per instruction", got=k)
    total = (_unit("embeddings", x).sum(axis=1) ** 2).sum(axis=-1)
    return np.asarray((total - k) / (k * (k - 1)), dtype=np.float64)


def similarity(a: npt.ArrayLike, b: npt.ArrayLike) -> Similarity:
    """Compare two models' answers to the same instructions.

    - `a`, `b` (n, k, d): Embeddings of each model's k answers; k may differ between the two.

    Source: Karev and Xu, "ConSCompF: Consistency-focused Similarity Comparison Framework for Generative Large Language
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


_key = keys_of("judge", low=-1.0, high=1.0, unit="cosine", unchanged=1.0, counted="instructions")
CONSCOMPF = _key(
    "similarity",
    "higher",
    "ConSCompF similarity of variant and baseline answers, equation 4.",
    label="Similarity of answers",
    headline=140,
    leaderboard=True,
    floor="judge/similarity_floor",
)
_UNWEIGHTED = _key("similarity_unweighted", "higher", "Mean cosine of the mean answer embeddings.")
_FLOOR = _key("similarity_floor", "neither", "The baseline against its own second sample, equation 4: the best value.")
_CONSISTENCY = _key("consistency", "neither", "Mean cosine among the model's own answers to an instruction.")
_CONSISTENCY_BASELINE = _key("consistency_baseline", "neither", "The baseline's consistency.")


@metric(
    "similarity",
    keys=(CONSCOMPF, _UNWEIGHTED, _FLOOR, _CONSISTENCY, _CONSISTENCY_BASELINE),
    requires=(VARIANT, EMBEDDINGS),
    source="ConSCompF, equation 4; the authors' rescaled weighting is `per_instruction('reference')`",
)
def conscompf(inputs: MetricInputs) -> list[MetricResult]:
    """Similarity with its floor; over instructions, the studentised bootstrap's interval of the distance from 1.

    Most similarities are near 1 and a few far below: their distances from 1 are skewed as divergences are.
    """
    given = inputs.embeddings
    if given is None or given.variant is None:
        return []
    similar = similarity(given.baseline, given.variant)
    values = {
        CONSCOMPF: similar.per_instruction("equation4"),
        _UNWEIGHTED: similar.cosine,
        _CONSISTENCY: similar.consistency_b,
        _CONSISTENCY_BASELINE: similar.consistency_a,
    }
    if given.baseline_again is not None:
        values[_FLOOR] = similarity(given.baseline, given.baseline_again).per_instruction("equation4")
    estimates = {}
    for key, x in values.items():
        distance = np.where(np.isclose(x, 1.0, rtol=0.0, atol=1e-12), 0.0, 1.0 - x)  # equal answers but for rounding
        far = inputs.settings.skewed_interval(distance)
        interval = None if far is None else (1.0 - far.high, 1.0 - far.low)
        estimates[key] = Number(float(x.mean()), len(x), interval=interval)
    return pooled(inputs, estimates)


_rouge_key = keys_of("judge", low=-1.0, high=1.0, unit="correlation")
_ROUGE = {
    name.lower(): _rouge_key(
        f"similarity_rouge_{name.lower()}",
        "neither",
        f"{name} correlation of similarity (equation 4) and 1 - ROUGE-L over instructions.",
    )
    for name in ("Pearson", "Spearman")
}


@metric(
    "similarity_rouge",
    keys=tuple(_ROUGE.values()),
    requires=(VARIANT, EMBEDDINGS, GENERATIONS, package("rapidfuzz")),
    source="ConSCompF, correlation with ROUGE-L differences, here between the two models' own answers",
)
def similarity_rouge(inputs: MetricInputs) -> list[MetricResult]:
    """Over instructions that have both: near -1 where the two agree; nothing where either does not vary.

    The paper takes the difference of two models' ROUGE-L against reference answers, over pairs of models. For one
    variant the difference is ``1 - ROUGE-L`` of variant against baseline, which needs no reference. Pearson's interval
    is a bootstrap over instructions, Spearman's Bonett and Wright's.
    """
    pairs, given, s = answer_pairs(inputs), inputs.embeddings, inputs.settings
    if pairs is None or given is None or given.variant is None:
        return []
    scores, items = rouge_l(pairs.references, pairs.texts), pairs.item_id
    first = (pairs.turn == 0) & (pairs.task == given.task)
    # Of the models' first answers to each instruction, mean over samples
    differences = {str(i): 1.0 - float(scores[first & (items == i)].mean()) for i in np.unique(items[first])}
    rows = np.array([row for row, i in enumerate(given.item_ids) if i in differences], dtype=np.int64)
    if not len(rows):
        return []
    x: Float = similarity(given.baseline, given.variant).per_instruction("equation4")[rows]
    y = np.array([differences[given.item_ids[row]] for row in rows])
    overlaps = {
        "pearson": pearson(x, y, level=s.level, resamples=s.resamples, seed=s.seed, method=s.method),
        "spearman": spearman(x, y, level=s.level),
    }
    left = len(given.item_ids) - len(rows)
    estimates = {
        _ROUGE[name]: Number(one.value, one.n, left, one.interval) for name, one in overlaps.items() if one is not None
    }
    return pooled(inputs, estimates)


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelSimilarity:
    """The similarity of every pair of models, and where that places each of them."""

    names: tuple[str, ...]  # The models
    # Mean over instructions of ConSCompF's similarity, equation 4; symmetric, with ones on the diagonal; shape (m, m)
    values: Float
    coordinates: Float  # The models' places on the first two principal components: see `model_similarity`; shape (m, 2)
    # Share of the variance that each of the two components holds; None where all models are equally alike
    shares: tuple[float, float] | None
    n_instructions: int  # Instructions, and answers of a model to each
    n_samples: int
    encoder: str = ""  # Name of the encoder that all answers were embedded by
    # Variants that are not compared, and why, as the end of a sentence
    left_out: Mapping[str, str] = field(default_factory=dict)


def similarity_matrix(models: Sequence[npt.ArrayLike], weighting: Weighting = "equation4") -> Float:
    """Return the mean similarity of every pair of models, shape (m, m), from embeddings of shape (n, k, d) each."""
    matrix = np.eye(len(models))
    for i, one in enumerate(models):
        for j in range(i):
            matrix[i, j] = matrix[j, i] = similarity(one, models[j]).mean(weighting)
    return matrix


def model_similarity(
    models: Mapping[str, npt.NDArray[np.floating]],
    *,
    encoder: str = "",
    left_out: Mapping[str, str] | None = None,
) -> ModelSimilarity:
    """Return the similarity of every pair of models, and the models as points in a plane.

    Projected are the rows of the similarity matrix, centred and not scaled, as in the figure of the paper: models are
    near each other where they resemble the same models.

    - `models` (n, k, d): Embedded answers by model, row for row the same instructions; two models or more.
    """
    if len(models) < 2:
        raise DataError("A similarity needs at least two models", got=len(models))
    shapes = {np.shape(vectors)[:2] for vectors in models.values()}
    if len({n for n, _ in shapes}) != 1:
        raise AlignmentError("The models answered different numbers of instructions", got=sorted(shapes))
    matrix = similarity_matrix(list(models.values()))
    every = principal_components(matrix, len(matrix))
    variance = (every**2).sum(axis=0)
    total = float(variance.sum())
    # Rounding leaves a trace of variance between models that are all equally alike.
    shares = (float(variance[0] / total), float(variance[1] / total)) if total > 1e-20 else None
    n, k = min(shapes)
    return ModelSimilarity(
        names=tuple(models),
        values=matrix,
        coordinates=every[:, :2] if shares is not None else np.zeros((len(matrix), 2)),
        shares=shares,
        n_instructions=n,
        n_samples=k,
        encoder=encoder,
        left_out=dict(left_out or {}),
    )
