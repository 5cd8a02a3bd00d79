"""The lease on a piece of work: one holder at a time, and a dead holder does not block for ever."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from filelock import FileLock
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from mlflow_compress.errors import StoreAwayError, TrackingError
from mlflow_compress.tracking import lease as lease_module
from mlflow_compress.tracking import live_processes
from mlflow_compress.tracking.lease import _BEAT_S, _SILENT_LOOKS, PREFIX, Lease, give_back_leases, leased
from mlflow_compress.tracking.waiting import PatientClient
from tests.clock import Clock
from tests.waiting import until

ELSEWHERE = "other-machine-7-0123456789ab"


@pytest.fixture
def client(workdir: Path) -> PatientClient:
    """Return a client of a SQLite store; a server's experiments behave the same."""
    uri = f"sqlite:///{workdir / 'mlflow.db'}"
    return PatientClient(MlflowClient(uri), uri)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock by which a process waits for the lease of another one."""
    clock = Clock()
    clock.drive(monkeypatch, lease_module)
    return clock


def hold(client: PatientClient, lease: str, holder: str, experiment: str = "0", beat: int = 3) -> None:
    """Write a lease as another process would."""
    client.set_experiment_tag(experiment, f"{PREFIX}{lease}", f"{holder} {beat}")


def leases(client: PatientClient) -> list[str]:
    """Return the leases of all experiments: the work and the number."""
    tags = [tag for experiment in client.search_experiments() for tag in experiment.tags if tag.startswith(PREFIX)]
    return sorted(tag.removeprefix(PREFIX).rpartition(".")[0] for tag in tags)


HOLD = """
import sys
from mlflow.tracking import MlflowClient
from mlflow_compress.lifetime import end_with_parent
from mlflow_compress.tracking.lease import leased
from mlflow_compress.tracking.live_processes import own_name
from mlflow_compress.tracking.waiting import PatientClient
end_with_parent()
uri = sys.argv[1]
with leased(PatientClient(MlflowClient(uri), uri), "0", "abc", own_name(uri)):
    print(own_name(uri), flush=True)
    sys.stdin.read()
"""


@contextmanager
def holding(client: PatientClient) -> Iterator[subprocess.Popen[str]]:
    """Run another process that holds the lease until its input ends."""
    command, pipe = [sys.executable, "-c", HOLD, client.uri], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline(), "it has ended"
            yield process
        finally:
            process.kill()


def acquire_while(clock: Clock, client: PatientClient, *happens: Callable[[], object]) -> int:
    """Wait for the lease, while one thing happens during each pause; return after how many looks it was there."""
    clock.happens = iter(happens)
    with leased(client, "0", "abc", "next"):
        pass
    return len(clock.pauses) + 1


def nothing() -> None:
    """Happens during a pause."""


def test_one_at_a_time(client: PatientClient, clock: Clock) -> None:
    inside, most, n_done = 0, 0, 0
    guard = threading.Lock()
    other = client.create_experiment("other")
    name = live_processes.own_name(client.uri)

    def work(number: int) -> None:
        nonlocal inside, most, n_done
        for _ in range(3):
            with leased(client, "0" if number % 2 else other, "abc", name) as confirm:
                with guard:
                    inside += 1
                    most = max(most, inside)
                client.search_experiments()  # the others look meanwhile
                confirm()
                with guard:
                    inside -= 1
                    n_done += 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, n_done) == (1, 12)
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


def test_a_silent_holder_of_another_machine_is_replaced_after_twenty_looks_on_time(
    client: PatientClient, clock: Clock
) -> None:
    hold(client, "abc.7.x", ELSEWHERE)
    with leased(client, "0", "abc", "next"):
        assert leases(client) == ["abc.8"]
    assert len(clock.pauses) == _SILENT_LOOKS == 20  # the first look saw it, and each of twenty saw it unchanged
    assert leases(client) == []


def test_a_holder_of_another_machine_that_beats_is_not_replaced(client: PatientClient, clock: Clock) -> None:
    """It is slow: a beat is written just before it would count as gone. Then it gives the lease back."""
    beats = [lambda n=n: hold(client, "abc.0.x", ELSEWHERE, beat=n) for n in range(5)]
    slow = [one for beat in beats for one in (*[nothing] * (_SILENT_LOOKS - 1), beat)]
    hold(client, "abc.0.x", ELSEWHERE)
    gives_back = lambda: client.delete_experiment_tag("0", f"{PREFIX}abc.0.x")  # noqa: E731
    assert acquire_while(clock, client, *slow, gives_back) == len(slow) + 2


def test_late_looks_of_a_starved_waiter_do_not_count(client: PatientClient, clock: Clock) -> None:
    def recover() -> None:
        clock.late = 0.0

    hold(client, "abc.0.x", ELSEWHERE)
    clock.late = _BEAT_S
    late = [nothing] * 100
    assert acquire_while(clock, client, *late, recover) == 1 + len(late) + 1 + _SILENT_LOOKS


@pytest.mark.ci
def test_a_starved_or_stopped_holder_of_this_machine_is_not_replaced_as_long_as_its_process_lives(
    client: PatientClient, clock: Clock
) -> None:
    """Its process is stopped for ten minutes of the waiter's clock, and then killed: the next look replaces it."""
    with holding(client) as holder:
        os.kill(holder.pid, signal.SIGSTOP)
        os.waitpid(holder.pid, os.WUNTRACED)

        def kill() -> None:
            assert leases(client) == ["abc.0"]
            holder.kill()
            holder.wait()

        looks = [nothing] * 400  # of 1.5 s and more
        begin = clock.now
        assert acquire_while(clock, client, *looks, kill) == 1 + len(looks) + 1
        assert clock.now - begin >= 600
    assert leases(client) == []


