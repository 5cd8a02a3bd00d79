"""Loads the harness's tasks by name. Their data are read from the user's folder first.

`lm_eval` is imported inside functions only, because the import and the index of 14,000 names take seconds.
"""

import logging
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from mlflow_compress.errors import (
    ConfigError,
    DataError,
    MissingDependencyError,
    MlflowCompressError,
    UnsupportedError,
    nearest,
    require_extra,
)
from mlflow_compress.items.named_tasks import TASKS
from mlflow_compress.items.sources.data_dir import cache_of, folder_of, missing_data, quiet_bars, reason

_DEFINED = re.compile(r"""(?m)^\s*(?:-\s*)?["']?(?:task|group|tag)["']?\s*:\s*["']?([\w\-.+]+)""")


def _collection() -> Path:
    """Return the folder of the harness's task definitions, without importing `lm_eval`."""
    require_extra("harness", "lm_eval", by="A task of lm-evaluation-harness")
    spec = find_spec("lm_eval")
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))) / "tasks"


@lru_cache(maxsize=1)
def _texts() -> dict[Path, str]:
    paths = (path for path in _collection().rglob("*") if "yaml" in path.name and path.is_file())
    return {path: path.read_text(encoding="utf-8", errors="replace") for path in sorted(paths)}


def check_is_mentioned(name: str) -> None:
    """Refuse a name that no definition contains as a word: no task, group or tag has it."""
    if find_spec("lm_eval") is None:
        near = nearest(name, TASKS.names(), n=3)
        own = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise MissingDependencyError(
            f"Task {name!r} is not listed by `mlflow-compress list tasks`",
            fix=f"{own}If it is one of lm-evaluation-harness, run: pip install 'mlflow-compress[harness]'",
        )
    word = re.compile(rf"(?<![\w\-.+]){re.escape(name)}(?![\w\-.+])")
    if not any(name in text and word.search(text) for text in _texts().values()):
        raise _unknown(name)


def folder_of_task(name: str) -> str | None:
    """Return the folder of a task's definition; None for groups, tags, and names with several definitions.

    A task needs only its own file and the files that it includes by path.
    """
    key = rf"""(?m)^["']?(task|group)["']?\s*:\s*["']?{re.escape(name)}["']?\s*$"""
    definitions = [
        (path, match.group(1)) for path, text in _texts().items() if name in text and (match := re.search(key, text))
    ]
    if len(definitions) != 1 or definitions[0][1] != "task" or definitions[0][0].suffix != ".yaml":
        return None
    return definitions[0][0].parent.relative_to(_collection()).as_posix()


def defined_names() -> list[str]:
    """Return the names of tasks, groups and tags, for suggestions. Tags that are given as a list are left out."""
    return sorted({name for text in _texts().values() for name in _DEFINED.findall(text)})


def definition(name: str, folders: Sequence[str]) -> bytes:
    """Return a task's name and the contents of its folders: definitions and their Python files."""
    parts = [name.encode()]
    for folder in folders:
        for path in sorted((_collection() / folder).rglob("*")):
            if path.is_file() and ("yaml" in path.name or path.suffix == ".py"):
                where = path.relative_to(_collection()).as_posix()
                parts.append(where.encode() + b"\n" + path.read_bytes())
    return b"\n".join(parts)


FEWSHOT_SEED = 1234  # the harness's defaults, so that prompts are the same as its own
_RANDOM_SEED = 0

_SPLITS = ("training_split", "validation_split")


@lru_cache(maxsize=4)
def manager(folders: tuple[str, ...] = ()) -> Any:
    """Return the harness's index of tasks: of its complete collection (takes seconds), or of some folders (fast)."""
    import lm_eval.tasks

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it logs every default
    if not folders:
        return lm_eval.tasks.TaskManager()
    return lm_eval.tasks.TaskManager(include_path=[_collection() / f for f in folders], include_defaults=False)


