"""The receiver of webhooks: a WSGI application that takes deliveries, and one thread that decides on them."""

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from queue import SimpleQueue
from socketserver import ThreadingMixIn
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from mlflow_compress.commands.command import Say, configured, silent
from mlflow_compress.commands.gate.parameters import GateConfig
from mlflow_compress.commands.promote.parameters import PromoteConfig
from mlflow_compress.commands.promote.run import run_promote
from mlflow_compress.commands.webhook.parameters import WebhookConfig
from mlflow_compress.decide.promotion import gates_of
from mlflow_compress.errors import ConfigError, MachineError, MlflowCompressError, TrackingError
from mlflow_compress.files import alone_with
from mlflow_compress.home import home
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.live_processes import scratch_folder
from mlflow_compress.tracking.tracker import Tracker
from mlflow_compress.tracking.webhook import HEADERS, Deliveries, Delivery, RefusedError, delivery_id

logger = logging.getLogger(__name__)

_LONGEST_BODY = 1 << 20
_SLOWEST_S = 10.0  # of a client, per read


def gate_config(config: WebhookConfig, **more: Any) -> GateConfig:
    """Return the parameters of the gate that versions of no main run must pass."""
    policy = {} if config.policy is None else {"policy": config.policy}
    return configured(GateConfig, {"config": config.gate, "experiment": config.experiment, **policy, **more})


