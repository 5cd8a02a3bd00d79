"""Opens models that a server has: where it is, which key it gets, and what it can."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mlflow_compress.config import ENDPOINT, EngineConfig, ServedConfig
from mlflow_compress.engines.endpoint.served_model import ServedModel
from mlflow_compress.engines.endpoint.server_probe import open_served_model
from mlflow_compress.engines.interface import ModelRequest, engine
from mlflow_compress.errors import EndpointError
from mlflow_compress.transport.addresses import SERVED_VARIABLE, check_served_address
from mlflow_compress.transport.endpoint import EndpointConfig, shown_url

KEY_VARIABLE = "ENDPOINT_API_KEY"
_NO_KEY = "none"  # what a server that asks for no key is sent


def endpoint_of(address: str, served: ServedConfig, *, parameter: str, model_parameter: str) -> EndpointConfig:
    """Return where and how a served model is called. `address` is the value of the parameter."""
    given = address.removeprefix(ENDPOINT)
    check_served_address(parameter, given)
    whole = os.environ.get(SERVED_VARIABLE, "").strip()
    return EndpointConfig(
        base_url=whole if whole and shown_url(whole) == given else given,
        key=os.environ.get(KEY_VARIABLE, "").strip() or _NO_KEY,
        timeout=served.endpoint_timeout,
        max_retries=served.endpoint_max_retries,
        concurrency=served.endpoint_concurrency,
        what="server of models",
        url_parameter=parameter,
        model_parameter=model_parameter,
        key_variable=KEY_VARIABLE,
        error=EndpointError,
    )


@engine("endpoint")
class EndpointEngine:
    """Asks servers; nothing has to be started."""

    abilities = ServedModel.abilities

    def started(
        self, running: EngineConfig, *, on_gpu: bool | None, workers: Any = None
    ) -> AbstractContextManager[None]:
        """Return an empty block."""
        return nullcontext()

    def open(self, request: ModelRequest) -> ServedModel:
        """Return a model after its server was asked what it can; `request.reader` makes the prompts."""
        assert request.reader is not None
        served, names = request.served, {"parameter": request.parameter, "model_parameter": request.name_parameter}
        endpoint = endpoint_of(request.address, served, **names)
        return open_served_model(endpoint, request.name, request.reader, chat=served.endpoint_chat)
