"""The gate on the demo: it stops early, goes on after a kill, decides as a promotion does after all items, and exits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest

import mlflow_compress as mc
from mlflow_compress import cli
from mlflow_compress.commands.evaluate import models as evaluated
from mlflow_compress.commands.webhook.parameters import WebhookConfig
from mlflow_compress.commands.webhook.run import Receiver, gate_config
from mlflow_compress.errors import ConfigError
from mlflow_compress.tracking.tracker import Tracker
from mlflow_compress.tracking.webhook import Delivery
from tests.conftest import Fork, forked_checks
from tests.stores import artifacts, runs_in

FEW = {"limit": 4, "num_shuffles": 0, "num_fewshot": 0, "task_args": "noise_items=4"}
OPTIONS = [f"--{name}={value}" for name, value in FEW.items()]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gate") / "results"


@pytest.fixture(scope="module")
def near(store: Path, python: Fork) -> Path:
    """Return a checkpoint that hardly differs from the demo."""
    with forked_checks(python):
        return Path(mc.compress("demo", "rtn", bits=8, store=store).folder)


@pytest.fixture(scope="module")
def far(store: Path, python: Fork) -> Path:
    """Return a checkpoint that differs a lot."""
    with forked_checks(python):
        return Path(mc.compress("demo", "rtn", bits=2, store=store).folder)


def policy(folder: Path, text: str) -> str:
    path = folder / "policy.yaml"
    path.write_text(text)
    return str(path)


LOOSE = "kl: none\nmargins: []\ngates: [{metric: distance/flips_pct, at_most: 50}]\n"


def gate(checkpoint: Path, store: Path, **more: object) -> mc.GateVerdict:
    return mc.gate(checkpoint, store=store, block=5, **FEW, **more)  # type: ignore[arg-type]


@pytest.mark.ci
def test_a_near_variant_passes_early_and_a_far_one_fails_early(
    near: Path, far: Path, store: Path, tmp_path: Path
) -> None:
    rules = policy(tmp_path, LOOSE)
    passed = gate(near, store, policy=rules, output=str(tmp_path / "out"))
    assert passed.passed and passed.exit_code == 0 and passed.items_used < passed.items_available
    strict = policy(tmp_path, "kl: none\nmargins: []\ngates: [{metric: distance/top1_agreement, at_least: 0.99}]\n")
    failed = gate(far, store, policy=strict)
    assert not failed.passed and failed.exit_code == 3 and failed.items_used < failed.items_available
    # An interval of 95 % does not hold where a gate has stopped.
    assert not any("Accuracy" in remark for remark in (*passed.remarks, *failed.remarks))
    # The files say the same, and the run has them.
    written = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert written["passed"] and written["items_used"] == passed.items_used and written["exit_code"] == 0
    shown = (tmp_path / "out" / "verdict.md").read_text()
    assert shown.startswith("## Passed: rtn-8bit") and "% saved" in shown
    folder = artifacts(store, passed.run.run_id)
    assert (folder / "verdict.md").read_text() == shown and (folder / "records" / "items.parquet").is_file()
    # The baseline was evaluated once, and the second gate has found it.
    assert failed.remarks[0].startswith("Account: all ") and "found in the store" in failed.remarks[1]
    json.dumps(passed.to_dict(), allow_nan=False)
    assert len(passed.to_pandas()) == 1


@pytest.mark.ci
def test_gates_on_answers_are_decided_after_the_items_and_not_where_these_fail(
    near: Path, far: Path, store: Path, tmp_path: Path
) -> None:
    few = {"answer_args": {"instruction_limit": 3, "num_samples": 2, "max_new_tokens": 8, "judge_max_tokens": 8}}
    text = """
    kl: none
    gates: [{metric: distance/flips_pct, at_most: 50}, {metric: judge/length_ratio, at_most: 5}]
    margins: [{metric: judge/defects_delta_pct, margin: 60}]
    require: {stages: [evaluate, judge]}
    """
    passed = gate(near, store, policy=policy(tmp_path, text), **few)
    assert passed.passed and [row.by for row in passed.rows] == ["items", "answers", "answers"], passed
    assert any(remark.startswith("For users: ") for remark in passed.remarks)
    longer = policy(tmp_path, text.replace("length_ratio, at_most: 5", "length_ratio, at_least: 2"))
    failed = gate(near, store, policy=longer, **few)
    assert not failed.passed and [row.verdict for row in failed.rows] == ["pass", "fail", "pass"]
    assert "judge/length_ratio" in failed.verdict
    before = len(runs_in(store))
    strict = policy(tmp_path, text.replace("flips_pct, at_most: 50", "top1_agreement, at_least: 0.99"))
    early = gate(far, store, policy=strict, **few)
    assert [row.verdict for row in early.rows] == ["fail", "undecided", "undecided"]
    assert len(runs_in(store)) == before + 1  # the gate's own run: no answer was generated


@pytest.mark.ci
def test_after_all_items_the_fixed_n_rule_decides_as_a_promotion(near: Path, store: Path, tmp_path: Path) -> None:
    """With the whole evaluation, and a limit between the value and the upper end, items cannot decide early."""
    whole = mc.evaluate(near, store=store, **FEW)  # type: ignore[arg-type]
    flips = whole["distance/flips_pct"]
    for bound, passes in ((flips.high * 1.0001, True), (flips.high * 0.9999, False)):
        rules = policy(
            tmp_path, f"kl: none\nmargin: 99\nmargins: []\ngates: [{{metric: distance/flips_pct, at_most: {bound}}}]\n"
        )
        found = gate(near, store, policy=rules, error=1e-6)  # no early verdict is that sure
        [row] = found.rows
        assert found.items_used == found.items_available == flips.n
        assert (row.by, row.verdict == "pass", found.passed) == ("all items", passes, passes), row
        assert "by the fixed-n rule after all items" in found.verdict
        assert "Accuracy, of all items: no worse than 99 points." in found.remarks


@pytest.mark.ci
def test_an_interrupted_gate_goes_on_with_the_block_that_it_was_at(
    near: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = policy(tmp_path, "kl: none\nmargins: []\ngates: [{metric: distance/flips_pct, at_most: 20}]\n")
    scored: list[int] = []
    score = evaluated.BlockScorer._score

    def counted(self: evaluated.BlockScorer, keys: evaluated.ItemKeys, resume: Path) -> object:
        if len(scored) == 2:
            scored.append(-1)
            raise KeyboardInterrupt
        scored.append(len(keys))
        return score(self, keys, resume)

    monkeypatch.setattr(evaluated.BlockScorer, "_score", counted)
    with pytest.raises(KeyboardInterrupt):
        gate(near, store, policy=rules, seed=7)
    assert [run.info.status for run in runs_in(store)].count("KILLED") == 1
    found = gate(near, store, policy=rules, seed=7)
    assert found.passed and scored[:3] == [5, 5, -1] and found.verdict.endswith(" Seed 7 (given).")
    # The first two blocks were not scored again.
    assert 5 * 2 + sum(scored[3:]) == found.items_used
    assert found.rows == gate(near, store, policy=rules, seed=7).rows  # as without an interruption


@pytest.mark.slow
def test_a_killed_process_leaves_its_blocks(near: Path, store: Path, tmp_path: Path) -> None:
    rules = policy(tmp_path, "kl: none\nmargins: []\ngates: [{metric: distance/flips_pct, at_most: 20}]\n")
    code = (
        "import sys, mlflow_compress as mc\n"
        "mc.gate(sys.argv[1], policy=sys.argv[2], store=sys.argv[3], block=2, seed=11, progress=lambda line: print(line, flush=True), "
        f"**{FEW!r})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(near), rules, str(store)],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    for _ in range(3):
        process.stdout.readline()
    process.kill()
    process.wait()
    lines: list[str] = []
    mc.gate(near, policy=rules, store=store, block=2, seed=11, progress=lines.append, **FEW)  # type: ignore[arg-type]
    assert lines[0].startswith("2 of")
    [folder] = [p for p in (store / ".mlflow_compress").glob("unfinished/*") if p.is_dir()] or [None]
    assert folder is None  # what was finished is tidied up


@pytest.mark.ci
def test_a_gate_on_the_checkpoint_needs_no_item(near: Path, store: Path, tmp_path: Path) -> None:
    rules = policy(tmp_path, "kl: none\nmargins: []\ngates: [{metric: size/ratio, at_least: 3}]\n")
    found = gate(near, store, policy=rules)
    assert not found.passed and found.items_used == 0 and found.rows[0].by == "checkpoint"


@pytest.mark.ci
def test_the_command_s_exit_codes(near: Path, workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["gate", "--checkpoint", str(near), "--block", "5", *OPTIONS]
    assert cli.main([*command, "--policy", policy(workdir, LOOSE), "--output", "verdict"]) == 0
    shown = capsys.readouterr()
    assert ": passes; after" in shown.out and "gates decided" in shown.err
    assert (workdir / "verdict" / "verdict.md").is_file()
    never = policy(workdir, "kl: none\nmargins: []\ngates: [{metric: distance/rbo10, at_least: 0.9999}]\n")
    assert cli.main([*command, "--policy", never]) == 3
    assert cli.main([*command, "--policy", "nowhere.yaml"]) == 2
    assert cli.main(["gate"]) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("forked_checks")
def test_speed_and_memory_are_measured_before_the_items(store: Path, tmp_path: Path) -> None:
    """One layer less is timed, and its bounds decide; a format that is only simulated fails with that reason."""
    shorter = Path(mc.compress("demo", "layer-drop", method_args={"layers": "1"}, store=store).folder)
    short = {"speed_args": {"repeats": 2, "prompt_tokens": 8, "new_tokens": 3, "threads": 1}}
    rules = policy(tmp_path, "kl: none\nmargins: []\ngates: [{metric: distance/flips_pct, at_most: 99}]\n")
    passed = gate(shorter, store, policy=rules, min_decode_speedup=0.001, max_memory_ratio=50, **short)
    rows = {row.reason.partition(":")[0]: row for row in passed.rows if row.by == "timing"}
    assert set(rows) == {"decode speedup (lower end)", "peak memory to the baseline's (upper end)"} and passed.passed
    assert any("in transformers" in remark for remark in passed.remarks) and passed.items_used > 0

    slow = gate(shorter, store, policy=rules, min_decode_speedup=1000, **short)
    assert not slow.passed and slow.items_used == 0 and "decode speedup (lower end): " in slow.verdict

    packed = Path(mc.compress("demo", "hqq", bits=8, store=store).folder)
    simulated = gate(packed, store, policy=rules, max_memory_ratio=1000)
    assert not simulated.passed and simulated.items_used == 0 and "only simulated" in simulated.verdict


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")  # of MLflow's own
def test_a_version_that_somebody_else_has_logged_is_decided_by_the_gate(
    near: Path, tracker: Tracker, tmp_path: Path
) -> None:
    settings = "".join(f"{name}: {value}\n" for name, value in {**FEW, "block": 5}.items())
    (tmp_path / "gate.yaml").write_text(f"model: demo\n{settings}policy: {policy(tmp_path, LOOSE)}\n")
    receiver = Receiver(WebhookConfig(gate=str(tmp_path / "gate.yaml")), "a secret")
    with mlflow.start_run():
        named = {"name": "model", "task": "text-generation", "registered_model_name": "theirs"}
        mlflow.transformers.log_model(str(near), pip_requirements=[], **named)
    tracker.client.create_registered_model("no-model")
    (tmp_path / "empty").mkdir()
    tracker.client.create_model_version("no-model", str(tmp_path / "empty"))
    for model in ("theirs", "no-model"):
        receiver.decide(Delivery(model, "1", model))
    verdict = tracker.client.get_model_version("theirs", "1").tags["verdict"]
    [run] = tracker.find_finished("gate", delivery="theirs")
    assert verdict == run.data.tags["verdict"] and run.data.tags["passed"] == "true"
    assert run.data.tags["variant"] == "rtn-8bit-g128"
    receiver.decide(Delivery("theirs", "1", "theirs"))  # killed after the gate, before the verdict was written
    assert len(tracker.find_finished("gate")) == 1
    assert "0 such folders" in tracker.client.get_model_version("no-model", "1").tags["verdict"]
    with pytest.raises(ConfigError, match="blok"):
        (tmp_path / "gate.yaml").write_text("blok: 5\n")
        gate_config(receiver._config)