@pytest.mark.ci
def test_beside_busy_processes_nothing_but_its_end_replaces_a_holder(client: PatientClient, clock: Clock) -> None:
    with ExitStack() as busy, holding(client) as holder:
        for _ in range(4):
            spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            busy.callback(spinning.wait)
            busy.callback(spinning.kill)
        looks: list[Callable[[], object]] = [nothing] * (2 * _SILENT_LOOKS)  # it is slow
        os.kill(holder.pid, signal.SIGSTOP)
        looks += [lambda: os.kill(holder.pid, signal.SIGCONT), *looks]  # and was stopped
        looks[-1] = lambda: (holder.kill(), holder.wait())
        assert acquire_while(clock, client, *looks) == 1 + len(looks)


def test_a_dead_holder_of_this_machine_is_replaced_at_the_next_look(client: PatientClient, clock: Clock) -> None:
    theirs = f"{live_processes.own_host()}-7-0123456789ab"
    lock = live_processes._place(client.uri) / f"{theirs}.lock"
    lock.parent.mkdir(parents=True)
    hold(client, "abc.0.x", theirs)
    with FileLock(lock) as alive:
        looks = [nothing] * (3 * _SILENT_LOOKS)
        assert acquire_while(clock, client, *looks, alive.release) == 1 + len(looks) + 1
    assert leases(client) == []


def test_a_holder_of_another_machine_with_a_similar_name_is_not_looked_up_here(
    client: PatientClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = live_processes.own_name(client.uri)
    assert live_processes.alive_here(client.uri, name)
    for other in (f"{live_processes.own_host()}-b-7-0123456789ab", "dead"):
        path = live_processes._place(client.uri) / f"{other}.lock"
        path.touch()  # homes may be shared by machines whose locks are not
        assert live_processes.alive_here(client.uri, other) is None
    assert live_processes.alive_here(client.uri, f"{live_processes.own_host()}-7-0123456789ab") is None


def test_a_living_holder_is_not_replaced(client: PatientClient, clock: Clock) -> None:
    looked, got = threading.Event(), threading.Event()

    def second() -> None:
        acquire_while(clock, client, *[nothing] * (3 * _SILENT_LOOKS), looked.set)
        got.set()
        looked.set()

    thread = threading.Thread(target=second)
    with leased(client, "0", "abc", live_processes.own_name(client.uri)) as confirm:
        thread.start()
        looked.wait()
        assert not got.is_set()
        confirm()
    thread.join()
    assert got.is_set()


def test_a_clock_that_is_set_back_changes_no_lease(client: PatientClient, clock: Clock) -> None:
    def set_back() -> None:
        clock.set_back += 3600

    hold(client, "abc.0.x", ELSEWHERE)
    assert acquire_while(clock, client, *[set_back] * 100) == 1 + _SILENT_LOOKS


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


def test_a_lost_lease_is_not_written_again(client: PatientClient, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Lease(client, "0", "abc", "mine")
    assert mine._take({})
    waits = iter([lambda: None, lambda: client.delete_experiment_tag("0", mine._tag)])
    monkeypatch.setattr(mine._stop, "wait", lambda seconds: next(waits)())
    mine._beat()  # once, and then it sees the loss
    assert mine._lost.is_set() and leases(client) == []


def test_a_lease_that_cannot_be_given_back_now_is_given_back_later(
    client: PatientClient, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would be that of a living process for ever."""
    away, delete = threading.Event(), client.impatient.delete_experiment_tag

    def impatient(*arguments: str) -> None:
        if away.is_set():
            raise MlflowException("no connection")
        delete(*arguments)

    def patient(*arguments: str) -> None:
        raise StoreAwayError("It does not answer")

    with leased(client, "0", "abc", live_processes.own_name(client.uri)):
        monkeypatch.setattr(client.impatient, "delete_experiment_tag", impatient)
        client.delete_experiment_tag = patient
        away.set()
        clock.happens = iter([*[nothing] * 5, away.clear])
    until(lambda: leases(client) == [])
    assert clock.pauses == [_BEAT_S] * 6


def test_the_leases_of_dead_processes_are_given_back(client: PatientClient) -> None:
    hold(client, "abc.0.x", "dead", client.create_experiment("other"))
    hold(client, "abd.0.y", "alive")
    client.set_experiment_tag("0", "color", "dead 3")
    give_back_leases(client, {"dead"})
    assert leases(client) == ["abd.0"] and client.get_experiment("0").tags["color"] == "dead 3"
