"""An open run in MLflow, to which stages write."""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from mlflow import entities
from mlflow.entities.trace_state import TraceState
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.tracing import constant
from mlflow.tracing.client import TracingClient
from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS, MLFLOW_RUN_NOTE
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags
from sqlalchemy.exc import SQLAlchemyError

from mlflow_compress.errors import TrackingError
from mlflow_compress.lifetime import signals_later
from mlflow_compress.records import AnswerFeedback, JudgedAnswer, MetricResult
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.artifacts import artifacts_place
from mlflow_compress.tracking.experiment import search_runs, tags_filter
from mlflow_compress.tracking.live_processes import open_runs, own_name, run_opened
from mlflow_compress.tracking.store import new_parameters
from mlflow_compress.tracking.waiting import PatientClient

_TRACES_PER_CALL = 100
_PREVIEW = 1000  # characters of question and answer in the list of traces


def _info(one: JudgedAnswer, trace_id: str, experiment_id: str, run_id: str, now: int) -> entities.TraceInfo:
    return entities.TraceInfo(
        trace_id=trace_id,
        trace_location=entities.TraceLocation.from_experiment_id(experiment_id),
        request_time=now // 1_000_000,
        state=TraceState.OK,
        request_preview=one.messages[-1]["content"][:_PREVIEW],
        response_preview=one.answer[:_PREVIEW],
        trace_metadata={
            constant.TraceMetadataKey.SOURCE_RUN: run_id,
            constant.TRACE_SCHEMA_VERSION_KEY: str(constant.TRACE_SCHEMA_VERSION),
        },
        tags={constant.TraceTagKey.TRACE_NAME: f"{one.model}'s answer", "model": one.model, **one.tags},
        assessments=[_feedback(given, trace_id) for given in one.feedback],
    )


def _feedback(given: AnswerFeedback, trace_id: str) -> entities.Feedback:
    return entities.Feedback(
        trace_id=trace_id,
        name=given.name,
        value=given.value,
        error=None
        if given.reason is None
        else entities.AssessmentError(error_code=given.reason, error_message=given.rationale),
        rationale=given.rationale,
        source=entities.AssessmentSource(source_type="LLM_JUDGE", source_id=given.source),
        metadata=dict(given.details),
    )


