"""The whole path on the embedded demo, as a user runs it: `mlflow run .`, a second variant, the control, promotion."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import mlflow
import pandas as pd
import pytest
from markupsafe import escape
from mlflow.entities import Run

from mlflow_compress import cli
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracker import Tracker

pytestmark = pytest.mark.ci  # two whole jobs; the README's first command is one more

ROOT = Path(__file__).parents[2]
WIDE = [f"--{gate}=100" for gate in ("max_kl", "max_kl_outliers_pct", "max_flips_pct", "max_accuracy_drop_pct")]
FEW = {
    "limit": "12",
    "answer_args": "max_new_tokens=16,instruction_limit=1,num_samples=2,judge_max_tokens=16",
}
FEW |= {"speed_args": "repeats=2,prompt_tokens=16,new_tokens=4,threads=1"}


def mlflow_run(folder: Path, **parameters: str) -> subprocess.CompletedProcess[str]:
    """Run the project as the README does, in `folder`, with few items."""
    values = {**FEW, "output_dir": str(folder / "compressed"), **parameters}
    options = [part for name, value in values.items() for part in ("-P", f"{name}={value}")]
    command = [sys.executable, "-m", "mlflow", "run", str(ROOT), "--env-manager", "local", *options]
    environment = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment.pop("OPENAI_API_KEY", None)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class World:
    """A store in which a 4-bit variant and the control were run."""

    folder: Path
    tracker: Tracker
    output: str
    said: str  # On the standard error

    def variant(self, name: str) -> Run:
        """Return the parent run of a variant."""
        [run] = self.tracker.find_finished("main", **{run_names.VARIANT: name})
        return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Run `mlflow run .` for rtn 4 bit with the judge, then for the control without it."""
    folder = tmp_path_factory.mktemp("e2e")
    first = mlflow_run(folder, method="rtn", bits="4")
    assert first.returncode == 0, first.stderr[-3000:]
    second = mlflow_run(folder, method="none", judge="false")
    assert second.returncode == 0, second.stderr[-3000:]
    mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")  # `world` does so for each test
    world = World(folder, Tracker(), first.stdout, first.stderr)
    before = len(world.tracker.client.search_runs([world.tracker.experiment_id]))
    again = mlflow_run(folder, method="rtn", bits="4", judge="false")  # a run that has more holds this too
    assert again.returncode == 0 and "Done before, and nothing has changed since" in again.stderr
    assert again.stdout.splitlines()[-12:] == first.stdout.splitlines()[-12:]
    assert len(world.tracker.client.search_runs([world.tracker.experiment_id])) == before
    return world


@pytest.fixture
def world(finished: World) -> World:
    """Return them, with their store as the one that commands use."""
    mlflow.set_tracking_uri(finished.tracker.uri)
    return finished


def test_the_parent_run_carries_what_people_compare(world: World) -> None:
    run = world.variant("rtn-4bit-g128")
    metrics = run.data.metrics
    for name in ("distance/kl_mean", "distance/flips_pct", "quality/accuracy", "quality/accuracy_delta"):
        assert name in metrics, name
    for name in ("robustness/shuffle_drop_pct", "uncertainty/uacc", "quality/perplexity", "judge/similarity"):
        assert name in metrics, name
    assert metrics["distance/kl_mean"] > 0
    assert metrics["distance/flips_pct"] >= 100 * abs(metrics["quality/accuracy_delta"]) - 0.1
    assert len(metrics) <= 32  # few enough to look through, with the two shares that policies read of the account
    assert float(run.data.params["bits_per_weight"]) < 16
    note = run.data.tags["mlflow.note.content"]
    assert note.splitlines()[0].strip("*") == run.data.tags[run_names.VERDICT]
    artifacts = {f.path for f in world.tracker.client.list_artifacts(run.info.run_id)}
    assert {"report", "figures", "outputs.json"} <= artifacts
    report = (world.tracker.fetch(run.info.run_id, "report") / "report.html").read_text()
    assert "<script src" not in report and str(escape(run.data.tags[run_names.VERDICT].split(";")[0])) in report


