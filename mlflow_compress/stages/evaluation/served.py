"""Served models of a stage: their addresses, keys and names, and whether a server still serves what it served."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from mlflow_compress import atomic
from mlflow_compress.config import ENDPOINT, ServedConfig
from mlflow_compress.errors import AlignmentError, EndpointError
from mlflow_compress.files.json_text import read_json_object
from mlflow_compress.models.identity import IdentifiedModel
from mlflow_compress.scoring.endpoint.opening import open_served_model
from mlflow_compress.scoring.endpoint.served_model import ServedModel
from mlflow_compress.scoring.endpoint.server_probe import SAME
from mlflow_compress.tracking.run_names import FACTS
from mlflow_compress.transport.addresses import SERVED_VARIABLE, check_served_address
from mlflow_compress.transport.endpoint import EndpointConfig, shown_url

KEY_VARIABLE = "ENDPOINT_API_KEY"
_NO_KEY = "none"  # what a server that asks for no key is sent


def endpoint_of(address: str, served: ServedConfig, *, parameter: str, model_parameter: str) -> EndpointConfig:
    """Return where and how a served model is called. `address` is the value of the parameter.

    Raises
    ------
    ConfigError
        The address is none, or holds a user, a password or a query, which would be recorded.
    """
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


def open_served(
    address: str, name: str, served: ServedConfig, reader: IdentifiedModel, *, parameter: str, model_parameter: str
) -> ServedModel:
    """Return a served model, after its server was asked what it can. `reader` is the model whose tokenizer it has."""
    endpoint = endpoint_of(address, served, parameter=parameter, model_parameter=model_parameter)
    return open_served_model(endpoint, name, reader, chat=served.endpoint_chat)


def facts(model: ServedModel) -> dict[str, object]:
    """Return what the server can, and who it is, for a run: no address, no key."""
    return {"served_model": model.name, "weights": model.weights, **asdict(model.can)}


def recognise(model: ServedModel, earlier: object) -> None:
    """Refuse a server that answers a fixed text otherwise than it did: another model has its name.

    Parameters
    ----------
    model : ServedModel
    earlier : object
        What `facts` returned then.

    Raises
    ------
    AlignmentError
    """
    check_same_model(facts(model), earlier)


def check_same_model(now: Mapping[str, object], earlier: object) -> None:
    """Refuse what `recognise` refuses, from what `facts` returned now and then."""
    then = earlier.get("probe") if isinstance(earlier, dict) else None
    probe = now["probe"]
    assert isinstance(probe, list | tuple)
    if not isinstance(then, list | tuple) or len(then) != len(probe):
        return
    if any(abs(float(a) - b) > SAME for a, b in zip(then, probe, strict=True)):
        raise AlignmentError(
            f"The served model {now['served_model']!r} answers otherwise than when it was evaluated under this name",
            allowed=", ".join(f"{float(value):.2f}" for value in then),
            got=", ".join(f"{value:.2f}" for value in probe),
            fix="Serve each variant under a name of its own, and give it as served_model",
        )


def recognised_in(folder: Path, model: ServedModel) -> None:
    """Write down who answers into a folder of unfinished work, or check that the same still answers."""
    file = folder / f"{model.weights[:16]}-{FACTS}"
    if file.is_file():
        recognise(model, read_json_object(file))
        return
    atomic.write(file, json.dumps(facts(model)).encode())
