"""The lease on a piece of work: one holder at a time, and a dead holder does not block for ever."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from mlflow_compress.errors import TrackingError
from mlflow_compress.tracking import lease as lease_module
from mlflow_compress.tracking.lease import Lease, leased, leases_of
from mlflow_compress.tracking.waiting import PatientClient


@pytest.fixture
def client(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> PatientClient:
    """Return a client of a SQLite store; a server's registry behaves the same."""
    monkeypatch.setattr(lease_module, "_BEAT_S", 0.1)
    monkeypatch.setattr(lease_module, "_LOOK_S", 0.05)
    monkeypatch.setattr(lease_module, "_DEAD_AFTER_S", 1.5)
    uri = f"sqlite:///{workdir / 'mlflow.db'}"
    return PatientClient(MlflowClient(uri), uri)


def names(client: PatientClient) -> list[str]:
    return sorted(model.name for model in client.search_registered_models())


def test_one_at_a_time(client: PatientClient) -> None:
    inside, most = 0, 0
    guard = threading.Lock()

    def work(holder: str) -> None:
        nonlocal inside, most
        with leased(client, "abc", holder) as confirm:
            with guard:
                inside += 1
                most = max(most, inside)
            time.sleep(0.2)
            confirm()
            with guard:
                inside -= 1

    threads = [threading.Thread(target=work, args=(f"holder-{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == 1 and not any(thread.is_alive() for thread in threads)
    assert names(client) == []


def test_other_work_is_not_waited_for(client: PatientClient) -> None:
    with leased(client, "abc", "one"), leased(client, "abd", "two"):
        assert names(client) == ["mlflow-compress-lease-abc-0", "mlflow-compress-lease-abd-0"]


def test_a_dead_holder_is_replaced(client: PatientClient) -> None:
    client.create_registered_model("mlflow-compress-lease-abc-7", tags={"holder": "dead", "beat": "3"})
    began = time.monotonic()
    with leased(client, "abc", "next"):
        assert names(client) == ["mlflow-compress-lease-abc-8"]
    assert 1.5 <= time.monotonic() - began < 30
    assert names(client) == []


def test_a_living_holder_is_not_replaced(client: PatientClient) -> None:
    got = threading.Event()

    def second() -> None:
        with leased(client, "abc", "second"):
            got.set()

    thread = threading.Thread(target=second)
    with leased(client, "abc", "first") as confirm:
        thread.start()
        assert not got.wait(4)  # longer than a dead holder has
        confirm()
    assert got.wait(30)
    thread.join(30)


def test_a_clock_that_is_set_back_changes_no_lease(client: PatientClient, monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(time.time(), -3600)  # an hour back at every look
    monkeypatch.setattr(time, "time", lambda: next(now))
    test_a_living_holder_is_not_replaced(client)
    test_a_dead_holder_is_replaced(client)


def test_a_holder_that_was_cut_off_does_not_go_on(client: PatientClient) -> None:
    mine = Lease(client, "abc", "mine")
    mine.acquire()
    client.create_registered_model("mlflow-compress-lease-abc-1", tags={"holder": "other", "beat": "0"})
    client.delete_registered_model("mlflow-compress-lease-abc-0")
    with pytest.raises(TrackingError, match="another one does its work now"):
        mine.confirm()
    mine.release()
    assert names(client) == ["mlflow-compress-lease-abc-1"]


def test_an_answer_that_was_lost_is_no_other_holder(client: PatientClient) -> None:
    client.create_registered_model("mlflow-compress-lease-abc-0", tags={"holder": "me", "beat": "0"})
    assert Lease(client, "abc", "me")._take(0, set())
    assert not Lease(client, "abc", "you")._take(0, set())


def test_the_leases_of_dead_processes_are_found(client: PatientClient) -> None:
    client.create_registered_model("mlflow-compress-lease-abc-0", tags={"holder": "dead"})
    client.create_registered_model("mlflow-compress-lease-abd-0", tags={"holder": "alive"})
    client.create_registered_model("compressed-demo", tags={"holder": "dead"})
    assert leases_of(client, {"dead"}) == ["mlflow-compress-lease-abc-0"]
