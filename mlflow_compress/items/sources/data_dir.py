"""Loads data sets in hub layout: from the user's folder if it has them, otherwise from the hub."""

import hashlib
import io
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]

from mlflow_compress import demo
from mlflow_compress.config import EMBEDDED
from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.files import is_too_deep
from mlflow_compress.items.named_tasks import TASKS, NamedTask
from mlflow_compress.items.sources.question_files import json_lines
from mlflow_compress.items.task import Corpus, Parts, TaskSettings

A = TypeVar("A")
R = TypeVar("R")

_HUB_TIMEOUT = 10.0  # seconds
_MANY_BRACKETS = 500  # in one line; records have fewer
_MOST_BYTES = 200_000_000  # of a file that is read into memory; `datasets` leaves larger ones on the disk


def check_data_dir(data_dir: str) -> None:
    """Refuse a folder of data sets that does not exist."""
    if data_dir and not Path(data_dir).is_dir():
        raise ConfigError("Parameter 'data_dir' names no folder", got=data_dir)


def check_set_or_file(parameter: str, name: str, sets: Collection[str]) -> None:
    """Refuse a name that is neither that of a set nor a file."""
    if name not in sets and not Path(name).is_file():
        raise ConfigError(f"Parameter {parameter!r} names neither a set nor a file", allowed=sorted(sets), got=name)


def reader_of(
    parameter: str, name: str, sets: Mapping[str, Callable[[A], R]], *, model: str, data_dir: str, fix: str
) -> Callable[[A], R] | None:
    """Return what reads a named set, None of a file; "auto" is the demo's set, for the embedded models only."""
    if name == "auto" and model not in demo.MODELS:
        raise ConfigError(f"'{parameter}' has a default for the embedded models only", fix=fix)
    chosen = EMBEDDED if name == "auto" else name
    check_set_or_file(parameter, chosen, sets)
    if chosen not in sets:
        return None
    check_data_dir(data_dir)
    return sets[chosen]


def folder_of(dataset: str, data_dir: str) -> Path | None:
    """Return the folder of the data set ORG/NAME in `data_dir`; None if it is not there."""
    if not data_dir or not (Path(data_dir) / dataset).is_dir():
        return None
    return (Path(data_dir) / dataset).resolve()


