"""Promotion against a real store: only variants of one evaluation of one model compete, and the others are named."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlflow.entities import LoggedModelOutput

from mlflow_compress import cli
from mlflow_compress.commands.main import summary
from mlflow_compress.commands.promote.parameters import PromoteConfig
from mlflow_compress.commands.promote.run import run_promote
from mlflow_compress.errors import ConfigError
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.evaluations import evaluations
from mlflow_compress.tracking.model_registry import create_model, planned_model
from mlflow_compress.tracking.tracker import Tracker
from tests.compress_models import make_llama

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
        gates = {"gate/kl_items": items, "gate/kl_upper": kl, "gate/flips_pct_upper": 2}
        account = {"items/unscored_pct": 0.0, "items/cut_pct": 0.0}
        run.log_values({**values, **gates, **account, "gate/accuracy_drop_pct_upper": 1, run_names.ITEMS: items})
        logged = client.create_logged_model(tracker.experiment_id, name=variant, source_run_id=run.run_id, tags=tags)
        client.log_outputs(run.run_id, [LoggedModelOutput(logged.model_id, step=0)])
    return run.run_id


def champion(tracker: Tracker, name: str = "compressed-llama") -> str:
    return str(tracker.client.get_model_version_by_alias(name, "champion").run_id)


def decision_of(tracker: Tracker) -> dict[str, object]:
    newest = tracker.find_finished("promote")[0]
    return dict(tracker.fetch_json(newest.info.run_id, "decision.json"))


def test_only_the_evaluation_with_most_items_competes(tracker: Tracker) -> None:
    """A smaller variant that was measured on five items does not win over one that was measured on all."""
    whole = finished(tracker, "rtn-4bit", ALL, items=1000, size=100)
    finished(tracker, "rtn-2bit", FIVE, items=5, size=10)
    output = run_promote(PromoteConfig(model="llama", **WIDE)).as_text()
    assert champion(tracker) == whole
    assert "1. rtn-4bit (1000 items)" in output and "rtn-2bit" not in output
    assert f"Left out, not comparable: evaluation {FIVE[:8]} (1 variant, 5 items)." in output
    record = decision_of(tracker)
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
    with pytest.raises(ConfigError, match="other base weights than this folder"):
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--alias", "latest"], "This alias is reserved"),
        (["--alias", "v3"], "This alias is reserved"),
        (["--alias", "best one"], "is not a name that MLflow takes"),
        (["--evaluation", "abc"], "of an evaluation id"),
        (["--evaluation", "zzzzzz"], "of an evaluation id"),
        (["--evaluation", "123456"], "has no such evaluation"),
        (["--model", "unheard-of"], "has no such baseline. Allowed: llama. Got: 'unheard-of'"),
        (["--max_kl_outliers_pct", "-1"], "is too small"),
    ],
)
def test_rejected_parameters_leave_no_run(
    tracker: Tracker, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    finished(tracker, "rtn-4bit")
    assert cli.main(["promote", "--model", "llama", *arguments]) == 2
    assert message in capsys.readouterr().err
    stages = [r.data.tags[run_names.STAGE] for r in tracker.client.search_runs([tracker.experiment_id])]
    assert stages == ["main"]
    assert tracker.client.search_registered_models() == []


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
        variant="rtn-4bit", checkpoint_sha256="d" * 64, label="llama", tracker=tracker, evaluation=ALL
    )
    rows, shown = summary._variants(stages)  # type: ignore[arg-type]
    assert shown == "rtn-4bit (dddddddd)"
    assert {row["name"]: (row["size/bytes"], row["distance/kl_mean"]) for row in rows} == {
        "rtn-4bit (cccccccc)": (100, 0.02),
        "rtn-4bit (dddddddd)": (99.0, 0.5),  # this run's own values, not those of its earlier run
        "rtn-8bit": (200, 0.01),
    }
