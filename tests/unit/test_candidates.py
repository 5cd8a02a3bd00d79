"""Promotion against a real store: only variants of one evaluation of one model compete, and the others are named.

Challenger against champion: the difference per item, and whether the alias moves.
"""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mlflow.entities import LoggedModelOutput

import mlflow_compress as mc
from mlflow_compress.commands.command import store_in
from mlflow_compress.commands.main import summary
from mlflow_compress.commands.promote.parameters import PromoteConfig
from mlflow_compress.commands.promote.run import run_promote
from mlflow_compress.config.policy import ReplacementRule
from mlflow_compress.decide.champion import HeadToHead, Incumbent, head_to_head, settle
from mlflow_compress.decide.promotion import Candidate, CandidateOutcome, Decision, PolicyAnswer
from mlflow_compress.errors import AlignmentError, ConfigError, TrackingError
from mlflow_compress.metrics.stats.intervals import Interval
from mlflow_compress.records import RunRecords
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.evaluations import evaluations
from mlflow_compress.tracking.model_registry import create_model, planned_model
from mlflow_compress.tracking.tracker import Tracker
from tests.compress_models import make_llama
from tests.metric_records import in_groups, inputs, items

ALL, FIVE, OTHER = "a" * 16, "b" * 16, "abcdef" + "0" * 10
WIDE = {"max_kl": 1.0, "max_flips_pct": 100.0, "max_accuracy_drop_pct": 100.0}


def finished(
    tracker: Tracker,
    variant: str,
    evaluation: str | None = ALL,
    *,
    weights: str = "1" * 64,
    items: int = 1000,
    size: float = 100,
    kl: float = 0.01,
    checkpoint: str = "c" * 64,
    model: str = "llama",
    method: str = "rtn",
) -> str:
    """Make a finished main run with a logged model, as far as promotion reads it, and return its id."""
    client = tracker.client
    tags = {run_names.BASE_MODEL: model, run_names.VARIANT: variant, run_names.METHOD: method}
    if evaluation is not None:
        tags |= {
            run_names.EVALUATION: evaluation,
            run_names.BASE_WEIGHTS: weights,
            run_names.CHECKPOINT_SHA256: checkpoint,
        }
    with tracker.run(f"{variant} {model}", "main", tags, own=False) as run:
        values = {"size/bytes": size, "size/ratio": 1000 / size, "distance/kl_mean": kl, "distance/flips_pct": 1}
        values["quality/accuracy_delta"] = 0.0
        values |= {"distance/kl_clipped_mean": kl / 2, "distance/kl_above_clip_pct": 0.0}
        gates = {"gate/kl_items": items, "gate/kl_clipped_upper": kl, "gate/kl_above_clip_pct_upper": 0.3}
        gates |= {"gate/flips_pct_upper": 2}
        account = {"items/unscored_pct": 0.0, "items/cut_pct": 0.0}
        run.log_values({**values, **gates, **account, "gate/accuracy_drop_pct_upper": 1, run_names.N_ITEMS: items})
        logged = client.create_logged_model(tracker.experiment_id, name=variant, source_run_id=run.run_id, tags=tags)
        client.log_outputs(run.run_id, [LoggedModelOutput(logged.model_id, step=0)])
    return run.run_id


def champion(tracker: Tracker, name: str = "compressed-llama") -> str:
    return str(tracker.client.get_model_version_by_alias(name, "champion").run_id)


def test_variants_of_a_folder_s_store_compete_and_are_reported_there(tracker: Tracker, tmp_path: Path) -> None:
    folder = Tracker(uri=store_in(tmp_path / "runs"))
    own = finished(folder, "rtn-4bit")
    assert mc.promote(model="llama", store=tmp_path / "runs", **WIDE).champion == "rtn-4bit"
    assert champion(folder) == own
    assert tracker.client.search_registered_models() == []
    with pytest.raises(ConfigError, match="has no such baseline"):
        mc.promote(model="llama")
    with pytest.raises(TrackingError, match="has no such run"):
        mc.report("0123abcd", store=tmp_path / "runs", output=tmp_path / "report.html")


