"""BERTScore of the variant's answers against the baseline's; optional, with a model of the user's choice."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mlflow_compress.errors import CheckpointError, DataError
from mlflow_compress.files import read_json
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import MetricKey, metric
from mlflow_compress.metrics.core.requirements import BERTSCORE_MODEL, GENERATIONS, VARIANT, package
from mlflow_compress.metrics.stats.arrays import Float, same_length
from mlflow_compress.metrics.text import answer_pairs
from mlflow_compress.records import MetricResult


def bert_score(references: Sequence[str], texts: Sequence[str], folder: str, layer: int) -> Float:
    """BERTScore F of each text against its reference, shape (n,), in [-1, 1]; 1 for equal texts.

    ``F = 2 P R/(P + R)``: R is the mean over the reference's tokens of the highest cosine similarity to any token of
    the text, P the same the other way round, over contextual embeddings; no idf weights, no rescaling.

    - `folder`: Of the embedding model. Values are comparable under the same model and layer only.

    Source: Zhang et al., "BERTScore: evaluating text generation with BERT", 2020; computed by the authors'
    `bert_score`.
    """
    from bert_score import BERTScorer

    if same_length(references=references, texts=texts) == 0:
        raise DataError("BERTScore needs at least one pair of texts")
    scorer = BERTScorer(model_type=folder, num_layers=layer)
    return np.asarray(scorer.score(list(texts), list(references))[2].double().numpy())


def authors_layer(name: str, folder: Path) -> int:
    """Return the layer whose outputs BERTScore uses.

    - `name`: What the model is called. For names that `bert_score` knows ("roberta-large" is its default for English)
      the layer is the one its authors chose, for others the last.

    Raises `CheckpointError`: when the folder has no configuration that tells the number of layers.
    """
    from bert_score.utils import model2layers

    path = folder / "config.json"
    config = read_json(path, error=CheckpointError) if path.is_file() else None
    last = config.get("num_hidden_layers") if isinstance(config, dict) else None
    if not isinstance(last, int) or isinstance(last, bool):
        raise CheckpointError(
            "Not a model that BERTScore can use",
            allowed="a folder with a config.json that has num_hidden_layers",
            got=str(folder),
        )
    return int(model2layers.get(name, last))


@metric(
    "bert_score",
    keys=(
        MetricKey.share(
            "judge/bert_score", "higher", "Mean BERTScore F of the variant's answers against the baseline's.", low=-1.0
        ),
    ),
    requires=(VARIANT, GENERATIONS, BERTSCORE_MODEL, package("bert_score")),
    source="bert_score 0.3.13, F without idf and without rescaling",
)
def bert_score_mean(inputs: MetricInputs) -> list[MetricResult]:
    """By task and pooled over all free answers; the bootstrap draws instructions, not samples or turns."""
    pairs = answer_pairs(inputs)
    model = inputs.settings.bertscore_model
    if pairs is None or model is None:
        return []
    scores = bert_score(pairs.references, pairs.texts, *model)
    return list(pairs.mean("judge/bert_score", scores, inputs))
