"""The command that lets events of MLflow's registry be decided."""

import os
from typing import Any, Literal

from mlflow_compress.commands.command import Say, configured, register_command, silent
from mlflow_compress.commands.promote.parameters import Alias, PromoteConfig
from mlflow_compress.config.declarations import OptionalText, Parameters, like, option
from mlflow_compress.errors import ConfigError

SECRET_VARIABLE = "MLFLOW_COMPRESS_WEBHOOK_SECRET"


class WebhookConfig(Parameters):
    """Decide on new versions of MLflow's registry, and on those that get a tag, when its webhooks tell of them."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 lets other machines in")
    port: int = option(8765, "port to listen on; 0 takes a free one", ge=0, le=65535)
    tag: str = option("decide", "tag that asks for a decision when it is set on a version; new versions always do")
    gate: OptionalText = option(
        None,
        "YAML file of parameters of `gate`, which decides on versions that `main` has not made; none: nothing does",
        path="file",
    )
    policy: OptionalText = like(PromoteConfig, "policy")
    needs: Literal["none", "approval"] = like(PromoteConfig, "needs")
    alias: Alias = like(PromoteConfig, "alias")


def webhook_secret() -> str:
    """Return the secret that MLflow signs with, from the environment."""
    if secret := os.environ.get(SECRET_VARIABLE, ""):
        return secret
    raise ConfigError(
        "The webhook has no secret, so anybody could ask for a decision", fix=f"Set {SECRET_VARIABLE} as in MLflow"
    )


@register_command("serve-webhook", WebhookConfig, place=24, project=False)
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
    secret = webhook_secret()
    from mlflow_compress.commands.webhook.run import run_webhook

    run_webhook(config, secret, progress or silent)
