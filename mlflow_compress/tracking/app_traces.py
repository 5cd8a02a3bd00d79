"""Conversations that an application has logged to MLflow as traces."""

import json
from collections.abc import Mapping
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Trace
from mlflow.exceptions import MlflowException
from mlflow.utils import get_results_from_paginated_fn

from mlflow_compress.errors import DataError, TrackingError
from mlflow_compress.items.sources.conversations import Redaction, cleaned
from mlflow_compress.tracking.waiting import shown_store

_PAGE = 100  # traces per call
_CHAT = ("CHAT_MODEL", "LLM")  # types of spans that ask a model
_CATEGORY = "category"  # tag of a trace


def read_conversations(uri: str, where: str, redact: Redaction) -> list[dict[str, Any]]:
    """Return the conversations of an experiment's traces, redacted, each with `messages` and its `category`.

    - `where`: The experiment's name, or ``NAME?FILTER`` with a filter of MLflow's search of traces.

    Of a trace that ended well, the root span is read, or the last span that asks a model where the root has no texts.
    Messages stand as in OpenAI's requests and replies, or the input and the output are one text each.
    """
    name, _, wanted = where.partition("?")
    client = MlflowClient(tracking_uri=uri)
    try:
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            raise DataError("MLflow has no experiment of this name", got=f"{name} at {shown_store(uri)}")
        query = {"locations": [experiment.experiment_id], "filter_string": wanted or None}
        traces = get_results_from_paginated_fn(
            lambda most, token: client.search_traces(**query, max_results=most, page_token=token), _PAGE
        )
    except MlflowException as error:
        raise TrackingError(f"The traces cannot be read: {str(error).splitlines()[0]}", got=where) from error
    rows = [row for trace in traces if (row := _row(trace, redact)) is not None]
    if not rows:
        raise DataError(
            "No trace is a conversation of texts",
            allowed="inputs with messages or one text, and an answer as text, as MLflow's integrations log them",
            got=f"{len(traces)} traces of {where}",
        )
    return rows


def _row(trace: Trace, redact: Redaction) -> dict[str, Any] | None:
    if str(trace.info.state) not in ("TraceState.OK", "OK"):
        return None
    spans = [span for span in trace.data.spans if span.parent_id is None]
    spans += [span for span in reversed(trace.data.spans) if span.span_type in _CHAT]
    for span in spans:
        asked, answer = _asked(span.inputs), _answer(span.outputs)
        if asked and answer is not None:
            messages = cleaned([*asked, answer], redact)
            if None in messages:
                continue
            return {"messages": messages, "category": redact(str(trace.info.tags.get(_CATEGORY, "")))}
    return None


def _asked(inputs: Any) -> list[Mapping[str, Any]]:
    inputs = _parsed(inputs)
    messages = inputs.get("messages") if isinstance(inputs, Mapping) else inputs
    if isinstance(messages, list) and messages and all(isinstance(one, Mapping) and "role" in one for one in messages):
        return messages
    text = _only_text(inputs)
    return [] if text is None else [{"role": "user", "content": text}]


def _answer(outputs: Any) -> Mapping[str, Any] | None:
    outputs = _parsed(outputs)
    if isinstance(outputs, Mapping):
        if isinstance(choices := outputs.get("choices"), list) and len(choices) == 1:
            outputs = choices[0].get("message") if isinstance(choices[0], Mapping) else None
        elif isinstance(messages := outputs.get("messages"), list) and messages:
            outputs = messages[-1]
    if isinstance(outputs, Mapping) and outputs.get("role") == "assistant":
        return outputs
    text = _only_text(outputs)
    return None if text is None else {"role": "assistant", "content": text}


def _parsed(value: Any) -> Any:
    """Return what a text of JSON holds; another text as it is."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _only_text(value: Any) -> str | None:
    """Return a text, or that of a mapping with one entry."""
    if isinstance(value, Mapping) and len(value) == 1:
        value = next(iter(value.values()))
    return value if isinstance(value, str) and value.strip() else None
