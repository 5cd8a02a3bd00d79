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
        methods="fp8,magnitude,rtn,hqq",
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
    policy.write_text("kl: {max_kl: 0.03}\ngates: []\n")
    made = sweep(policy)
    assert {path.name.split("-")[1] for path in Path("out").iterdir() if path.is_dir()} == {"fp8", "rtn"}
    rows = {row.name: row for row in made.scoreboard.rows}
    assert {name for name, row in rows.items() if row.status == "finished"} == {"fp8", "rtn-8bit-g128"}
    for name in ("magnitude-50pct", "rtn-2bit-g128"):
        assert "The policy fails what it would be: KL" in rows[name].reason
    # A checkpoint of hqq must fit.
    assert all("needs the whole model in memory" in rows[f"hqq bits={bits}"].reason for bits in (8, 2))
    [run] = tracker.find(screen.STAGE)
    numbers = [known["values"] for known in tracker.fetch_json(run.run_id, "screened.json").values()]
    assert len(numbers) == 4
    for name, screened in (("fp8", numbers[0]), ("rtn-8bit-g128", numbers[2])):
        evaluated = tracker.run_of(tracker.child_ids(str(rows[name].run_id))["evaluate"]).data.metrics
        same = screened.keys() & evaluated.keys()
        assert {"distance/kl_mean", "distance/flips_pct"} <= same
        assert {one: screened[one] for one in same} == {one: evaluated[one] for one in same}, name
    monkeypatch.setattr(screen, "scorers_of_forms", None)  # what was scored is found again
    policy.write_text("kl: {max_kl: 0}\ngates: []\n")
    with pytest.raises(UnsupportedError, match="fails every variant of this sweep"):
        sweep(policy)
    with pytest.raises(ConfigError, match="'screen' is for models that do not fit"):
        sweep(policy, device="cpu")
