"""The parameters of blind ratings by people."""

from typing import Annotated, Literal

from pydantic import Field

from mlflow_compress.config.declarations import OptionalNames, OptionalText, Parameters, option


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
