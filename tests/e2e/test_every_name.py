"""Every name that six commands leave in a store, on the demo, is a name that they left before.

`tests/golden/every_name.json` holds, per command and stage, the names of metrics, tags, parameters, artifacts and runs,
and those of the registry. Only names: values have goldens of their own. The commands run as a user runs them, and what
they left is read by MLflow's client, so that nothing here depends on how the package is arranged. To write the file
again, after names that changed on purpose: ``WRITE_EVERY_NAME=1 python -m pytest -m slow tests/e2e/test_every_name.py``.

Not in the file, with the reason:

- MLflow's own tags (`mlflow.*`): they differ between its releases. Those that this package writes itself are there.
- Files of the package's code beside a logged model: they are the package's modules, not results.
- Registered models that are leases on a baseline: they stand for processes that wait, not for variants.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import LoggedModel, Run, Trace
from mlflow.tracking import MlflowClient

from mlflow_compress.config.declarations import as_typed
from tests.judge_server import completion, judge_server

ROOT = Path(__file__).parents[2]
STORED = ROOT / "tests" / "golden" / "every_name.json"
KEPT_TAGS = tuple(
    f"mlflow.{name}"
    for name in (
        "note.content",
        "sharedViewState.",
        "parentRunId",
        "experimentKind",
        "loggedArtifacts",
        "modelVersions",
    )
)
LEASE = "mlflow-compress-lease-"

ITEMS: dict[str, Any] = {"device": "cpu", "limit": 3, "task_args": {"noise_items": 4}}
SPEED: dict[str, Any] = {"speed_args": {"repeats": 2, "prompt_tokens": 16, "new_tokens": 4, "threads": 1}}
ANSWERS: dict[str, Any] = {
    "answer_args": {"instruction_limit": 1, "num_samples": 2, "max_new_tokens": 8, "judge_max_tokens": 8}
}
JUDGE: dict[str, Any] = {
    "judges": "similarity,divergent_tokens,mt_bench,pairwise",
    "judge_model": "j",
    "judge_args": {"repeats": 2},
}
WIDE: dict[str, Any] = {f"max_{gate}": 100 for gate in ("kl", "kl_outliers_pct", "flips_pct", "accuracy_drop_pct")}

Names = dict[str, list[str]]


def run_command(folder: Path, command: str, exit_code: int, **parameters: object) -> None:
    """Run a command as a user does, with a store in `folder`."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "OPENAI_", "ENCODER_"))}
    environment |= {
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
        "PYTHONPATH": str(ROOT),
        "OPENAI_API_KEY": "sk-of-a-local-server",
        "OMP_NUM_THREADS": "1",
    }
    options = [f"--{name}={as_typed(value)}" for name, value in parameters.items()]
    done = subprocess.run(
        [sys.executable, "-m", "mlflow_compress", command, *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == exit_code, f"{command}: {done.stdout[-1000:]}\n{done.stderr[-3000:]}"


@contextmanager
def judge() -> Iterator[str]:
    """Serve a judge model that gives the same grade to every answer, and calls every pair a tie."""

    def script(_: int, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        verdict = "[[C]]" if "Assistant B" in str(body) else "[[7]]"
        return 200, completion(f"Good. {verdict}", "j", usage={"prompt_tokens": 100, "completion_tokens": 20})

    with judge_server(script, model="j") as server:
        yield server.base_url


def plain(name: str) -> str:
    """Return a name with what differs from run to run replaced: hashes, ids and numbers of shards."""
    name = re.sub(r"(?<![A-Za-z0-9])(m-|tr-)?[0-9a-f]{8,64}(?![A-Za-z0-9])", "<id>", name)
    return re.sub(r"\d{5}-of-\d{5}", "<shard>", name)


def ours(tags: Iterable[str]) -> list[str]:
    """Return the tags that this package has named."""
    return [plain(tag) for tag in tags if not tag.startswith("mlflow.") or tag.startswith(KEPT_TAGS)]


def counted(lists: list[list[str]]) -> list[str]:
    """Return the names of several runs; one that not every run has says how many have it."""
    counts = Counter(name for names in lists for name in sorted(set(names)))
    every = len(lists)
    return [name if n == every else f"{name} ({n} of {every})" for name, n in sorted(counts.items())]


def artifacts(client: MlflowClient, run_id: str, path: str | None = None) -> Iterator[str]:
    for file in client.list_artifacts(run_id, path):
        if file.is_dir:
            yield from artifacts(client, run_id, file.path)
        else:
            yield plain(file.path)


def model_artifacts(client: MlflowClient, model_id: str, path: str | None = None) -> Iterator[str]:
    for file in client.list_logged_model_artifacts(model_id, path):
        if not file.is_dir:
            yield plain(file.path)
        elif file.path != "code":
            yield from model_artifacts(client, model_id, file.path)


def of_run(client: MlflowClient, run: Run) -> Names:
    files = list(artifacts(client, run.info.run_id))
    stored = client.download_artifacts(run.info.run_id, "metrics.json") if "metrics.json" in files else None
    results = [row["name"] for row in json.loads(Path(stored).read_text())["results"]] if stored else []
    return {
        "run names": [plain(run.info.run_name)],
        "metrics": list(run.data.metrics),
        "tags": ours(run.data.tags),
        "params": list(run.data.params),
        "artifacts": files,
        "results": results,
        "data sets": [given.dataset.name for given in run.inputs.dataset_inputs],
    }


def of_model(client: MlflowClient, model: LoggedModel) -> Names:
    return {
        "names": [plain(model.name)],
        "metrics": [metric.key for metric in model.metrics or []],
        "tags": ours(model.tags),
        "params": list(model.params),
        "artifacts": list(model_artifacts(client, model.model_id)),
    }


def of_trace(trace: Trace) -> Names:
    return {
        "tags": ours(trace.info.tags),
        "spans": [span.name for span in trace.data.spans],
        "assessments": [assessment.name for assessment in trace.info.assessments],
    }


def together(place: str, of_all: list[Names]) -> Names:
    """Return the names of entities of one kind, by place and kind of name; empty lists are left out."""
    found = {f"{place} > {kind}": counted([names[kind] for names in of_all]) for kind in of_all[0]}
    return {kind: names for kind, names in found.items() if names}


def entities(client: MlflowClient) -> Iterator[tuple[str, Run | LoggedModel | Trace]]:
    """Yield every run, logged model and trace of a store, with its id."""
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    yield from ((run.info.run_id, run) for run in client.search_runs(experiments, max_results=5000))
    yield from ((model.model_id, model) for model in client.search_logged_models(experiments))
    yield from ((trace.info.trace_id, trace) for trace in client.search_traces(locations=experiments, max_results=500))


def names_by_stage(client: MlflowClient, made_by: Mapping[str, str]) -> Names:
    """Return the names in what the commands have made, by command and stage, as they are after the last command."""
    found: dict[str, list[Names]] = {}
    for entity_id, entity in entities(client):
        if isinstance(entity, Run):
            kind, names = entity.data.tags.get("stage", "no stage"), of_run(client, entity)
        elif isinstance(entity, LoggedModel):
            kind, names = "logged models", of_model(client, entity)
        else:
            kind, names = "traces", of_trace(entity)
        found.setdefault(f"{made_by[entity_id]} > {kind}", []).append(names)
    return {kind: names for place, of_all in found.items() for kind, names in together(place, of_all).items()}


def names_beside(client: MlflowClient) -> Names:
    """Return the names in the model registry, and the tags of the experiments."""
    models = [model for model in client.search_registered_models() if not model.name.startswith(LEASE)]
    versions = [version for model in models for version in client.search_model_versions(f"name = '{model.name}'")]
    found = together(
        "registered models",
        [{"names": [plain(model.name)], "tags": ours(model.tags), "aliases": list(model.aliases)} for model in models],
    )
    found |= together("versions", [{"tags": ours(version.tags)} for version in versions])
    for experiment in client.search_experiments():
        found[f"experiment {experiment.name} > tags"] = sorted(ours(experiment.tags))
    return found


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Names:
    """Run the six commands one after the other in one store, and return the names in it."""
    folder = tmp_path_factory.mktemp("names")
    (folder / "prices.yaml").write_text("j: {prompt: 30, completion: 60}\n")
    made_by: dict[str, str] = {}

    def client() -> MlflowClient:  # opened after the first command, which makes the store
        return MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")

    def run(command: str, exit_code: int = 0, **parameters: object) -> None:
        run_command(folder, command, exit_code, **parameters)
        for entity_id, _ in entities(client()):
            made_by.setdefault(entity_id, command)

    with judge() as base_url:
        asked = {**JUDGE, "judge_args": {"repeats": 2, "base_url": base_url, "prices": folder / "prices.yaml"}}
        run("main", method="rtn", bits=4, **ITEMS, **SPEED, **ANSWERS, **asked)
    # Pruned weights are timed, those of rtn only where vLLM is.
    run("sweep", methods="rtn,magnitude", bits=3, judge="false", output_dir=folder / "swept", **ITEMS, **SPEED)
    [pruned] = (folder / "swept").glob("demo-magnitude*")
    run("promote", **WIDE)
    # Of so few items no default gate is passed, so every gate is looked at after all of them.
    run("gate", 3, checkpoint=pruned, min_decode_speedup=0.001, max_memory_ratio=100, **ITEMS, **SPEED)
    run("search", formats="rtn:3,rtn:8", search_args={"windows": 8}, bits_per_weight=5, **ITEMS)
    run(
        "diagnose",
        method="rtn",
        bits=3,
        diagnosis_args={"corpus_tokens": 1280, "corpus_window": 64},
        **(ITEMS | {"limit": 1}),
    )
    return names_by_stage(client(), made_by) | names_beside(client())


def differences(before: Names, now: Names) -> Iterator[str]:
    """Say, one line per name, what is missing and what is new."""
    for place in sorted(before.keys() | now.keys()):
        old, new = set(before.get(place, [])), set(now.get(place, []))
        yield from (f"{place}: missing: {name}" for name in sorted(old - new))
        yield from (f"{place}: new: {name}" for name in sorted(new - old))


@pytest.mark.slow
def test_every_name_is_as_before(names: Names) -> None:
    if os.environ.get("WRITE_EVERY_NAME"):
        lines = [f"{json.dumps(place)}: {json.dumps(found)}" for place, found in sorted(names.items())]
        STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    changed = list(differences(json.loads(STORED.read_text()), names))
    assert not changed, "\n".join(["what the commands leave has other names than before:", *changed])