def test_the_stages_are_children_none_is_left_running_and_the_judge_had_no_key(world: World) -> None:
    children = world.tracker.children(world.variant("rtn-4bit-g128").info.run_id)
    assert set(children) == {"quantize", "evaluate", "judge", "speed"}
    [made] = world.variant("rtn-4bit-g128").outputs.model_outputs
    for stage in ("evaluate", "judge"):  # MLflow shows there which model they have measured
        measured = world.tracker.client.get_run(children[stage].info.run_id).inputs.model_inputs
        assert [one.model_id for one in measured] == [made.model_id]
    every = world.tracker.client.search_runs([world.tracker.experiment_id])
    assert {run.info.status for run in every} == {"FINISHED"}
    judge = world.tracker.children(world.variant("rtn-4bit-g128").info.run_id)["judge"]
    assert "OPENAI_API_KEY" in judge.data.tags[run_names.SKIPPED]
    assert not any(name.startswith("judge/mt_bench") for name in judge.data.metrics)


def test_the_experiment_lists_variants_and_default_says_where_they_are(world: World) -> None:
    client = world.tracker.client
    assert client.get_experiment(world.tracker.experiment_id).name == "mlflow-compress"
    every = client.search_runs([world.tracker.experiment_id])
    assert {run.data.tags["stage"] for run in every if "mlflow.parentRunId" not in run.data.tags} == {"main"}
    variants = {run.info.run_id for run in every}
    posts = client.search_runs(["0"])
    assert len(posts) == 3  # the last is of a command that was done before
    for post in posts:
        assert post.info.run_name.startswith("see ") and post.info.status == "FINISHED"
        assert any(run_id in post.data.tags["mlflow.note.content"] for run_id in variants)


def test_the_output_ends_with_a_table_and_the_link(world: World) -> None:
    assert "distance" in world.output.lower() or "KL" in world.output
    *_, leaderboard, charts, following = world.output.splitlines()
    assert "viewStateShareKey=leaderboard" in leaderboard and "viewStateShareKey=charts" in charts
    assert following.startswith("Next: ")


def test_all_that_is_shown_fits_a_terminal_and_nothing_is_said_twice(world: World) -> None:
    lines = [*world.said.splitlines(), *world.output.splitlines()]
    assert len(lines) <= 45, "\n".join(lines)
    every = "\n".join(lines)
    assert [every.count(text) for text in ("default policy", " flipped;", "rtn-4bit-g128: ", "Same greedy")] == [
        1,
        1,
        1,
        0,
    ]


def test_the_baseline_was_evaluated_once_and_the_control_has_not_moved_at_all(world: World) -> None:
    assert len(world.tracker.find_finished("baseline")) == 1
    first = world.tracker.children(world.variant("rtn-4bit-g128").info.run_id)["evaluate"]
    assert first.data.tags["baseline"] == "evaluated now"
    control = world.tracker.children(world.variant("none").info.run_id)["evaluate"]
    assert control.data.tags["baseline"] == "found in the store"
    run = world.variant("none")
    metrics = run.data.metrics
    assert metrics["distance/kl_mean"] == 0 and metrics["distance/corpus_kl_mean"] == 0
    assert world.tracker.children(run.info.run_id)["evaluate"].data.metrics["distance/corpus_kl_max"] == 0
    assert metrics["distance/all_flips_pct"] == 0 and metrics["quality/accuracy_delta"] == 0


