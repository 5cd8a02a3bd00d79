"""The workers of a command: actors that hold a model, shared by all it does, and the loop that hands out tasks."""

import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any

from mlflow_compress.config import EngineConfig
from mlflow_compress.engines.ray.cluster_worker import ClusterWorker
from mlflow_compress.errors import ConfigError, MlflowCompressError, StoreAwayError, WorkerError, require_extra

_TOKEN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE")
_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_ANSWER_SECONDS = 10.0
_SHORT = 40  # characters of a temporary folder: Ray makes sockets in it, whose paths must not exceed 107


@contextmanager
def connected(settings: EngineConfig) -> Iterator[ModuleType]:
    """Yield the module `ray` while this process is connected to a cluster.

    Where the process is connected already, that connection is used, and stays.
    """
    if settings.ray_address is None:
        # Ray's own switch, read when it is imported: raylet, gcs_server, workers and this process listen on 127.0.0.1,
        # where Ray would otherwise open them to the network. It is the default on macOS, hence the name.
        os.environ.setdefault(_CLUSTERS, "0")
    require_extra("ray", "ray", by="engine=ray")
    import ray

    if ray.is_initialized():
        yield ray
        return
    logging.getLogger("ray").setLevel(logging.ERROR)  # otherwise it says more than the command itself
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    folder = tempfile.gettempdir()
    scratch = tempfile.mkdtemp(prefix="ray-", dir=folder if len(folder) <= _SHORT else "/tmp")
    try:
        with _own_signals():
            if settings.ray_address is None:
                if not any(os.environ.get(name) for name in _TOKEN):
                    # Without this, Ray makes a token and writes it into the user's home.
                    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
                ray.init(
                    address="local",  # not the cluster that RAY_ADDRESS names: it was not asked for
                    num_cpus=cores(),
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _temp_dir=scratch,
                )
            else:
                _join(ray, settings.ray_address)
        yield ray
    finally:
        ray.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)  # a daemon of Ray may still write its last lines


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _join(ray: ModuleType, address: str) -> None:
    try:
        known = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
        if known != "auto" and "://" not in known:
            host, port = known.rsplit(":", 1)
            socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()  # Ray itself waits for ever
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, OverflowError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"No Ray cluster answers: {str(error).strip().splitlines()[0]}",
            allowed="'auto' on a machine of a running cluster, or host:port of its head",
            got=address,
            fix="It wants its token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to the cluster's"
            if "AuthToken" in str(error.__cause__)
            else "Start one with `ray start --head`, or leave ray_address out",
        ) from error


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's own handlers: Ray replaces that of SIGTERM, and then no open run would be closed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


_LOOK_SECONDS = 0.5
_CONNECT_SECONDS = 2.0
_HEAD_AWAY_SECONDS = 40.0  # Ray ends the process after 60; a head that keeps its state elsewhere is back before
_HERE_AWAY_SECONDS = 0.0  # Ray ends this process, without a word, at the next thing that it wants from there


class HeadWatch:
    """Looks twice a second whether the head, and Ray's process on this machine, take connections.

    A head that is started again without a memory is another cluster, which ends what it finds on its machines. So the
    process on this machine tells both: the head was restarted, or this machine has lost its place.
    """

    def __init__(self, ray: ModuleType) -> None:
        context = ray.get_runtime_context()
        host, port = context.gcs_address.rsplit(":", 1)
        [here] = [node for node in ray.nodes() if node["NodeID"] == context.get_node_id()]
        self._places = {
            "The head of the Ray cluster": ((host, int(port)), _HEAD_AWAY_SECONDS),
            "Ray's process on this machine": (
                (here["NodeManagerAddress"], int(here["NodeManagerPort"])),
                _HERE_AWAY_SECONDS,
            ),
        }
        self._silent_since: dict[str, float] = {}
        self._next_look = 0.0

    def check(self) -> None:
        """Return if the cluster is there, or may come back."""
        now = time.monotonic()
        if now < self._next_look:
            return
        for name, (address, patience) in self._places.items():
            if _answers(address):
                self._silent_since.pop(name, None)
                continue
            if patience and name not in self._silent_since:
                logger.warning("%s does not answer; waiting for it, at most %.0f s", name, patience)
            if now - self._silent_since.setdefault(name, now) >= patience:
                raise WorkerError(
                    f"{name} does not answer any more",
                    got=":".join(map(str, address)),
                    fix="Start the cluster again, then the same command: it continues from what is on disk",
                )
        self._next_look = time.monotonic() + _LOOK_SECONDS


