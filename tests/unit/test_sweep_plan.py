"""Which variants a sweep makes, what it says about their cost, and what is refused before anything starts."""

from pathlib import Path
from typing import Any

import pytest

import mlflow_compress as mc
from mlflow_compress import cli
from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.commands.shared.named_models import model_path
from mlflow_compress.commands.sweep.parameters import SweepConfig
from mlflow_compress.commands.sweep.plan import combinations, size_estimate
from mlflow_compress.commands.sweep.result import PlannedVariant, SweepPlan
from mlflow_compress.compression.method import METHODS, method_config
from mlflow_compress.config import as_text, parameters, parse
from mlflow_compress.errors import ConfigError
from mlflow_compress.models.source_model import resolve
from mlflow_compress.models.stored_weights import read_headers, total_bytes
from mlflow_compress.tracking.tracker import Tracker


def names(**values: Any) -> tuple[list[str], dict[str, str]]:
    chosen, left_out = combinations(parse(SweepConfig, values))
    return [one.name for one in chosen], dict(left_out)


def test_a_sweep_has_every_parameter_of_the_main_job() -> None:
    """With the same default and help; only these have no meaning, or are its own."""
    ours, main = parameters(SweepConfig), parameters(MainConfig)
    assert main.keys() - ours.keys() == {"method", "resume", "checkpoint"}
    for name in main.keys() & ours.keys() - {"bits", "group_size"}:
        assert (ours[name].default, ours[name].description) == (main[name].default, main[name].description), name


def test_every_combination_that_a_method_supports_and_why_the_others_are_left_out() -> None:
    made, left_out = names(methods="awq,gptq,bnb-nf4,hqq,wanda", bits="8,4,3,2")
    assert made == [
        *(f"awq-{bits}bit-g128" for bits in (8, 4, 3)),
        *(f"gptq-{bits}bit-g128" for bits in (8, 4, 3, 2)),
        "bnb-nf4",
        *(f"hqq-{bits}bit-g64" for bits in (8, 4, 3, 2)),
        "wanda-50pct",  # it has no bits: once
    ]
    assert list(left_out) == ["awq bits=2", "bnb-nf4 bits=8", "bnb-nf4 bits=3", "bnb-nf4 bits=2"]
    assert left_out["awq bits=2"] == "Method 'awq' does not support these bits. Allowed: 8, 4, 3. Got: 2."


def test_equal_settings_are_one_variant_and_a_package_that_is_not_installed_is_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert names(methods=["rtn", "rtn"], bits=["auto", 4], group_size=[128, 64])[0] == ["rtn-4bit-g128", "rtn-4bit-g64"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    made, left_out = names(methods="none,rtn", bits="4")
    assert made == ["none"] and "needs packages that are not installed" in left_out["rtn bits=4"]


def test_a_grid_gives_axes_per_method(tmp_path: Path) -> None:
    grid = tmp_path / "sweep.yaml"
    grid.write_text(
        "- {methods: [rtn, gptq], bits: [4, 3], group_size: [128, 64]}\n"
        "- {method: wanda, method_args: [{sparsity: 0.5}, 'pattern=2:4']}\n"
        "- {method: awq, calibration_samples: [8, 16]}\n"
    )
    assert names(grid=str(grid))[0] == [
        *(f"{method}-{bits}bit-g{group}" for method in ("rtn", "gptq") for bits in (4, 3) for group in (128, 64)),
        "wanda-50pct",
        "wanda-2of4",
        "awq-4bit-g128 (calibration_samples=8)",
        "awq-4bit-g128 (calibration_samples=16)",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("methods: [rtn]", "no list of entries"),
        ("- rtn", "no list of entries"),
        ("- {bits: 4}", "needs 'method' or 'methods'"),
        ("- {method: rtn, methods: [awq]}", "needs 'method' or 'methods'"),
        ("- {method: rtn, limit: 5}", "a parameter that is not an axis.*limit"),
        ("- {method: rtn, bits: []}", "has no values.*bits"),
        ("- {method: rtm}", "Did you mean 'rtn'"),
        ("- {method: rtn, bits: 4.5}", "'bits' must be a whole number"),
        ("- {method: rtn, method_args: {sparsity: 1}}", "'rtn' has no parameter 'sparsity'"),
        ("- {method: rtn, bits: 5}", "No combination of this sweep is supported.*does not support these bits"),
        ("- {method: [", "no YAML file that can be read"),
        ("[]", "an empty grid"),
    ],
)
def test_a_broken_grid_is_one_clear_error(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        names(grid=str(tmp_path / "grid.yaml"))


def test_axes_stand_in_the_grid_or_beside_it_not_both(tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text("- {method: rtn}")
    with pytest.raises(ConfigError, match="'bits' conflicts with a grid"):
        names(grid=str(tmp_path / "grid.yaml"), bits="4")


def test_a_dry_run_shows_the_plan_and_makes_no_run(tracker: Tracker, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sweep", "--methods=rtn,none", "--bits=4,5", "--limit=2", "--dry_run=true"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 variants of demo; 1 combination is not supported")
    assert "- rtn bits=5: Method 'rtn' does not support these bits" in out
    assert "Time: unknown" in out and "Disk: about" in out
    assert tracker.client.search_runs([tracker.experiment_id]) == []
    plan = mc.sweep(methods="rtn,none", bits="4,5", limit=2, dry_run=True)
    assert isinstance(plan, SweepPlan) and len(plan.to_pandas()) == 2
    assert plan.seconds is None and plan.to_dict()["evaluation"] == plan.evaluation


def test_the_size_is_estimated_from_bits_and_groups() -> None:
    """Of the demo: linear layers from 16 bits to 4, and per group of 128 a scale of 16 bits and a zero point of 4."""
    source = resolve(model_path("demo"))
    base = total_bytes(read_headers(source.folder))
    weights = sum(rows * columns for rows, columns in source.linear.values())
    bits = METHODS.get("rtn").stored_bits(method_config("rtn", bits=4))
    assert bits == 4 + 20 / 128
    found = size_estimate(source, base, bits)
    assert found == pytest.approx(base - 2 * weights + weights * (4 + 20 / 128) / 8)
    assert found == pytest.approx(3.79e6, rel=0.02)  # what the checkpoint weighs
    assert METHODS.get("wanda").stored_bits(method_config("wanda")) is None  # the plan says "at most"


def planned(name: str, *, seconds: float | None, finished: str | None = None) -> PlannedVariant:
    return PlannedVariant(name=name, method="rtn", finished_run=finished, seconds=seconds, size_bytes=10.0)


def test_the_plan_counts_what_is_to_do() -> None:
    def plan(*variants: PlannedVariant) -> SweepPlan:
        return SweepPlan(
            baseline="demo", evaluation="e" * 16, variants=variants, left_out={}, base_size_bytes=100, copies=2
        )

    both = plan(planned("a", seconds=10), planned("b", seconds=20), planned("c", seconds=None, finished="1" * 32))
    assert both.seconds == 30 and both.disk_bytes == 40
    assert "about 30 s" in both.as_text() and "finished, run 11111111" in both.as_text()
    some = plan(planned("a", seconds=10), planned("b", seconds=None))
    assert some.seconds is None and "about 10 s, and that of 1 variant is unknown" in some.as_text()
    assert "Nothing to do" in plan(planned("c", seconds=None, finished="1" * 32)).as_text()


def test_the_parameters_of_a_sweep_read_back() -> None:
    config = parse(SweepConfig, {"methods": ["awq", "gptq"], "bits": "8,4", "method_args": "sparsity=0.5"})
    assert parse(SweepConfig, as_text(config)) == config
