"""The command that forecasts flips, from two evaluations of one baseline."""

from typing import TYPE_CHECKING

from mlflow_compress.commands.command import Argument, StoreLike, register_command

if TYPE_CHECKING:
    from mlflow_compress.commands.evaluate.result import Evaluation
    from mlflow_compress.commands.forecast.run import Forecast


@register_command(
    "forecast",
    about="Say how many answers of a variant will flip on items that it was not run on, without any model.",
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
    from mlflow_compress.commands.compare.command import load
    from mlflow_compress.commands.forecast.run import forecast_of

    return forecast_of(*(load(x, store=store) if isinstance(x, str) else x for x in (variant, other)))