def _answers(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=_CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


_SECONDS = 5.0


class _LineKeeper:
    """Keeps what was said until it is read: an actor of its own, because a worker that computes answers nobody."""

    def __init__(self) -> None:
        self._lines: list[tuple[int, str]] = []

    def say(self, number: int, line: str) -> None:
        self._lines.append((number, line))

    def take(self) -> list[tuple[int, str]]:
        """Return what was said since the last call."""
        taken, self._lines = self._lines, []
        return taken


class _SaidLines:
    """What workers say about their tasks. The keeper ends when nobody refers to it any more.

    Workers get `keeper` as an argument and call ``keeper.say.remote(number, line)``, which does not wait.
    """

    def __init__(self, ray: ModuleType) -> None:
        self._ray = ray
        self.keeper: Any = ray.remote(_LineKeeper).options(num_cpus=0, max_restarts=-1).remote()

    def take(self) -> list[tuple[int, str]]:
        """Return the number of the task and the line of everything that is new; nothing while the keeper is away."""
        try:
            taken: list[tuple[int, str]] = self._ray.get(self.keeper.take.remote(), timeout=_SECONDS)
        except self._ray.exceptions.RayError:
            return []
        return taken


logger = logging.getLogger(__name__)

_ATTEMPTS = 4  # of one task, each of which has taken a worker with it
_START_SECONDS = 600.0  # until the first worker has its place; a cluster that grows needs some minutes
_POLL_SECONDS = 1.0
_AT_ONCE = 2  # tasks of a worker: it receives the next one while it computes


@dataclass(frozen=True)
class WorkerCall:
    """A task: a call of a worker's method. Arguments may be references to objects in Ray's store."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(eq=False)
class _Member:
    """An actor, and the tasks that it has."""

    handle: Any
    n_tasks: int = 0


class Workers:
    """Actors that compute tasks, each with one GPU or with some cores of its own.

    An actor that is lost, alone or with its machine, is replaced, and its tasks are given to another one.

    `make` starts one, whose method ``describe`` says what must be equal in all; `code` is what of that must be as in
    this process. `check` is called about once a second, and raises an error where the cluster is gone (see
    `HeadWatch`).
    """

    def __init__(
        self,
        ray: ModuleType,
        n: int,
        make: Callable[[], Any],
        *,
        device: str = "cpu",
        code: Mapping[str, str] = MappingProxyType({}),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._ray = ray
        self._check = check
        self._gone = False
        self.n = n
        self.device = device
        self.code = code
        self._make = make
        self._ready: list[_Member] = []
        self._starting: dict[Any, _Member] = {}
        self._described: dict[str, str] | None = None
        self._lost = 0
        self._last_ready = time.monotonic()
        for _ in range(n):
            self._start_one()

    @property
    def described(self) -> dict[str, str]:
        """What the first worker has said of itself (see `ClusterWorker.describe`)."""
        while self._described is None:
            self._wait_for([])
        return self._described

    def share(self, value: Any) -> Any:
        """Put a value into Ray's store, once for all workers, and return the reference for a task's arguments."""
        return self._ray.put(value)

    def said_lines(self) -> _SaidLines:
        """Return a place for lines that workers say while they compute."""
        return _SaidLines(self._ray)

    def call(self, method: str, *arguments: Any) -> Any:
        """Return the result of a method from one worker. It may be called while tasks run."""
        for attempt in range(1, _ATTEMPTS + 1):
            while not self._ready:
                self._wait_for([])
            member = min(self._ready, key=lambda one: one.n_tasks)
            reference = getattr(member.handle, method).remote(*arguments)
            while reference not in self._wait_for([reference]):
                continue
            try:
                return self._ray.get(reference)
            except self._ray.exceptions.RayTaskError as error:
                raise _failed(error) from error
            except self._ray.exceptions.RayError as error:
                self._replace(member, error)
                if attempt == _ATTEMPTS:
                    raise _lost(error) from error
        raise AssertionError  # the loop returns or raises

    def release(self) -> None:
        for member in self._ready if not self._gone else []:
            member.handle.release.remote()

    def run(
        self,
        n_tasks: int,
        make: Callable[[int], WorkerCall],
        done: Callable[[int, Any], None],
        *,
        at_once: int = _AT_ONCE,
        lost: Callable[[int, WorkerError], None] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Run tasks; call `done` with the number and the result of each as it comes, in any order.

        `make` returns the task of a number when a worker is free for it, and again when that worker is lost. A worker
        has `at_once` tasks: from two on, it receives the next one while it computes. `lost` is told of a task with
        which several workers were lost, and the others go on; without it, that ends all. `meanwhile` is called about
        once a second.
        """
        waiting, attempts = deque(range(n_tasks)), [0] * n_tasks
        busy: dict[Any, tuple[_Member, int]] = {}
        try:
            while waiting or busy:
                self._hand_out(make, waiting, busy, at_once)
                meanwhile()
                for reference in self._wait_for(list(busy)):
                    member, number = busy.pop(reference)
                    member.n_tasks -= 1
                    try:
                        result = self._ray.get(reference)
                    except self._ray.exceptions.RayTaskError as error:
                        raise _failed(error) from error
                    except self._ray.exceptions.RayError as error:
                        attempts[number] += 1
                        self._replace(member, error)
                        if attempts[number] < _ATTEMPTS:
                            waiting.appendleft(number)
                        elif lost is None:
                            raise _lost(error) from error
                        else:
                            lost(number, _lost(error))
                    else:
                        done(number, result)
        finally:  # nobody is busy, unless an error or the user has ended this
            for member in {member for member, _ in busy.values()}:
                self._stop(member)  # what it computes is of no use any more

    def _hand_out(
        self, make: Callable[[int], WorkerCall], waiting: deque[int], busy: dict[Any, tuple[_Member, int]], at_once: int
    ) -> None:
        """Give every worker a task, and further ones while there are enough for all."""
        for ahead in range(at_once):
            for member in self._ready:
                if member.n_tasks == ahead and len(waiting) > ahead * self.n:
                    number = waiting.popleft()
                    task = make(number)
                    member.n_tasks += 1
                    busy[getattr(member.handle, task.method).remote(*task.arguments)] = member, number

    def _wait_for(self, busy: list[Any]) -> list[Any]:
        """Return those of the `busy` references that have a result, or none after a second; admit who has started."""
        try:
            self._check()
        except WorkerError:
            self._gone = True  # every further call to Ray may wait for it, and end the process
            raise
        finished, _ = self._ray.wait([*self._starting, *busy], num_returns=1, timeout=_POLL_SECONDS)
        if self._ready:
            self._last_ready = time.monotonic()
        elif time.monotonic() - self._last_ready > _START_SECONDS:
            raise WorkerError(
                f"The cluster had no room for a worker within {_START_SECONDS:.0f} seconds",
                fix="Ask for fewer cpus_per_worker, or add machines; `ray status` shows what is free",
            )
        for reference in finished:
            if reference in self._starting:
                self._admit(self._starting.pop(reference), reference)
        return [reference for reference in finished if reference in busy]

    def _admit(self, member: _Member, reference: Any) -> None:
        """Let a worker that has started take tasks, if it is like the others."""
        try:
            described = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise _failed(error) from error
        except self._ray.exceptions.RayError as error:
            self._lost += 1
            if self._lost > _ATTEMPTS * self.n:
                raise WorkerError(f"Workers cannot start: {_first_line(error)}") from error
            self._start_one()
            return
        if self._described is None:
            self._described = described
        first = {**self._described, **self.code}
        if differ := sorted(name for name in described.keys() | first.keys() if described.get(name) != first.get(name)):
            raise WorkerError(
                f"Workers, or this process, differ in {', '.join(differ)}: records would depend on the worker",
                allowed=str({name: first.get(name) for name in differ}),
                got={name: described.get(name) for name in differ},
                fix="Use machines of one kind, with the same version of mlflow-compress",
            )
        self._ready.append(member)

    def _start_one(self) -> None:
        member = _Member(self._make())
        self._starting[member.handle.describe.remote()] = member

    def _replace(self, member: _Member, error: Exception) -> None:
        if member in self._ready:
            logger.warning("A worker was lost, and is replaced: %s", _first_line(error))
            self._stop(member)

    def _stop(self, member: _Member) -> None:
        """End a worker, and start another one in its place."""
        if member in self._ready and not self._gone:
            self._ready.remove(member)
            self._ray.kill(member.handle)
            self._start_one()


@contextmanager
def started_workers(
    settings: EngineConfig, *, on_gpu: bool | None, kind: type[ClusterWorker] = ClusterWorker
) -> Iterator[Workers]:
    """Yield workers, which end with the block. `on_gpu` gives each of them a GPU; None: if the cluster has any."""
    with connected(settings) as ray:
        resources = ray.cluster_resources()
        n_cores, n_gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
        device = "cuda" if on_gpu or (on_gpu is None and n_gpus) else "cpu"
        room = n_cores // settings.cpus_per_worker
        room = min(room, n_gpus) if device == "cuda" else room
        n = room if settings.workers == "auto" else settings.workers
        # A cluster may grow; one machine does not.
        if n < 1 or (settings.ray_address is None and n > room):
            raise ConfigError(
                "Parameter 'workers' asks for more workers than fit",
                allowed=f"at most {room}: {n_cores} cores and {n_gpus} GPUs",
                got=f"{n} with {settings.cpus_per_worker} cores{' and a GPU' if device == 'cuda' else ''} each",
                fix="Change workers, cpus_per_worker or device",
            )
        actor = ray.remote(kind).options(
            num_cpus=settings.cpus_per_worker, num_gpus=1 if device == "cuda" else 0, max_restarts=0
        )
        n_threads = settings.cpus_per_worker
        yield Workers(
            ray,
            n,
            lambda: actor.remote(device, n_threads),
            device=device,
            code=kind.code(),
            check=HeadWatch(ray).check,
        )


def _lost(error: Exception) -> WorkerError:
    """Return the error of a task with which several workers were lost."""
    return WorkerError(
        f"{_ATTEMPTS} workers were lost, one after the other, with the same task: {_first_line(error)}",
        fix="Memory is the usual reason: use fewer workers per machine",
    )


def _failed(error: Any) -> MlflowCompressError:
    """Return the error of a worker's task: in one sentence where the cause is the user's to read."""
    cause = getattr(error, "cause", error)
    if isinstance(cause, StoreAwayError):
        return cause
    if isinstance(cause, MlflowCompressError):
        return WorkerError(f"A worker failed: {cause}")
    logger.warning("A task failed", exc_info=error)
    return WorkerError(f"A worker failed: {type(cause).__name__}: {_first_line(cause)}")


def _first_line(error: object) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
