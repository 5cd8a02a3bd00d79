"""The parameters of the receiver of webhooks."""

from typing import Literal

from mlflow_compress.commands.promote.parameters import Alias, PromoteConfig
from mlflow_compress.config.declarations import OptionalText, Parameters, like, option


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
