"""Judges, their inputs and outputs, and their registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mlflow_compress.config import JudgeConfig
from mlflow_compress.records import Generations, Judgments, RunRecords
from mlflow_compress.registry import Registry
from mlflow_compress.transport.spending import Spending


class AskedInstruction(Protocol):
    """Interface of an instruction, as far as judges use it (`items.sources.instructions.Instruction`)."""

    @property
    def item_id(self) -> str:
        """The instruction's id."""

    @property
    def category(self) -> str:
        """Category of the instruction, such as those of MT-Bench."""

    @property
    def turns(self) -> Sequence[str]:
        """The user's message of each turn."""

    @property
    def reference(self) -> Sequence[str]:
        """Reference answers by turn; empty if there are none."""


@dataclass(frozen=True, kw_only=True)
class JudgeInputs:
    """Answers of both models to the same instructions.

    Attributes
    ----------
    instructions : sequence of AskedInstruction
    graded : mapping of str to Generations
        One answer per turn of "baseline" and "variant", at MT-Bench's temperatures.
    samples : mapping of str to Generations
        Several sampled answers to each first turn, of "baseline", "variant" and "again": a second, independent sample
        of the baseline.
    spending : Spending
        Counts what all judges of the run spend, and holds their budget.
    say : callable (line)
        Shows a line to the user, such as what the judgments will cost.
    greedy : mapping of str to RunRecords
        Greedy answers of "baseline" and "variant" as tokens, and scores of both on the baseline's; empty unless a judge
        asks for them (`Judge.greedy`).
    """

    instructions: Sequence[AskedInstruction]
    graded: Mapping[str, Generations]
    samples: Mapping[str, Generations]
    spending: Spending = field(default_factory=Spending)
    say: Callable[[str], None] = lambda line: None
    greedy: Mapping[str, RunRecords] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class AnswerVectors:
    """Embedded answers of several models to the same instructions.

    Attributes
    ----------
    task : str
        Name of the instruction set.
    item_ids : tuple of str, length n
        The instructions, in the order of the first model's records.
    vectors : dict of str to numpy.ndarray, shape (n, k, d)
        By model, as in `JudgeInputs.samples`; sample s of instruction i is ``vectors[model][i, s]``.
    encoder, encoder_id : str
        Name of the encoder, and the digest of everything that decides its vectors.
    """

    task: str
    item_ids: tuple[str, ...]
    vectors: dict[str, npt.NDArray[np.float32]]
    encoder: str
    encoder_id: str


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Output of a judge. Metrics compute numbers from it; a judge computes none.

    Attributes
    ----------
    judgments : mapping of str to Judgments
        Ratings of the answers of "baseline" and "variant"; their column `task` is the judge's name, by which a metric
        finds them (requirement "judgments:<name>").
    vectors : AnswerVectors, optional
        Embeddings of the sampled answers, for the similarity metrics.
    records : mapping of str to RunRecords
        Further records of "baseline" and "variant", from which metrics are computed.
    skipped : str, optional
        Reason why the judge could not judge, as a sentence.
    parameters : mapping of str to str
        Settings that reproduce the output; logged as the run's parameters.
    values : mapping of str to float
        Numbers of judgments, and of those without a rating; logged as metrics. Values that several judges give under
        one name are added up.
    remarks : sequence of str
        Sentences for the run's note.
    failed : str, optional
        Why the stage fails after everything else has been logged, as sentences.
    """

    judgments: Mapping[str, Judgments] = field(default_factory=dict)
    vectors: AnswerVectors | None = None
    records: Mapping[str, RunRecords] = field(default_factory=dict)
    skipped: str | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    remarks: Sequence[str] = ()
    failed: str | None = None


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A way to compare or grade generated answers.

    Attributes
    ----------
    open : callable (settings, folder) -> callable (JudgeInputs) -> Judged
        Called before any answer is generated. It loads what the judge needs, and raises an error if that is missing.
        The returned function judges the answers. The judge may store paid results in `folder`.
    requires : str
        What the judge needs to run, in one sentence.
    source : str
        The paper or program that defines it, and any deviation from it.
    on_request : bool
        Whether it judges only if it is named: "all" leaves it out.
    greedy : bool
        Whether it needs `JudgeInputs.greedy`.
    """

    open: Callable[[JudgeConfig, Path], Callable[[JudgeInputs], Judged]]
    requires: str
    source: str
    on_request: bool = False
    greedy: bool = False


JUDGES: Registry[Judge] = Registry("judge", "mlflow_compress.judges", group="mlflow_compress.judges")


def chosen_judges(asked: str) -> list[str]:
    """Return the names of the requested judges. An unknown name is a `ConfigError`.

    Parameters
    ----------
    asked : str
        Names separated by commas; "all" is every installed judge that is not `Judge.on_request`.
    """
    names: list[str] = []
    for name in (part.strip() for part in asked.split(",")):
        names += [n for n, judge in JUDGES.items() if not judge.on_request] if name == "all" else [name]
    for name in names:
        JUDGES.get(name)
    return list(dict.fromkeys(names))
