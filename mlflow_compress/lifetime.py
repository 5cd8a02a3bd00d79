"""How this process ends early: on SIGTERM and SIGINT, and when the process that started it is gone."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

_SECONDS_BETWEEN_LOOKS = 1.0


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt once; later signals are ignored, so that nothing interrupts the closing of runs."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt(signum)


def raise_on_signals() -> None:
    """Turn the first SIGTERM or SIGINT into KeyboardInterrupt, so that open runs are closed and child processes ended.

    A terminal sends Ctrl-C to the parent and its stage, and the parent then ends its stage with SIGTERM: the stage
    gets two signals, and the second must not stop it from closing its run.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """Return what a shell reports for the signal that raised this: 143 for SIGTERM, 130 for SIGINT."""
    return 128 + int(interrupt.args[0] if interrupt.args else signal.SIGINT)


def end_with_parent() -> None:
    """Send this process SIGTERM when its parent process ends, however that ended (SIGKILL leaves it no time to ask)."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def killed_by(returncode: int) -> str | None:
    """Return the name of the signal that ended a child process ("SIGFPE"), or None where it ended by itself.

    Popen reports a signal as a negative number, a shell in between as 128 and the signal's number.
    """
    number = -returncode if returncode < 0 else returncode - 128
    try:
        return signal.Signals(number).name
    except ValueError:
        return None
