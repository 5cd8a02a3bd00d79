"""Judges, their inputs and outputs, and their registry."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from mlflow_compress.config import JudgeSettings
from mlflow_compress.records import Generations, Instruction, Judgments, RunRecords
from mlflow_compress.registry import Registry
from mlflow_compress.transport.spending import Spending


@dataclass(frozen=True, kw_only=True)
class JudgeInputs:
    """Answers of both models to the same instructions."""

    instructions: Sequence[Instruction]
    graded: Mapping[str, Generations]  # One answer per turn of "baseline" and "variant", at MT-Bench's temperatures
    # Several sampled answers to each first turn, of "baseline", "variant" and "again": the baseline's second sample
    samples: Mapping[str, Generations]
    # Counts what all judges of the run spend, and holds their budget
    spending: Spending = field(default_factory=Spending)
    say: Callable[[str], None] = lambda line: None  # Shows a line to the user, such as what the judgments will cost
    # Greedy answers of "baseline" and "variant", and scores of both on the baseline's, if a judge is `Judge.greedy`
    greedy: Mapping[str, RunRecords] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class AnswerVectors:
    """Embedded answers of several models to the same instructions."""

    task: str  # Name of the instruction set
    item_ids: tuple[str, ...]  # The instructions, in the order of the first model's records
    # By model, as in `JudgeInputs.samples`; sample s of instruction i is ``vectors[model][i, s]``; shape (n, k, d)
    vectors: dict[str, npt.NDArray[np.float32]]
    encoder: str  # Name of the encoder, and the digest of everything that decides its vectors
    encoder_id: str


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Output of a judge. Metrics compute numbers from it; a judge computes none."""

    # Ratings of "baseline" and "variant"; by their column `task`, the judge's name, `rated_by(name)` finds them
    judgments: Mapping[str, Judgments] = field(default_factory=dict)
    vectors: AnswerVectors | None = None  # Embeddings of the sampled answers, for the similarity metrics
    # Further records of "baseline" and "variant", from which metrics are computed
    records: Mapping[str, RunRecords] = field(default_factory=dict)
    skipped: str | None = None  # Reason why the judge could not judge, as a sentence
    # Settings that reproduce the output; logged as the run's parameters
    parameters: Mapping[str, str] = field(default_factory=dict)
    # Numbers of judgments, and of those without a rating; logged as metrics, and added up over judges
    values: Mapping[str, float] = field(default_factory=dict)
    remarks: Sequence[str] = ()  # Sentences for the run's note
    failed: str | None = None  # Why the stage fails after everything else has been logged, as sentences


class _NoSettings(BaseModel):
    """The settings of a judge that declares none."""


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A way to compare or grade generated answers."""

    # Loads what the judge needs, or raises, before any answer is generated, and returns the function that judges. Paid
    # results may be stored in the folder.
    open: Callable[[Any, Path], Callable[[JudgeInputs], Judged]]
    settings: type[BaseModel] = _NoSettings  # What `open` gets: its fields are parameters of the judge command
    requires: str  # What the judge needs to run, in one sentence
    source: str  # The paper or program that defines it, and any deviation from it
    on_request: bool = False  # Whether it judges only if it is named: "all" leaves it out
    greedy: bool = False  # Whether it needs `JudgeInputs.greedy`


JUDGES: Registry[Judge] = Registry("judge", "mlflow_compress.judges", group="mlflow_compress.judges")


S = TypeVar("S", bound=BaseModel)


def declared_settings(kind: type[S], config: JudgeSettings) -> S:
    """Return the settings that a judge declares, from the parameters of the command."""
    values = config.values()
    if unknown := kind.model_fields.keys() - values.keys():
        raise TypeError(f"its settings declare {min(unknown)!r}, which is no parameter of the judge command")
    return kind(**{name: values[name] for name in kind.model_fields})


def open_judge(name: str, config: JudgeSettings, folder: Path) -> Callable[[JudgeInputs], Judged]:
    """Return the function that judges answers, which may store paid results in `folder`.

    What a plug-in raises, or returns wrongly, is an error that names the plug-in.
    """
    judge = JUDGES.get(name)
    with JUDGES.blaming(name):
        judging = judge.open(declared_settings(judge.settings, config), folder)
        if not callable(judging):
            raise TypeError(f"`open` returned {type(judging).__name__}, not a function")

    def judged(inputs: JudgeInputs) -> Judged:
        with JUDGES.blaming(name):
            output = judging(inputs)
            _check(output)
            return output

    return judged


def _check(judged: Judged) -> None:
    if not isinstance(judged, Judged):
        raise TypeError(f"it returned {type(judged).__name__}, not Judged")
    kinds = (("judgments", judged.judgments, Judgments), ("records", judged.records, RunRecords))
    for field_name, by_model, kind in kinds:
        for who, value in by_model.items():
            if who not in ("baseline", "variant") or not isinstance(value, kind):
                raise TypeError(
                    f"Judged.{field_name} holds {type(value).__name__} of {who!r}, not {kind.__name__} of 'baseline' "
                    "and 'variant'"
                )
    if judged.vectors is not None and not {"baseline", "again", "variant"} <= judged.vectors.vectors.keys():
        raise TypeError("Judged.vectors needs vectors of 'baseline', 'again' and 'variant'")


def chosen_judges(text: str) -> list[str]:
    """Return the names of the requested judges; "all" is every installed one that is not `Judge.on_request`."""
    names: list[str] = []
    for name in (part.strip() for part in text.split(",")):
        names += [n for n, judge in JUDGES.items() if not judge.on_request] if name == "all" else [name]
    for name in names:
        JUDGES.get(name)
    return list(dict.fromkeys(names))
