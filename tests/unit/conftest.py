"""Fixtures that several files of unit tests share."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random Llama in bfloat16; no test writes into it."""
    from tests.compress_models import make_llama

    return make_llama(tmp_path_factory.mktemp("base") / "llama")


@pytest.fixture(scope="session")
def demo() -> Any:
    """Return the demonstration model, loaded; no test changes it."""
    from mlflow_compress.demo import MODEL_DIR
    from mlflow_compress.models.loading import LoadConfig, load_model

    return load_model(LoadConfig(path=str(MODEL_DIR), device="cpu"))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Threads only wait for each other with models of this size."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def full() -> tuple[Any, Any]:
    """Return records of every kind, and every metric of them."""
    from mlflow_compress.metrics import compute_all
    from tests import metric_records
    from tests.report_results import FAST

    inputs = replace(metric_records.inputs(), settings=FAST)
    return inputs, compute_all(inputs)
