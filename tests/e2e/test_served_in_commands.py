"""Served models in `main`, `sweep`, `promote` and `gate`: evaluated, shown beside checkpoints, decided by distances."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlflow
import pytest

import mlflow_compress as mc
from mlflow_compress.commands.main.in_process import in_process
from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.commands.main.run import check, run_variant
from mlflow_compress.commands.main.stages import VariantRun
from mlflow_compress.commands.sweep.parameters import SweepConfig
from mlflow_compress.commands.sweep.plan import combinations
from mlflow_compress.config import expanded
from mlflow_compress.errors import AlignmentError, ConfigError
from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracker import Tracker
from tests.e2e.test_served_models import task
from tests.served_demo import NAME, served_demo
from tests.stores import runs_in
from tests.unit.scoring_models import rounding

POLICY = """
kl: none
gates: [{metric: distance/flips_pct, at_most: 60}]
margins: [{metric: quality/accuracy_delta, margin: 0.6}]
objective: {by: utility, utility: [{metric: distance/flips_pct, weight: 1}]}
"""


@pytest.fixture
def few(tmp_path: Path) -> dict[str, Any]:
    asked = {
        "tasks": task(tmp_path),
        "num_shuffles": 0,
        "num_fewshot": 0,
        "task_args": {"noise_items": 2},
        "dtype": "float32",
    }
    return {**asked, "judge": False, "speed": False}


@pytest.fixture
def url(loaded: LoadedModel) -> Iterator[str]:
    with served_demo(loaded) as server:
        yield server.base_url


def main_here(tracker: Tracker, url: str, few: dict[str, Any], **more: Any) -> VariantRun:
    """Run the main job with its stages in this process."""
    given = {"checkpoint": f"endpoint:{url}", "endpoint_args": {"served_model": NAME}, **few, **more}
    config = MainConfig(**expanded(MainConfig, given))
    return run_variant(config, tracker, check(config), start=partial(in_process, say=lambda line: None))


@pytest.mark.ci
def test_a_served_variant_in_main_is_promoted_by_its_distances(
    tracker: Tracker, url: str, loaded: LoadedModel, few: dict[str, Any], tmp_path: Path
) -> None:
    short = {"speed": True, "speed_args": {"repeats": 2, "prompt_tokens": 16, "new_tokens": 4}}
    found = main_here(tracker, url, {**few, **short})
    assert found["speed/first_token_ms"].value > 0
    assert found.name == f"endpoint-{NAME}" and found.manifest is None
    # A KL is at most half of the square of the largest change of ln p, and both passes are rounded.
    assert found["distance/flips_pct"].value == 0.0
    assert found["distance/kl_top20"].value <= (2 * rounding(loaded)) ** 2 / 2
    run = tracker.client.get_run(found.run.run_id)
    assert set(tracker.children(found.run.run_id)) == {"evaluate", "speed"}
    evaluate = tracker.child_ids(found.run.run_id)["evaluate"]
    told = {
        "served_model": NAME,
        "endpoint": url,
        "server": "vLLM 0.0.1",
        "evaluate_run_id": evaluate,
    }
    assert told.items() <= run.data.tags.items()
    assert f"Served: {NAME} (loaded from demo) at {url}, by vLLM 0.0.1" in run.data.tags["mlflow.note.content"]
    assert run.data.params["method"] == run.data.tags["method"] == "endpoint" and run.data.params["bits"] == "none"
    assert not [name for name in run.data.metrics if name.startswith("size/")]

    # The default policy asks for KL and ranks by size, which a server does not show: nothing is promoted, with reasons.
    refused = mc.promote(dry_run=True)
    assert refused.outcome == "nothing"
    reasons = " ".join(refused.decision.outcomes[0].reasons)
    assert "give a policy with 'kl: none'" in reasons and "let the policy's objective rank by" in reasons

    (tmp_path / "policy.yaml").write_text(POLICY)
    promoted = mc.promote(policy=str(tmp_path / "policy.yaml"))
    assert promoted.outcome == "promoted" and promoted.champion == found.name
    version = tracker.client.get_model_version_by_alias("compressed-demo", "champion")
    assert {**told, "weights": "served"}.items() <= version.tags.items()
    assert version.run_id == found.run.run_id
    assert f"Served as {NAME} at {url} by vLLM 0.0.1; its numbers are those of run {evaluate}." in version.description
    with pytest.raises(Exception, match=f"has no weights here.*Ask the server at {url} for it"):
        mlflow.pyfunc.load_model("models:/compressed-demo@champion")


def test_a_served_variant_is_gated_by_what_a_server_shows(url: str, few: dict[str, Any], tmp_path: Path) -> None:
    asked = {name: value for name, value in few.items() if name not in ("judge", "speed")}
    asked |= {"store": tmp_path / "runs", "endpoint_args": {"served_model": NAME}}
    with pytest.raises(ConfigError, match=r"a gate that a served model cannot pass.*give a policy with 'kl: none'"):
        mc.gate(f"endpoint:{url}", **asked)
    (tmp_path / "sizes.yaml").write_text("kl: none\ngates: [{metric: size/ratio, at_least: 2}]\n")
    with pytest.raises(ConfigError, match="the size of a served model is not known"):
        mc.gate(f"endpoint:{url}", policy=str(tmp_path / "sizes.yaml"), **asked)
    assert not runs_in(tmp_path / "runs")

    (tmp_path / "policy.yaml").write_text(POLICY)
    said: list[str] = []
    verdict = mc.gate(f"endpoint:{url}", policy=str(tmp_path / "policy.yaml"), block=3, progress=said.append, **asked)
    assert verdict.passed and verdict.variant == f"endpoint-{NAME}"
    assert verdict.items_used == 6 and verdict.items_available == 12  # no flips in 6: fewer than 60 %, for sure
    assert all(row.value == 0.0 for row in verdict.rows if row.by == "items")
    assert "echo          yes" in said[0] and "3 of 12 items" in said[1]


@pytest.mark.ci
def test_a_sweep_takes_served_models_beside_methods(
    tracker: Tracker, url: str, few: dict[str, Any], tmp_path: Path, loaded: LoadedModel
) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text(f"- {{method: fp16}}\n- {{checkpoint: 'endpoint:{url}', served_model: [{NAME}]}}\n")
    lines: list[str] = []
    asked = {**few, "grid": str(grid), "progress": lambda progress: lines.append(progress.line)}
    swept = mc.sweep(**asked)
    rows = {row.name: row for row in swept.scoreboard.rows}
    assert set(rows) == {"fp16", f"endpoint-{NAME}"} and not swept.failed
    assert any("endpoint-demo-served" in line and line.rstrip().endswith("served") for line in lines[0].splitlines())
    mains = {run.data.tags[run_names.VARIANT]: run for run in tracker.find_finished("main")}
    assert set(tracker.children(mains[f"endpoint-{NAME}"].info.run_id)) == {"evaluate"}
    assert "size/bytes" in mains["fp16"].data.metrics
    evaluations = {run.data.tags[run_names.EVALUATION] for run in mains.values()}
    assert len(evaluations) == 1  # they are compared

    again = mc.sweep(**{**asked, "progress": lambda progress: lines.append(progress.line)})
    assert isinstance(again, mc.Sweep) and len(tracker.find_finished("main")) == 2  # both are found

    # Another model under the name at the same address is not taken for the one that was measured.
    loaded.model.model.layers[2].mlp.down_proj.weight.data.mul_(0.5)
    try:
        with pytest.raises(AlignmentError, match="gives other answers than before"):
            mc.sweep(**asked)
    finally:
        loaded.model.model.layers[2].mlp.down_proj.weight.data.mul_(2.0)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{checkpoint: 'endpoint:http://127.0.0.1:1/v1', served_model: x, bits: 4}", "served models has another"),
        (
            "{checkpoint: ['endpoint:http://127.0.0.1:1/v1', folder], served_model: x}",
            "for served models has another parameter",
        ),
        ("{checkpoint: 'endpoint:http://127.0.0.1:1/v1'}", "'served_model' must be given"),
        ("{checkpoint: 'endpoint:http://u:secret@127.0.0.1:1/v1', served_model: x}", "a user, a password or a query"),
    ],
)
def test_a_grid_with_half_a_served_model_is_refused(entry: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text(f"- {entry}\n")
    with pytest.raises(ConfigError, match=said) as error:
        mc.sweep(grid=str(tmp_path / "grid.yaml"))
    assert "secret" not in str(error.value)


def test_what_methods_share_is_not_for_served_models(tmp_path: Path) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text("- {method: gptq}\n- {checkpoint: 'endpoint:http://127.0.0.1:1/v1', served_model: [x, y]}\n")
    asked = SweepConfig(grid=str(grid), calibration="demo", calibration_samples=8)
    made, left_out = combinations(asked)
    assert {"endpoint-x", "endpoint-y"} <= {one.name for one in made} and len(made) + len(left_out) == 3


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "'served_model' must be given"),
        (
            {"served_model": "x", "method": "gptq"},
            "Parameter 'method' is given for a served model",
        ),
        ({"served_model": "x", "bits": 4}, "Parameter 'bits' is given for a served model"),
        (
            {"served_model": "x", "checkpoint": None, "model": "endpoint:http://127.0.0.1:1/v1"},
            "names a served model",
        ),
    ],
)
def test_main_refuses_a_served_model_with_settings_that_it_does_not_have(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(MainConfig(**{"checkpoint": "endpoint:http://127.0.0.1:1/v1", "tasks": "demo", **more}))
