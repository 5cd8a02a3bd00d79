"""Judgments in MLflow's page of traces: one trace per judged answer, with one assessment per judgment.

They are written last, from what is stored already, in the caller's thread and not by MLflow's queue, whose workers lose
traces on SQLite and say so only in a log. Traces show judgments; the records of the run keep them.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from mlflow.entities import AssessmentError, AssessmentSource, Feedback, Span, SpanType, TraceInfo, TraceLocation
from mlflow.entities.trace_state import TraceState
from mlflow.exceptions import MlflowException
from mlflow.tracing.client import TracingClient
from mlflow.tracing.constant import (
    TRACE_SCHEMA_VERSION,
    TRACE_SCHEMA_VERSION_KEY,
    SpanAttributeKey,
    TraceMetadataKey,
    TraceTagKey,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags
from sqlalchemy.exc import SQLAlchemyError

from mlflow_compress.errors import TrackingError
from mlflow_compress.records.judged_answers import AnswerFeedback, JudgedAnswer

_TRACES_PER_CALL = 100
_PREVIEW = 1000  # characters of question and answer in the list of traces


def log_judged_answers(uri: str, experiment_id: str, run_id: str, judged: Sequence[JudgedAnswer]) -> None:
    """Write one trace per answer, linked to the run.

    Raises
    ------
    TrackingError
        The store refused a trace. Those before it are written.
    """
    client = TracingClient(uri)
    written = 0
    try:
        for start in range(0, len(judged), _TRACES_PER_CALL):
            spans = []
            for one in judged[start : start + _TRACES_PER_CALL]:
                trace_id, now = f"tr-{secrets.token_hex(16)}", time.time_ns()
                client.start_trace(_info(one, trace_id, experiment_id, run_id, now))
                spans.append(_span(one, trace_id, now))
            client.log_spans(experiment_id, spans)
            written += len(spans)
    except (MlflowException, SQLAlchemyError, OSError) as error:
        raise TrackingError(
            f"The store refuses traces: {str(error).splitlines()[0]}",
            got=f"{written} of {len(judged)} written",
            fix="The records of the run hold every judgment; judge_traces=false writes no traces",
        ) from error


def _info(one: JudgedAnswer, trace_id: str, experiment_id: str, run_id: str, now: int) -> TraceInfo:
    return TraceInfo(
        trace_id=trace_id,
        trace_location=TraceLocation.from_experiment_id(experiment_id),
        request_time=now // 1_000_000,
        state=TraceState.OK,
        request_preview=one.messages[-1]["content"][:_PREVIEW],
        response_preview=one.answer[:_PREVIEW],
        trace_metadata={TraceMetadataKey.SOURCE_RUN: run_id, TRACE_SCHEMA_VERSION_KEY: str(TRACE_SCHEMA_VERSION)},
        tags={TraceTagKey.TRACE_NAME: f"{one.model}'s answer", "model": one.model, **one.tags},
        assessments=[_feedback(given, trace_id) for given in one.feedback],
    )


def _feedback(given: AnswerFeedback, trace_id: str) -> Feedback:
    return Feedback(
        trace_id=trace_id,
        name=given.name,
        value=given.value,
        error=None if given.reason is None else AssessmentError(error_code=given.reason, error_message=given.rationale),
        rationale=given.rationale,
        source=AssessmentSource(source_type="LLM_JUDGE", source_id=given.source),
        metadata=dict(given.details),
    )


def _span(one: JudgedAnswer, trace_id: str, now: int) -> Span:
    """Return the answer as a span without a duration: when it was generated is not known here."""
    attributes: dict[str, Any] = {
        SpanAttributeKey.REQUEST_ID: trace_id,
        SpanAttributeKey.SPAN_TYPE: SpanType.CHAT_MODEL,
        SpanAttributeKey.INPUTS: {"messages": [dict(message) for message in one.messages]},
        SpanAttributeKey.OUTPUTS: one.answer,
    }
    context = SpanContext(
        int(trace_id.removeprefix("tr-"), 16), secrets.randbits(63) + 1, is_remote=False, trace_flags=TraceFlags(1)
    )
    return Span(
        ReadableSpan(
            name=f"{one.model}'s answer",
            context=context,
            resource=Resource.get_empty(),
            attributes={key: json.dumps(value, ensure_ascii=False) for key, value in attributes.items()},
            start_time=now,
            end_time=now,
            status=Status(StatusCode.OK),
        )
    )