def _span(one: JudgedAnswer, trace_id: str, now: int) -> entities.Span:
    """Return the answer as a span without a duration: when it was generated is not known here."""
    attributes: dict[str, Any] = {
        constant.SpanAttributeKey.REQUEST_ID: trace_id,
        constant.SpanAttributeKey.SPAN_TYPE: entities.SpanType.CHAT_MODEL,
        constant.SpanAttributeKey.INPUTS: {"messages": [dict(message) for message in one.messages]},
        constant.SpanAttributeKey.OUTPUTS: one.answer,
    }
    context = SpanContext(
        int(trace_id.removeprefix("tr-"), 16), secrets.randbits(63) + 1, is_remote=False, trace_flags=TraceFlags(1)
    )
    return entities.Span(
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


NOTE_LIMIT = 8000
_TAG_LIMIT = 5000


class TrackedRun:
    """One open run, to which stages write."""

    def __init__(self, client: PatientClient, run_id: str) -> None:
        self._client = client
        self.run_id = run_id

    @property
    def info(self) -> Any:
        return self._client.get_run(self.run_id).info

    @property
    def artifacts_at(self) -> str:
        """The folder of the run's artifacts, or their address where they are not on this machine."""
        return artifacts_place(self.info.artifact_uri)

    @cached_property
    def _artifacts(self) -> Any:
        return get_artifact_repository(self.info.artifact_uri, tracking_uri=self._client.uri)

    def rename(self, name: str) -> None:
        self._client.update_run(self.run_id, name=name)

    def end(self, status: str, message: str) -> None:
        self.set_tags({run_names.RUN_ERROR: message})
        self.set_note(f"**{status}:** {message}")
        self._client.set_terminated(self.run_id, status)

    def set_tags(self, tags: Mapping[str, object]) -> None:
        self._client.log_batch(self.run_id, tags=[entities.RunTag(k, str(v)[:_TAG_LIMIT]) for k, v in tags.items()])

    def log_params(self, params: Mapping[str, object]) -> None:
        """Log parameters. If the run has a parameter with another value, the new value is logged as ``resolved/NAME``.

        `mlflow run` logs every parameter as it was given ("auto"), and MLflow cannot change a logged parameter.
        """
        there = self._client.get_run(self.run_id).data.params
        new = new_parameters(there, {key: str(value) for key, value in params.items()})
        self._client.log_batch(self.run_id, params=[entities.Param(key, value) for key, value in new.items()])

    def remove_tags(self, *keys: str) -> None:
        there = self._client.get_run(self.run_id).data.tags
        for key in keys:
            if key in there:
                self._client.delete_tag(self.run_id, key)

    def log_values(self, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self.run_id, metrics=[entities.Metric(k, float(v), now, 0) for k, v in values.items()])

    def log_results(self, results: Sequence[MetricResult]) -> None:
        """Log results, exact: who shows them rounds them. A task's result gets its name appended."""
        self.log_values({(f"{r.name}/{r.task}" if r.task else r.name): r.value for r in results})

    def log_file(self, path: Path, folder: str = "") -> None:
        self._client.wait_for(lambda: self._artifacts.log_artifact(str(path), folder or None), long=True)

    def log_folder(self, path: Path, folder: str) -> None:
        self._client.wait_for(lambda: self._artifacts.log_artifacts(str(path), folder), long=True)

    def log_text(self, text: str, name: str) -> None:
        self._client.log_text(self.run_id, text, name)

    def log_json(self, value: Any, name: str) -> None:
        self._client.log_dict(self.run_id, value, name)

    def log_table(self, columns: Mapping[str, Sequence[Any]], name: str) -> None:
        """Store a table, which MLflow's UI can compare between runs. A table of the same name is replaced.

        `MlflowClient.log_table` would append to it, and would store every image twice more.
        """
        rows = [[None if value != value else value for value in row] for row in zip(*columns.values(), strict=True)]
        self.log_json({"columns": list(columns), "data": rows}, name)
        tables = json.loads(self._client.get_run(self.run_id).data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))
        if (table := {"path": name, "type": "table"}) not in tables:
            self._client.set_tag(self.run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps([*tables, table]))

    def log_figures(self, folder: Path, names: Sequence[str]) -> None:
        """Store the PNG files of a folder as `figures/`, and as a table that MLflow's UI compares between runs."""
        self.log_folder(folder, "figures")
        paths = [f"figures/{name}.png" for name in names]
        images = [{"type": "image", "filepath": path, "compressed_filepath": path} for path in paths]
        self.log_table({"figure": names, "image": images}, "figures.json")

    def log_judged_answers(self, judged: Sequence[JudgedAnswer]) -> None:
        """Write one trace per answer. If the store refuses a trace, those before it are written."""
        experiment, client = str(self.info.experiment_id), TracingClient(self._client.uri)
        written = 0
        try:
            for start in range(0, len(judged), _TRACES_PER_CALL):
                spans = []
                with signals_later():
                    for one in judged[start : start + _TRACES_PER_CALL]:
                        trace_id, now = f"tr-{secrets.token_hex(16)}", time.time_ns()
                        client.start_trace(_info(one, trace_id, experiment, self.run_id, now))
                        spans.append(_span(one, trace_id, now))
                    client.log_spans(experiment, spans)
                written += len(spans)
        except (MlflowException, SQLAlchemyError, OSError) as error:
            raise TrackingError(
                f"The store refuses traces: {str(error).splitlines()[0]}",
                got=f"{written} of {len(judged)} written",
                fix="The records of the run hold every judgment; judge_args: traces=false writes no traces",
            ) from error

    def set_note(self, markdown: str) -> None:
        self._client.set_tag(self.run_id, MLFLOW_RUN_NOTE, markdown[:NOTE_LIMIT])


def create_run(client: PatientClient, uri: str, experiment_id: str, name: str, tags: Mapping[str, object]) -> str:
    """Return the id of a new run, which is open in this process.

    A server that goes away may have made the run, and not have said so. Then this run is taken, and no second one made.
    """
    mine = {run_names.PROCESS: own_name(uri)}
    every = {**{key: str(value) for key, value in tags.items()}, **mine}

    def made(asked: Any) -> str | None:
        runs = search_runs(asked, f"{tags_filter(mine)} and attributes.status = 'RUNNING'")
        return next((str(run.info.run_id) for run in runs if run.info.run_id not in open_runs(uri)), None)

    def make(asked: Any) -> str:
        return str(asked.create_run(experiment_id, run_name=name, tags=every).info.run_id)

    try:
        run_id = client.once(make, made)
        run_opened(uri, run_id)
    except KeyboardInterrupt:
        client.hurry()
        if (left := made(client)) is not None:
            client.set_terminated(left, "KILLED")
        raise
    return run_id
