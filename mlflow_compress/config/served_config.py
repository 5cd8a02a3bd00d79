"""Parameters of models that a server computes: ``checkpoint=endpoint:http://127.0.0.1:8000/v1``."""

from __future__ import annotations

from typing import Literal

from mlflow_compress.config.declarations import Group, OptionalText, option

ENDPOINT = "endpoint:"
"""What the address of a served model begins with, where another model has a folder."""


class ServedConfig(Group):
    """Models that a server computes (checkpoint=endpoint:URL, model=endpoint:URL), and how it is called."""

    served_model: OptionalText = option(
        None, "with checkpoint=endpoint:http://host:port/v1: the model's name at that server"
    )
    baseline_served_model: OptionalText = option(None, "with model=endpoint:URL: the baseline's name at that server")
    tokenizer: OptionalText = option(
        None, "tokenizer of served models: a folder or a hub id; none: the baseline's", path="folder"
    )
    endpoint_chat: Literal["auto", "true", "false"] = option(
        "auto",
        "send conversations as chat completions; 'auto' does where the server's chat template reads as the baseline's",
    )
    endpoint_concurrency: int = option(16, "requests to a server of models at the same time", ge=1)
    endpoint_timeout: float = option(120.0, "seconds for one such request", gt=0)
    endpoint_max_retries: int = option(5, "retries of such a request that failed for a reason that may pass", ge=0)


def is_endpoint(model: str | None) -> bool:
    """Return whether a model is named by the address of the server that computes it."""
    return model is not None and model.startswith(ENDPOINT)
