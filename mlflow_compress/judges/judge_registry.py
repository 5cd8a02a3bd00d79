"""What a judge is, and the registry that holds every one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mlflow_compress.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A way to compare or grade generated answers, and what a person should know before trusting it.

    Attributes
    ----------
    config : type
        Its frozen configuration class.
    produces : {"embeddings", "judgments"}
        Answer vectors for the similarity metrics, or `Judgments` records.
    needs : str
        What must be there before it can run, in one sentence.
    source : str
        The paper or program that defines it, and any deviation from it.
    """

    config: type
    produces: Literal["embeddings", "judgments"]
    needs: str
    source: str


JUDGES: Registry[Judge] = Registry("judge", "mlflow_compress.judges", group="mlflow_compress.judges")