def test_only_the_evaluation_with_most_items_competes(tracker: Tracker) -> None:
    """A smaller variant that was measured on five items does not win over one that was measured on all."""
    whole = finished(tracker, "rtn-4bit", ALL, items=1000, size=100)
    finished(tracker, "rtn-2bit", FIVE, items=5, size=10)
    output = run_promote(PromoteConfig(model="llama", **WIDE)).as_text()
    assert champion(tracker) == whole
    assert "1. rtn-4bit (1,000 items)" in output and "rtn-2bit" not in output
    assert f"Left out, not comparable: evaluation {FIVE[:8]} (1 variant, 5 items)." in output
    record = tracker.fetch_json(tracker.find_finished("promote")[0].info.run_id, "decision.json")
    assert record["evaluation"] == {"id": ALL, "items": 1000, "base_weights": "1" * 64}
    assert len(record["left_out"]) == 1  # type: ignore[arg-type]
    assert FIVE[:8] in tracker.find_finished("promote")[0].data.tags["mlflow.note.content"]


def test_an_evaluation_can_be_asked_for_by_the_beginning_of_its_id(tracker: Tracker) -> None:
    finished(tracker, "rtn-4bit", ALL, items=1000)
    few = finished(tracker, "rtn-2bit", FIVE, items=5)
    run_promote(PromoteConfig(model="llama", evaluation="bbbbbb", **WIDE)).as_text()
    assert champion(tracker) == few
    params = tracker.find_finished("promote")[0].data.params
    assert params["evaluation"] == FIVE and params["max_kl_outliers_pct"] == "1.0"


def test_between_equal_evaluations_the_newest_wins(tracker: Tracker) -> None:
    finished(tracker, "rtn-4bit", ALL, items=20)
    newest = finished(tracker, "rtn-4bit", FIVE, items=20)
    run_promote(PromoteConfig(model="llama", **WIDE)).as_text()
    assert champion(tracker) == newest


def test_a_name_of_two_models_is_refused_until_one_is_chosen(tracker: Tracker) -> None:
    one = finished(tracker, "rtn-4bit", ALL, weights="1" * 64)
    finished(tracker, "rtn-2bit", OTHER, weights="2" * 64, size=10)
    with pytest.raises(ConfigError, match=r"name of 2 different models.*weights 22222222.*weights 11111111"):
        run_promote(PromoteConfig(model="llama", **WIDE)).as_text()
    assert tracker.find_finished("promote") == []
    output = run_promote(PromoteConfig(model="llama", evaluation=ALL[:6], **WIDE)).as_text()
    assert champion(tracker) == one
    assert "of other base weights 22222222" in output


def test_two_folders_of_one_name_have_registered_models_of_their_own(tracker: Tracker, tmp_path: Path) -> None:
    from mlflow_compress.models.stored_weights import hash_weights

    folders = [make_llama(tmp_path / side / "llama", seed=seed) for seed, side in enumerate("ab")]
    hashes = [hash_weights(folder)[1] for folder in folders]
    runs = [finished(tracker, "rtn-4bit", key, weights=w) for key, w in zip((ALL, OTHER), hashes, strict=True)]
    first = run_promote(PromoteConfig(model=str(folders[0]), **WIDE)).as_text()
    assert champion(tracker) == runs[0] and "is used" not in first
    second = run_promote(PromoteConfig(model=str(folders[1]), **WIDE)).as_text()
    other = f"compressed-llama-{hashes[1][:8]}"
    assert champion(tracker) == runs[0]  # not moved by the other model
    assert champion(tracker, other) == runs[1] and f"'{other}' is used" in second
    assert run_promote(PromoteConfig(model=str(folders[1]), **WIDE)).as_text().count("stays 'champion'") == 1
    third = make_llama(tmp_path / "c" / "llama", seed=3)
    with pytest.raises(ConfigError, match="other weights than those in this folder"):
        run_promote(PromoteConfig(model=str(third), **WIDE)).as_text()


def test_a_registered_model_that_names_no_base_weights_is_taken_over(tracker: Tracker) -> None:
    tracker.client.create_registered_model("compressed-llama")
    assert planned_model(tracker, "llama", "1" * 64) == ("compressed-llama", None)
    create_model(tracker, "compressed-llama", "1" * 64)
    assert planned_model(tracker, "llama", "2" * 64)[0] == "compressed-llama-22222222"


