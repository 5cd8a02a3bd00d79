"""`serve-webhook` as a process: killed midway and started again, and with deliveries that a real MLflow server sends."""

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlflow
import pytest
from cryptography.fernet import Fernet
from mlflow import MlflowClient
from mlflow.entities.webhook import WebhookEvent

from benchmarks.local_servers import TrackingServer, free_port
from mlflow_compress.commands.webhook.command import SECRET_VARIABLE
from mlflow_compress.tracking.tracker import Tracker
from tests.unit.test_candidates import finished
from tests.unit.test_promote_policy import aliases
from tests.unit.test_webhook import (
    CLOCK,
    NAME,
    SECRET,
    Sent,
    delivery,
    ids,
    registered,
    shuffled_with_forgeries,
    verdicts,
)
from tests.waiting import until

pytestmark = pytest.mark.ci


# The command, at the moment at which `delivery` signs.
NOW = f"""
import sys, threading
from types import SimpleNamespace
from mlflow_compress import cli
from mlflow_compress.commands.webhook import run

run.time = SimpleNamespace(time=lambda: {CLOCK.time()})
"""
GOES_ON = f"{NOW}sys.exit(cli.main(sys.argv[1:]))"
# It makes three decisions, and stops before it has noted the third.
STOPS = f"""{NOW}
def promote(self, *arguments, before=run.Receiver._promote, more=iter("12")):
    run_id = before(self, *arguments)
    return run_id if next(more, None) else threading.Event().wait()

run.Receiver._promote = promote
sys.exit(cli.main(sys.argv[1:]))
"""


@contextmanager
def receiver(port: int, log: Path, *python: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the command until the block ends, or has killed it."""
    command = [sys.executable, *(python or ("-m", "mlflow_compress")), "serve-webhook", "--port", str(port)]
    with log.open("ab") as sink, subprocess.Popen(command, stdout=sink, stderr=sink) as process:
        try:
            began = log.read_bytes().count(b"Listening on http://127.0.0.1:")
            until(lambda: log.read_bytes().count(b"Listening on http://127.0.0.1:") > began, process, log)
            yield process
        finally:
            process.terminate()


def post(port: int, sent: Sent) -> int:
    request = urllib.request.Request(f"http://127.0.0.1:{port}", data=sent[1], headers=sent[0])
    try:
        with urllib.request.urlopen(request) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_killed_midway_and_started_again_gives_one_verdict_each(
    tracker: Tracker, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    versions = [registered(tracker, finished(tracker, name)) for name in ("a", "b")]
    genuine = [delivery(version, tag=tag) for version in versions for tag in (None, *["decide"] * 7)]
    hundred, port = shuffled_with_forgeries(genuine), free_port()
    with receiver(port, workdir / "log", "-c", STOPS) as process:
        answers = [post(port, sent) for sent in hundred[:60]]
        until(lambda: len(verdicts(tracker)) >= 3, process, workdir / "log")
        os.kill(process.pid, signal.SIGKILL)
    assert len(verdicts(tracker)) == 3 < answers.count(202) <= len(genuine)
    with receiver(port, workdir / "log", "-c", GOES_ON) as process:
        answers += [post(port, sent) for sent in hundred[60:]]
        until(lambda: set(verdicts(tracker)) == ids(genuine), process, workdir / "log")
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 143
    assert answers.count(202) == len(genuine) and set(answers) == {202, 401, 409}
    assert verdicts(tracker) == dict.fromkeys(ids(genuine), 1)
    tags = [tracker.client.get_model_version(NAME, version).tags for version in versions]
    decided = [key for one in tags for key, text in one.items() if key.startswith("delivery.") and "by run" in text]
    assert sorted(decided) == sorted(f"delivery.{id_}" for id_ in ids(genuine))


def test_a_real_server_delivers_and_the_alias_moves(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY", Fernet.generate_key().decode())
    monkeypatch.setenv("MLFLOW_WEBHOOK_ALLOWED_SCHEMES", "http")
    monkeypatch.setenv("MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS", "true")
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    port = free_port()
    with TrackingServer(workdir, f"sqlite:///{workdir / 'mlflow.db'}") as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
        mlflow.set_tracking_uri(server.uri)
        events = [WebhookEvent.from_str("model_version.created"), WebhookEvent.from_str("model_version_tag.set")]
        MlflowClient().create_webhook("decide", f"http://127.0.0.1:{port}", events, secret=SECRET)
        tracker = Tracker()
        with receiver(port, workdir / "log") as process:
            version = registered(tracker, finished(tracker, "a"))
            until(lambda: "verdict" in tracker.client.get_model_version(NAME, version).tags, process, workdir / "log")
            assert aliases(tracker) == {"champion": version}
            tracker.client.set_model_version_tag(NAME, version, "decide", "again")
            until(lambda: len(verdicts(tracker)) == 2, process, workdir / "log")
        assert set(verdicts(tracker).values()) == {1}
    assert b"Passes: KL clipped per item (upper end)" in (workdir / "log").read_bytes()
