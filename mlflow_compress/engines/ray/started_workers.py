"""The workers of a command: started for it, and shared by all that it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mlflow_compress.config import EngineConfig
from mlflow_compress.engines.ray.cluster_worker import ClusterWorker
from mlflow_compress.engines.ray.connection import HeadWatch, connected
from mlflow_compress.engines.ray.workers import Workers
from mlflow_compress.errors import ConfigError

_open: Workers | None = None


@contextmanager
def started_workers(
    settings: EngineConfig, *, on_gpu: bool | None, kind: type[ClusterWorker] = ClusterWorker
) -> Iterator[Workers]:
    """Yield workers, which end with the block. Within a block of an outer call, yield those of that block.

    When an inner block ends, the workers free their models: compression may need the memory.

    `on_gpu` gives each worker a GPU; None: if the cluster has any.
    """
    global _open
    if _open is not None:
        try:
            yield _open
        finally:
            _open.release()
        return
    with connected(settings) as ray:
        resources = ray.cluster_resources()
        n_cores, n_gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
        device = "cuda" if on_gpu or (on_gpu is None and n_gpus) else "cpu"
        room = n_cores // settings.cpus_per_worker
        room = min(room, n_gpus) if device == "cuda" else room
        n = room if settings.workers == "auto" else settings.workers
        # A cluster may grow; one machine does not.
        if n < 1 or (settings.ray_address is None and n > room):
            raise ConfigError(
                "Parameter 'workers' asks for more than there is",
                allowed=f"at most {room}: {n_cores} cores and {n_gpus} GPUs",
                got=f"{n} with {settings.cpus_per_worker} cores{' and a GPU' if device == 'cuda' else ''} each",
                fix="Change workers, cpus_per_worker or device",
            )
        actor = ray.remote(kind).options(
            num_cpus=settings.cpus_per_worker, num_gpus=1 if device == "cuda" else 0, max_restarts=0
        )
        n_threads = settings.cpus_per_worker
        _open = Workers(
            ray,
            n,
            lambda: actor.remote(device, n_threads),
            device=device,
            code=kind.code(),
            check=HeadWatch(ray).check,
        )
        try:
            yield _open
        finally:
            _open = None


def current_workers() -> Workers:
    """Return the workers of the innermost block of `started_workers`."""
    assert _open is not None, "engine=ray is used outside of `started_workers`"
    return _open
