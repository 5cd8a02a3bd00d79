"""The parameters of the receiver of webhooks."""

from typing import Literal

from mlflow_compress.commands.promote.parameters import Alias, PromoteConfig
from mlflow_compress.config.declarations import OptionalText, Parameters, like, option


class WebhookConfig(Parameters):
    """Receive MLflow's webhooks, and decide on new versions in its registry and on versions that get a tag."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 accepts other machines")
    port: int = option(8765, "port to listen on; 0 takes a free one", ge=0, le=65535)
    tag: str = option("decide", "tag that requests a decision when it is set on a version; a new version always does")
    gate: OptionalText = option(
        None,
        "YAML file with parameters of `gate`, for versions that `main` did not create; none: no decision on these",
        path="file",
    )
    policy: OptionalText = like(PromoteConfig, "policy")
    needs: Literal["none", "approval"] = like(PromoteConfig, "needs")
    alias: Alias = like(PromoteConfig, "alias")
