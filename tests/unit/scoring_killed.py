"""Run as a module: scores in child processes that are killed at random points, until one gets through.

``python -m tests.unit.scoring_killed FOLDER SEED`` leaves FOLDER/whole and FOLDER/killed with the records of an
undisturbed and of the killed run, and prints the number of kills.
"""

import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from math import inf
from pathlib import Path

import torch

from mlflow_compress.models.loading import LoadConfig, load_model
from mlflow_compress.scoring.baseline_store import StateStore, StateWriter
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from tests.unit.scoring_models import TEXT, load_random, mixed_requests

CONFIG = ScoringConfig(progress=False, shard_seconds=0.0, batch_tokens=48, head_rows=4)
WANTED_KILLS = 25


def run(folder: Path, out: Path, resume: Path | None, last: float = inf) -> None:
    """Score, and write down in how many steps; step number `last` of it kills the process: no clock decides where."""
    loaded = load_model(LoadConfig(path=str(folder / "model")))
    steps = 0

    def step(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps == last:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(step)  # called with every call, and every return, of a function
    baseline = StateStore.open(folder / "baseline")
    scorer = Scorer(loaded, CONFIG)
    store = out / "store"
    if (store / "manifest.json").exists():  # killed between the store and the records: begin both anew
        shutil.rmtree(store)
        if resume is not None:
            shutil.rmtree(resume, ignore_errors=True)  # the journal counts on the store's shards
    with StateWriter(store, loaded, shard_bytes=3000) as writer:
        results = [
            *scorer.score(mixed_requests(), capture=writer, baseline=baseline, resume=resume),
            *scorer.score_corpus("corpus", TEXT * 4, window=32, capture=writer, baseline=baseline, resume=resume),
        ]
    for records in results:
        records.write(out)
    sys.setprofile(None)
    (folder / "steps").write_text(str(steps))


def prepare(folder: Path) -> None:
    base = load_random("llama", path=folder / "base")
    load_random("llama", seed=1, path=folder / "model")
    with StateWriter(folder / "baseline", base) as writer:
        scorer = Scorer(base, CONFIG)
        scorer.score(mixed_requests(), capture=writer)
        scorer.score_corpus("corpus", TEXT * 4, window=32, capture=writer)


def in_child(work: Callable[..., None], *arguments: object) -> bool:
    """Run in a forked child; return whether it got through.

    This process only ever imports: a fork of a process whose libraries have threads may hang.
    """
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        work(*arguments)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit(os.WEXITSTATUS(status))
    return os.WIFEXITED(status)


def main(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    in_child(prepare, folder)
    in_child(run, folder, folder / "whole", None)
    steps = int((folder / "steps").read_text())
    kills = 0
    for _ in range(WANTED_KILLS):
        kills += not in_child(run, folder, folder / "killed", folder / "resume", round(rng.uniform(0.2, 0.7) * steps))
    in_child(run, folder, folder / "killed", folder / "resume")
    sys.stdout.write(f"{kills}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