def cache_of(local: Path) -> str:
    """Return the cache folder of `datasets` for a local folder and its current files.

    By default, `datasets` (5.2.0) caches by the folder's last name and the configuration. Then another folder of the
    same name, or a changed file, would give the old rows.
    """
    import datasets

    stats = [(path.relative_to(local).as_posix(), path.stat()) for path in sorted(local.rglob("*")) if path.is_file()]
    state = [str(local), *((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)]
    digest = hashlib.sha256(repr(state).encode()).hexdigest()[:16]
    return str(Path(datasets.config.HF_DATASETS_CACHE) / "mlflow_compress" / digest)


def missing_data(
    dataset: str, data_dir: str, *, why: str, task: str, file: str = "", revision: str | None = None
) -> DataError:
    """Return the error for a data set that cannot be loaded, with the command that fetches it (or one file of it)."""
    folder = data_dir or "DATA_DIR"
    what = " ".join([dataset, *([file] if file else []), *(["--revision", revision] if revision else [])])
    return DataError(
        f"{task!r} needs the data set {dataset!r}: {why}",
        fix=f"On a machine with a network: hf download --repo-type dataset {what} --local-dir {folder}/{dataset} ; "
        f"then give data_dir={folder}",
    )


def load_split(
    dataset: str, config: str | None, split: str, *, data_dir: str, task: str, revision: str | None = None
) -> Any:
    """Return one split of a data set as a `datasets.Dataset`. `revision` applies to the hub's copy only."""
    local = folder_of(dataset, data_dir)
    if local is not None and (files := _files_of(local, config, split)):
        return _read_files(files, dataset, data_dir, task)
    return _load(dataset, data_dir, task, revision=revision, name=config, split=split)


def _files_of(local: Path, config: str | None, split: str) -> list[Path]:
    """Return a split's files where the data set's card names them; none where only `datasets` can find or read them.

    `datasets` takes a tenth of a second and more for each split: MMLU has 114.
    """
    card = local / "README.md"
    if not card.is_file():
        return []
    state = card.stat()
    named = _named_in_card(card, state.st_mtime_ns, state.st_size)
    patterns = named.get((config or "default", split)) or (named.get((None, split)) if config is None else None) or ()
    files = [path for pattern in patterns for path in sorted(local.glob(pattern))]
    plain = all(path.suffix in (".jsonl", ".parquet") and path.stat().st_size < _MOST_BYTES for path in files)
    return files if plain else []


@lru_cache(maxsize=8)
def _named_in_card(card: Path, *state: int) -> dict[tuple[str | None, str], tuple[str, ...]]:
    """Return the patterns of a split's files by configuration and split; those of an only one also by None.

    What else a configuration can say (another folder, how a file is read) is left to `datasets`.
    """
    from huggingface_hub import metadata_load

    try:
        metadata = metadata_load(card) or {}
    except (ValueError, yaml.YAMLError):  # which `datasets` reports
        return {}
    configs = metadata.get("configs")
    if not isinstance(configs, list) or not all(isinstance(one, dict) for one in configs):
        return {}
    named: dict[tuple[str | None, str], tuple[str, ...]] = {}
    for one in configs:
        files = one.get("data_files")
        if one.keys() - {"config_name", "data_files", "default"} or not isinstance(files, list):
            continue
        for entry in files:
            if not isinstance(entry, dict) or entry.keys() != {"split", "path"}:
                continue
            paths = entry["path"] if isinstance(entry["path"], list) else [entry["path"]]
            if any(not isinstance(path, str) or Path(path).is_absolute() or ".." in Path(path).parts for path in paths):
                continue
            named[one.get("config_name", "default"), entry["split"]] = tuple(paths)
            if len(configs) == 1 or one.get("default"):
                named[None, entry["split"]] = tuple(paths)
    return named


def _read_files(files: Sequence[Path], dataset: str, data_dir: str, task: str) -> Any:
    """Return the rows of files, each of which is read once, and checked as it is read."""
    import datasets
    import pyarrow as pa
    from pyarrow import parquet

    tables = []
    for path in files:
        try:
            if path.suffix == ".parquet":
                tables.append(parquet.read_table(path))
            else:
                rows = list(json_lines(path))
                names = dict.fromkeys(name for row in rows for name in row)
                tables.append(pa.table({name: [row.get(name) for row in rows] for name in names}))
        except (OSError, pa.ArrowException) as error:
            raise missing_data(dataset, data_dir, why=f"{path} cannot be read ({error})", task=task) from error
    return datasets.Dataset(pa.concat_tables(tables, promote_options="permissive"))


def read_data_file(dataset: str, file: str, *, data_dir: str, task: str) -> Any:
    """Return one file of a data set as a `datasets.Dataset`, for data sets that are too large to fetch completely."""
    return _load(dataset, data_dir, task, file=file, data_files={"file": file}, split="file")


def file_of(dataset: str, file: str, *, data_dir: str, task: str) -> Path:
    """Return the path of a data set's published file: in `data_dir` (or its sub-folder `data`), or from the hub."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    local = folder_of(dataset, data_dir)
    if local is not None:
        path = next((place for place in (local / file, local / "data" / file) if place.is_file()), None)
        if path is None:
            raise missing_data(dataset, data_dir, why=f"{local} has no {file}", task=task, file=file)
        return path
    try:
        with quiet_bars(), _asked_once(dataset):
            return Path(hf_hub_download(dataset, file, repo_type="dataset"))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise missing_data(dataset, data_dir, why=reason(error, None), task=task, file=file) from error


def _load(dataset: str, data_dir: str, task: str, *, file: str = "", revision: str | None = None, **what: Any) -> Any:
    import datasets
    from datasets.load import load_dataset  # not `datasets.load_dataset`: auto-round puts another function there

    local = folder_of(dataset, data_dir)
    if local is not None:
        _check_json(local)
    try:
        with quiet_bars():
            if local is None:
                with _asked_once(dataset):
                    return load_dataset(dataset, revision=revision, **what)
            return load_dataset(str(local), cache_dir=cache_of(local), **what)
    except (OSError, ValueError, StopIteration, datasets.exceptions.DatasetsError) as error:
        # What a missing network, data set, configuration or split raises, and a broken file.
        raise missing_data(
            dataset, data_dir, why=reason(error, local), task=task, file=file, revision=revision
        ) from error


@contextmanager
def _asked_once(dataset: str) -> Iterator[None]:
    """Within this block a hub that does not answer one request is not asked again, and what it has sent before is used.

    The libraries would ask it six times, in 23 seconds, and print each time.
    """
    import datasets.config
    import httpx
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    try:
        if not constants.is_offline_mode():
            HfApi().dataset_info(dataset, timeout=_HUB_TIMEOUT)
    except HfHubHTTPError:
        pass  # it has answered
    except (httpx.TransportError, OSError) as error:
        before: list[tuple[Any, bool]] = [(module, module.HF_HUB_OFFLINE) for module in (constants, datasets.config)]
        for module, _ in before:
            module.HF_HUB_OFFLINE = True
        try:
            yield
        except (OSError, ValueError, datasets.exceptions.DatasetsError):
            raise OSError(f"the hub does not answer: {error}") from None
        finally:
            for module, offline in before:
                module.HF_HUB_OFFLINE = offline
        return
    yield


def _check_json(local: Path) -> None:
    """Refuse lines that are no objects, and deep nesting: pyarrow, which reads the file, can crash the process."""
    for path in sorted([*local.rglob("*.json"), *local.rglob("*.jsonl")]):
        deep = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                begin = line.strip()[:5]
                if begin == b"null" or (
                    path.suffix == ".jsonl" and begin and not begin.startswith((b"{", b"\xef\xbb\xbf{"))
                ):
                    raise DataError(f"{path}, line {number}: not a JSON object")
                opened = line.count(b"[") + line.count(b"{")
                deep += opened - line.count(b"]") - line.count(b"}")
                # Brackets within texts count here, so what is suspicious is parsed.
                if (opened > _MANY_BRACKETS and is_too_deep(line)) or (
                    deep > _MANY_BRACKETS and is_too_deep(path.read_bytes())
                ):
                    raise DataError(f"{path}, line {number}: JSON that is nested too deeply")
                deep = deep if deep <= _MANY_BRACKETS else 0


def reason(error: Exception, local: Path | None) -> str:
    """Return the reason why a data set could not be read, as one line."""
    cause = error.__cause__ or error  # `datasets` says what is wrong with a file in the cause alone
    first = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
    return f"{local} cannot be read ({first})" if local else f"it is not in data_dir, and cannot be fetched ({first})"


def quiet_bars() -> AbstractContextManager[object]:
    """Hide the libraries' progress bars, unless they are shown in a terminal."""
    return nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())


def register_corpus(
    name: str,
    read: Callable[[str], Sequence[str]],
    *,
    definition: str,
    between: str = "",
    max_tokens: int | None = None,
    **described: Any,
) -> None:
    """Register a corpus under a name.

    `read` returns its documents, from a data folder; they are joined with `between`. `definition` is everything that
    decides the text, see `NamedTask`. `max_tokens` are scored, from the beginning. `described` are the other
    fields of `NamedTask`.
    """

    def build(settings: TaskSettings, shots: int | None) -> Parts:
        documents = read(settings.data_dir)
        return Parts(corpora=(Corpus.of(name, documents, between=between, max_tokens=max_tokens),))

    TASKS.register(name)(
        NamedTask(
            **described,
            shots="",
            rule="perplexity and KL, windows of 512",
            definition=f"{definition}, llama.cpp windows of 512".encode,
            build=build,
        )
    )
