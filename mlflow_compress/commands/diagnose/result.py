"""Where a variant's movement comes from."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlflow_compress.commands.shared.tabular import Tabular, lines_of_run
from mlflow_compress.config import EMBEDDED
from mlflow_compress.metrics.diagnosis import GroupMove, GroupsFound, ShownText
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.diagnosis_page import control_rows, diagnosis_sentence, group_row, groups_table
from mlflow_compress.reporting.tables import Table
from mlflow_compress.tracking.store import RunLink

_GROUPS_SHOWN = 10  # in a terminal


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Which groups of weights to keep at more bits, and the recipe that does."""

    keep: tuple[str, ...]  # Their names
    share: float  # Of the sum of all groups' KL
    weights: float  # Of the weights of all groups
    kept_as: str  # "at 8 bits", "as they are"
    recipe: Path | None = None  # File of a recipe for the method `mixed`
    calibration: str = ""  # What the command says besides
    no_recipe: str | None = None  # Why there is none

    @property
    def text(self) -> str:
        if not self.keep:
            return "Its linear layers carry less than half of the movement, so more bits for them would not help."
        groups = self.keep[0] if len(self.keep) == 1 else f"{', '.join(self.keep[:-1])} and {self.keep[-1]}"
        shares = f"{100 * self.weights:.2g} % of the weights carry {100 * self.share:.0f} % of what the groups move"
        recipe = f" No recipe is written: {self.no_recipe}." if self.no_recipe else ""
        return f"Keep {groups} {self.kept_as}: {shares}.{recipe}"

    def command(self, model: str) -> str | None:
        """The command that makes, evaluates and judges the variant; None where there is no recipe."""
        if self.recipe is None:
            return None
        named = "" if model == EMBEDDED else f" --model {shlex.quote(model)}"
        recipe = shlex.quote(f"recipe={self.recipe}")
        return f"mlflow-compress main{named} --method mixed --method_args {recipe}{self.calibration}"


@dataclass(frozen=True, kw_only=True)
class Diagnosis(Tabular):
    """Where a variant's movement comes from: each group of weights alone, and the text on which it moves."""

    # The variant's short name, and its baseline's
    name: str
    baseline: str
    model: str  # The baseline, as it was given
    checkpoint: str  # Folder of the variant
    results: GroupsFound  # Every group of weights, the whole variant, and the controls
    advice: Advice
    unchanged: tuple[str, ...]  # Groups whose weights are the baseline's
    # KL of the whole variant by position in the text, by class of the predicted token, and by task and category of
    # items
    positions: tuple[MetricResult, ...]
    classes: tuple[MetricResult, ...]
    categories: tuple[MetricResult, ...]
    texts: tuple[ShownText, ...]  # The texts that moved most
    # Why every layer was computed for every group; None where only the layers behind a swap were
    whole_model_reason: str | None
    seconds: float  # How long the measuring took
    records_folder: Path  # The distances of every swap at every token (`swap_distances.parquet`)
    run: RunLink

    def __getitem__(self, name: str) -> GroupMove:
        """Return one group by its name: "layers.3.qkv". An unknown name is a `KeyError`."""
        by_name = {group.name: group for group in self.results.groups}
        return by_name[name]

    @property
    def summary(self) -> str:
        return diagnosis_sentence(self.name, self.results)

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        return [group_row(group) for group in self.results.groups]

    def table(self) -> Table:
        return groups_table(self.results)

    def to_dict(self) -> dict[str, Any]:
        names = ("name", "baseline", "checkpoint", "unchanged", "whole_model_reason", "seconds")
        parts = ("positions", "classes", "categories")
        return {
            **{name: getattr(self, name) for name in names},
            "groups": list(self.to_rows()),
            "advice": {**asdict(self.advice), "recipe": self.advice.recipe and self.advice.recipe.name},
            "whole": _result_values(self.results.whole),
            "together": _result_values(self.results.together),
            "no_swap": self.results.no_swap,
            "sum_of_parts": self.results.sum_of_parts,
            "additivity": _result_values(self.results.additivity),
            "noise_ratio": _result_values(self.results.noise_ratio),
            **{part: [_result_values(result) for result in getattr(self, part)] for part in parts},
            "texts": [asdict(text) for text in self.texts],
            "run": asdict(self.run),
        }

    def as_text(self) -> str:
        lines = [self.summary, "", *self.table().only("group", "kl", "against_noise").lines()]
        if (more := len(self.results.groups) - _GROUPS_SHOWN) > 0:
            lines[-more:] = [f"({more} more in groups.csv)"]
        lines += ["", *(f"{name}: {value}" for name, value in control_rows(self.results))]
        command = self.advice.command(self.model)
        lines += ["", self.advice.text, *([] if command is None else [f"  {command}"])]
        return "\n".join([*lines, "", *lines_of_run(self.run)])


def _result_values(result: MetricResult | None) -> dict[str, Any] | None:
    """Return a result as plain values."""
    if result is None:
        return None
    names = ("value", "low", "high", "level", "n", "n_unscored", "task", "category")
    return {name: getattr(result, name) for name in names}
