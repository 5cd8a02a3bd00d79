"""MLflow's webhooks as a receiver reads them. The queue of accepted deliveries is the store: one tag per delivery."""

import base64
import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from mlflow.artifacts import download_artifacts
from mlflow.exceptions import MlflowException
from mlflow.webhooks import constants

from mlflow_compress.errors import DataError
from mlflow_compress.tracking.experiment import every_page
from mlflow_compress.tracking.tracker import Tracker

HEADERS = (constants.WEBHOOK_DELIVERY_ID_HEADER, constants.WEBHOOK_TIMESTAMP_HEADER, constants.WEBHOOK_SIGNATURE_HEADER)
TOLERANCE_S = 300  # as the specification Standard Webhooks recommends, by whose scheme MLflow signs
_TAG, _PENDING = "delivery.", "pending"
_LONGEST_TAG = 5000


class RefusedError(Exception):
    """A delivery that is not taken, with its HTTP status."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True)
class Delivery:
    """An event of one version, as MLflow has delivered it once."""

    model: str  # The registered model, and the number of its version
    version: str
    id: str  # MLflow's id of the delivery


def delivery_id(headers: Mapping[str, str], body: bytes, secret: str, now: float) -> str:
    """Return the id of a delivery that MLflow has signed with the secret within the tolerance.

    The signature is "v1," and the base64 of HMAC-SHA256 over "id.timestamp.body".
    """
    given_id, sent, signature = (headers.get(name, "") for name in HEADERS)
    signed = hmac.new(secret.encode(), f"{given_id}.{sent}.".encode() + body, hashlib.sha256).digest()
    expected = f"{constants.WEBHOOK_SIGNATURE_VERSION},{base64.b64encode(signed).decode()}"
    if not hmac.compare_digest(expected.encode(), signature.encode()):
        raise RefusedError(401, "the signature is not that of the secret")
    if not re.fullmatch(r"\d{1,12}", sent, re.ASCII) or abs(now - int(sent)) > TOLERANCE_S:
        raise RefusedError(401, f"it was not sent within the last {TOLERANCE_S} s")
    if not re.fullmatch(r"[\w-]{1,64}", given_id, re.ASCII):
        raise RefusedError(401, "it has no id")
    return given_id


class Deliveries:
    """The accepted deliveries of a store, as tags of their versions: `delivery.ID` is "pending", then the verdict."""

    def __init__(self, tracker: Tracker) -> None:
        self._client = tracker.client
        self._lock = Lock()

    def accept(self, one: Delivery) -> bool:
        """Make a delivery pending; False where the version does not exist. A replay is refused."""
        client, key = self._client.impatient, _TAG + one.id  # the sender does not wait; it tries again
        try:
            with self._lock:
                if key in client.get_model_version(one.model, one.version).tags:
                    raise RefusedError(409, "this delivery was taken before")
                client.set_model_version_tag(one.model, one.version, key, _PENDING)
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return False
            raise RefusedError(503, "the tracking store did not take it") from error
        return True

    def pending(self) -> list[Delivery]:
        """Return the deliveries without a verdict."""
        return [
            Delivery(str(version.name), str(version.version), key.removeprefix(_TAG))
            for version in every_page(self._client.search_model_versions)
            for key, value in version.tags.items()
            if key.startswith(_TAG) and value == _PENDING
        ]

    def run_of(self, one: Delivery) -> str | None:
        """Return the run that a version, or its logged model, is of."""
        version = self._client.get_model_version(one.model, one.version)
        if not version.run_id and version.model_id:
            return str(self._client.get_logged_model(version.model_id).source_run_id)
        return str(version.run_id) if version.run_id else None

    def checkpoint_of(self, one: Delivery, folder: Path) -> Path:
        """Download a version's files, and return the folder among them that is a checkpoint of safetensors."""
        files = download_artifacts(f"models:/{one.model}/{one.version}", dst_path=str(folder))
        folders = [path.parent for path in Path(files).rglob("config.json") if any(path.parent.glob("*.safetensors"))]
        if len(folders) != 1:
            raise DataError(
                "The version's files cannot be evaluated",
                allowed="one folder with config.json and safetensors, as mlflow.transformers logs it",
                got=f"{len(folders)} such folders",
            )
        return folders[0]

    def finish(self, one: Delivery, verdict: str, run_id: str | None) -> None:
        """Give a delivery its verdict, and show the last one as the version's tag `verdict`."""
        for key, text in (("verdict", verdict), (_TAG + one.id, f"decided by run {run_id}" if run_id else verdict)):
            self._client.set_model_version_tag(one.model, one.version, key, text[:_LONGEST_TAG])
