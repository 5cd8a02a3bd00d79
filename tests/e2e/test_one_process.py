"""Where models may run on a GPU, a main job's stages share one process: what they log is what their projects log."""

from importlib import import_module
from pathlib import Path

import mlflow
import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

import mlflow_compress as mc
from mlflow_compress.tracking import run_names

pytestmark = pytest.mark.ci  # two main jobs


def stages_of_a_job(folder: Path) -> dict[str, Run]:
    folder.mkdir()
    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    mc.run(method="rtn", bits=4, limit=3, task_args={"noise_items": 2}, judge=False, output_dir=str(folder / "out"))
    client = MlflowClient()
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
    return {run.data.tags[run_names.STAGE]: run for run in runs if run_names.STAGE in run.data.tags}


def test_stages_in_one_process_log_what_projects_log(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    projects = stages_of_a_job(workdir / "projects")
    monkeypatch.setattr(import_module("mlflow_compress.commands.main.run"), "certainly_on_cpu", lambda device: False)
    here = stages_of_a_job(workdir / "here")
    assert here.keys() == projects.keys() == {"main", "quantize", "evaluate", "baseline", "speed"}
    for stage, run in here.items():
        project = projects[stage]
        assert run.info.status == project.info.status == "FINISHED"
        assert run.data.params.keys() == project.data.params.keys()
        measured = {name for name in run.data.metrics if not name.startswith("speed/")}
        assert {name: run.data.metrics[name] for name in measured} == {
            name: value for name, value in project.data.metrics.items() if not name.startswith("speed/")
        }
    assert len({run.data.tags[run_names.PROCESS] for run in projects.values()}) > 2
    assert len({run.data.tags[run_names.PROCESS] for run in here.values()}) == 1
