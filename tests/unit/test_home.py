"""Where state is kept: the variable, then beside the database, then the user's cache folder."""

from pathlib import Path

import pytest

from mlflow_compress.home import VARIABLE, home


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_a_sqlite_store_keeps_state_beside_its_database(tmp_path: Path):
    assert home(f"sqlite:///{tmp_path}/mlflow.db") == tmp_path / ".mlflow_compress"


def test_a_server_keeps_state_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert home("http://127.0.0.1:5000") == Path.home() / ".cache" / "mlflow_compress"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert home("http://127.0.0.1:5000") == tmp_path / "mlflow_compress"


def test_the_variable_decides_where_it_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "state"))
    assert home("sqlite:////data/mlflow.db") == home("http://127.0.0.1:5000") == tmp_path / "state"