def load_harness_tasks(
    name: str, *, shots: int | None, data_dir: str, folders: tuple[str, ...] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the leaf tasks and groups of a task, group or tag, as the harness's own objects by name.

    `shots` None takes the task's own number of examples. `folders` of the harness's collection contain the task;
    without them the complete collection is searched.
    """
    if not folders:
        check_is_mentioned(name)
    alone = None if folders else folder_of_task(name)
    index = manager((alone,) if alone else folders)
    if name not in index.task_index:
        raise _unknown(name)
    with ExitStack() as loading:
        loading.callback(random.setstate, random.getstate())
        loading.callback(np.random.set_state, np.random.get_state())
        random.seed(_RANDOM_SEED)  # as the harness does
        np.random.seed(FEWSHOT_SEED)
        loading.enter_context(_local_data(index, name, shots, data_dir))
        loading.enter_context(quiet_bars())
        results = index.load([name])
    for leaf, task in results["tasks"].items():
        _prepare(leaf, task, shots)
    return results["tasks"], results.get("groups", {})


def _unknown(name: str) -> ConfigError:
    near = nearest(name, [*TASKS.names(), *defined_names()], n=3)
    return ConfigError(
        "Unknown task",
        allowed="files (.jsonl, .txt), names of `mlflow-compress list tasks`, and those of lm-evaluation-harness",
        got=name,
        fix=f"Did you mean {' or '.join(map(repr, near))}?" if near else None,
    )


def _prepare(name: str, task: Any, shots: int | None) -> None:
    """Set few-shot number and seed as the harness's `simple_evaluate` does. Refuse tasks that cannot be run here."""
    if getattr(task, "MULTIMODAL", False):
        raise UnsupportedError(f"Task {name!r} needs images or sound")
    if getattr(task, "UNSAFE_CODE", False):
        raise UnsupportedError(f"Task {name!r} runs code that a model writes", fix="Run it in lm_eval, in a sandbox")
    defined = task.get_config("num_fewshot")
    if shots is not None and shots != defined:
        if defined == 0:
            raise ConfigError(f"Task {name!r} is defined without few-shot examples", allowed="0", got=shots)
        task.set_config(key="num_fewshot", value=shots)
    elif defined is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=FEWSHOT_SEED)


@contextmanager
def _local_data(index: Any, name: str, shots: int | None, data_dir: str) -> Iterator[None]:
    """Make the index read data from `data_dir` while a task is loaded.

    The harness has no override per task of a group, so its factory is replaced by one that changes each configuration.
    """
    from lm_eval.tasks._factory import TaskFactory

    # Task, data set and local folder, in the order in which they are read
    where: list[tuple[str, str, Path | None]] = []

    class Local(TaskFactory):  # type: ignore[misc]  # the harness has no types
        def _load_full_config(self, entry: Any, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
            config: dict[str, Any] = super()._load_full_config(entry, overrides)
            dataset = config.get("dataset_path")
            if isinstance(dataset, str) and not callable(config.get("custom_dataset")):
                local = folder_of(dataset, data_dir)
                where.append((str(config.get("task")), dataset, local))
                if local is not None:
                    config["dataset_path"] = str(local)
                    config["dataset_kwargs"] = {**(config.get("dataset_kwargs") or {}), "cache_dir": cache_of(local)}
                    _drop_missing_splits(config, local, shots)
            return config

    original, index._factory = index._factory, Local(meta=index.metadata)
    try:
        yield
    except MlflowCompressError:
        raise
    except (OSError, ValueError, KeyError) as error:  # what a missing network, data set, configuration or split raises
        if not where:
            raise DataError(f"lm-evaluation-harness cannot load task {name!r}: {error!r}") from error
        task, dataset, local = where[-1]
        raise missing_data(dataset, data_dir, why=reason(error, local), task=task) from error
    except Exception as error:  # a task definition is code of its own and may raise anything
        task = where[-1][0] if where else name
        raise DataError(f"lm-evaluation-harness cannot load task {task!r}: {error!r}") from error
    finally:
        index._factory = original


def _drop_missing_splits(config: dict[str, Any], local: Path, shots: int | None) -> None:
    """Remove splits that the folder lacks from a configuration, because the harness reads even unused splits.

    If the few-shot examples come from a missing split, the task is refused, because other examples make another task.
    """
    import datasets

    names = datasets.get_dataset_split_names(str(local), config.get("dataset_name"), cache_dir=cache_of(local))
    there = set(names)
    wanted = shots if shots is not None else config.get("num_fewshot") or 0
    fewshot_split = config.get("fewshot_split") or (config.get("fewshot_config") or {}).get("split")
    source = fewshot_split or next((config[key] for key in _SPLITS if config.get(key)), None)
    samples = (config.get("fewshot_config") or {}).get("samples")
    if wanted and source and not samples and source not in there:
        raise DataError(
            f"Task {config.get('task')!r} takes its few-shot examples from the split {source!r} of its data set, "
            "which is not there",
            allowed=sorted(there),
            got=str(local),
            fix=f"Fetch the whole data set, or ask for no examples ({config.get('task')}@0)",
        )
    for key in _SPLITS:
        if config.get(key) and config[key] not in there:
            config[key] = None
    if fewshot_split and fewshot_split not in there:
        config.pop("fewshot_split", None)
        if isinstance(config.get("fewshot_config"), dict):
            config["fewshot_config"].pop("split", None)
    judged = config.get("test_split") or config.get("validation_split")
    if judged not in there:
        raise DataError(
            f"The data set of task {config.get('task')!r} lacks the split that is evaluated",
            allowed=sorted(there),
            got=judged,
        )
