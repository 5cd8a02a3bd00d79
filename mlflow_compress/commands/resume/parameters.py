"""The parameters of the command that does again what did not end."""

from mlflow_compress.config.declarations import Parameters, option


class ResumeConfig(Parameters):
    """Do again what was killed, or was cut off from the tracking server; what is computed is found on disk."""

    dry_run: bool = option(False, "list the commands that did not end, and do nothing")
