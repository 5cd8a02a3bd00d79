"""The page that leads an item from its file to MLflow: short, and with names that exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
DOTTED = sorted(set(re.findall(r"`((?:\w+\.)+(?!py`)\w+)`", PAGE)))
FILES = sorted(set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", PAGE)))


def test_the_page_is_read_in_one_sitting() -> None:
    assert len(PAGE.splitlines()) < 60


@pytest.mark.parametrize("name", DOTTED)
def test_every_name_exists(name: str) -> None:
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(["mlflow_compress", *parts[:cut]]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[cut:]:
            found = getattr(found, attribute)
        return
    pytest.fail(f"mlflow_compress has no module {parts[0]}")


@pytest.mark.parametrize("path", FILES)
def test_every_file_and_folder_exists(path: str) -> None:
    assert (ROOT / "mlflow_compress" / path).exists()
