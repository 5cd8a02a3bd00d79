"""MLflow's data source of the tasks that main runs log. `import mlflow` imports it, so it imports nothing heavy."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow.data.dataset_source import DatasetSource

SOURCE_TYPE = "mlflow-compress task"


def file_source(path: Path) -> dict[str, str]:
    """Return the source of a task that is a file."""
    return {"task": path.stem, "file": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


class TaskSource(DatasetSource):  # type: ignore[misc]
    """A task: a name of this package or of lm-evaluation-harness, or a file with its SHA-256."""

    def __init__(self, source: Mapping[str, Any]) -> None:
        self.source = dict(source)

    @staticmethod
    def _get_source_type() -> str:
        return SOURCE_TYPE

    def load(self) -> Any:
        """Return the task's items as a DataFrame; of a corpus file, its text. A file that has changed is refused."""
        import pandas as pd

        from mlflow_compress.config import EMBEDDED
        from mlflow_compress.errors import ConfigError, DataError
        from mlflow_compress.items.sources.question_files import read_jsonl
        from mlflow_compress.items.suite import load_suite
        from mlflow_compress.items.task import TaskSettings

        if "task" not in self.source:
            raise ConfigError("This data set stands for several tasks", got=self.source, fix="Load each of them")
        if "file" not in self.source:
            return load_suite(self.source["task"], model=EMBEDDED, settings=TaskSettings()).items.table.to_pandas()
        path = Path(self.source["file"])
        if not path.is_file() or file_source(path) != self.source:
            raise DataError(
                "The file of this task is gone, or has changed since it was evaluated",
                allowed=f"SHA-256 {self.source['sha256']}",
                got=str(path),
            )
        return (
            pd.DataFrame(read_jsonl(path)).drop(columns="line")
            if path.suffix == ".jsonl"
            else path.read_text(encoding="utf-8")
        )

    @staticmethod
    def _can_resolve(raw_source: Any) -> bool:
        return False  # a path or a name alone stays what MLflow takes it for

    def to_dict(self) -> dict[str, Any]:
        return self.source

    @classmethod
    def from_dict(cls, source_dict: dict[Any, Any]) -> "TaskSource":
        return cls(source_dict)
