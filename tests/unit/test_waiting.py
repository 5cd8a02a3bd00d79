"""A tracking store that is away: waited for, with one clear error at the end, and no second wait after it."""

import logging
from typing import Any

import pytest
import requests
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import BAD_REQUEST, RESOURCE_DOES_NOT_EXIST, TEMPORARILY_UNAVAILABLE

from mlflow_compress.errors import ConfigError, StoreAwayError
from mlflow_compress.tracking import waiting
from mlflow_compress.tracking.waiting import PatientClient, longest_wait, outage, shown_store
from tests.clock import Clock

SERVER = "http://someone:secret@127.0.0.1:1"


def unreachable() -> MlflowException:
    """Return what MLflow raises where nobody listens: the cause is only in the chain."""
    try:
        try:
            raise requests.exceptions.ConnectionError("refused")
        except requests.exceptions.ConnectionError as error:
            raise MlflowException(f"API request failed with exception {error}")  # noqa: B904  # as MLflow does it
    except MlflowException as error:
        return error


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock by which a store is waited for."""
    clock = Clock()
    clock.drive(monkeypatch, waiting)
    return clock


@pytest.fixture
def client() -> PatientClient:
    return PatientClient(None, SERVER)


class Away:
    """A call that fails a number of times before it answers."""

    def __init__(self, failures: int) -> None:
        self.left, self.calls = failures, 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.left:
            raise unreachable()
        return "answer"


def test_a_server_that_comes_back_costs_a_wait(
    client: PatientClient, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    call = Away(7)
    with caplog.at_level(logging.WARNING):
        assert client.wait_for(call) == "answer"
    assert call.calls == 8 and clock.pauses == [0.5, 1, 2, 4, 8, 10, 10]
    first, last = caplog.messages  # said once, not at every try; and without the password
    assert "Waiting for the tracking server http://127.0.0.1:1 (no connection)" in first
    assert "answers again, after 36 s" in last and "secret" not in caplog.text


def test_the_wait_ends_with_one_error_and_nobody_waits_again(
    client: PatientClient, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(waiting.WAIT_VARIABLE, "20")
    with pytest.raises(StoreAwayError, match="has not answered") as raised:
        client.wait_for(Away(10**6))
    message = str(raised.value)
    assert "saved on this machine" in message and "mlflow-compress resume" in message and "secret" not in message
    assert raised.value.__cause__ is None and raised.value.__suppress_context__  # one error, no chain of tracebacks

    assert clock.pauses == [0.5, 1, 2, 4, 8, 4.5]  # 20 seconds together

    monkeypatch.setenv(waiting.WAIT_VARIABLE, "600")
    again, n_pauses = Away(10**6), len(clock.pauses)
    with pytest.raises(StoreAwayError):
        client.wait_for(again)
    assert again.calls == 1 and len(clock.pauses) == n_pauses
    assert client.wait_for(Away(0)) == "answer"
    assert client.wait_for(Away(2)) == "answer"  # it is back, and is waited for again


def test_after_an_interrupt_nothing_is_waited_for(client: PatientClient) -> None:
    client.hurry()
    for _ in range(2):
        closing = Away(1)
        with pytest.raises(StoreAwayError):
            client.wait_for(closing)
        assert closing.calls == 1
        assert client.wait_for(closing) == "answer"


def test_what_was_made_is_not_made_twice() -> None:
    made: list[str] = []

    class Client:
        def create(self) -> str:
            made.append(f"run {len(made)}")
            if len(made) == 1:
                raise unreachable()  # it was made, and the answer was lost
            return made[-1]

    client = PatientClient(Client(), SERVER)
    assert client.once(lambda asked: asked.create(), lambda asked: made[-1] if made else None) == "run 0"
    assert made == ["run 0"]


@pytest.mark.parametrize(
    ("error", "uri", "away"),
    [
        (unreachable(), SERVER, True),
        (requests.exceptions.RetryError("too many 503 error responses"), SERVER, True),
        (requests.exceptions.ChunkedEncodingError("cut"), SERVER, True),
        (MlflowException("x", error_code=BAD_REQUEST), SERVER, False),
        (MlflowException("no such run", error_code=RESOURCE_DOES_NOT_EXIST), SERVER, False),
        (ValueError("a fault of ours"), SERVER, False),
        (
            MlflowException("(sqlite3.OperationalError) database is locked", error_code=TEMPORARILY_UNAVAILABLE),
            "sqlite:///x",
            True,
        ),
        (
            MlflowException("(sqlite3.OperationalError) database or disk is full", error_code=TEMPORARILY_UNAVAILABLE),
            "sqlite:///x",
            False,
        ),
        (MlflowException("could not connect", error_code=TEMPORARILY_UNAVAILABLE), "postgresql://a", True),
    ],
)
def test_what_is_an_outage(error: Exception, uri: str, away: bool) -> None:
    assert (outage(error, uri) is not None) == away


def test_a_refusal_is_raised_at_once(client: PatientClient) -> None:
    calls: list[int] = []

    def refused() -> None:
        calls.append(1)
        raise MlflowException("no such run", error_code=RESOURCE_DOES_NOT_EXIST)

    with pytest.raises(MlflowException, match="no such run"):
        client.wait_for(refused)
    assert calls == [1]


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_the_wait_is_a_number_of_seconds(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(waiting.WAIT_VARIABLE, text)
    with pytest.raises(ConfigError, match=r"number of seconds.*Got: '" + text):
        longest_wait()


def test_addresses_are_shown_without_passwords() -> None:
    assert shown_store("postgresql://mlflow:p@ss@db/x?y=1") == "postgresql://db/x?y=1"
    assert shown_store("sqlite:////data/a@b.db") == "sqlite:////data/a@b.db"


def test_a_patient_client_keeps_what_the_client_returns() -> None:
    class Client:
        def get(self, number: int, *, more: int) -> Any:
            return number + more

    assert PatientClient(Client(), SERVER).get(1, more=2) == 3