def test_one_name_for_two_checkpoints_is_two_candidates(tracker: Tracker) -> None:
    """Another calibration text makes another checkpoint of the same name; of one checkpoint the newest run counts."""
    for checkpoint, size in (("d" * 64, 90), ("e" * 64, 100), ("d" * 64, 95)):
        finished(tracker, "awq-4bit", checkpoint=checkpoint, size=size)
    [found] = evaluations(tracker, "llama")
    assert [v.name for v in found.variants] == ["awq-4bit (dddddddd)", "awq-4bit (eeeeeeee)"]
    assert found.variants[0].run.data.metrics["size/bytes"] == 95
    assert (
        "'awq-4bit' is the name of several checkpoints" in run_promote(PromoteConfig(model="llama", **WIDE)).as_text()
    )


def test_an_id_that_begins_two_evaluations_is_refused(tracker: Tracker) -> None:
    for key in ("abcdef" + "0" * 10, "abcdef" + "1" * 10):
        finished(tracker, "rtn-4bit", key)
    with pytest.raises(ConfigError, match="Several evaluations have this id"):
        run_promote(PromoteConfig(model="llama", evaluation="abcdef")).as_text()


def test_a_version_and_its_logged_model_point_to_each_other(tracker: Tracker) -> None:
    run_id = finished(tracker, "rtn-4bit")
    for _ in range(2):  # the second promotion makes no second version
        run_promote(PromoteConfig(model="llama", **WIDE)).as_text()
    [version] = tracker.client.search_model_versions("name = 'compressed-llama'")
    model = tracker.client.get_logged_model(version.source.removeprefix("models:/"))
    assert model.source_run_id == run_id == version.run_id
    [link] = json.loads(model.tags["mlflow.modelVersions"])
    assert (link["name"], str(link["version"])) == ("compressed-llama", str(version.version))
    assert version.tags[run_names.EVALUATION] == ALL


