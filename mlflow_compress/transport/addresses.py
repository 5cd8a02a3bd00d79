"""Addresses with user and password: they reach the stages by the environment, and are recorded nowhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from mlflow_compress.config import JudgeSettings
from mlflow_compress.errors import ConfigError
from mlflow_compress.transport.endpoint import shown_url

SERVED_VARIABLE = "ENDPOINT_BASE_URL"
"""Environment variable with the whole address of a server of models, whose user and password no run may show."""

VARIABLES = {"judge_base_url": "OPENAI_BASE_URL", "encoder_base_url": "ENCODER_BASE_URL"}
"""Parameters that hold an address, and the environment variable of each."""


def whole_address(parameter: str, value: str) -> str:
    """Return an address with the user and password that its environment variable may add to it."""
    there = os.environ.get(VARIABLES[parameter], "").strip()
    return there if there and value == shown_url(there) else value


def check_served_address(parameter: str, address: str) -> None:
    """Refuse the address of a server of models with user, password or query, before it is noted anywhere."""
    if address != shown_url(address):
        recorded = ", and delete this run, which `mlflow run` has made with it" if "MLFLOW_RUN_ID" in os.environ else ""
        raise ConfigError(
            f"Parameter {parameter!r} holds a user, a password or a query, which runs would show",
            got=shown_url(address),
            fix=f"Give the address without them, and the whole one in the environment variable {SERVED_VARIABLE}; or a "
            f"key in ENDPOINT_API_KEY{recorded}",
        )


def check_address(settings: JudgeSettings) -> None:
    """Refuse an address with user, password or query that ``mlflow run`` has recorded before this package saw it."""
    for parameter, url in _with_secrets(settings).items():
        if "MLFLOW_RUN_ID" in os.environ:
            raise ConfigError(
                f"{parameter} holds a user, a password or a query, and `mlflow run` has recorded it in this run",
                got=shown_url(url),
                fix=f"Put the whole address into the environment variable {VARIABLES[parameter]}, and delete this run",
            )


@contextmanager
def without_password(settings: JudgeSettings) -> Iterator[JudgeSettings]:
    """Give the parameters with addresses that may be recorded: without user, password and query.

    Until the block ends, the environment holds the whole addresses, for the processes of the stages. See
    `check_address`.
    """
    check_address(settings)
    secret = _with_secrets(settings)
    before = {VARIABLES[parameter]: os.environ.get(VARIABLES[parameter]) for parameter in secret}
    os.environ.update({VARIABLES[parameter]: url for parameter, url in secret.items()})
    try:
        yield settings.with_values(**{parameter: shown_url(url) for parameter, url in secret.items()})
    finally:
        for variable, value in before.items():
            del os.environ[variable]
            if value is not None:
                os.environ[variable] = value


def _with_secrets(settings: JudgeSettings) -> dict[str, str]:
    """Return the addresses that hold more than may be recorded, by parameter."""
    urls = {
        "judge_base_url": settings.judging.judge_base_url,
        "encoder_base_url": settings.answers.encoder_base_url,
    }
    return {parameter: url for parameter, url in urls.items() if url is not None and url != shown_url(url)}
