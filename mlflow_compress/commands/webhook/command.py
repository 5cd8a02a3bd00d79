"""The command that lets events of MLflow's registry be decided."""

import os
from typing import Any

from mlflow_compress.commands.command import Say, configured, register_command, silent
from mlflow_compress.commands.webhook.parameters import WebhookConfig
from mlflow_compress.errors import ConfigError

SECRET_VARIABLE = "MLFLOW_COMPRESS_WEBHOOK_SECRET"


@register_command("serve-webhook", WebhookConfig, heading="keep", place=24, project=False)
def serve_webhook(*, progress: Say | None = None, **parameters: Any) -> None:
    """Take MLflow's webhook deliveries until interrupted, and give each a verdict on its version, as `promote` does.

    Parameters
    ----------
    progress : callable (line), optional
        Is told the address, and every verdict.
    **parameters

    Raises
    ------
    ConfigError
        There is no secret, the address is in use, the policy cannot be used, or the store has a receiver.

    Examples
    --------
    >>> mc.serve_webhook(port=99999)
    Traceback (most recent call last):
        ...
    mlflow_compress.errors.ConfigError: Parameter 'port' is too large. Allowed: 65535 or less. Got: 99999.
    """
    config = configured(WebhookConfig, parameters)
    secret = os.environ.get(SECRET_VARIABLE, "")  # MLflow signs with it
    if not secret:
        raise ConfigError(
            "The webhook has no secret, so anybody could request a decision", fix=f"Set {SECRET_VARIABLE} as in MLflow"
        )
    from mlflow_compress.commands.webhook.run import run_webhook

    run_webhook(config, secret, progress or silent)
