"""Which layer of a model BERTScore takes its token embeddings from."""

from __future__ import annotations

import json
from pathlib import Path


def bertscore_layer(name: str, folder: Path) -> int:
    """Return the layer.

    Parameters
    ----------
    name : str
        What the model is called. For names that `bert_score` knows ("roberta-large" is its default for English) the
        layer is the one its authors chose, for others the last.
    folder : Path
        Where the model lies.
    """
    from bert_score.utils import model2layers

    last = json.loads((folder / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    return int(model2layers.get(name, last))