def test_the_plot_shows_one_evaluation_only(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs on five items, or of another model of that name, have no place beside this one."""
    finished(tracker, "rtn-4bit", ALL, size=100, kl=0.02)
    finished(tracker, "rtn-4bit", ALL, size=100, kl=0.03, checkpoint="d" * 64)
    finished(tracker, "rtn-8bit", ALL, size=200, kl=0.01)
    finished(tracker, "rtn-2bit", FIVE, items=5)
    finished(tracker, "rtn-3bit", OTHER, weights="2" * 64)
    monkeypatch.setattr(summary, "_values", lambda stages: {"size/bytes": 99.0, "distance/kl_mean": 0.5})
    stages = SimpleNamespace(
        variant="rtn-4bit", checkpoint_sha256="d" * 64, label="llama", tracker=tracker, evaluation=ALL, pooled={}
    )
    rows, shown = summary._variants(stages)  # type: ignore[arg-type]
    assert shown == "rtn-4bit (dddddddd)"
    assert {row["name"]: (row["size/bytes"], row["distance/kl_mean"]) for row in rows} == {
        "rtn-4bit (cccccccc)": (100, 0.02),
        "rtn-4bit (dddddddd)": (99.0, 0.5),  # this run's own values, not those of its earlier run
        "rtn-8bit": (200, 0.01),
    }


HERE, ELSEWHERE = "a" * 16, "b" * 16


def with_kl(records: RunRecords, change: float, spread: float = 0.0) -> RunRecords:
    """Return the records with every KL moved, by more of every other item."""
    table = records.option_distances.table
    columns = {name: table.column(name).to_pylist() for name in table.schema.names}
    pairs = zip(columns["kl"], columns["item_id"], strict=True)
    columns["kl"] = [kl + change + spread * (-1) ** int(item) for kl, item in pairs]
    return replace(records, option_distances=type(records.option_distances).from_columns(columns))


def test_the_difference_is_challenger_minus_champion_per_item_and_nothing_against_itself() -> None:
    variant = inputs(30).variant
    found = head_to_head(variant, variant)
    assert (found.kl, found.kl_interval) == (0.0, None)  # no difference in n items is not no difference
    assert (found.accuracy, found.gained, found.lost) == (0.0, 0, 0)
    assert found.accuracy_interval.low < 0 < found.accuracy_interval.high  # no change in n items is not no change
    # Every KL 0.25 nats higher: the difference is exactly that on every item, so that nothing is known of others.
    full = inputs(30)
    found = head_to_head(full.variant, with_kl(full.variant, 0.25))
    assert not isinstance(found, str) and found.kl_interval is None
    assert found.kl == pytest.approx(0.25)
    back = head_to_head(with_kl(full.variant, 0.25), full.variant)
    assert not isinstance(back, str) and back.kl == pytest.approx(-0.25)


def test_correctness_is_counted_on_the_same_items() -> None:
    """As computed by hand from both models' answers."""
    full = inputs(60)
    found = head_to_head(full.baseline, full.variant)  # the baseline has no distances, so that KL is not compared
    assert not isinstance(found, str) and found.kl is None and found.kl_items == 0
    rows = np.flatnonzero(np.isin(full.view.family, full.headline_families) & full.scored_by_both)
    before, after = full.baseline_predictions.correct[rows, 0], full.variant_predictions.correct[rows, 0]
    assert (found.gained, found.lost) == (int((after & ~before).sum()), int((before & ~after).sum()))
    assert found.accuracy == pytest.approx(after.mean() - before.mean()) and found.items == len(rows)


def test_the_order_of_the_records_does_not_matter() -> None:
    full = inputs(30)
    other = with_kl(full.variant, 0.1)
    table = other.option_distances.table  # type: ignore[union-attr]
    turned = replace(
        other, option_distances=type(full.variant.option_distances)(table.take(list(range(len(table)))[::-1]))
    )
    one, two = head_to_head(full.variant, turned), head_to_head(full.variant, other)
    assert one.kl == pytest.approx(two.kl) and one.kl_interval == pytest.approx(two.kl_interval)
    assert (one.accuracy_interval, one.gained, one.lost) == (two.accuracy_interval, two.gained, two.lost)


def test_items_with_a_text_in_common_are_compared_as_groups() -> None:
    full = inputs(60)
    kl = replace(full.baseline, option_distances=with_kl(full.variant, 0.1).option_distances)
    alone, by_two, by_twenty = (head_to_head(in_groups(kl, size), in_groups(full.variant, size)) for size in (1, 2, 20))
    assert alone == head_to_head(kl, full.variant)
    assert (alone.kl, alone.accuracy) == (pytest.approx(by_two.kl), by_twenty.accuracy)
    assert by_two.accuracy_interval not in (None, alone.accuracy_interval)
    # Twenty items a group leave nine groups in three tasks.
    assert by_twenty.kl_interval is by_twenty.accuracy_interval is None
    assert by_twenty.described.count("no interval") == 2
    found = settle(decision("new"), OLD, ReplacementRule(require="not_worse"), HERE, lambda candidate: by_twenty)
    assert found.outcome == "unchanged" and "because the accuracy has no interval" in found.reasons[0]


def test_a_copy_of_the_champion_is_not_worse_and_not_better() -> None:
    full = inputs(400)
    copy = head_to_head(full.variant, full.variant)
    assert isinstance(copy, HeadToHead) and copy.kl == 0.0 and copy.kl_interval is None and copy.kl_is_same
    assert "KL +0 nats on every item" in copy.described
    outcomes = {}
    for require in ("not_worse", "better"):
        rule = ReplacementRule(require=require, accuracy_margin=0.01)  # type: ignore[arg-type]
        outcomes[require] = settle(decision("new"), OLD, rule, HERE, lambda candidate: copy).outcome
    assert outcomes == {"not_worse": "promoted", "better": "unchanged"}


def test_other_items_are_refused_and_no_items_are_a_reason() -> None:
    full = inputs(30)
    with pytest.raises(AlignmentError):
        head_to_head(full.variant, replace(full.variant, items=items(31)))
    assert head_to_head(full.variant, replace(full.variant, items=None)) == "no items were evaluated"


def candidate(name: str) -> Candidate:
    return Candidate(name=name, run_id=f"run-{name}", version=None, method="rtn", metrics={})


def decision(*names: str) -> Decision:
    outcomes = tuple(
        CandidateOutcome(
            candidate=candidate(name), passed=True, answer=PolicyAnswer(word="passes"), reasons=(), rank=rank
        )
        for rank, name in enumerate(names, 1)
    )
    return Decision(champion=outcomes[0].candidate if outcomes else None, outcomes=outcomes)


def against(kl: tuple[float, float] | None, accuracy: tuple[float, float], *, items_with_kl: int = 100) -> HeadToHead:
    interval = None if kl is None else Interval(*kl)
    return HeadToHead(
        kl=0.0 if items_with_kl else None,
        kl_interval=interval,
        kl_items=items_with_kl,
        kl_is_same=False,
        accuracy=0.0,
        accuracy_interval=Interval(*accuracy),
        items=100,
        gained=0,
        lost=0,
    )


OLD = Incumbent(name="old", version="1", run_id="run-old", evaluation=HERE, pinned=False)
EVEN = against((-0.01, 0.01), (-0.02, 0.02))


def settled(
    names: tuple[str, ...], rule: ReplacementRule, *, incumbent: Incumbent | None = OLD, **found: object
) -> tuple[str, str | None]:
    result = settle(decision(*names), incumbent, rule, HERE, lambda c: found.get(c.name, EVEN))  # type: ignore[return-value, arg-type]
    return result.outcome, result.winner.name if result.winner else None


def test_the_first_that_passes_gets_the_alias_unless_the_champion_is_pinned_or_protected() -> None:
    any_ = ReplacementRule()
    assert settled((), any_) == ("nothing", None)
    assert settled(("a", "b"), any_, incumbent=None) == ("promoted", "a")
    assert settled(("a", "b"), any_) == ("promoted", "a")
    assert settled(("old", "a"), any_) == ("unchanged", "old")
    # Where the two cannot be compared, the default rule does not ask for it.
    assert settled(("a",), any_, a="the champion was measured on other items") == ("promoted", "a")
    pinned = replace(OLD, pinned=True)
    assert settled(("a",), ReplacementRule(), incumbent=pinned) == ("unchanged", None)
    assert settled(("old", "a"), ReplacementRule(), incumbent=pinned) == ("unchanged", "old")
    foreign = replace(OLD, evaluation=ELSEWHERE)
    assert settled(("a",), ReplacementRule(), incumbent=foreign) == ("promoted", "a")
    assert settled(("a",), ReplacementRule(replace="same_evaluation"), incumbent=foreign) == ("unchanged", None)
    assert settled(("a",), ReplacementRule(replace="same_evaluation")) == ("promoted", "a")


@pytest.mark.parametrize(
    ("kl", "accuracy", "not_worse", "better"),
    [
        ((-0.02, -0.01), (-0.01, 0.03), True, True),
        ((-0.02, 0.01), (-0.01, 0.03), True, False),
        ((-0.02, 0.011), (-0.01, 0.03), False, False),
        ((-0.02, -0.01), (-0.011, 0.03), False, False),
        (None, (0.0, 0.0), False, False),
    ],
)
def test_the_interval_s_bad_end_decides(
    kl: tuple[float, float] | None, accuracy: tuple[float, float], not_worse: bool, better: bool
) -> None:
    for require, allowed in (("not_worse", not_worse), ("better", better)):
        rule = ReplacementRule(require=require, kl_margin=0.01, accuracy_margin=0.01)  # type: ignore[arg-type]
        assert settled(("a",), rule, a=against(kl, accuracy)) == (("promoted", "a") if allowed else ("unchanged", None))


def test_generated_answers_are_compared_by_accuracy_alone() -> None:
    rule = ReplacementRule(require="better")
    assert settled(("a",), rule, a=against(None, (0.001, 0.02), items_with_kl=0)) == ("promoted", "a")
    assert settled(("a",), rule, a=against(None, (0.0, 0.02), items_with_kl=0)) == ("unchanged", None)


def test_the_next_challenger_is_asked_until_the_champion_s_own_rank() -> None:
    rule = ReplacementRule(require="better")
    good = against((-0.02, -0.01), (0.0, 0.03))
    assert settled(("a", "b"), rule, b=good) == ("promoted", "b")
    assert settled(("a", "old", "b"), rule, b=good) == ("unchanged", "old")
    assert settled(("a", "b"), rule, a="run x has no evaluate run") == ("unchanged", None)
    result = settle(decision("a", "b"), OLD, rule, HERE, lambda c: good if c.name == "b" else EVEN)
    assert (
        "a against the champion 'old' (version 1)" in result.reasons[0]
        and "not shown to be better" in result.reasons[0]
    )
    assert result.compared == good
