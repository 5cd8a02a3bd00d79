"""The commands that compare two evaluations and forecast from two, and the function that loads one."""

from dataclasses import replace
from os.path import isdir
from pathlib import Path
from typing import TYPE_CHECKING

from mlflow_compress.commands.command import Argument, PathOrText, StoreLike, path_text, register_command, store_of

if TYPE_CHECKING:
    from mlflow_compress.commands.compare.run import Comparison, Forecast
    from mlflow_compress.commands.evaluate.result import Evaluation


_SIDE = "run id, folder of Parquet records, harness samples_*.jsonl, or id/pred/gold JSONL"


@register_command(
    "compare",
    description="Compare two evaluations from their records or prediction files, without any model.",
    heading="look",
    place=18,
    project=False,
    arguments=(
        Argument(("baseline",), {"help": _SIDE}),
        Argument(("variant",), {"help": _SIDE}),
        Argument(("--json",), {"action": "store_true", "help": "print one JSON object"}),
    ),
)
def compare(
    baseline: "Evaluation | PathOrText", variant: "Evaluation | PathOrText", *, store: StoreLike = None
) -> "Comparison":
    """Return accuracy, flips and McNemar's test of two evaluations, from what they left on disk: no model is loaded.

    Parameters
    ----------
    baseline, variant : Evaluation, str or path
        What `evaluate` or `load` returned, a run id, a folder of Parquet records, a sample log of
        lm-evaluation-harness, or a JSONL file with ``{"id", "pred", "gold"}`` per line.
    store : path, optional
        The folder in which run ids are looked up in place of MLflow's tracking store.

    Raises
    ------
    AlignmentError
        The two answered other items, prompts, answer orders or few-shot examples.
    ConfigError, DataError
        A side cannot be found or read.

    Examples
    --------
    >>> same = mc.compare(found, found)
    >>> same["flips_pct"], same["mcnemar_p"]
    (0.0, 1.0)
    """
    from mlflow_compress.commands.compare.run import compare as compare_sources
    from mlflow_compress.commands.evaluate.result import Evaluation

    sides = (("baseline", baseline), ("variant", variant))
    left, right = (path_text(name, s.records_folder if isinstance(s, Evaluation) else s) for name, s in sides)
    found = compare_sources(left, right, store_of(store))
    first, second = (
        s.name if isinstance(s, Evaluation) else name for (_, s), name in zip(sides, found.names, strict=True)
    )
    return replace(found, names=(first, second))


def load(source: PathOrText, *, store: StoreLike = None) -> "Evaluation":
    """Return an evaluation that was made before.

    Parameters
    ----------
    source : str or path
        The id of an evaluate run, a baseline run or a main run; or a folder of Parquet records, whose metrics are
        computed now.
    store : path, optional
        The folder in which run ids are looked up in place of MLflow's tracking store.

    Raises
    ------
    ConfigError, TrackingError
        There is no such run or folder, or it holds no evaluation.

    Examples
    --------
    >>> again = mc.load(found.run.run_id, store=folder)
    >>> again.metrics == found.metrics
    True
    """
    from mlflow_compress.commands.compare.run import from_folder, from_run

    text = path_text("source", source)
    if isdir(text):  # noqa: PTH112 - False for a name that is too long, where Path raises
        return from_folder(Path(text))
    return from_run(text, store_of(store))


@register_command(
    "forecast",
    description="Predict how many answers of a variant flip on items that it was not run on, without any model.",
    heading="look",
    place=18,
    project=False,
    arguments=(
        Argument(("variant",), {"help": "run id of the variant's evaluation"}),
        Argument(("other",), {"help": "run id of an evaluation of the same baseline that has the items"}),
        Argument(("--json",), {"action": "store_true", "help": "print one JSON object"}),
    ),
)
def forecast(variant: "Evaluation | str", other: "Evaluation | str", *, store: StoreLike = None) -> "Forecast":
    """Return the flips to expect on items that a variant was not run on, by task, with intervals.

    They follow from how sure the baseline is of these items, and from how sure it was of those that the variant
    flipped. Nothing is loaded: the baseline has been scored on the items, beside another variant.

    Parameters
    ----------
    variant : Evaluation or str
        The variant's evaluation, or the id of its run.
    other : Evaluation or str
        An evaluation of the same baseline on other tasks: of another variant, or a run of the baseline.
    store : path, optional
        The folder in which run ids are looked up in place of MLflow's tracking store.

    Raises
    ------
    AlignmentError
        The two have other baselines.
    ConfigError, TrackingError
        A run cannot be found, or one of the two has no items that a forecast can be made from.

    Examples
    --------
    >>> mc.forecast(found, found)
    Traceback (most recent call last):
        ...
    mlflow_compress.errors.ConfigError: There is no item to forecast: the variant was run on all of them.
    """
    from mlflow_compress.commands.compare.run import forecast_of

    return forecast_of(*(load(x, store=store) if isinstance(x, str) else x for x in (variant, other)))
