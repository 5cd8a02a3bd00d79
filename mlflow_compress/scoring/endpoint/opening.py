"""Opens a served model: its server is probed before anything is asked of it."""

from __future__ import annotations

from dataclasses import replace

from mlflow_compress.models.identity import IdentifiedModel
from mlflow_compress.scoring.endpoint.chat_probe import ChatWanted, probe_chat
from mlflow_compress.scoring.endpoint.routes import Vocabulary
from mlflow_compress.scoring.endpoint.served_model import ServedModel
from mlflow_compress.scoring.endpoint.server_probe import ServerProbe
from mlflow_compress.scoring.plan.encoding import Encoder
from mlflow_compress.transport.endpoint import EndpointConfig


def open_served_model(
    endpoint: EndpointConfig, name: str, reader: IdentifiedModel, *, chat: ChatWanted = "auto"
) -> ServedModel:
    """Return a served model, after its server was asked what it can.

    Parameters
    ----------
    endpoint : EndpointConfig
    name : str
        The model's name there.
    reader : IdentifiedModel
        The model whose tokenizer makes the prompts; its weights are not read.
    chat : {"auto", "true", "false"}
        Whether conversations are sent as chat completions: see `chat_probe.probe_chat`.

    Raises
    ------
    EndpointError
        The server cannot be reached, or gives no log-probabilities that scoring can use.
    AlignmentError
        Its tokens are not those of `reader`.
    """
    vocabulary = Vocabulary(Encoder(reader.tokenizer, reader.max_length), reader.vocab_size)
    can = ServerProbe(endpoint, name, vocabulary).run()
    by_chat, answers = probe_chat(endpoint, name, reader.tokenizer, chat)
    can = replace(can, chat=by_chat, answers=answers)
    return ServedModel(endpoint, name, reader.tokenizer, reader.vocab_size, reader.max_length, reader.path, can)
