"""A sweep of a model that does not fit: what the policy fails is known before a checkpoint is written."""

from pathlib import Path
from typing import Literal

import pytest

import mlflow_compress as mc
from mlflow_compress.commands.sweep import screen
from mlflow_compress.commands.sweep.result import Sweep
from mlflow_compress.commands.sweep.screen import left_unmade
from mlflow_compress.decide.promotion import PolicyAnswer
from mlflow_compress.demo import DATA_DIR
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.tracking.tracker import Tracker


def sweep(
    policy: Path,
    *,
    methods: str = "fp8,magnitude,rtn,hqq",
    device: Literal["cpu", "balanced"] = "balanced",
    save: Literal["passing", "winner"] = "passing",
) -> Sweep:
    return mc.sweep(
        policy=policy,
        methods=methods,
        bits="8,2",
        tasks=DATA_DIR / "choice.jsonl",
        limit=4,
        task_args={"noise_items": 2},
        judge=False,
        output_dir="out",
        device=device,
        max_memory={"cpu": "12MB"} if device == "balanced" else {},
        save=save,
    )


@pytest.mark.ci
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
        assert "It would fail the policy: KL" in rows[name].reason
    # A checkpoint of hqq must fit.
    assert all("needs the whole model in memory" in rows[f"hqq bits={bits}"].reason for bits in (8, 2))
    [run] = tracker.find(screen.SCREEN_STAGE)
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
    with pytest.raises(ConfigError, match="only if the model does not fit into memory"):
        sweep(policy, device="cpu")


@pytest.mark.slow
def test_only_the_smallest_variant_that_passes_is_made(tracker: Tracker, workdir: Path, no_fresh_process: None) -> None:
    policy = workdir / "policy.yaml"
    policy.write_text("kl: {max_kl: 1, max_outliers_pct: 100}\ngates: []\nmargins: []\n")
    made = sweep(policy, methods="rtn,fp8", save="winner")
    [checkpoint] = [path.name for path in Path("out").iterdir() if path.is_dir()]
    assert checkpoint.startswith("demo-rtn-2bit")
    rows = {row.name: row for row in made.scoreboard.rows}
    assert [name for name, row in rows.items() if row.status == "finished"] == ["rtn-2bit-g128"]
    for name in ("fp8", "rtn-8bit-g128"):
        assert rows[name].reason == "rtn-2bit-g128 passes as well, and is no larger"


def test_where_no_variant_passes_what_is_open_is_made() -> None:
    sizes = {"a": 3.0, "b": 2.0, "c": 1.0}
    fails, opened = PolicyAnswer(word="fails", why="flips 9 % > 5"), PolicyAnswer(word="open", why="needs more items")
    assert left_unmade({"a": opened, "b": opened, "c": fails}, sizes) == {
        "c": "It would fail the policy: flips 9 % > 5"
    }
    passes = PolicyAnswer(word="passes")
    assert left_unmade({"a": passes, "b": passes, "c": opened}, sizes) == {
        "a": "b passes as well, and is no larger",
        "c": "The policy leaves it open (needs more items), and b passes",
    }
    assert left_unmade({"a": passes, "b": passes, "c": opened}, None) == {}