def test_promotion_gates_ranks_and_explains(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    before = len(world.tracker.find_finished("promote"))
    assert cli.main(["promote", *WIDE]) == 0
    assert "rtn-4bit-g128 (version" in capsys.readouterr().out
    version = world.tracker.client.get_model_version_by_alias("compressed-demo", "champion")
    assert version.tags[run_names.VARIANT] == "rtn-4bit-g128"
    run, *earlier = world.tracker.find_finished("promote")
    assert len(earlier) == before
    decision = world.tracker.fetch_json(run.info.run_id, "decision.json")
    reasons = {o["candidate"]["name"]: o["reasons"] for o in decision["decision"]["outcomes"]}
    assert "cannot be promoted" in reasons["none"][0]
    # With a gate that nothing passes, the alias stays where it is.
    assert cli.main(["promote", "--max_kl", "0"]) == 3
    assert "not moved" in capsys.readouterr().out
    again = world.tracker.client.get_model_version_by_alias("compressed-demo", "champion")
    assert again.version == version.version


def test_the_champion_loads_by_alias_generates_and_scores(world: World) -> None:
    assert cli.main(["promote", *WIDE]) == 0
    model = mlflow.pyfunc.load_model("models:/compressed-demo@champion")
    texts = model.predict(pd.DataFrame({"prompt": ["Answer:", "Once"]}))["text"].tolist()
    assert len(texts) == 2 and all(isinstance(text, str) and text for text in texts)
    shorter = model.predict(pd.DataFrame({"prompt": ["Answer:", "Once"]}), params={"max_new_tokens": 2})["text"]
    assert all(long.startswith(short) and len(short) < len(long) for long, short in zip(texts, shorter, strict=True))
    scores = model.predict(pd.DataFrame({"prompt": ["Answer:", "Answer:"], "continuation": [" A", " A B"]}))
    assert (scores["loglik"] < 0).all() and scores["n_tokens"].tolist() == [1, 2]
    assert scores["loglik"][1] < scores["loglik"][0]


def test_a_changed_checkpoint_is_refused_and_leaves_no_run(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    reference = world.tracker.children(world.variant("none").info.run_id)["quantize"].data.tags[run_names.CHECKPOINT]
    weights = next(Path(reference).glob("*.safetensors"))
    original = weights.read_bytes()
    weights.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    before = len(world.tracker.client.search_runs([world.tracker.experiment_id]))
    try:
        assert cli.main(["evaluate", "--checkpoint", reference]) == 1
    finally:
        weights.write_bytes(original)
    assert "changed since it was written" in capsys.readouterr().err
    assert len(world.tracker.client.search_runs([world.tracker.experiment_id])) == before


def test_a_misspelt_parameter_fails_the_run(world: World) -> None:
    done = mlflow_run(world.folder, metod="awq")
    assert done.returncode != 0
    assert "Did you mean 'method'?" in done.stderr
    runs = world.tracker.client.search_runs(["0"], order_by=["attributes.start_time DESC"])
    assert runs[0].info.status == "FAILED"
    world.tracker.client.delete_run(runs[0].info.run_id)


def test_metrics_can_be_recomputed_from_the_stored_records(world: World) -> None:
    from mlflow_compress.metrics import MetricInputs, MetricSettings, compute_all
    from mlflow_compress.records import RunRecords

    evaluate = world.tracker.children(world.variant("rtn-4bit-g128").info.run_id)["evaluate"]
    baseline = evaluate.data.tags["baseline_run_id"]
    records = {run: RunRecords.read(world.tracker.fetch(run, "records")) for run in (baseline, evaluate.info.run_id)}
    noise = RunRecords.read(world.tracker.fetch(baseline, "noise"))
    again = compute_all(
        MetricInputs(
            baseline=records[baseline],
            variant=records[evaluate.info.run_id],
            noise=noise,
            settings=MetricSettings(seed=42, split_seed=42),
        )
    )
    stored = world.tracker.fetch_json(evaluate.info.run_id, "metrics.json")["results"]
    assert [(r.name, r.task, r.category, r.value) for r in again] == [
        (row["name"], row["task"], row["category"], row["value"]) for row in stored
    ]
    json.dumps(stored, allow_nan=False)
    behind = world.tracker.fetch_json(evaluate.info.run_id, "details.json")
    assert {row["name"] for row in behind["noise_floor"]} == {
        n for n in evaluate.data.metrics if n.startswith("distance/") and n.count("/") == 1
    }
    assert len(behind["conformal"]) == 4 and [row["task"] for row in behind["corpus"]] == ["demo_corpus"]
