"""The commands for blind ratings by people."""

from typing import TYPE_CHECKING, Any

from mlflow_compress.commands.command import (
    PathOrText,
    Positional,
    StoreLike,
    configured,
    opened_store,
    path_text,
    register_command,
)
from mlflow_compress.commands.rate.parameters import BlindConfig, RatingsConfig

if TYPE_CHECKING:
    from mlflow_compress.commands.evaluate.result import AnswerEvaluation
    from mlflow_compress.commands.main.stages import VariantRun
    from mlflow_compress.commands.rate.run import BlindSheet, HumanRatings


@register_command(
    "blind",
    BlindConfig,
    place=13,
    positional=Positional("run", "RUN", "a main run or a judge run"),
    short={"output": "-o"},
)
def blind(
    run: "AnswerEvaluation | VariantRun | str | None" = None, *, store: StoreLike = None, **parameters: Any
) -> "BlindSheet":
    """Return a blind sheet: both models' answers in hidden order, for people to rate.

    Parameters
    ----------
    run : AnswerEvaluation, VariantRun or str
        What `judge` or `run` returned, or the id of its run.
    store : path, optional
        The folder in which the run is looked up in place of MLflow's tracking store.
    **parameters

    Raises
    ------
    ConfigError
        There is no such run with answers, or the folder has something in it.
    DataError
        All answers are identical.

    Examples
    --------
    >>> sheet = mc.blind(answers, output=folder / "blind", store=folder)
    >>> sorted(path.name for path in sheet.for_raters.iterdir())
    ['answers.csv', 'rate.html']
    """
    from mlflow_compress.commands.evaluate.result import Measurement

    if isinstance(run, Measurement):
        run = run.run.run_id if run.run else None
    config = configured(BlindConfig, {"run": run, **parameters}, store)
    from mlflow_compress.commands.rate.run import run_blind

    return run_blind(config, opened_store(store, config))


@register_command(
    "ratings",
    RatingsConfig,
    place=14,
    positional=Positional("files", "FILE", "CSV files, one per rater"),
)
def ratings(*files: PathOrText, store: StoreLike = None, **parameters: Any) -> "HumanRatings":
    """Return what raters prefer: the variant's win rate with its interval, and how far the raters agree.

    Parameters
    ----------
    *files : str or path
        One CSV file per rater, as the page saves it or a spreadsheet does; its name is the rater's.
    store : path, optional
        The folder that holds the rated run in place of MLflow's tracking store.
    **parameters

    Raises
    ------
    ConfigError
        A file, or the key, is not there.
    DataError
        A row has an unknown id or choice, or is there twice: every such row is named.

    Examples
    --------
    >>> table = sheet.for_raters / "answers.csv"
    >>> _ = (folder / "anna.csv").write_bytes(table.read_bytes().replace(b",\\r\\n", b",tie\\r\\n"))
    >>> mc.ratings(folder / "anna.csv", key=sheet.key, store=folder)["human/win_rate"].value
    0.5
    """
    values = {"files": ",".join(path_text("files", file) for file in files), **parameters} if files else parameters
    config = configured(RatingsConfig, values)
    from mlflow_compress.commands.rate.run import run_ratings

    return run_ratings(config, opened_store(store, config))
