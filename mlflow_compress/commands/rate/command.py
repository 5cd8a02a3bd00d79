"""The commands for blind ratings by people."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from mlflow_compress.commands.command import (
    PathOrText,
    Positional,
    StoreLike,
    configured,
    opened_store,
    path_text,
    register_command,
)
from mlflow_compress.config.declarations import OptionalNames, OptionalText, Parameters, option

if TYPE_CHECKING:
    from mlflow_compress.commands.evaluate.result import AnswerEvaluation
    from mlflow_compress.commands.main.stages import VariantRun
    from mlflow_compress.commands.rate.run import BlindSheet, HumanRatings


class BlindConfig(Parameters):
    """Write both models' answers in hidden order for people to rate: a page, a CSV file, and the key apart."""

    run: OptionalText = option(None, "id of a main run or judge run")
    output: str = option("blind", "folder to write: for_raters/ is for raters, key.json is not")
    limit: int = option(0, "pairs of answers, drawn at random; 0 takes all", ge=0)
    seed: Annotated[int, Field(ge=0)] | Literal["auto"] = option(
        "auto", "seed of order and sides; 'auto' draws one that nobody can guess; it stands in the key"
    )


class RatingsConfig(Parameters):
    """Read raters' files with the key: win rate with interval, and how far raters agree."""

    files: OptionalNames = option(
        None, "CSV files of ratings, comma-separated; each is named like its rater", path="files"
    )
    key: str = option("blind/key.json", "key of the sheet", path="file")
    log: bool = option(False, "log the results to the rated run, as human/...")
    seed: int = option(42, "seed of the bootstrap", ge=0)


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
