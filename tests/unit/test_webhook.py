"""Deliveries of MLflow's registry: signed as MLflow signs them, taken once, decided once, whoever else sends what."""

import io
import json
import logging
import random
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import pytest
from mlflow.webhooks.delivery import _generate_hmac_signature

import mlflow_compress as mc
from mlflow_compress.commands.webhook import run
from mlflow_compress.commands.webhook.command import SECRET_VARIABLE
from mlflow_compress.commands.webhook.parameters import WebhookConfig
from mlflow_compress.commands.webhook.run import Receiver
from mlflow_compress.errors import ConfigError
from mlflow_compress.tracking.model_registry import create_model
from mlflow_compress.tracking.tracker import Tracker
from mlflow_compress.tracking.webhook import HEADERS, TOLERANCE_S
from tests.clock import Clock
from tests.unit.test_candidates import finished
from tests.unit.test_promote_policy import aliases
from tests.waiting import until

NAME, SECRET = "compressed-llama", "a secret"
CLOCK = Clock()  # of the sender and the receiver
Sent = tuple[dict[str, str], bytes]


def delivery(version: str, *, tag: str | None = None, secret: str = SECRET, at: float | None = None) -> Sent:
    """Return headers and body of an event as MLflow sends it: a new version, or a tag on one."""
    what = ("model_version_tag", "set") if tag else ("model_version", "created")
    data: dict[str, object] = {"name": NAME, "version": version, **({"key": tag, "value": "now"} if tag else {})}
    body = json.dumps({"entity": what[0], "action": what[1], "timestamp": "2026-11-25T00:00:00", "data": data})
    id_, sent = str(uuid.uuid4()), str(int(CLOCK.time() if at is None else at))
    signature = _generate_hmac_signature(secret, id_, sent, body)
    return dict(zip(HEADERS, (id_, sent, signature), strict=True)), body.encode()


def registered(tracker: Tracker, run_id: str) -> str:
    """Register a variant as a person does; return the version."""
    [output] = tracker.client.get_run(run_id).outputs.model_outputs
    create_model(tracker, NAME, "1" * 64)
    source = f"models:/{output.model_id}"
    return str(tracker.client.create_model_version(NAME, source, run_id=run_id, model_id=output.model_id).version)


def shuffled_with_forgeries(genuine: list[Sent], total: int = 100) -> list[Sent]:
    """Return all of them in a random order, with duplicates of the genuine ones and forgeries of every kind."""
    mixer = random.Random(7)
    everything = list(genuine)
    while len(everything) < total:
        headers, body = mixer.choice(genuine)
        other_id, later = {HEADERS[0]: str(uuid.uuid4())}, {HEADERS[1]: str(int(headers[HEADERS[1]]) + 1)}
        forgeries: list[Sent] = [
            (headers, body.replace(b'"1"', b'"2"').replace(b"set", b"sit") + b" "),
            ({**headers, **other_id}, body),
            ({**headers, **later}, body),
            ({**headers, HEADERS[2]: ""}, body),
            delivery("1", secret="another"),
            delivery("1", at=CLOCK.time() - TOLERANCE_S - 5),
            delivery("1", at=CLOCK.time() + TOLERANCE_S + 5),
        ]
        everything.append(mixer.choice(forgeries) if mixer.random() < 0.5 else (headers, body))
    mixer.shuffle(everything)
    return everything


def verdicts(tracker: Tracker) -> dict[str, int]:
    """Return how many finished decisions each delivery has."""
    asked = [run.data.tags["delivery"] for run in tracker.find_finished("promote") if "delivery" in run.data.tags]
    return {id_: asked.count(id_) for id_ in asked}


def ids(sent: list[Sent]) -> set[str]:
    return {headers[HEADERS[0]] for headers, _ in sent}


