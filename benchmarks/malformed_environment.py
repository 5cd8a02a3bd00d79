"""Values of environment variables that nobody means, and what this package makes of them: see `outcome_with`."""

import json
import os
import sqlite3
import traceback
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from mlflow_compress.errors import MlflowCompressError, machine_fault

ANYTHING = (
    *("", " ", "x", "0", "-1", "1e9", "nan", "true", "None", "é", "🦆", "a\nb", "%", "{}", "'", "x" * 5000),
    *("/", "/proc/nothing/x", "../../../../../../../../nothing", "http://", "http://[", "http://127.0.0.1:1", "1,2,x"),
)
STORES = (
    *ANYTHING,
    *("sqlite://", "sqlite:///", "sqlite:////proc/nothing/a.db", "sqlite:///a/../b.db", "sqlite:///.", "sqlite:///a?b=c"),
    *("sqlite+x:///a.db", "file:///proc/nothing", "file:", "postgresql://", "postgresql://u:p@127.0.0.1:1/d", "mysql://x"),
    *("mssql://x", "databricks", "databricks://x", "databricks-uc", "uc:x", "s3://b/c", "https://u:p@127.0.0.1:1/a"),
    *("http://a b", "http://127.0.0.1:99999", "http://127.0.0.1:x", "ftp://127.0.0.1", "://", "azureml://x"),
    *("http+unix://x", "http://é"),
)  # fmt: skip

OF_MLFLOW: Mapping[str, tuple[str, ...]] = {
    "MLFLOW_TRACKING_URI": STORES,
    "MLFLOW_REGISTRY_URI": STORES,
    **dict.fromkeys(
        (
            *("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_TRACKING_TOKEN"),
            *("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_INSECURE_TLS"),
            *("MLFLOW_TRACKING_SERVER_CERT_PATH", "MLFLOW_TRACKING_CLIENT_CERT_PATH", "MLFLOW_TRACKING_AUTH"),
            *("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR"),
            *("MLFLOW_ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT", "MLFLOW_ARTIFACT_LOCATION_MAX_LENGTH", "MLFLOW_ARTIFACTS_URI"),
            *(
                "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR",
                "MLFLOW_SQLALCHEMYSTORE_POOL_SIZE",
                "MLFLOW_TRUNCATE_LONG_VALUES",
            ),
            *("MLFLOW_ENABLE_ASYNC_LOGGING", "MLFLOW_WORKSPACE", "MLFLOW_CONFIGURE_LOGGING", "MLFLOW_LOGGING_LEVEL"),
            *("MLFLOW_COMPRESS_SERVER_WAIT", "MLFLOW_COMPRESS_HOME", "MLFLOW_COMPRESS_CACHE_GB"),
        ),
        ANYTHING,
    ),
}
"""Variables that decide which store is used and how, with values."""

OF_LIBRARIES: Mapping[str, tuple[str, ...]] = dict.fromkeys(
    (
        *("HF_HOME", "HF_TOKEN", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_HUB_CACHE", "HF_HUB_DOWNLOAD_TIMEOUT"),
        *("HF_HUB_ETAG_TIMEOUT", "TRANSFORMERS_OFFLINE", "TRANSFORMERS_VERBOSITY", "TOKENIZERS_PARALLELISM"),
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF"),
        *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCH_LOGS", "NUMBA_NUM_THREADS"),
        *("LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_USE_CPU"),
    ),
    ANYTHING,
)
"""Variables that libraries read while they are imported, or while they load a model."""


def use_store() -> None:
    """Open the store, write a run with everything that a run has, and find it again."""
    from mlflow_compress.tracking.tracker import Tracker

    tracker = Tracker()
    with tracker.run("name", "quantize", {"mlflow-compress.base": "x"}) as run:
        run.log_params({"a": 1})
        run.log_values({"b": 2.0})
        Path("file.txt").write_text("text")
        run.log_file(Path("file.txt"))
        run.log_json({"c": 3}, "c.json")
        run.set_note("note")
    tracker.link(run.run_id)
    tracker.find("quantize")
    tracker.fetch_json(run.run_id, "c.json")


def use_model(model: Path) -> None:
    """Check the parameters of a command, load a model, and run it. No library may be imported before."""
    import warnings

    from mlflow_compress.commands.command import configured
    from mlflow_compress.commands.quantize.parameters import QuantizeConfig

    warnings.simplefilter("ignore")
    configured(QuantizeConfig, {"model": str(model), "method": "none"}, Path("store"))
    import torch

    from mlflow_compress.models.loading import LoadConfig, load_model

    load_model(LoadConfig(path=str(model), device="cpu")).model(torch.tensor([[1, 2, 3]]))


def runs_left_open(folder: Path) -> list[str]:
    """Return the names of runs that are RUNNING in a folder's store."""
    files = [file for file in folder.rglob("*.db") if file.is_file()]
    names: list[str] = []
    for file in files:
        with closing(sqlite3.connect(file)) as connection:
            names += [row[0] for row in connection.execute("SELECT name FROM runs WHERE status = 'RUNNING'")]
    return names


def outcome_with(name: str, value: str, use: Callable[[], None], folder: Path) -> tuple[str, str]:
    """Return "accepted", "refused" or "raw", and in what words, where a fork with this variable uses what reads it."""
    folder.mkdir(parents=True)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        answer = ("raw", "it ended")
        try:
            os.chdir(folder)
            os.environ["MLFLOW_COMPRESS_SERVER_WAIT"] = "0"
            os.environ[name] = value
            try:
                use()
                answer = ("accepted", "")
            except Exception as raised:  # noqa: BLE001  (whatever is let through is what is looked for)
                error = machine_fault(raised) or raised
                if isinstance(error, MlflowCompressError):
                    answer = ("refused", str(error))
                else:
                    answer = ("raw", f"{type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}")
            if left := runs_left_open(folder):
                answer = ("raw", f"left open: {left}, after {answer}")
        finally:
            os.write(write, json.dumps(answer).encode()[:60_000])
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    found, words = json.loads(data) if data else ("raw", "it died")
    return found, words
