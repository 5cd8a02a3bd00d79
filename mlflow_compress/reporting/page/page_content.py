"""What the page over variants shows, before it becomes HTML, Markdown, CSV or JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlflow_compress.decide.promotion import Decision
from mlflow_compress.decide.scoreboard import Scoreboard
from mlflow_compress.metrics.model_similarity import ModelSimilarity
from mlflow_compress.records import Generations, Items, Judgments, MetricResult
from mlflow_compress.reporting.page.explorer import VariantChanges


@dataclass(frozen=True, kw_only=True, eq=False)
class PageVariant:
    """One variant that has results.

    Attributes
    ----------
    name : str
        As in the scoreboard.
    verdict : str
        What was found, in one sentence.
    run_id, address : str
        Its main run, and the address that shows the run in MLflow.
    results : sequence of MetricResult
        Every result, also by task and category.
    settings : mapping of str to str
        How it was made: the parameters in which variants differ.
    changes : VariantChanges or None
        Its changed answers; None where the evaluation has corpora only.
    answers : Generations or None
        What it answered to the instructions; None where no judge stage ran on the instructions of the page.
    grades : Judgments or None
        A judge's grades of these answers.
    """

    name: str
    verdict: str
    run_id: str
    address: str
    results: Sequence[MetricResult] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    changes: VariantChanges | None = None
    answers: Generations | None = None
    grades: Judgments | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class PageContent:
    """Everything that the page shows.

    Attributes
    ----------
    board : Scoreboard
        The variants side by side, and which of them can be told apart.
    decision : Decision
        What a promotion policy says; nothing is promoted.
    policy : str
        The policy in words: "the default policy".
    objective : {"size", "kl", "speed", "utility"}
        What the policy ranks by.
    gates : sequence of str
        Its gates in words.
    variants : sequence of PageVariant
        In the order of the scoreboard.
    items : Items or None
        The baseline's items; None where the evaluation has corpora only.
    answers : Generations or None
        What the baseline answered to the instructions.
    grades : Judgments or None
        A judge's grades of these answers.
    similarity : ModelSimilarity or None
        How similar the answers of baseline and variants are; None where no judge stage embedded them.
    setup : mapping
        How it was measured; values may be nested.
    notes : sequence of str
        What the page leaves out, and why.
    """

    board: Scoreboard
    decision: Decision
    policy: str
    objective: str
    gates: Sequence[str]
    variants: Sequence[PageVariant]
    items: Items | None = None
    answers: Generations | None = None
    grades: Judgments | None = None
    similarity: ModelSimilarity | None = None
    setup: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def title(self) -> str:
        """Title of the page."""
        n = len(self.board.rows)
        return f"{n} {'variant' if n == 1 else 'variants'} of {self.board.baseline}"

    @property
    def changes(self) -> dict[str, VariantChanges]:
        """The changed answers of the variants that have any items, by name."""
        return {v.name: v.changes for v in self.variants if v.changes is not None}
