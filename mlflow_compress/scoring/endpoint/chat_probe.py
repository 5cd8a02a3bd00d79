"""Whether a server answers conversations as we would show them to its model, so that it may answer them by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from mlflow_compress.errors import EndpointError
from mlflow_compress.scoring.endpoint.chat_answers import ChatAnswer, read_chat
from mlflow_compress.scoring.generation.chat_format import PLAIN, chat_format
from mlflow_compress.scoring.plan.encoding import Encoder
from mlflow_compress.transport.client import Transport
from mlflow_compress.transport.endpoint import EndpointConfig
from mlflow_compress.transport.replies import NoReply

ChatWanted = Literal["auto", "true", "false"]
_TURN = "What is the capital of France? Why?"


def probe_chat(endpoint: EndpointConfig, model: str, tokenizer: Any, wanted: ChatWanted) -> tuple[bool, str]:
    """Return whether conversations are sent as chat completions, and why in words.

    They are where the server has that route, the tokenizer has a chat template, and the server's own template makes as
    many tokens of a message as ours. A baseline and a variant must read the same prompt.

    Parameters
    ----------
    endpoint : EndpointConfig
    model : str
        The model's name there.
    tokenizer : transformers.PreTrainedTokenizerBase
        Ours.
    wanted : {"auto", "true", "false"}
        "true" makes an error of what stands in the way, but for other tokens, which it accepts.

    Raises
    ------
    EndpointError
        Chat completions are wanted, and there are none.
    """
    if wanted == "false":
        return False, "as completions, in our chat template (endpoint_chat=false)"
    style = chat_format(tokenizer)
    if style.name == PLAIN:
        if wanted == "true":
            raise EndpointError("Chat completions are wanted, and the tokenizer has no chat template")
        return False, "as completions: the tokenizer has no chat template"
    found = _ask(endpoint, model)
    if isinstance(found, str):
        if wanted == "true":
            raise EndpointError(f"{endpoint.where} gives no chat completions: {found}", fix="Leave endpoint_chat out")
        return False, "as completions, in our chat template: the server gives no chat completions"
    ours = len(Encoder(tokenizer, 1 << 30).ids([style.prompt([_TURN])], special=False)[0])
    theirs = found.usage.prompt if found.usage is not None else None
    if theirs != ours and wanted == "auto":
        read = "an unknown number of" if theirs is None else theirs
        return False, f"as completions: the server's chat template makes {read} tokens of a message, ours {ours}"
    differs = f"which is not ours: {theirs} tokens of a message, and ours makes {ours}"
    agree = "which reads as ours" if theirs == ours else differs
    return True, f"as chat completions, in the server's chat template, {agree}"


def _ask(endpoint: EndpointConfig, model: str) -> ChatAnswer | str:
    """Return the answer to a fixed message; the reason where there is none."""
    body = {"model": model, "messages": [{"role": "user", "content": _TURN}], "max_tokens": 1, "temperature": 0}

    async def once(transport: Transport) -> ChatAnswer | NoReply:
        return await transport.post("/chat/completions", body, read_chat, model=model, n_bytes=len(_TURN))

    try:
        # Some servers answer a missing template with a 5xx: one more try is enough.
        with Transport(replace(endpoint, max_retries=min(endpoint.max_retries, 1))) as transport:
            found: ChatAnswer | NoReply = transport.for_all(once, [transport])[0]
    except EndpointError as error:
        return str(error)
    return found.detail if isinstance(found, NoReply) else found
