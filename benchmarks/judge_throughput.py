"""How much faster the judge's calls are with 16 at the same time than one by one.

    python benchmarks/judge_throughput.py

A local server in a process of its own answers each call after 200 ms. Prints calls a second one by one and at
`judge_concurrency=16`, and their ratio, as one JSON line.
"""

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from mlflow_compress.judges.asking import Asker, Question, read_rating
from mlflow_compress.judges.prompts import grading_prompt
from mlflow_compress.transport.endpoint import EndpointConfig
from mlflow_compress.transport.replies import ReplyCache

_MESSAGE = {"message": {"role": "assistant", "content": "Good. Rating: [[7]]"}, "finish_reason": "stop", "index": 0}
_USAGE = {"prompt_tokens": 400, "completion_tokens": 9}
_BODY = json.dumps({"object": "chat.completion", "model": "local", "choices": [_MESSAGE], "usage": _USAGE}).encode()
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(_BODY) + _BODY


def serve(latency: float, ready: Connection) -> None:
    """Answer every request after `latency` seconds, until the process is ended."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
                await asyncio.sleep(latency)
                writer.write(_ANSWER)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def questions(n: int) -> list[Question]:
    """Return n gradings of answers of MT-Bench's usual length."""
    return [
        Question(str(i), grading_prompt("writing", 0, (f"Write text {i}.",), ("word " * 250,)), 0) for i in range(n)
    ]


def calls_per_second(base_url: str, n: int, concurrency: int) -> float:
    """Return the calls a second of n gradings, each written to the cache."""
    endpoint = EndpointConfig(base_url=base_url, key="none", concurrency=concurrency)
    with tempfile.TemporaryDirectory() as folder:
        asker = Asker(endpoint=endpoint, model="local", cache=ReplyCache(Path(folder) / "judgments.jsonl"))
        begin = time.perf_counter()
        found = asker.ask_all(questions(n), read_rating)
        seconds = time.perf_counter() - begin
    assert [judgment.value for judgment in found] == [7.0] * n
    return n / seconds


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=320, help="calls at 16 at the same time [320]")
    parser.add_argument("--latency", type=float, default=0.2, help="seconds until the server answers [0.2]")
    asked = parser.parse_args(argv)
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(asked.latency, theirs), daemon=True)
    server.start()
    try:
        url = f"http://127.0.0.1:{ours.recv()}/v1"
        calls_per_second(url, 2, 1)  # imports the client
        one = calls_per_second(url, max(asked.calls // 16, 10), 1)
        many = calls_per_second(url, asked.calls, 16)
    finally:
        server.terminate()
    found = {"one_by_one_per_s": round(one, 2), "sixteen_per_s": round(many, 2), "ratio": round(many / one, 1)}
    print(json.dumps({"latency_s": asked.latency, "calls": asked.calls, **found}))


if __name__ == "__main__":
    main()
