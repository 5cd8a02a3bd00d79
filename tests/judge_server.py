"""A real local HTTP server that speaks the chat-completions protocol and answers by a script."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Script = Callable[[int, dict[str, Any]], "str | tuple[int, dict[str, Any]]"]
"""From the request's number (0, 1, ...) and body to the judge's text, or to a status with an error body."""


@dataclass
class JudgeServer:
    """What the server saw, and where it is."""

    base_url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)


@contextmanager
def judge_server(script: Script, *, model: str = "gpt-4-0613") -> Iterator[JudgeServer]:
    """Serve until the block ends. Errors ask for a retry after one millisecond, so that tests need not wait."""
    lock = threading.Lock()
    state = JudgeServer("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(state.bodies)
                state.bodies.append({"path": self.path, **body})
                state.keys.append(self.headers["Authorization"].removeprefix("Bearer "))
            answer = script(number, body)
            status, payload = answer if isinstance(answer, tuple) else (200, _completion(answer, model))
            data = json.dumps(payload).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            if status != 200:
                self.send_header("retry-after-ms", "1")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Keep the test's output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.base_url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _completion(text: str, model: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
    }
