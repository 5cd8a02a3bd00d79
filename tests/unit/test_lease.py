"""The lease on a piece of work: one holder at a time, and a dead holder does not block for ever."""

import itertools
import threading
import time
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from mlflow_compress.errors import TrackingError
from mlflow_compress.tracking import lease as lease_module
from mlflow_compress.tracking.lease import PREFIX, Lease, give_back_leases, leased
from mlflow_compress.tracking.waiting import PatientClient


@pytest.fixture
def client(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> PatientClient:
    """Return a client of a SQLite store; a server's experiments behave the same."""
    monkeypatch.setattr(lease_module, "_BEAT_S", 0.1)
    monkeypatch.setattr(lease_module, "_LOOK_S", 0.1)
    monkeypatch.setattr(lease_module, "_DEAD_AFTER_S", 1.5)
    uri = f"sqlite:///{workdir / 'mlflow.db'}"
    return PatientClient(MlflowClient(uri), uri)


def hold(client: PatientClient, lease: str, holder: str, experiment: str = "0") -> None:
    """Write a lease as another process would."""
    client.set_experiment_tag(experiment, f"{PREFIX}{lease}", f"{holder} 3")


def leases(client: PatientClient) -> list[str]:
    """Return the leases of all experiments: the work and the number."""
    tags = [tag for experiment in client.search_experiments() for tag in experiment.tags if tag.startswith(PREFIX)]
    return sorted(tag.removeprefix(PREFIX).rpartition(".")[0] for tag in tags)


def test_one_at_a_time(client: PatientClient) -> None:
    inside, most = 0, 0
    guard = threading.Lock()
    other = client.create_experiment("other")

    def work(number: int) -> None:
        nonlocal inside, most
        with leased(client, "0" if number % 2 else other, "abc", f"holder-{number}") as confirm:
            with guard:
                inside += 1
                most = max(most, inside)
            time.sleep(0.2)
            confirm()
            with guard:
                inside -= 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == 1 and not any(thread.is_alive() for thread in threads)
    assert leases(client) == []


def test_other_work_is_not_waited_for_and_a_lease_shows_neither_in_the_registry_nor_in_the_ui(
    client: PatientClient,
) -> None:
    with leased(client, "0", "abc", "one"), leased(client, "0", "abd", "two"):
        assert leases(client) == ["abc.0", "abd.0"]
    with leased(client, "0", "abc", "one"):
        assert leases(client) == ["abc.0"]
        assert client.search_registered_models() == [] and client.search_runs(["0"]) == []
        # MLflow's UI shows no tag that begins so.
        assert all(tag.startswith("mlflow.") for tag in client.get_experiment("0").tags)


def test_two_that_ask_at_once_both_withdraw(client: PatientClient) -> None:
    hold(client, "abc.0.other", "other")
    assert not Lease(client, "0", "abc", "mine")._take({})
    assert leases(client) == ["abc.0"]  # the other one's


def test_a_dead_holder_is_replaced(client: PatientClient) -> None:
    hold(client, "abc.7.x", "dead")
    began = time.monotonic()
    with leased(client, "0", "abc", "next"):
        assert leases(client) == ["abc.8"]
    assert 1.5 <= time.monotonic() - began < 30
    assert leases(client) == []


def test_a_living_holder_is_not_replaced(client: PatientClient) -> None:
    got = threading.Event()

    def second() -> None:
        with leased(client, "0", "abc", "second"):
            got.set()

    thread = threading.Thread(target=second)
    with leased(client, "0", "abc", "first") as confirm:
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


@pytest.mark.parametrize("others_deleted_it", [True, False])
def test_a_holder_that_was_cut_off_does_not_go_on(client: PatientClient, others_deleted_it: bool) -> None:
    mine = Lease(client, "0", "abc", "mine")
    mine.acquire()
    hold(client, "abc.1.x", "other")
    if others_deleted_it:
        client.delete_experiment_tag("0", mine._tag)
    with pytest.raises(TrackingError, match="another one does its work now"):
        mine.confirm()
    mine.release()
    assert leases(client) == ["abc.1"]


def test_a_lost_lease_is_not_written_again(client: PatientClient) -> None:
    mine = Lease(client, "0", "abc", "mine")
    mine.acquire()
    client.delete_experiment_tag("0", mine._tag)
    assert mine._lost.wait(10)
    assert leases(client) == []


def test_the_leases_of_dead_processes_are_given_back(client: PatientClient) -> None:
    hold(client, "abc.0.x", "dead", client.create_experiment("other"))
    hold(client, "abd.0.y", "alive")
    client.set_experiment_tag("0", "color", "dead 3")
    give_back_leases(client, {"dead"})
    assert leases(client) == ["abd.0"] and client.get_experiment("0").tags["color"] == "dead 3"
