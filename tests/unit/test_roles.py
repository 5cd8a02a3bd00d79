"""A promotion that waits for a person, and requirements that a person waives until a date: on a real store.

Retention: what nothing needs may be deleted; what an alias, a receipt or a decision needs never is.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
import yaml

import mlflow_compress as mc
from mlflow_compress import cli
from mlflow_compress.config import Policy
from mlflow_compress.config.policy import AnomalyRule, MarginGate, MetricGate, Requirements
from mlflow_compress.errors import ConfigError
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking import run_names as names
from mlflow_compress.tracking.tracker import Tracker
from tests.unit.test_candidates import finished
from tests.unit.test_promote_policy import aliases, stages

UNTIL = datetime.now(UTC).date() + timedelta(days=7)  # tests that run over midnight find it in the future too
NAME = "compressed-llama"


def waits(tracker: Tracker, **parameters: object) -> mc.Promotion:
    finished(tracker, "first", size=300)
    return mc.promote(model="llama", needs="approval", **parameters)


@pytest.fixture
def waiver(tmp_path: Path) -> Callable[..., str]:
    def write(until: date = UNTIL, **content: object) -> str:
        path = tmp_path / "waiver.yaml"
        said = {"requirement": "distance/flips_pct", "reason": "The items are old.", "person": "Ada", "until": until}
        path.write_text(yaml.safe_dump({name: value for name, value in {**said, **content}.items() if value != ""}))
        return str(path)

    return write


def test_a_promotion_waits_until_somebody_approves_it(tracker: Tracker, capsys: pytest.CaptureFixture[str]) -> None:
    decided = waits(tracker)
    assert (decided.outcome, decided.champion, decided.exit_code) == ("waiting", None, 0)
    assert decided.verdict == "first (version 1) waits for an approval to become 'champion'."
    assert aliases(tracker) == {} and decided.run is not None
    waiting = mc.history(model="llama")
    assert f"Version 1 waits for an approval as 'champion', by the decision of run {decided.run.run_id[:8]}." in (
        waiting.as_text()
    )
    assert repr(waiting).startswith("AliasHistory: 'champion' of ")  # without a row
    evaluation = {run_names.PARENT: tracker.find_finished("main")[0].info.run_id}
    with tracker.run("evaluate", "evaluate", evaluation, own=False) as run:
        run.set_tags({run_names.RECEIPT: "e" * 64})  # as `export` does
    assert cli.main(["promote", "approve", "1", "--by", "Ada", "--model", "llama", "--reason", "seen by eye"]) == 0
    assert "first (version 1) is now 'champion', approved by Ada." in capsys.readouterr().out
    assert aliases(tracker) == {"champion": "1"}
    version = tracker.client.get_model_version(NAME, "1")
    noted = {"approval": "approved by Ada", "decision": decided.run.run_id, "policy": Policy().sha256}
    assert {**noted, "receipt": "e" * 64}.items() <= version.tags.items()
    assert "approved by Ada" in version.description and "seen by eye" in version.description
    tags = tracker.client.get_run(decided.run.run_id).data.tags
    assert (tags["approved_by"], tags["receipt"], tags["policy"]) == ("Ada", "e" * 64, Policy().sha256)
    [tenure] = mc.history(model="llama").tenures
    assert (tenure.by, tenure.version, tenure.variant, tenure.reason) == ("approve", "1", "first", "seen by eye")
    assert (tenure.approved_by, tenure.policy_sha256, tenure.receipt_sha256) == ("Ada", Policy().sha256, "e" * 64)
    with pytest.raises(ConfigError, match=r"does not wait for an approval. Allowed: no version waits. Got: '1'"):
        mc.approve(1, by="Ada", model="llama")
    assert stages(tracker).count("approve") == 1  # what is refused leaves no run
    # The next one waits while the first stays; the decision says who has the alias.
    tracker.client.delete_run(run.run_id)  # it has no records to compare
    finished(tracker, "second", size=200)
    later = mc.promote(model="llama", needs="approval")
    assert later.champion == "first" and later.verdict.endswith("become 'champion', held by version 1.")
    found = mc.approve(2, by="Bo", model="llama")
    assert (found.replaced, found.by) == ("1", "Bo") and aliases(tracker) == {"champion": "2", "champion-previous": "1"}
    assert mc.rollback(model="llama").version == "1"


def test_an_approval_that_could_not_move_the_alias_can_be_given_again(
    tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits(tracker)
    with monkeypatch.context() as broken:
        broken.setattr("mlflow_compress.tracking.model_registry.move_alias", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            mc.approve(1, by="Ada", model="llama")
    assert mc.history(model="llama").tenures == () and aliases(tracker) == {}
    assert mc.approve(1, by="Ada", model="llama").version == "1" and aliases(tracker) == {"champion": "1"}


def test_an_approval_is_refused_once_the_decision_no_longer_holds(tracker: Tracker, tmp_path: Path) -> None:
    first = waits(tracker)
    other = tmp_path / "policy.yaml"
    other.write_text("kl: none\n")
    with pytest.raises(ConfigError, match="no longer valid: the policy has changed"):
        mc.approve(1, by="Ada", model="llama", policy=other)
    tracker.client.set_model_version_tag(NAME, "1", "policy", "f" * 64)
    with pytest.raises(ConfigError, match="no longer valid: the policy has changed"):
        mc.approve(1, by="Ada", model="llama")
    tracker.client.set_model_version_tag(NAME, "1", "policy", Policy().sha256)
    tracker.client.copy_model_version(f"models:/{NAME}/1", NAME)
    tracker.client.set_registered_model_alias(NAME, "champion", "2")  # by hand
    with pytest.raises(ConfigError, match=r"'champion' has moved since. Allowed: version None. Got: 'version 2'"):
        mc.approve(1, by="Ada", model="llama")
    tracker.client.delete_registered_model_alias(NAME, "champion")
    finished(tracker, "second", size=200)
    newer = mc.promote(model="llama", needs="approval")
    assert first.run is not None and newer.run is not None
    with pytest.raises(ConfigError, match="does not wait"):
        mc.approve(1, by="Ada", model="llama")
    assert mc.promote(model="llama", max_kl=0).outcome == "nothing"
    with pytest.raises(ConfigError, match="does not wait"):
        mc.approve(newer.decision.outcomes[0].candidate.version, by="Ada", model="llama")
    assert aliases(tracker) == {} and "approve" not in stages(tracker)
    for missing in ({"version": 1}, {"by": "Ada"}, {"by": " ", "version": 1}):
        with pytest.raises(ConfigError, match="needs a version and a person"):
            mc.approve(model="llama", **missing)


def test_the_verdict_quotes_a_waiver_and_an_expired_one_is_refused(
    tracker: Tracker, waiver: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(tracker, "first", size=300)
    strict = {"model": "llama", "max_flips_pct": 1.5}  # the upper end is 2
    assert mc.promote(**strict, dry_run=True).outcome == "nothing"
    found = mc.promote(**strict, waiver=waiver(), needs="approval")
    quote = f"distance/flips_pct is waived until {UNTIL} by Ada: The items are old"
    assert f"{quote}. Without it: flips in % (upper end): 2 > 1.5." in found.verdict and found.run is not None
    assert quote in tracker.client.get_model_version(NAME, "1").description
    assert found.policy_sha256 == Policy().overridden(max_flips_pct=1.5).sha256  # a waiver changes no policy
    record = tracker.fetch_json(found.run.run_id, "decision.json")
    assert (record["waiver"]["person"], record["waiver"]["until"]) == ("Ada", str(UNTIL))
    for days, expired in ((0, False), (1, True)):

        class Then(datetime):
            @classmethod
            def now(cls, tz: object = None, days: int = days) -> datetime:
                return datetime.combine(UNTIL, datetime.min.time(), UTC) + timedelta(days=days)

        with monkeypatch.context() as later:
            later.setattr("mlflow_compress.config.policy.datetime", Then)
            with pytest.raises(ConfigError, match="by Ada has expired") if expired else nullcontext():
                mc.promote(**strict, waiver=waiver(), dry_run=True)
            if expired:
                with pytest.raises(ConfigError, match="The waiver of distance/flips_pct by Ada has expired"):
                    mc.approve(1, by="Bo", model="llama")
    assert quote in mc.approve(1, by="Bo", model="llama").verdict
    [tenure] = mc.history(model="llama").tenures
    assert tenure.waiver == quote and quote in mc.history(model="llama").as_text()
    assert "makes no difference to the winner" in mc.promote(model="llama", waiver=waiver(), dry_run=True).as_text()
    runs = stages(tracker)
    past = UNTIL - timedelta(days=9)
    with pytest.raises(ConfigError, match=rf"has expired. Allowed: until {past}. Got: '\d{{4}}-\d\d-\d\d'"):
        mc.promote(**strict, waiver=waiver(past))
    assert stages(tracker) == runs


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"requirement": "distance/flipz"}, "no such requirement to waive. Allowed: kl, distance/flips_pct"),
        ({"person": ""}, "waiver.yaml cannot be used: Parameter 'person' cannot be used: Field required"),
        ({"reason": "  "}, "Parameter 'reason' must be text"),
        ({"until": "soon"}, "Parameter 'until'"),
        ({"who": "Ada"}, "Unknown parameter"),
    ],
)
def test_a_wrong_waiver_is_one_error(
    wrong: dict[str, object], message: str, tracker: Tracker, waiver: Callable[..., str]
) -> None:
    finished(tracker, "first")
    with pytest.raises(ConfigError, match=message):
        mc.promote(model="llama", waiver=waiver(**wrong))
    assert stages(tracker) == ["main"] and cli.main(["promote", "--model", "llama", "--waiver", "nowhere.yaml"]) == 2


def test_each_requirement_can_be_waived_alone() -> None:
    policy = Policy(
        gates=(
            MetricGate(metric="distance/flips_pct", at_most=5),
            MetricGate(metric="distance/flips_pct", at_most=9, task="mmlu", category="law"),
        ),
        margins=(MarginGate(metric="quality/accuracy_delta", margin=0.02),),
        require=Requirements(stages=("judge",), items=20, max_cut_pct=100),
        target="vllm",
        anomalies=AnomalyRule(zero_kl=True),
    )
    each = policy.without_each()
    assert list(each) == [
        "kl",
        "distance/flips_pct",
        "distance/flips_pct of mmlu/law",
        "quality/accuracy_delta",
        "require.stages",
        "require.items",
        "require.max_unscored_pct",
        "target",
        "anomalies",
    ]
    assert len({one.sha256 for one in (policy, *each.values())}) == 1 + len(each)
    assert each["distance/flips_pct"].gates == policy.gates[1:] and each["require.items"].require.stages == ("judge",)


HOUR = 3_600_000
NOW = 2e9  # seconds since 1970


def made(tracker: Tracker, stage: str, name: str, *, days: float = 100, ended: bool = True, **tags: str) -> str:
    """Make a run that ended some days ago, with an artifact of 1,000 bytes."""
    then = int(1000 * NOW - 24 * HOUR * days)
    every = {names.STAGE: stage, names.BASE_MODEL: "demo", **tags}
    run = tracker.client.create_run(tracker.experiment_id, start_time=then, tags=every, run_name=name)
    tracker.client.log_text(run.info.run_id, "x" * 1000, "folder/file.txt")
    if ended:
        tracker.client.set_terminated(run.info.run_id, end_time=then)
    return str(run.info.run_id)


def variant(tracker: Tracker, name: str, baseline: str, evaluate: dict[str, str] | None = None) -> tuple[str, str]:
    main = made(tracker, "main", name)
    child = {names.PARENT: main, names.BASELINE_RUN: baseline, **(evaluate or {})}
    return main, made(tracker, "evaluate", name, **child)


def test_what_nothing_needs_is_deleted_and_nothing_else(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW)
    client = tracker.client
    base, lone = made(tracker, "baseline", "base"), made(tracker, "baseline", "lone")
    plain = variant(tracker, "plain", lone)
    signed = variant(tracker, "signed", base, {names.RECEIPT: "a" * 64})
    shared = variant(tracker, "shared", base)  # another variant was found equal, and has its evaluation
    champion = variant(tracker, "champion", base, {names.SKIPPED: f"evaluation: found in run {shared[1]}"})
    young = made(tracker, "main", "young", days=10)
    running = made(tracker, "main", "running", ended=False)
    decision = made(tracker, "promote", "decision")
    model = client.create_logged_model(tracker.experiment_id, name="m", source_run_id=champion[0])
    spare = client.create_logged_model(tracker.experiment_id, name="spare", source_run_id=plain[0])
    client.create_registered_model("compressed-demo")
    source = {"source": f"models:/{model.model_id}", "run_id": champion[0], "model_id": model.model_id}
    version = client.create_model_version("compressed-demo", **source)
    client.set_registered_model_alias("compressed-demo", "champion", version.version)
    foreign = client.create_run(tracker.experiment_id, start_time=1)  # not ours
    client.set_terminated(foreign.info.run_id, end_time=2)

    found = mc.gc()
    assert {run.run_id for run in found.runs} == {lone, *plain}
    assert found.size_bytes == 3000 and not found.deleted
    assert sum(found.kept.values()) == len({base, *signed, *shared, *champion, young, running, decision})
    stages = {one: client.get_run(one).info.lifecycle_stage for one in (lone, *plain)}
    assert set(stages.values()) == {"active"}  # a dry run changes nothing
    assert {run.run_id for run in mc.gc(older_than=5).runs} == {lone, *plain, young}
    assert mc.gc(base_model="another").runs == []
    client.create_experiment("empty")
    assert mc.gc(experiment="empty").runs == []
    with pytest.raises(ConfigError, match="no such experiment"):
        mc.gc(experiment="missing")

    assert cli.main(["gc", "--delete", "true"]) == 0
    for one in (lone, *plain):
        assert client.get_run(one).info.lifecycle_stage == "deleted"
    for one in (base, *signed, *shared, *champion, young, running, decision, foreign.info.run_id):
        assert client.get_run(one).info.lifecycle_stage == "active"
    left = {m.model_id for m in client.search_logged_models([tracker.experiment_id])}
    assert left == {model.model_id} and spare.model_id not in left
    assert mc.gc().runs == []
