"""How similar the answers of several models are: ConSCompF's matrix, and its two principal components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.metrics.conscompf import Weighting, principal_components, similarity
from mlflow_compress.metrics.stats.arrays import Float


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
    """Return the mean similarity of every pair of models, shape (m, m).

    Parameters
    ----------
    models : sequence of array_like, shape (n, k, d)
        Embeddings of each model's answers to the same instructions; k may differ between models.
    weighting : {"equation4", "reference", "unweighted"}
        See `Similarity.per_instruction`; the authors' tables hold "reference".
    """
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

    Projected are the rows of the similarity matrix: a model is the vector of its similarities to all models, itself
    included. Columns are centred, not scaled. The coordinates are the scores on the first two principal components, as
    in the figure of the paper. So two models are near each other where they resemble the same models.

    Parameters
    ----------
    models : mapping of str to numpy.ndarray, shape (n, k, d)
        Embedded answers by model, row for row the same instructions; two models or more.
    encoder, left_out
        As in `ModelSimilarity`.

    Raises
    ------
    DataError
        There are fewer than two models.
    AlignmentError
        The models have answered different numbers of instructions.
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