@pytest.fixture
def receiver(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> Receiver:
    CLOCK.drive(monkeypatch, run)
    return Receiver(WebhookConfig(), SECRET)


@contextmanager
def deciding(receiver: Receiver, finished: Callable[[], bool], caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Let a thread decide on what is pending until it has finished. What it could not decide is in the log."""
    with receiver.deciding():
        yield
        failed = lambda: any(record.levelno >= logging.ERROR for record in caplog.records)  # noqa: E731
        until(finished, ended=failed, said=lambda: caplog.text)


def post(receiver: Receiver, sent: Sent, method: str = "POST", length: str | None = None) -> int:
    """Return the status of an answer."""
    headers, body = sent
    environ: dict[str, Any] = {"REQUEST_METHOD": method, "wsgi.input": io.BytesIO(body)}
    environ["CONTENT_LENGTH"] = str(len(body)) if length is None else length
    environ |= {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in headers.items()}
    status = []
    assert b"".join(receiver(environ, lambda line, _: status.append(int(line[:3])))).endswith(b"\n")
    return int(status[0])


def test_one_verdict_for_each_genuine_delivery_of_a_hundred(
    tracker: Tracker, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    small, large = (registered(tracker, finished(tracker, name, size=size)) for name, size in (("s", 100), ("l", 300)))
    genuine = [delivery(v, tag=tag) for v in (small, large) for tag in (None, "decide", "decide")]
    hundred = shuffled_with_forgeries(genuine)
    assert len(hundred) == 100
    all_decided = lambda: set(verdicts(tracker)) == ids(genuine)  # noqa: E731
    with deciding(receiver, all_decided, caplog), ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda sent: post(receiver, sent), hundred))
    assert verdicts(tracker) == dict.fromkeys(ids(genuine), 1)
    assert answers.count(202) == 6 and set(answers) == {202, 409, 401}
    assert {a for a, (h, b) in zip(answers, hundred, strict=True) if (h, b) not in genuine} == {401}
    assert aliases(tracker) == {"champion": small}
    for version in (small, large):
        tags = tracker.client.get_model_version(NAME, version).tags
        assert tags["verdict"].startswith("Passes: KL clipped per item (upper end)")
        assert tags["verdict"].endswith(f"s (version {small}) stays 'champion'.")
        assert sum(key.startswith("delivery.") and text.startswith("decided by run") for key, text in tags.items()) == 3
    assert tracker.client.get_model_version(NAME, small).tags["variant"] == "s"  # as if promote had registered it


def test_what_asks_nothing_leaves_nothing(tracker: Tracker, receiver: Receiver) -> None:
    version = registered(tracker, finished(tracker, "s"))
    before = tracker.client.get_model_version(NAME, version).tags
    assert post(receiver, delivery(version, tag="variant")) == 200
    assert post(receiver, delivery("99")) == 200  # MLflow's test of a webhook names a version that is not there
    assert post(receiver, delivery(version), "GET") == 405
    assert post(receiver, delivery(version), length=str(1 << 21)) == 413
    assert post(receiver, delivery(version), length="-1") == 413
    body = b"[1]"
    signature = _generate_hmac_signature(SECRET, "id", now := str(int(CLOCK.time())), body.decode())
    assert post(receiver, (dict(zip(HEADERS, ("id", now, signature), strict=True)), body)) == 400
    assert tracker.client.get_model_version(NAME, version).tags == before


def test_a_version_of_no_variant_and_a_decision_that_cannot_be_made_are_said(
    tracker: Tracker, receiver: Receiver
) -> None:
    with tracker.run("other", "evaluate", {}) as other:
        pass
    create_model(tracker, NAME, "1" * 64)
    tracker.client.create_model_version(NAME, "somewhere", run_id=other.run_id)
    assert post(receiver, delivery("1")) == 202
    [pending] = receiver._deliveries.pending()
    receiver.decide(pending)
    assert "belongs to no main run" in tracker.client.get_model_version(NAME, "1").tags["verdict"]
    assert receiver._deliveries.pending() == [] and verdicts(tracker) == {}


def test_a_decision_before_a_kill_is_taken_and_not_made_again(
    tracker: Tracker, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    version = registered(tracker, finished(tracker, "s"))
    assert post(receiver, sent := delivery(version)) == 202
    [pending] = receiver._deliveries.pending()
    receiver._promote(pending, tracker.find("main")[0].tags)  # and then the process was killed
    again = Receiver(WebhookConfig(), SECRET)
    assert post(again, sent) == 409
    with deciding(again, lambda: not again._deliveries.pending(), caplog):
        pass
    assert verdicts(tracker) == dict.fromkeys(ids([sent]), 1)
    assert tracker.client.get_model_version(NAME, version).tags["verdict"].startswith("Passes")


def test_a_store_that_fails_is_said_and_the_delivery_is_taken_when_it_is_sent_again(
    tracker: Tracker, receiver: Receiver
) -> None:
    sent = delivery(registered(tracker, finished(tracker, "a", size=100)))
    with closing(sqlite3.connect(tracker.uri.removeprefix("sqlite:///"))) as database:
        database.execute("ALTER TABLE model_versions RENAME TO elsewhere")
        assert post(receiver, sent) == 503
        database.execute("ALTER TABLE elsewhere RENAME TO model_versions")
    assert post(receiver, sent) == 202


def test_without_a_secret_nothing_is_served(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=f"has no secret.*Set {SECRET_VARIABLE}"):
        mc.serve_webhook()
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    with pytest.raises(ConfigError, match="cannot be listened on"):
        mc.serve_webhook(host="192.0.2.1")
