"""Run by torchrun as a module: scores with all processes what `test_scoring_team` scores with one.

``python -m torch.distributed.run ... -m tests.unit.scoring_together together FOLDER`` leaves in FOLDER what one process
and all of them found, and ends with exit code 3, which says that every line was reached. Mode "killed" evaluates the
models that are there, with a journal, in FOLDER/killed.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mlflow_compress.errors import DataError, MlflowCompressError
from mlflow_compress.models.loading import LoadConfig, load_model
from mlflow_compress.records import RunRecords
from mlflow_compress.scoring.baseline_store.state_store import StateStore, StateWriter
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from mlflow_compress.scoring.processes import team
from mlflow_compress.scoring.processes.scoring_jobs import JobRunner
from tests.unit.scoring_models import TEXT, load_random, mixed_requests

CONFIG = ScoringConfig(progress=False, batch_tokens=64, head_rows=8)
DONE = 3


def prepare(folder: Path) -> None:
    """Save a baseline and a variant."""
    load_random("llama", path=folder / "base")
    load_random("llama", seed=1, path=folder / "model")


def opened(folder: Path) -> Any:
    return load_model(LoadConfig(path=str(folder), device="cpu"))


def measure(scorer: Scorer, **how: Any) -> tuple[RunRecords, list[Any]]:
    """Score requests and a text; return the records, and the reports of the two passes."""
    scores, distances = scorer.score(mixed_requests(), **how)
    reports = [scorer.report]
    tokens, moved = scorer.score_corpus("corpus", TEXT * 6, window=32, **how)
    return RunRecords(option_scores=scores, option_distances=distances, token_scores=tokens, token_distances=moved), [
        *reports,
        scorer.report,
    ]


def evaluate(folder: Path, out: Path, *, resume: Path | None = None, config: ScoringConfig = CONFIG) -> list[Any]:
    """Capture the baseline, and compare the variant with the store and with the resident baseline."""
    base = opened(folder / "base")
    with StateWriter(out / "store", base, shard_bytes=3000) as writer:
        records, reports = measure(Scorer(base, config), capture=writer, resume=resume and resume / "base")
    records.write(out / "base")
    variant = Scorer(opened(folder / "model"), config)
    for name, baseline in {"stored": StateStore.open(out / "store", baseline=base), "resident": base}.items():
        records, more = measure(variant, baseline=baseline, resume=resume and resume / name)
        records.write(out / name)
        reports += more
    return reports


def with_itself(folder: Path, store: Path) -> RunRecords:
    """Compare the baseline with a store of its states."""
    base = opened(folder / "base")
    return measure(Scorer(base, CONFIG), baseline=StateStore.open(store, baseline=base))[0]


def alone(folder: Path) -> None:
    """What one process leaves. It is this process, because a rounding may depend on the threads it was started with."""
    reports = evaluate(folder, folder / "one")
    assert {(r.n_processes, r.single_process_reason) for r in reports} == {(1, None)}
    Scorer(opened(folder / "base"), CONFIG).score(mixed_requests(), resume=folder / "begun_by_one")


def fail(unit: object, attention: object) -> torch.Tensor:
    place = "an open group, which libraries would use" if torch.distributed.is_initialized() else "its own share"
    raise DataError(f"The leader failed in {place}")


def together(folder: Path) -> dict[str, Any]:
    """Evaluate; read the store of one process; say why not together; fail, and go on."""
    found: dict[str, Any] = {"processes": [r.n_processes for r in evaluate(folder, folder / "two")]}
    with_itself(folder, folder / "one" / "store").write(folder / "two_of_one")
    base = opened(folder / "base")
    memory, little = Scorer(replace(base, config=None), CONFIG), Scorer(base, CONFIG)
    memory.score(mixed_requests())
    little.score(mixed_requests()[:1])
    found["alone"] = [[s.report.n_processes, s.report.single_process_reason] for s in (memory, little) if s.report]
    shutil.copytree(folder / "model", folder / "broken")
    broken = opened(folder / "broken")
    assert broken.weights  # which is read from the file
    (folder / "broken" / "model.safetensors").unlink()
    failing = Scorer(base, replace(CONFIG, path="plain"))  # without a probe of packs, which would fail first
    failing.body.run = fail  # type: ignore[method-assign]
    for scorer, resume in (
        (failing, None),
        (Scorer(base, CONFIG), folder / "begun_by_one"),
        (Scorer(broken, CONFIG), None),
    ):
        try:
            scorer.score(mixed_requests(), resume=resume)
        except MlflowCompressError as error:
            found[type(error).__name__] = str(error)
    measure(Scorer(base, CONFIG))[0].write(folder / "after" / "base")
    return found


def main(mode: str, folder: Path) -> int:
    torch.set_num_threads(1)
    if team.serves():
        return team.serve(JobRunner().run)
    if mode == "killed":
        with team.leading():
            config = replace(CONFIG, shard_seconds=0.0)  # every group is written down
            evaluate(folder, folder / "killed", resume=folder / "unfinished", config=config)
        return 0
    prepare(folder)
    alone(folder)
    with team.leading():
        found = together(folder)
    with_itself(folder, folder / "two" / "store").write(folder / "one_of_two")
    (folder / "found.json").write_text(json.dumps(found))
    return DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
