"""The parameters of a report."""

from typing import Literal

from mlflow_compress.config.declarations import OptionalNames, OptionalText, Parameters, option


class ReportConfig(Parameters):
    """The report: one page over the variants of an evaluation, or its tables for a pull request."""

    runs: OptionalNames = option(None, "ids of main runs of one evaluation, comma-separated, or that of a sweep's run")
    output: str = option("report.html", "file to write: .html, .md, .csv or .json")
    policy: OptionalText = option(
        None, "YAML file of the policy that chooses; none: the default policy of promote", path="file"
    )
    format: Literal["auto", "html", "md", "csv", "json"] = option(
        "auto", "format of the file; 'auto': by the file name"
    )
