"""A headless Chromium, driven by its own protocol over a pipe; needs no package and no driver."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.waiting import until

AXE = Path(__file__).parents[1] / "tools" / "page_libraries" / "node_modules" / "axe-core" / "axe.min.js"
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
    "--disable-component-update",
    "--disable-extensions",
    "--remote-debugging-pipe",
]
# Chromium reads commands from 3 and answers on 4. Copies from 10 upwards first: a copy that is 3 or 4 would end at exec.
_START = """
import os, sys
from fcntl import F_DUPFD, fcntl
read, write = (fcntl(int(end), F_DUPFD, 10) for end in sys.argv[1:3])
os.dup2(read, 3), os.dup2(write, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def chromium() -> str | None:
    """Return the browser's program, or None where there is none."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page of a headless browser."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = os.fdopen(commands, "wb"), os.fdopen(answers, "rb", buffering=0)
        self._rest, self._number, self._session = b"", 0, ""
        self.errors: list[str] = []  # complaints of its console, also of what the page's policy has refused
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the browser's protocol, and return the answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(answer["error"]["message"])
                return answer["result"]
            self._hear(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = self._answers.read(1 << 20)
            if not read:
                raise RuntimeError("the browser has ended")
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _hear(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"].get("exception", {}).get("description", "exception"))

    def show(self, address: str, *, width: int = 1600, dark: bool = False, scripts: bool = True) -> None:
        """Open an address in a window of this width."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.send(
            "Page.navigate", url="about:blank"
        )  # an address that differs in its fragment alone is not loaded again
        self.send("Page.navigate", url=address)

    def run(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript; a promise is waited for."""
        found = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description", "exception"))
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """Return the first value of an expression that is true."""
        return until(lambda: self.run(expression))

    def ready(self) -> int:
        """Wait until the page over variants is usable, and return after how many milliseconds it was."""
        return int(self.until("document.documentElement?.dataset.ready"))

    def close(self) -> None:
        """End the browser."""
        self._session = ""
        self.send("Browser.close")
        self._commands.close()
        self._answers.close()


@contextmanager
def browser() -> Iterator[Browser]:
    """Yield a headless browser with a profile of its own, and end it."""
    program = chromium()
    assert program is not None
    (read_commands, commands), (answers, write_answers) = os.pipe(), os.pipe()
    ends = [str(read_commands), str(write_answers)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, *ends, program, *_FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(read_commands, write_answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        try:
            page = Browser(commands, answers)
            yield page
            page.close()
        finally:
            process.terminate()
            process.wait()
