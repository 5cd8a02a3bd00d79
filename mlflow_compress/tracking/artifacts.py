"""Reads the artifacts of runs: in place where they lie in a local folder, otherwise through the download cache."""

import atexit
import json
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import mlflow
from filelock import ReadWriteLock, Timeout
from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.utils.file_utils import get_local_path_or_none, local_file_uri_to_path

from mlflow_compress import files as atomic
from mlflow_compress.errors import ConfigError, TrackingError
from mlflow_compress.files import read_json
from mlflow_compress.hashes import sha256_file
from mlflow_compress.home import home
from mlflow_compress.tracking.waiting import PatientClient

LIMIT_VARIABLE = "MLFLOW_COMPRESS_CACHE_GB"
_DEFAULT_GB = 20.0

logger = logging.getLogger(__name__)

# Entries that this process has returned, with their read locks. They stay in use until the process ends, because it is
# unknown when the last file of a returned path is read. The operating system releases the locks of a killed process.
_in_use: dict[Path, ReadWriteLock] = {}
_one_thread = threading.Lock()


def limit_bytes() -> int:
    """Return the size limit of the cache in bytes: ``MLFLOW_COMPRESS_CACHE_GB`` (20 if not set) times 10^9."""
    text = os.environ.get(LIMIT_VARIABLE, str(_DEFAULT_GB))
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = 0.0
    if not 0.0 < gigabytes < float("inf"):
        raise ConfigError(f"{LIMIT_VARIABLE} must be a positive number of gigabytes", got=text)
    return int(gigabytes * 1e9)


def artifacts_place(uri: str) -> str:
    """Return the local folder of a run's artifacts, or their address where they are not on this machine."""
    return get_local_path_or_none(uri) or uri


class Downloads:
    """Cache of downloaded folders. The least recently used ones are deleted first, but none that a process uses.

    An entry ``KEY/`` is complete if its listing ``KEY.json`` exists. The listing holds the SHA-256 of each file. It is
    checked when a process first uses the entry. Readers, writers and deleting processes lock ``KEY.lock``. Entries in
    use count for `limit` (bytes), but are never deleted, even above it.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit

    def get(self, key: str, download: Callable[[Path], None]) -> Path:
        """Return the folder of an entry. `download` fills an empty folder if the entry is missing or damaged.

        `key` is a valid file name; equal keys must mean equal content.
        """
        entry = self.folder / key
        with _one_thread:
            if entry in _in_use:
                return entry
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = ReadWriteLock(self.folder / f"{key}.lock")
            while True:
                lock.acquire_read()  # waits for a process that downloads or deletes this entry
                if self._is_complete(key):
                    _in_use[entry] = lock
                    os.utime(self._listing(key))
                    break
                lock.release()
                with lock.write_lock():
                    if not self._is_complete(key):
                        self._download(key, download)
            self._make_room()
        return entry

    def _listing(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _is_complete(self, key: str) -> bool:
        listing = self._listing(key)
        if not listing.is_file():
            return False
        with suppress(ValueError):  # damaged, like any other file that is not what was downloaded
            if json.loads(listing.read_text(encoding="utf-8")) == _checksums(self.folder / key):
                return True
        logger.warning("The downloaded copy %s was changed; it is downloaded again", self.folder / key)
        return False

    def _download(self, key: str, download: Callable[[Path], None]) -> None:
        self._delete(key)
        partial = self.folder / f"{key}.partial"
        partial.mkdir()
        try:
            download(partial)
            atomic.rename(partial, self.folder / key)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        text = json.dumps(_checksums(self.folder / key), indent=1)
        atomic.write(self._listing(key), f"{text}\n".encode())

    def _delete(self, key: str) -> None:
        self._listing(key).unlink(missing_ok=True)
        for path in (self.folder / key, self.folder / f"{key}.partial"):
            if path.is_dir():
                shutil.rmtree(path)

    def _make_room(self) -> None:
        """Delete partial downloads of killed processes, then the least recently used entries above the limit."""
        for partial in self.folder.glob("*.partial"):
            if partial.is_dir():
                self._delete_if_free(partial.name.removesuffix(".partial"), only_partial=True)
        entries = []
        for listing in self.folder.glob("*.json"):
            with suppress(FileNotFoundError):  # another process deletes it at this moment
                size = sum(file.stat().st_size for file in _files(self.folder / listing.stem))
                entries.append((listing.stat().st_mtime_ns, listing.stem, size))
        total = sum(size for _, _, size in entries)
        for _, key, size in sorted(entries):
            if total <= self.limit:
                return
            if self._delete_if_free(key):
                logger.info("Deleted the downloaded copy %s (%d bytes), the least recently used", key, size)
                total -= size

    def _delete_if_free(self, key: str, *, only_partial: bool = False) -> bool:
        """Delete an entry, or its partial download, and return True; return False if a process uses it."""
        if self.folder / key in _in_use:
            return False
        try:
            with ReadWriteLock(self.folder / f"{key}.lock").write_lock(blocking=False):
                if only_partial:
                    shutil.rmtree(self.folder / f"{key}.partial", ignore_errors=True)
                else:
                    self._delete(key)
        except Timeout:
            return False
        return True


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _checksums(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): sha256_file(path) for path in _files(folder)}


def local_folder(client: PatientClient, run: Run, folder: str) -> Path:
    """Return the local path of an artifact folder of a run.

    Artifacts in a local folder are read in place. Others are downloaded once, into the cache below `home`. Those of an
    unfinished run may still change, so they go into a temporary folder that this process deletes.
    """

    def download(target: Path) -> None:
        artifacts = get_artifact_repository(info.artifact_uri, tracking_uri=client.uri)
        client.wait_for(lambda: artifacts.download_artifacts(folder, str(target)), long=True)

    info = run.info
    try:
        if _is_local(info.artifact_uri):
            # `mlflow.artifacts.download_artifacts` would copy them into a temporary folder, and leave it there.
            path = Path(local_file_uri_to_path(info.artifact_uri)) / folder
            if not path.exists():
                raise FileNotFoundError(f"there is no {path}")
            return path
        if info.status != "FINISHED":
            scratch = Path(tempfile.mkdtemp())
            atexit.register(shutil.rmtree, scratch, ignore_errors=True)
            download(scratch)
            return scratch / folder
        cache = Downloads(home(client.uri) / "downloads", limit_bytes())
        return cache.get(f"{info.run_id}.{folder.replace('/', '.')}", download) / folder
    except (MlflowException, OSError) as error:
        raise TrackingError(
            f"The artifacts '{folder}' of run {info.run_id} cannot be read: {str(error).splitlines()[0]}",
            fix="Delete that run, so that it is computed again",
        ) from error


def json_artifact(client: PatientClient, run: Run, name: str) -> Any:
    """Return a JSON artifact of a run, read in place where it lies in a local folder."""
    try:
        if _is_local(run.info.artifact_uri):
            return read_json(Path(local_file_uri_to_path(run.info.artifact_uri)) / name, error=TrackingError)
        return client.wait_for(lambda: mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/{name}"))
    except (MlflowException, OSError, TrackingError) as error:
        raise TrackingError(
            f"Run {run.info.run_id} has no artifact {name!r} that can be read", got=str(error)
        ) from error


def _is_local(artifact_uri: str) -> bool:
    return urlparse(artifact_uri).scheme in ("", "file")
