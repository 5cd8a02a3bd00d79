"""A process's life: how its threads wait, what ends it early (signals, the end of its parent), and what it has cost."""

import atexit
import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

STORE_AWAY = 75
"""Exit code of a command that has waited for the tracking server in vain; in sysexits.h, a temporary failure."""

BROKE_OFF = 70
"""Exit code of a stage that broke off, see `breaks_off`; in sysexits.h, an internal error."""

KILLED_BY = "was killed by"  # in the error of a stage that a signal has ended, before the signal's name
_SECONDS_BETWEEN_LOOKS = 1.0


_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def raise_on_signals(said: str = "") -> None:
    """Turn the first SIGTERM or SIGINT into KeyboardInterrupt, so that open runs are closed and child processes ended.

    A terminal sends Ctrl-C to the parent and its stage. The parent then ends its stage with SIGTERM. So the stage gets
    two signals, and the second one must not stop it from closing its run.

    - `said`: What goes to the standard error at once: to close runs takes seconds.
    """

    def interrupt(signum: int, frame: FrameType | None) -> None:
        for number in _SIGNALS:
            # SIG_IGN would make Python complain about a signal that has come, and is not handled yet.
            signal.signal(number, lambda signum, frame: None)
        if said:
            os.write(2, f"{said}\n".encode())  # print fails where it is interrupted itself
        raise KeyboardInterrupt(signum)

    for number in _SIGNALS:
        signal.signal(number, interrupt)


@contextmanager
def signals_later() -> Iterator[None]:
    """Let SIGTERM and SIGINT that come during this block be handled at its end, as they would have been.

    Python raises KeyboardInterrupt between any two of its instructions: in a database library, this can leave a lock,
    become another error, or get lost in a destructor.
    """
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in _SIGNALS:
        signal.signal(number, lambda signum, frame: came.append(signum))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for signum in came:
            signal.raise_signal(signum)


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """Return the exit code that shells use for the signal behind an interrupt: 143 for SIGTERM, 130 for SIGINT."""
    return 128 + int(interrupt.args[0] if interrupt.args else signal.SIGINT)


_SLEEPS = "passive"  # in lower case, which tells our setting from a user's
_M_MMAP_MAX, _M_TRIM_THRESHOLD = -4, -1  # in malloc.h
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def keep_freed_memory() -> None:
    """Let glibc keep the memory that is freed, for the next tensors; other allocators are left as they are.

    Otherwise every large tensor is mapped, and its pages are zeroed by the kernel one fault at a time: 7 to 13 % of
    AWQ's processor seconds on the demo.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def let_threads_sleep() -> None:
    """Let the threads of OpenMP and OpenBLAS sleep while they wait, unless the user has set how they wait.

    By default they spin, and two processes of two threads on two cores then take eight times as long as one after the
    other. It must be called before torch and numpy are loaded.
    """
    if not any(name in os.environ for name in _WAITING):
        os.environ["OMP_WAIT_POLICY"] = _SLEEPS
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # numpy's: the shortest, 16 ticks of the processor's clock


def as_the_user_set(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what `let_threads_sleep` has set: for processes whose speed is measured."""
    return {name: value for name, value in environment.items() if (name, value) != (_WAITING[0], _SLEEPS)}


def end_process(code: int) -> NoReturn:
    """End this process as Python does, but without taking its modules apart.

    That takes about a second, and two in a fork, which copies the memory that it shares with its parent. Threads are
    waited for, and what is registered for the end of a process is done.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


@contextmanager
def quick_collections() -> Iterator[None]:
    """Keep what exists now out of the garbage collections of this block.

    A million objects of imported modules make each of them take half a second.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def end_with_parent() -> None:
    """Send SIGTERM to this process when its parent process ends, even if the parent was killed by SIGKILL."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def processor_time() -> float:
    """Return the processor time of this process, and of the processes that it has started and that have ended."""
    return sum(os.times()[:4])


def killed_by(returncode: int) -> str | None:
    """Return the name of the signal that ended a child process ("SIGFPE"), or None if it ended by itself.

    Popen returns the signal's number as a negative number. A shell in between returns 128 plus the signal's number.
    """
    number = -returncode if returncode < 0 else returncode - 128
    try:
        return signal.Signals(number).name
    except ValueError:
        return None
