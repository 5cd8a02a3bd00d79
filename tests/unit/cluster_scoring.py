"""Run as a module: scores with the workers of a Ray cluster what `test_scoring_cluster` compares with one process.

``python -m tests.unit.cluster_scoring MODE FOLDER`` evaluates the models in FOLDER (see `prepare`) and writes the records
to FOLDER/MODE. It is a process of its own, with as many threads as a worker, because a rounding may depend on the
threads that a process was started with.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mlflow_compress.config import EngineConfig
from mlflow_compress.engines.ray.cluster_worker import ClusterWorker, ModelRef, ShardTask
from mlflow_compress.engines.ray.remote_model import RemoteModel
from mlflow_compress.engines.ray.workers import HeadWatch, Workers, connected, started_workers
from mlflow_compress.errors import MlflowCompressError
from mlflow_compress.models.loading import LoadConfig, load_model, open_light
from mlflow_compress.records import Generations, RunRecords
from mlflow_compress.scoring.baseline_store import StateStore, StateWriter
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from mlflow_compress.scoring.forward.by_layer import BodyByLayer
from mlflow_compress.scoring.generation.generate import generate_two_turns
from mlflow_compress.scoring.generation.generation_rows import GenerationConfig
from tests.unit.scoring_models import TEXT, load_random, mixed_requests
from tests.unit.test_generate_matches import INSTRUCTIONS
from tests.waiting import until

CONFIG = ScoringConfig(progress=False, batch_tokens=64, head_rows=8, shard_seconds=0.0)
ANSWERS = GenerationConfig(max_new_tokens=12, samples=3, batch_rows=4)
ADDRESS = "CLUSTER_ADDRESS"
Opened = Callable[[Path], Any]


def prepare(folder: Path) -> None:
    """Save a baseline and a variant."""
    load_random("llama", path=folder / "base")
    load_random("llama", seed=1, path=folder / "model")


def here(folder: Path) -> Any:
    """Load a model in this process."""
    return load_model(LoadConfig(path=str(folder), device="cpu"))


def on(workers: Workers, **placed: Any) -> Opened:
    """Return what opens a model on workers."""
    config = {"device": "cpu", **placed}
    return lambda folder: RemoteModel.of(open_light(LoadConfig(path=str(folder), **config)), workers=workers)


def scored(scorer: Scorer, **how: Any) -> RunRecords:
    """Score requests and a text."""
    scores, distances = scorer.score(mixed_requests(), **how)
    tokens, moved = scorer.score_corpus("corpus", TEXT * 6, window=32, **how)
    return RunRecords(option_scores=scores, option_distances=distances, token_scores=tokens, token_distances=moved)


def evaluate(opened: Opened, folder: Path, out: Path, *, resume: Path | None = None) -> None:
    """Capture the baseline, compare the variant with its store, and let the variant answer."""
    base, variant = opened(folder / "base"), opened(folder / "model")
    with StateWriter(out / "store", base, shard_bytes=3000) as writer:
        scored(Scorer(base, CONFIG), capture=writer, resume=resume and resume / "base").write(out / "base")
    store = StateStore.open(out / "store", baseline=base)
    scored(Scorer(variant, CONFIG), baseline=store, resume=resume and resume / "variant").write(out / "variant")
    answers: Generations = generate_two_turns(variant, INSTRUCTIONS, ANSWERS, resume=resume and resume / "answers")
    answers.write(out / "answers")


class HeldWorker(ClusterWorker):
    """Scores three shards, and holds the next one until a file is there: so it can be lost in the middle."""

    def __init__(self, device: str, n_threads: int, go_on: Path) -> None:
        super().__init__(device, n_threads)
        self._go_on, self._n_scored = go_on, 0

    def score(self, ref: ModelRef, task: ShardTask, head: Any, rows: Any) -> Any:
        self._n_scored += 1
        if self._n_scored > 3:
            until(self._go_on.exists)
        return super().score(ref, task, head, rows)


class DyingWorker(ClusterWorker):
    """Kills itself in the middle of a shard of each model, and while it answers: once each."""

    def _dies(self, name: str) -> None:
        mark = Path(os.environ["MARKS"]) / name
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def score(self, ref: ModelRef, task: ShardTask, head: Any, rows: Any) -> Any:
        if task.shard.first == 3:
            self._dies("base" if task.captures else "variant")
        return super().score(ref, task, head, rows)

    def decode(self, *arguments: Any) -> Any:
        self._dies("answers")
        return super().decode(*arguments)


class CountingWorker(ClusterWorker):
    """Writes down how often each shard has read the layers: a line a shard."""

    def score(self, ref: ModelRef, task: ShardTask, head: Any, rows: Any) -> Any:
        body = self._parts(ref)[0]
        assert isinstance(body, BodyByLayer)
        sweep, n_sweeps = body._sweep, 0

        def counted(*args: Any) -> Any:
            nonlocal n_sweeps
            n_sweeps += 1
            return sweep(*args)

        body._sweep = counted  # type: ignore[method-assign]
        try:
            return super().score(ref, task, head, rows)
        finally:
            body._sweep = sweep  # type: ignore[method-assign]
            with Path(os.environ["READS"]).open("a") as file:
                file.write(f"{n_sweeps}\n")


@contextmanager
def workers_of(kind: type[ClusterWorker], *more: Any, address: str | None = None) -> Iterator[Workers]:
    """Yield two workers of a kind, each with one core."""
    with connected(EngineConfig(ray_address=address)) as ray:
        actor = ray.remote(kind).options(num_cpus=1, max_restarts=0)
        yield Workers(ray, 2, lambda: actor.remote("cpu", 1, *more), check=HeadWatch(ray).check)


def errors(folder: Path, workers: Workers) -> dict[str, str]:
    """Return what goes wrong, by name: files that are missing on a worker, and other weights."""
    found = {}
    broken, other = on(workers)(folder / "base"), on(workers)(folder / "model")
    object.__setattr__(broken, "ref", ModelRef(LoadConfig(path=str(folder / "nowhere")), broken.weights))
    object.__setattr__(other, "ref", ModelRef(LoadConfig(path=str(folder / "base")), other.weights))
    for name, model in {"missing": broken, "weights": other}.items():
        try:
            Scorer(model, CONFIG).score(mixed_requests())
        except MlflowCompressError as error:
            found[name] = f"{type(error).__name__}: {error}"
    try:
        with started_workers(EngineConfig(workers=1000), on_gpu=False):
            pass
    except MlflowCompressError as error:
        found["workers"] = f"{type(error).__name__}: {error}"
    return found


def lose_a_node(folder: Path) -> None:
    """Score on two machines, of which one goes down in the middle, with its worker and its results."""
    from ray.cluster_utils import Cluster

    with_one_core = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=with_one_core)
    lost = cluster.add_node(num_cpus=1)
    resume, go_on, n_done = folder / "unfinished-node", folder / "go-on-node", 0
    with workers_of(HeldWorker, go_on, address=cluster.address) as workers:
        whole = workers.run

        def run(n_tasks: int, make: Any, done: Any) -> None:
            def and_lose(number: int, result: Any) -> None:
                nonlocal n_done
                done(number, result)
                n_done += 1
                if n_done == 5:
                    cluster.remove_node(lost, allow_graceful=False)
                    cluster.add_node(num_cpus=1)
                    go_on.touch()

            whole(n_tasks, make, and_lose)

        workers.run = run  # type: ignore[method-assign]
        evaluate(on(workers), folder, folder / "node", resume=resume)
    assert lost not in cluster.list_all_nodes()
    cluster.shutdown()


def main(mode: str, folder: Path) -> int:
    torch.set_num_threads(1)
    out = folder / mode
    if mode == "one":
        prepare(folder)
        evaluate(here, folder, out)
    elif mode == "two":
        with started_workers(EngineConfig(workers=2), on_gpu=None) as workers:
            evaluate(on(workers), folder, out, resume=folder / "unfinished-two")
            found = errors(folder, workers)
        (folder / "errors.json").write_text(json.dumps(found))
    elif mode == "dying":
        with workers_of(DyingWorker) as workers:
            evaluate(on(workers), folder, out)
    elif mode == "layers":
        with workers_of(CountingWorker) as workers:
            evaluate(on(workers, device="balanced", max_memory={"cpu": "100KB"}), folder, out)
    elif mode in ("killed", "head"):
        with workers_of(HeldWorker, folder / f"go-on-{mode}", address=os.environ.get(ADDRESS)) as workers:
            evaluate(on(workers), folder, out, resume=folder / f"unfinished-{mode}")
    elif mode == "one_goes_on":
        evaluate(here, folder, out, resume=folder / "unfinished-goes-on")
    elif mode == "node":
        lose_a_node(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
