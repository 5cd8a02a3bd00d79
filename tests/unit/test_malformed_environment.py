"""Environment variables that nobody means: one clear error that says which, and no run that stays open."""

from pathlib import Path

import pytest

from mlflow_compress.commands.command import configured
from mlflow_compress.commands.quantize.parameters import QuantizeConfig
from mlflow_compress.errors import ConfigError, TrackingError
from mlflow_compress.tracking.tracker import Tracker
from mlflow_compress.tracking.waiting import PatientClient, store_errors


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("http://[", ["Invalid IPv6 URL", "MLFLOW_TRACKING_URI"]),
        ("http://127.0.0.1:x", ["MLFLOW_TRACKING_URI"]),
        ("mysql://x", ["No module named 'MySQLdb'", "Install the package of that database"]),
        ("ftp://127.0.0.1", ["MLFLOW_TRACKING_URI"]),
        ("sqlite:///.", ["is a folder, not a database", "MLFLOW_TRACKING_URI"]),
    ],
)
def test_a_store_whose_address_cannot_be_read_is_one_error(
    address: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_COMPRESS_SERVER_WAIT", "0")
    with pytest.raises(TrackingError) as error:
        Tracker()
    assert [word for word in words if word not in str(error.value)] == []
    assert not list(tmp_path.iterdir())


def test_a_variable_that_mlflow_cannot_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "soon")
    with pytest.raises(
        TrackingError, match=r"Failed to convert 'soon'.*Correct the environment variable MLFLOW_HTTP_REQ"
    ):
        Tracker()


def test_a_variable_without_which_no_run_could_be_closed_is_refused_before_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_ENABLE_ASYNC_LOGGING", "perhaps")
    with pytest.raises(TrackingError, match="Correct the environment variable MLFLOW_ENABLE_ASYNC_LOGGING"):
        Tracker()
    assert not list(tmp_path.iterdir())


def test_a_variable_that_mlflow_reads_in_the_midst_of_a_run_is_named_too() -> None:
    def upload() -> None:
        raise ValueError("Failed to convert 'x' for MLFLOW_ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT: it is no number")

    client = PatientClient(None, "sqlite:///x.db")
    with pytest.raises(TrackingError, match="Correct the environment variable MLFLOW_ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT"):
        client.wait_for(upload)
    with pytest.raises(ValueError, match="our own"):
        client.wait_for(lambda: int("our own"))


def test_an_error_without_words_has_its_name() -> None:
    with pytest.raises(TrackingError, match="It fails: KeyError"), store_errors("It fails", "x"):
        raise KeyError


@pytest.mark.parametrize("name", ["HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT", "MLFLOW_CONFIGURE_LOGGING"])
@pytest.mark.parametrize("value", ["", "x", "1.5"])
def test_a_variable_that_would_end_the_import_of_a_library_is_refused_before(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"The environment variable {name} cannot be read.*Correct it, or unset it"):
        configured(QuantizeConfig, {"method": "none"}, tmp_path)
    monkeypatch.setenv(name, "1")
    configured(QuantizeConfig, {"method": "none"}, tmp_path)


def test_an_address_of_the_hub_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://[")
    with pytest.raises(
        ConfigError, match=r"HF_ENDPOINT cannot be read: Invalid IPv6 URL\. Got: 'http://\['\. Correct it"
    ):
        configured(QuantizeConfig, {"method": "none"}, tmp_path)
