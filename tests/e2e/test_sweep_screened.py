"""A sweep of a model that does not fit: what the policy fails is known before a checkpoint is written."""

from pathlib import Path
from typing import Literal

import pytest

import mlflow_compress as mc
from mlflow_compress.commands.sweep import screen
from mlflow_compress.commands.sweep.result import Sweep
from mlflow_compress.demo import DATA_DIR
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.tracking.tracker import Tracker

pytestmark = pytest.mark.ci


def sweep(policy: Path, *, device: Literal["cpu", "balanced"] = "balanced") -> Sweep:
    return mc.sweep(
        policy=policy,
        methods="rtn",
        bits="8,2",
        tasks=DATA_DIR / "choice.jsonl",
        limit=4,
        task_args={"noise_items": 2},
        judge=False,
        output_dir="out",
        device=device,
        max_memory={"cpu": "12MB"} if device == "balanced" else {},
        screen=True,
    )


def test_what_the_policy_fails_is_not_made(
    tracker: Tracker, workdir: Path, no_fresh_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = workdir / "policy.yaml"
    policy.write_text("kl: {max_kl: 0.001}\ngates: []\n")
    made = sweep(policy)
    assert [path.name.split("-")[2] for path in Path("out").iterdir() if path.is_dir()] == ["8bit"]
    rows = {row.name: row for row in made.scoreboard.rows}
    assert "The policy fails what it would be: KL" in rows["rtn-2bit-g128"].reason
    [run] = tracker.find(screen.STAGE)
    numbers = tracker.fetch_json(run.run_id, "screened.json")
    evaluated = tracker.run_of(tracker.child_ids(str(rows["rtn-8bit-g128"].run_id))["evaluate"]).data.metrics
    screened, _ = (known["values"] for known in numbers.values())
    same = screened.keys() & evaluated.keys()
    assert {"distance/kl_mean", "distance/flips_pct"} <= same
    assert {name: screened[name] for name in same} == {name: evaluated[name] for name in same}
    monkeypatch.setattr(screen, "scorers_of_forms", None)  # what was scored is found again
    policy.write_text("kl: {max_kl: 0}\ngates: []\n")
    with pytest.raises(UnsupportedError, match="fails every variant of this sweep"):
        sweep(policy)
    with pytest.raises(ConfigError, match="'screen' is for models that do not fit"):
        sweep(policy, device="cpu")