class Receiver:
    """A WSGI application, which answers at once; `deciding` lets a thread decide on what it has accepted."""

    def __init__(self, config: WebhookConfig, secret: str, say: Say = silent) -> None:
        self._config, self._secret, self._say = config, secret, say
        self.tracker = Tracker(config.experiment)
        self._deliveries = Deliveries(self.tracker)
        self._queue: SimpleQueue[Delivery | None] = SimpleQueue()
        self._stopping = False

    def __call__(self, environ: Mapping[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request, as WSGI asks for it."""
        try:
            if environ["REQUEST_METHOD"] != "POST":
                raise RefusedError(405, "a delivery is posted")
            length = environ.get("CONTENT_LENGTH") or "0"
            if not length.isdecimal() or int(length) > _LONGEST_BODY:
                raise RefusedError(413, f"a delivery has at most {_LONGEST_BODY} bytes")
            headers = {name: environ.get(f"HTTP_{name.upper().replace('-', '_')}", "") for name in HEADERS}
            status, said = self._receive(headers, environ["wsgi.input"].read(int(length)))
        except RefusedError as refused:
            status, said = refused.status, str(refused)
        text = f"{said}\n".encode()
        start_response(
            f"{status} {HTTPStatus(status).phrase}",
            [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(text)))],
        )
        return [text]

    def _receive(self, headers: Mapping[str, str], body: bytes) -> tuple[int, str]:
        """Return the HTTP status and what is said of a delivery, after making it pending; others are refused."""
        id_ = delivery_id(headers, body, self._secret, time.time())
        try:
            event = json.loads(body)
            kind, data = f"{event['entity']}.{event['action']}", event["data"]
            asks = kind == "model_version.created" and run_names.EVALUATION not in (data.get("tags") or {})
            asks = asks or (kind == "model_version_tag.set" and data["key"] == self._config.tag)
            one = Delivery(str(data["name"]), str(data["version"]), id_) if asks else None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RefusedError(400, f"this is no event of MLflow: {error!r}") from error
        if one is None:
            return 200, f"{kind}: no decision is requested"
        if not self._deliveries.accept(one):
            return 200, "there is no such version"
        self._queue.put(one)
        return 202, "pending"

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Within this block, a thread decides on what is pending. It ends with the decision that it is at."""
        for one in self._deliveries.pending():
            self._queue.put(one)
        worker = Thread(target=self._work, name="deciding")
        worker.start()
        try:
            yield
        finally:
            self._stopping = True
            self._queue.put(None)
            worker.join()

    def _work(self) -> None:
        while (one := self._queue.get()) is not None and not self._stopping:
            try:
                self.decide(one)
            except Exception as error:
                unusual = not isinstance(error, MlflowCompressError)
                logger.error("Delivery %s stays pending until the next start: %s", one.id, error, exc_info=unusual)

    def decide(self, one: Delivery) -> None:
        """Give a delivery its verdict. The decision of a process that was killed after it is taken, not made again."""
        run_id = self._deliveries.run_of(one)
        tags = {} if run_id is None else self.tracker.look_up(run_id).tags
        verdict, decided = "Not decided: the version belongs to no main run", None
        try:
            if tags.get(run_names.STAGE) == "main" and run_names.EVALUATION in tags:
                decided = self._made("promote", one) or self._promote(one, tags)
                verdict = self._verdict(decided, str(run_id))
            elif self._config.gate is not None:
                decided = self._made("gate", one) or self._gate(one)
                verdict = self.tracker.look_up(decided).tags[run_names.VERDICT]
        except (TrackingError, MachineError):
            raise
        except MlflowCompressError as error:
            verdict = f"Not decided: {error}"
        self._deliveries.finish(one, verdict, decided)
        self._say(f"{one.model} version {one.version}: {verdict}")

    def _made(self, stage: str, one: Delivery) -> str | None:
        runs = self.tracker.find_finished(stage, **{run_names.DELIVERY: one.id})
        return str(runs[0].info.run_id) if runs else None

    def _gate(self, one: Delivery) -> str:
        from mlflow_compress.commands.gate.run import run_gate  # needs torch

        with scratch_folder(self.tracker.uri) as scratch:
            checkpoint = self._deliveries.checkpoint_of(one, scratch / f"{one.model}-version-{one.version}")
            config = gate_config(self._config, checkpoint=checkpoint)
            return run_gate(config, self.tracker, self._say, {run_names.DELIVERY: one.id}).run.run_id

    def _promote(self, one: Delivery, tags: Mapping[str, str]) -> str:
        config = PromoteConfig(
            model=tags[run_names.BASE_MODEL],
            evaluation=tags[run_names.EVALUATION],
            **{name: getattr(self._config, name) for name in ("policy", "needs", "alias", "experiment")},
        )
        promotion = run_promote(config, {run_names.DELIVERY: one.id})
        assert promotion.run is not None
        return promotion.run.run_id

    def _verdict(self, decided: str, run_id: str) -> str:
        """Return a decision in words, beginning with the variant of one run."""
        record = self.tracker.fetch_json(decided, "decision.json")
        own = [o for o in record["decision"]["outcomes"] if o["candidate"]["run_id"] == run_id]
        said = [f"{'Passes' if o['passed'] else 'Does not pass'}: {'; '.join(o['reasons'])}." for o in own]
        return " ".join([*said, record["verdict"]])


class _Handler(WSGIRequestHandler):
    timeout = _SLOWEST_S

    def log_message(self, format: str, *args: Any) -> None:
        logger.info(format, *args)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


def run_webhook(config: WebhookConfig, secret: str, say: Say) -> None:
    """Serve until the process is interrupted."""
    gates_of(PromoteConfig(policy=config.policy).read_policy(), config.policy)
    if config.gate is not None:
        gate_config(config)
    receiver = Receiver(config, secret, say)
    uri = receiver.tracker.uri
    (lock := home(uri) / "webhook.lock").parent.mkdir(parents=True, exist_ok=True)
    with alone_with(lock, wait=False) as alone:
        if not alone:
            raise ConfigError("Another process on this machine receives this store's webhooks", fix="End it first")
        try:
            server = make_server(config.host, config.port, receiver, _Server, _Handler)
        except OSError as error:
            got = f"{config.host}:{config.port}"
            raise ConfigError(f"This address cannot be listened on: {error.strerror}", got=got) from error
        with server, receiver.deciding():
            say(f"Listening on http://{config.host}:{server.server_port}")
            server.serve_forever()
