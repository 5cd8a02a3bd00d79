"""The parameters of the command that does again what did not end."""

from mlflow_compress.config.declarations import Parameters, option


class ResumeConfig(Parameters):
    """Repeat commands that were killed or lost the tracking server; finished work is reused from disk."""

    dry_run: bool = option(False, "only list the unfinished commands")
