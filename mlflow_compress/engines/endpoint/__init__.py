"""Models that a server has, at an address ``endpoint:https://...``."""

import os

from mlflow_compress.config import ENDPOINT
from mlflow_compress.engines.endpoint.served_model import ServedModel
from mlflow_compress.engines.endpoint.server_probe import open_served_model
from mlflow_compress.engines.interface import ModelRequest, StartsNothing, engine
from mlflow_compress.errors import EndpointError
from mlflow_compress.transport.endpoint import SERVED_VARIABLE, EndpointConfig, check_served_address, shown_url

ENDPOINT_KEY_VARIABLE = "ENDPOINT_API_KEY"
_NO_KEY = "none"  # what a server that asks for no key is sent


@engine("endpoint")
class EndpointEngine(StartsNothing):
    """Asks servers."""

    abilities = ServedModel.abilities

    def open(self, request: ModelRequest) -> ServedModel:
        """Return a model after its server was asked what it can; `request.reader` makes the prompts."""
        assert request.reader is not None
        served, address = request.served, request.address.removeprefix(ENDPOINT)
        check_served_address(request.parameter, address)
        whole = os.environ.get(SERVED_VARIABLE, "").strip()
        endpoint = EndpointConfig(
            base_url=whole if whole and shown_url(whole) == address else address,
            key=os.environ.get(ENDPOINT_KEY_VARIABLE, "").strip() or _NO_KEY,
            timeout=served.endpoint_timeout,
            max_retries=served.endpoint_max_retries,
            concurrency=served.endpoint_concurrency,
            what="server of models",
            url_parameter=request.parameter,
            model_parameter=request.name_parameter,
            key_variable=ENDPOINT_KEY_VARIABLE,
            error=EndpointError,
        )
        return open_served_model(endpoint, request.name, request.reader, chat=served.endpoint_chat)
