"""Promotion by policy against a real store: dry run, exit codes, what is registered, rollback and history."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import mlflow_compress as mc
from mlflow_compress import cli
from mlflow_compress.commands.shared.past_runs import skipped_tag
from mlflow_compress.commands.shared.stored import METRICS_FILE, METRICS_FORMAT, metrics_file, results_json
from mlflow_compress.config import Policy
from mlflow_compress.config.policy import policy_of
from mlflow_compress.errors import ConfigError
from mlflow_compress.metrics import MetricInputs, MetricSettings, compute_all
from mlflow_compress.records import MetricResult, RunRecords
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.model_registry import SHOWN_METRICS
from mlflow_compress.tracking.run_names import RECORDS
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker
from tests.metric_records import inputs
from tests.unit.test_candidates import ALL, FIVE, WIDE, finished, with_kl

QUICK = MetricSettings(resamples=100)


def children(tracker: Tracker, main_run: str, *, records: RunRecords, results: list[dict[str, object]]) -> None:
    """Give a main run the finished evaluate run that holds these records and results."""
    with tracker.run("baseline", "evaluate", {run_names.BASE_MODEL: "llama"}, own=False) as run:
        log_records(run, inputs(30).baseline)
    tags = {run_names.PARENT: main_run, run_names.BASE_MODEL: "llama", run_names.EVALUATION: ALL}
    tags[run_names.BASELINE_RUN] = run.run_id
    with tracker.run("evaluate", "evaluate", tags, own=False) as run:
        log_records(run, records)
        run.log_json({"format": METRICS_FORMAT, "results": results}, METRICS_FILE)


def log_records(run: TrackedRun, records: RunRecords) -> None:
    with tempfile.TemporaryDirectory() as folder:
        records.write(Path(folder))
        run.log_folder(Path(folder), RECORDS)


@pytest.fixture(scope="module")
def measured() -> tuple[RunRecords, list[dict[str, object]]]:
    """Return the records of a variant, and the results of its comparison with a baseline."""
    full = inputs(30)
    assert full.variant is not None
    results = compute_all(MetricInputs(full.baseline, full.variant, settings=QUICK))
    return full.variant, results_json(results)


@pytest.fixture
def policy(tmp_path: Path) -> Callable[..., str]:
    """Return a function that writes a policy and returns its file; without the gates that it does not name."""

    def write(**content: object) -> str:
        path = tmp_path / "policy.yaml"
        path.write_text(yaml.safe_dump({"kl": "none", "gates": [], "margins": [], **content}))
        return str(path)

    return write


def stages(tracker: Tracker) -> list[str]:
    every = [experiment.experiment_id for experiment in tracker.client.search_experiments()]
    return sorted(run.data.tags[run_names.STAGE] for run in tracker.client.search_runs(every))


def aliases(tracker: Tracker) -> dict[str, str]:
    return {k: str(v) for k, v in tracker.client.get_registered_model("compressed-llama").aliases.items()}


def test_a_dry_run_decides_writes_nothing_and_says_which_run_mlflow_has_made(
    tracker: Tracker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(tracker, "rtn-4bit")
    assert cli.main(["promote", "--model", "llama", "--dry_run", "true"]) == 0
    shown = capsys.readouterr().out
    assert "rtn-4bit would become 'champion'" in shown and "nothing is registered" in shown
    assert stages(tracker) == ["main"] and tracker.client.search_registered_models() == []
    found = mc.promote(model="llama", dry_run=True)
    numbers = found.numbers()
    assert list(numbers.columns) == ["variant", "gate", "value", "read", "bound", "at_least", "passed"]
    assert set(numbers["variant"]) <= set(found.to_pandas()["variant"]) and len(numbers) >= 3
    assert ((numbers["read"] <= numbers["bound"]) == numbers["passed"]).all()
    assert found.run is None and found.outcome == "promoted" and found.champion == "rtn-4bit"
    json.dumps(found.to_dict(), allow_nan=False)
    given = tracker.client.create_run(tracker.experiment_id).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", given)
    assert any(given in remark for remark in mc.promote(model="llama", dry_run=True).remarks)
    run = tracker.client.get_run(given)
    assert run.info.run_name == "promote llama (dry run)" and run_names.STAGE not in run.data.tags


def speed_run(tracker: Tracker, main_run: str, *, low: float | None, memory: float = 0.5) -> None:
    """Give a main run a finished speed run: what it found, or, without `low`, that the format is only simulated."""
    tags = {run_names.PARENT: main_run, run_names.BASE_MODEL: "llama"}
    found = [] if low is None else [MetricResult("speed/decode_ratio_batch_1", low + 0.1, low, low + 0.2, n=5)]
    found += [MetricResult("speed/memory_peak_ratio", memory, memory - 0.1, memory + 0.1, n=3)] if found else []
    with tracker.run("speed", "speed", tags, own=False) as run:
        run.set_tags(skipped_tag("only simulated") if low is None else {})
        run.log_params({"speed_runtime": "vLLM"} if found else {})
        run.log_json(metrics_file(found), METRICS_FILE)


def test_speed_and_memory_decide_and_what_was_not_timed_does_not_pass(tracker: Tracker) -> None:
    for name, low, memory in (("fast", 1.3, 0.5), ("slow", 0.9, 0.5), ("large", 1.3, 0.9), ("simulated", None, 0.0)):
        speed_run(tracker, finished(tracker, name), low=low, memory=memory)
    finished(tracker, "unasked")
    found = mc.promote(model="llama", min_decode_speedup=1.2, max_memory_ratio=0.7)
    outcomes = {o.candidate.name: (o.passed, "; ".join(o.reasons)) for o in found.decision.outcomes}
    assert [name for name, (passed, _) in outcomes.items() if passed] == ["fast"] and found.champion == "fast"
    assert "decode speedup (lower end): 0.9 < 1.2" in outcomes["slow"][1]
    assert "peak memory to the baseline's (upper end): 1 > 0.7" in outcomes["large"][1]
    assert outcomes["simulated"][1].count("is missing (only simulated)") == 2
    assert outcomes["unasked"][1].count("is missing (the speed stage was not run)") == 2
    params = tracker.find_finished("promote")[0].data.params
    assert params["min_decode_speedup"] == "1.2" and params["max_memory_ratio"] == "0.7"
    # Without these parameters nobody is asked.
    assert [o.passed for o in mc.promote(model="llama").decision.outcomes] == [True] * 5


def test_only_the_winner_is_registered_and_found_by_its_tags(tracker: Tracker) -> None:
    for name, size in (("a", 100), ("b", 200), ("c", 300)):
        finished(tracker, name, size=size)
    found = mc.promote(model="llama")
    [version] = tracker.client.search_model_versions("name = 'compressed-llama'")
    assert found.run is not None and version.run_id == tracker.find_finished("main", variant="a")[0].info.run_id
    metrics = tracker.client.get_run(version.run_id).data.metrics
    assert {name: value for name, value in version.tags.items() if name not in ("evaluation", "weights", "method")} == {
        "variant": "a",
        "base_model": "llama",
        "decision": found.run.run_id,
        "policy": found.policy_sha256,
        **{name: f"{metrics[name]:g}" for name in SHOWN_METRICS if name in metrics},
    }
    assert "distance/flips_pct" in version.tags
    search = f"tags.base_model = 'llama' and tags.policy = '{found.policy_sha256}'"
    assert [one.version for one in tracker.client.search_model_versions(search)] == [version.version]
    assert [row["version"] for row in found.to_rows()] == ["1", None, None]


def test_policy_and_hash_are_kept_with_the_decision(tracker: Tracker, policy: Callable[..., str]) -> None:
    finished(tracker, "rtn|<b>4bit")
    found = mc.promote(model="llama", policy=policy(margins=[{"metric": "quality/accuracy_delta", "margin": 0.5}]))
    run = tracker.client.get_run(found.run.run_id)
    record = tracker.fetch_json(found.run.run_id, "decision.json")
    assert run.data.tags["policy"] == record["policy"]["sha256"] == found.policy_sha256
    assert policy_of(yaml.safe_load(record["policy"]["text"]), "record").sha256 == found.policy_sha256
    folder = Path(run.info.artifact_uri.removeprefix("file://"))
    assert (folder / "policy.yaml").read_text() == record["policy"]["text"]
    # What decided stands on the run, and an unusual name breaks no table.
    assert run.data.params["max_kl"] == "none" and run.data.params["max_accuracy_drop_pct"] == "50.0"
    assert "| 1 | rtn\\|&lt;b>4bit | 1 |" in (folder / "decision.md").read_text()


def test_gates_of_tasks_and_categories_read_the_results_of_the_evaluation(
    tracker: Tracker, policy: Callable[..., str], measured: tuple[RunRecords, list[dict[str, object]]]
) -> None:
    records, results = measured
    [law] = [r for r in results if (r["name"], r["task"], r["category"]) == ("distance/flips_pct", "mmlu", "law")]
    gate = {"metric": "distance/flips_pct", "task": "mmlu", "category": "law"}
    with_results, without = finished(tracker, "with", size=100), finished(tracker, "without", size=50)
    children(tracker, with_results, records=records, results=results)
    assert without
    exactly = mc.promote(model="llama", dry_run=True, policy=policy(gates=[{**gate, "at_most": law["high"]}]))
    assert exactly.champion == "with"
    failed = exactly.decision.outcomes[1]
    assert failed.candidate.name == "without" and "(upper end) is missing" in failed.reasons[0]
    below = policy(gates=[{**gate, "at_most": float(law["high"]) - 1e-9}])  # type: ignore[arg-type]
    assert mc.promote(model="llama", dry_run=True, policy=below).outcome == "nothing"


def test_sizes_that_the_main_run_leaves_out_are_those_of_the_quantize_run(
    tracker: Tracker, policy: Callable[..., str]
) -> None:
    """Main runs have a cache's sizes where it is not the baseline's: 2048 bytes a token here, and in it half of that."""
    caches = {"plain": (2048.0, 1.0), "half": (1024.0, 2.0)}
    for name, (taken, ratio) in caches.items():
        run = finished(tracker, name)
        if ratio != 1:
            for key, value in (("size/cache_bytes_per_token", taken), ("size/cache_ratio", ratio)):
                tracker.client.log_metric(run, key, value)
        tags = {run_names.PARENT: run, run_names.BASE_MODEL: "llama"}
        with tracker.run("quantize", "quantize", tags, own=False) as made:
            made.log_values({"size/cache_bytes_per_token": taken, "size/cache_ratio": ratio, "size/bytes": 1.0})
    finished(tracker, "unknown")  # without a quantize run, and so with no word of its cache

    def reasons(gate: dict[str, object]) -> dict[str, str]:
        found = mc.promote(model="llama", dry_run=True, policy=policy(gates=[gate]))
        return {o.candidate.name: "; ".join(o.reasons) for o in found.decision.outcomes}

    at_most = reasons({"metric": "size/cache_bytes_per_token", "at_most": 1500, "bound": "value"})
    assert "size/cache_bytes_per_token: 2048 > 1500" in at_most["plain"]
    assert "size/cache_bytes_per_token: 1024 <= 1500" in at_most["half"]
    assert "size/cache_bytes_per_token is missing" in at_most["unknown"]
    at_least = reasons({"metric": "size/cache_ratio", "at_least": 1, "bound": "value"})
    assert "size/cache_ratio: 1 >= 1" in at_least["plain"] and "size/cache_ratio: 2 >= 1" in at_least["half"]
    # Other sizes are those of the main run.
    assert "size/bytes: 1 " not in reasons({"metric": "size/bytes", "at_most": 2, "bound": "value"})["plain"]


def test_a_task_that_no_run_has_is_refused_before_a_run_is_made(
    tracker: Tracker, policy: Callable[..., str], measured: tuple[RunRecords, list[dict[str, object]]]
) -> None:
    children(tracker, finished(tracker, "rtn-4bit"), records=measured[0], results=measured[1])
    gates = [
        {"metric": "distance/flips_pct", "at_most": 50, "task": "mmlu", "category": "laws"},
        {"metric": "distance/flips_pct", "at_most": 50, "task": "mmlu2"},
    ]
    wanted = policy(gates=gates, require={"items_by_task": {"piqua": 5}})
    with pytest.raises(ConfigError, match="3 things are wrong") as found:
        mc.promote(model="llama", policy=wanted)
    for words in ("Got: 'mmlu/laws'. Did you mean 'mmlu/law'?", "Did you mean 'mmlu", "Did you mean 'piqa'?"):
        assert words in str(found.value)
    assert tracker.find_finished("promote") == []


def test_required_stages_are_those_that_finished(
    tracker: Tracker, policy: Callable[..., str], measured: tuple[RunRecords, list[dict[str, object]]]
) -> None:
    children(tracker, finished(tracker, "rtn-4bit"), records=measured[0], results=measured[1])
    assert mc.promote(model="llama", dry_run=True, policy=policy(require={"stages": ["evaluate"]})).exit_code == 0
    found = mc.promote(model="llama", dry_run=True, policy=policy(require={"stages": ["evaluate", "judge"]}))
    assert found.exit_code == 3 and "stage judge has not finished" in found.decision.outcomes[0].reasons[-1]


def test_a_challenger_is_compared_with_the_champion_item_by_item(
    tracker: Tracker, policy: Callable[..., str], measured: tuple[RunRecords, list[dict[str, object]]]
) -> None:
    records, results = measured
    children(tracker, finished(tracker, "first", size=200), records=records, results=results)
    mc.promote(model="llama")
    children(tracker, finished(tracker, "worse", size=100), records=with_kl(records, 0.25, 0.001), results=results)
    strict = policy(champion={"require": "not_worse", "kl_margin": 0.2, "accuracy_margin": 1})
    kept = mc.promote(model="llama", policy=strict)
    assert kept.outcome == "unchanged" and kept.champion == "first"
    assert any("KL +0.25 nats [+0.24" in remark and "not shown" in remark for remark in kept.remarks)
    loose = policy(margin=99, champion={"require": "not_worse", "kl_margin": 0.26, "accuracy_margin": 1})
    moved = mc.promote(model="llama", policy=loose)
    assert moved.outcome == "promoted" and moved.champion == "worse" and moved.run is not None
    [harm] = [remark for remark in moved.remarks if remark.startswith("Accuracy of ")]
    assert harm.startswith("Accuracy of worse: ") and harm.endswith(" 99 points.")
    record = tracker.fetch_json(moved.run.run_id, "decision.json")
    assert record["against_champion"]["kl"] == pytest.approx(0.25, abs=1e-3)
    assert aliases(tracker) == {"champion": "2", "champion-previous": "1"}


def test_a_pinned_champion_stays_until_the_pin_is_gone(tracker: Tracker) -> None:
    finished(tracker, "first", size=200)
    mc.promote(model="llama")
    tracker.client.set_registered_model_alias("compressed-llama", "pinned", "1")
    finished(tracker, "smaller", size=100)
    found = mc.promote(model="llama")
    assert found.outcome == "unchanged" and found.exit_code == 0 and found.champion == "first"
    assert any("is pinned and is not replaced" in remark for remark in found.remarks)
    tracker.client.delete_registered_model_alias("compressed-llama", "pinned")
    assert mc.promote(model="llama").champion == "smaller"


def test_a_champion_of_another_evaluation_can_be_kept(tracker: Tracker, policy: Callable[..., str]) -> None:
    finished(tracker, "few", FIVE, items=5)
    mc.promote(model="llama", **WIDE)
    finished(tracker, "many", ALL, items=1000)
    kept = mc.promote(model="llama", policy=policy(champion={"replace": "same_evaluation"}))
    assert kept.outcome == "unchanged" and kept.champion == "few"
    moved = mc.promote(model="llama", **WIDE)
    assert moved.champion == "many" and any("measured on other items" in remark for remark in moved.remarks)


def test_each_alias_has_its_previous_and_goes_back(tracker: Tracker, capsys: pytest.CaptureFixture[str]) -> None:
    finished(tracker, "first", size=300)
    mc.promote(model="llama")
    mc.promote(model="llama", alias="canary")
    finished(tracker, "second", size=200)
    mc.promote(model="llama")
    assert aliases(tracker) == {"champion": "2", "champion-previous": "1", "canary": "1"}
    assert cli.main(["promote", "rollback", "--model", "llama", "--reason", "answers are odd"]) == 0
    assert "first (version 1) is 'champion' again, in place of version 2." in capsys.readouterr().out
    assert aliases(tracker) == {"champion": "1", "champion-previous": "2", "canary": "1"}
    undone = mc.rollback(model="llama")
    assert (undone.version, undone.replaced) == ("2", "1") and aliases(tracker)["champion"] == "2"
    with pytest.raises(ConfigError, match="had this alias before"):
        mc.rollback(model="llama", alias="canary")
    with pytest.raises(ConfigError, match="has this alias"):
        mc.rollback(model="llama", alias="stable")
    tracker.client.set_registered_model_alias("compressed-llama", "pinned", "2")
    with pytest.raises(ConfigError, match="is pinned"):
        mc.rollback(model="llama")
    assert stages(tracker).count("rollback") == 2  # what is refused leaves no run
    json.dumps(undone.to_dict())


def test_the_history_says_who_had_the_alias_when_and_why(tracker: Tracker, capsys: pytest.CaptureFixture[str]) -> None:
    finished(tracker, "first", size=300)
    mc.promote(model="llama")
    mc.promote(model="llama")  # unchanged: no entry
    mc.promote(model="llama", max_kl=0)  # nothing passes: no entry
    finished(tracker, "second", size=200)
    mc.promote(model="llama", max_kl=0.5)
    mc.rollback(model="llama", reason="answers are odd")
    found = mc.history(model="llama")
    assert [tenure.reason for tenure in found.tenures] == ["answers are odd", None, None]
    assert "answers are odd" in found.as_text()
    assert [(t.variant, t.version, t.by) for t in found.tenures] == [
        ("first", "1", "rollback"),
        ("second", "2", "promote"),
        ("first", "1", "promote"),
    ]
    assert [t.until for t in found.tenures] == [None, found.tenures[0].since, found.tenures[1].since]
    assert found.tenures[0].policy_sha256 is None and found.tenures[2].policy_sha256 == Policy().sha256
    assert found.tenures[1].policy_sha256 == Policy().overridden(max_kl=0.5).sha256
    assert found.holder == "1" and found.remarks == ()
    assert cli.main(["promote", "history", "--model", "llama"]) == 0
    assert "moved 3 times; version 1 has it now" in capsys.readouterr().out
    assert len(found.to_pandas()) == 3
    tracker.client.set_registered_model_alias("compressed-llama", "champion", "2")
    assert "moved by hand" in mc.history(model="llama").remarks[0]
    assert "No version" in mc.history(model="llama", alias="canary").remarks[0]


def test_too_few_items_are_named_and_exit_code_3_says_that_nothing_passes(tracker: Tracker) -> None:
    """1 % of the answers flipped and the interval ends at 2 %: with a gate at 1.9 % about n items would show it."""
    finished(tracker, "rtn-4bit")
    found = mc.promote(model="llama", max_flips_pct=1.9)
    assert found.outcome == "nothing"
    [outcome] = found.decision.outcomes
    assert outcome.answer.text().startswith("open: needs about ") and outcome.answer.text().endswith("items for flips")
    command = ["promote", "--model", "llama"]
    assert cli.main([*command, "--max_kl", "0"]) == 3
    assert cli.main(command) == 0  # promoted
    assert cli.main(command) == 0  # unchanged
    assert cli.main([*command, "--max_kl", "0"]) == 3
    assert cli.main([*command, "--policy", "nowhere.yaml"]) == 2
    newest = tracker.find_finished("promote")[0].data.tags
    assert newest["promoted"] == "nothing" and newest["outcome"] == "nothing"
    assert aliases(tracker) == {"champion": "1"}
