"""The promotion policy: its file, its hash, and what it means as gates, rules and a ranking."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mlflow_compress import cli
from mlflow_compress.config import Policy, policy_yaml, read_policy
from mlflow_compress.config.policy import (
    AnomalyRule,
    KlBounds,
    MarginGate,
    MetricGate,
    Objective,
    Requirements,
    policy_of,
)
from mlflow_compress.decide.gates import Gate, standard_gates
from mlflow_compress.decide.promotion import Candidate, GateReading, decide, gates_of, ranking_of, read_gates
from mlflow_compress.errors import ConfigError
from mlflow_compress.records import MetricResult

bounds = st.floats(0, 100, allow_subnormal=False)


def candidate(name: str = "a", **more: object) -> Candidate:
    values = {"size/bytes": 100.0, "size/ratio": 4.0, "distance/kl_mean": 0.01, "distance/flips_pct": 1.0}
    values |= {"distance/kl_clipped_mean": 0.01, "distance/kl_above_clip_pct": 0.0}
    gates = {"gate/kl_items": 300.0, "gate/kl_clipped_upper": 0.02, "gate/kl_above_clip_pct_upper": 0.3}
    gates |= {"gate/flips_pct_upper": 2.0}
    account = {"items/unscored_pct": 0.0, "items/cut_pct": 0.0}
    drop = {"quality/accuracy_delta": 0.0, "gate/accuracy_drop_pct_upper": 1.0}
    metrics = {**values, **gates, **account, **drop, **more}
    return Candidate(name=name, run_id=name, version=None, method="rtn", metrics=metrics, items=300)  # type: ignore[arg-type]


def reasons(policy: Policy, one: Candidate) -> tuple[bool, str]:
    found = gates_of(policy)
    score, ranked_by = ranking_of(policy.objective)
    [outcome] = decide([one], found.gates, rules=found.rules, score=score, ranked_by=ranked_by).outcomes
    return outcome.passed, "; ".join(outcome.reasons)


def test_the_default_policy_means_exactly_the_standard_gates() -> None:
    found = gates_of(Policy())
    assert list(found.gates) == standard_gates()
    assert found.readings == frozenset() and not found.asks_stages


@pytest.mark.parametrize(
    ("metric", "name", "what"),
    [
        ("items/unscored_pct", "max_unscored_pct", "of the items have no score"),
        ("items/cut_pct", "max_cut_pct", "of the prompts were cut to the model's context"),
    ],
)
def test_too_many_items_without_a_score_or_with_a_cut_prompt_are_refused(metric: str, name: str, what: str) -> None:
    one = candidate(**{metric: 1.5})
    passed, said = reasons(Policy(), one)
    assert not passed and f"required: 1.5 % {what} > 1 %" in said
    assert reasons(Policy(require=Requirements(**{name: 1.5})), one)[0]  # type: ignore[arg-type]
    unknown = Candidate(**{**vars(one), "metrics": {k: v for k, v in one.metrics.items() if k != metric}})
    assert f"required: {metric} is missing" in reasons(Policy(), unknown)[1]
    text_alone = Candidate(**{**vars(unknown), "items": 0})
    assert "missing" not in reasons(Policy(), text_alone)[1]


@given(bounds, bounds, bounds, bounds)
def test_parameters_override_the_default_policy_exactly(kl: float, outliers: float, flips: float, drop: float) -> None:
    given = {"max_kl": kl, "max_kl_outliers_pct": outliers, "max_flips_pct": flips, "max_accuracy_drop_pct": drop}
    ours, theirs = gates_of(Policy().overridden(**given)).gates, standard_gates(**given)
    assert list(ours[:-1]) == theirs[:-1]
    # A margin is a share and the parameter is in points: they agree to ten digits.
    assert ours[-1].bound == pytest.approx(drop, abs=1e-9)  # type: ignore[union-attr]


def test_parameters_override_a_file_and_add_what_it_lacks(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(
        "kl: none\nmargins: []\ngates:\n"
        "  - {metric: distance/flips_pct, at_most: 1}\n  - {metric: distance/flips_pct, at_most: 9, task: mmlu}\n"
    )
    policy = read_policy(str(file))
    assert policy.kl is None and policy.overridden() == policy
    changed = policy.overridden(max_kl=0.1, max_flips_pct=3, max_accuracy_drop_pct=1)
    assert changed.kl == KlBounds(max_kl=0.1)
    assert [(g.at_most, g.task) for g in changed.gates] == [(3.0, None), (9.0, "mmlu")]
    assert changed.margins == (MarginGate(metric="quality/accuracy_delta", margin=0.01),)


FULL = Policy(
    kl=None,
    gates=(
        MetricGate(metric="distance/all_flips_pct", at_most=9, task="mmlu", category="law"),
        MetricGate(metric="judge/similarity", at_least=0.9),
    ),
    require=Requirements(stages=("judge",), items=100, items_by_task={"mmlu": 50}),
    anomalies=AnomalyRule(max_accuracy_gain=0.02, zero_kl=True),
)


@pytest.mark.parametrize("policy", [Policy(), FULL])
@pytest.mark.parametrize("comments", [True, False])
def test_what_is_printed_is_read_back(policy: Policy, comments: bool, tmp_path: Path) -> None:
    text = policy_yaml(policy, comments=comments)
    (tmp_path / "policy.yaml").write_text(text)
    assert read_policy(str(tmp_path / "policy.yaml")) == policy
    assert ("#" in text) == comments
    # Every value is named, so that a policy that was kept still says what it meant when a default has changed.
    assert set(yaml.safe_load(text)) == {*Policy.model_fields, *(["format"] if comments else [])}


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            "gates: [{metric: distance/flips_pct, at_least: 5}]",
            ["gates, entry 1: Of distance/flips_pct lower is better"],
        ),
        ("gates: [{metric: quality/accuracy, at_most: 0.5}]", ["Of quality/accuracy higher is better"]),
        ("gates: [{metric: size/ratio, at_most: 3}]", ["Of size/ratio higher is better"]),
        ("gates: [{metric: distance/flips_pct, at_most: 500}]", ["Allowed: 0 to 100 (percent). Got: 'at_most: 500'"]),
        ("gates: [{metric: distance/kl_mean, at_most: -0.1}]", ["No value of distance/kl_mean is beyond"]),
        (
            "margins: [{metric: quality/accuracy_delta, margin: 2}]",
            ["everything passes", "0.02 of accuracy are 2 points"],
        ),
        ("margins: [{metric: distance/flips_pct, margin: 200}]", ["Allowed: 0 to 100. Got: 200"]),
        (
            "gates: [{metric: distance/flip_pct, at_most: 5}]\nmargins: [{metric: quality/accuracy, margin: 1}]\n"
            "objective: {by: utility, utility: [{metric: size/bites, weight: 1}]}",
            ["3 things are wrong", "entry 1: ", "Did you mean 'distance/flips_pct'", "margins, entry 1", "objective: "],
        ),
        ("gatse: []\nmarginn: 1", ["Unknown parameters", "'gates' for 'gatse'", "'margin' for 'marginn'"]),
    ],
)
@pytest.mark.parametrize("command", ["promote policy", "promote", "gate"])
def test_a_policy_that_makes_no_sense_is_refused_with_every_place(
    text: str, lines: list[str], command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    given = [str(file)] if command == "promote policy" else ["--model", "demo", "--policy", str(file)]
    if command == "gate":
        given += ["--checkpoint", "endpoint:http://127.0.0.1:1/v1", "--endpoint_args", "served_model=x"]
    assert cli.main([*command.split(), *given]) == 2
    said = capsys.readouterr().err
    assert str(file) in said
    for line in lines:
        assert line in said


def test_equal_policies_have_one_hash(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("# a comment\nkl: {max_kl: 0.05}\n")
    assert read_policy(str(tmp_path / "a.yaml")).sha256 == Policy().sha256 != FULL.sha256


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("require: {max_unscored_pc: 2}", "Did you mean 'max_unscored_pct'"),
        ("kl: {max_kl: much}", "'max_kl' must be a number"),
        ("kl: {max_kl: -1}", "'max_kl' is too small"),
        ("gates: [{metric: distance/flips_pct}]", "needs one limit"),
        ("gates: [{metric: distance/flips_pct, at_most: 1, at_least: 0}]", "needs one limit"),
        ("gates: [{metric: distance/flips_pct, at_most: 1, category: law}]", "category without its task"),
        ("gates: [{metric: distance/flips_pct, at_most: 1, bound: top}]", "'bound' has an unknown value"),
        ("gates: [{at_most: 1}]", "metric"),
        ("margins: [{metric: distance/flips_pct, margin: -1}]", "'margin' is too small"),
        ("margin: -0.5", "'margin' is too small"),
        ("margin: 101", "Allowed: 100.0 or less"),
        ("objective: {by: utility}", "has no terms"),
        ("require: {stages: [bake]}", "unknown value"),
        ("champion: {require: best}", "'require' has an unknown value"),
        ("just words", "has no names"),
        ("kl: [", "names no YAML file"),
    ],
)
def test_a_broken_policy_is_refused_with_its_file_s_name(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    assert cli.main(["promote", "policy", str(file)]) == 2
    shown = capsys.readouterr().err
    assert message in shown and "policy.yaml" in shown


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Policy(gates=(MetricGate(metric="size/bytes", at_most=1, task="mmlu"),)), "does not have"),
        (Policy(margins=(MarginGate(metric="quality/accuracy", margin=0.1),)), "Use quality/accuracy_delta"),
        (Policy(margins=(MarginGate(metric="size/bytes", margin=0.1),)), "is none"),
        (Policy(objective=Objective(by="utility", utility=({"metric": "x/y", "weight": 1},))), "which way"),  # type: ignore[arg-type]
    ],
)
def test_what_the_metrics_do_not_have_is_refused(policy: Policy, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gates_of(policy)


def test_the_command_prints_the_policy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["promote", "policy"]) == 0
    printed = capsys.readouterr().out
    assert policy_of(yaml.safe_load(printed), "printed") == Policy() and Policy().sha256 in printed
    assert cli.main(["promote", "policy", str(tmp_path / "none.yaml")]) == 2


def test_a_gate_reads_the_bad_end_of_a_task_or_category() -> None:
    results = [
        MetricResult("distance/all_flips_pct", 5.0, 3.0, 8.0, n=40, task="mmlu", category="law"),
        MetricResult("judge/similarity", 0.95, 0.91, 0.97, n=20),
        MetricResult("distance/flips_pct", 1.0, 0.5, 2.0, n=60, task="mmlu"),
        MetricResult("quality/accuracy_delta", 0.03, 0.01, 0.05, n=60),
    ]
    found = read_gates(results, gates_of(FULL).readings)
    assert found == {
        "distance/all_flips_pct of mmlu/law (upper end)": 8.0,
        "distance/all_flips_pct of mmlu/law": 5.0,
        "judge/similarity (lower end)": 0.91,
        "judge/similarity": 0.95,
        "distance/flips_pct of mmlu (items)": 60.0,
        "quality/accuracy_delta (lower end)": 0.01,
    }
    one = candidate(**found)
    passed, said = reasons(FULL, one)
    assert not passed and "required: stage judge has not finished" in said
    judged = Candidate(**{**vars(one), "stages": frozenset({"evaluate", "judge"})})
    passed, said = reasons(FULL, judged)
    assert passed, said
    assert "distance/all_flips_pct of mmlu/law (upper end): 8 <= 9; judge/similarity (lower end): 0.91 >= 0.9" in said
    # Without an interval there is no end: missing, and failed.
    assert read_gates([MetricResult("judge/similarity", 0.95)], gates_of(FULL).readings) == {"judge/similarity": 0.95}
    assert "judge/similarity (lower end) is missing" in reasons(FULL, candidate())[1]


def test_a_gate_that_too_few_items_cannot_pass_says_how_many_are_needed() -> None:
    values = {"gate/kl_items": 320.0, "gate/kl_clipped_upper": 0.002, "gate/kl_above_clip_pct_upper": 1.186}
    one = candidate(**values, **{"distance/kl_clipped_mean": 0.001, "distance/kl_above_clip_pct": 0.0})
    assert (
        "items above the clip limit in % (upper end): 1.186 > 1, narrowly (even with none above it, at least 381 "
        "items are needed: give a larger limit, or more tasks; there are 320)"
    ) in reasons(Policy(), one)[1]


@pytest.mark.parametrize("bound", ["upper", "lower", "value"])
def test_every_part_of_a_result_can_be_read(bound: str) -> None:
    found = gates_of(
        Policy(kl=None, gates=({"metric": "distance/js_mean", "at_most": 0.5, "bound": bound},), margins=())  # type: ignore[arg-type]
    )
    read = read_gates([MetricResult("distance/js_mean", 2.0, 1.0, 3.0)], found.readings)
    [gate] = found.gates
    assert isinstance(gate, Gate) and read[gate.metric] == {"upper": 3.0, "lower": 1.0, "value": 2.0}[bound]
    one_end = gate.one_end(read)
    assert one_end is None if bound == "value" else one_end is not None and one_end.value == 2.0


def test_a_gate_on_the_mean_kl_itself_reads_its_upper_end() -> None:
    found = gates_of(Policy(kl=None, margins=(), gates=(MetricGate(metric="distance/kl_mean", at_most=0.1),)))
    read = read_gates([MetricResult("distance/kl_mean", 0.02, 0.01, 0.05)], found.readings)
    assert [read[gate.metric] for gate in found.gates] == [0.05]  # type: ignore[union-attr]


def test_margins_are_distances_from_what_an_unchanged_variant_has() -> None:
    """Agreement is 1 for an unchanged variant, so that a margin of 0.1 asks for 0.9; a distance is 0, and may be 0.1."""
    policy = Policy(
        kl=None,
        gates=(),
        margins=(
            MarginGate(metric="distance/top1_agreement", margin=0.1),
            MarginGate(metric="distance/js_mean", margin=0.1),
            MarginGate(metric="quality/accuracy_delta", margin=0.1, task="mmlu"),
        ),
    )
    agreement, js, accuracy = gates_of(policy).gates
    assert (agreement.bound, agreement.at_least) == (pytest.approx(0.9), True)  # type: ignore[union-attr]
    assert (js.bound, js.at_least) == (0.1, False)  # type: ignore[union-attr]
    assert (accuracy.bound, accuracy.at_least) == (-0.1, True)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("items", "mmlu", "said"),
    [
        (100, 50.0, None),
        (99, 50.0, "required: 99 items < 100"),
        (None, 50.0, "an unknown number of items < 100"),
        (100, 49.0, "required: 49 items of mmlu < 50"),
        (100, None, "required: items of mmlu are missing"),
    ],
)
def test_least_item_counts(items: int | None, mmlu: float | None, said: str | None) -> None:
    policy = Policy(require=Requirements(items=100, items_by_task={"mmlu": 50}))
    reading = GateReading(metric="distance/flips_pct", end="n", task="mmlu").name
    one = candidate(**({} if mmlu is None else {reading: mmlu}))
    passed, found = reasons(policy, Candidate(**{**vars(one), "items": items}))
    assert passed == (said is None) and (said or "") in found


@pytest.mark.parametrize(
    ("low", "kl", "said"),
    [
        (0.02, 0.01, None),
        (0.021, 0.01, "anomalous: accuracy rose by 0.021 or more, which is above 0.02"),
        (None, 0.01, "anomalous: the lower end of quality/accuracy_delta is missing"),
        (0.0, 0.0, "anomalous: KL is exactly 0, although method 'rtn' changes weights"),
    ],
)
def test_implausible_gains_are_anomalous(low: float | None, kl: float, said: str | None) -> None:
    policy = Policy(anomalies=AnomalyRule(max_accuracy_gain=0.02, zero_kl=True))
    values = {"distance/kl_mean": kl, **({} if low is None else {"quality/accuracy_delta (lower end)": low})}
    passed, found = reasons(policy, candidate(**values))
    assert passed == (said is None) and (said or "") in found
    assert reasons(Policy(), candidate(**values))[0]  # the default policy does not ask


SPEEDUP, MEMORY = "speed/decode_ratio_batch_1", "speed/memory_peak_ratio"


def served(speedup: float, low: float, memory: float) -> Candidate:
    """Return a candidate with what its speed stage found, read as `promote` reads it."""
    results = [
        MetricResult(SPEEDUP, speedup, low, 2 * speedup - low, n=5),
        MetricResult(MEMORY, memory, memory - 0.05, memory + 0.05, n=3),
    ]
    policy = Policy().overridden(min_decode_speedup=1.0, max_memory_ratio=1.0)
    return candidate(**read_gates(results, gates_of(policy).readings))


@pytest.mark.parametrize(
    ("speedup", "low", "memory", "passes", "why"),
    [
        (
            1.4,
            1.25,
            0.6,
            True,
            "decode speedup (lower end): 1.25 >= 1.2; peak memory to the baseline's (upper end): 0.65 <= 0.7",
        ),
        # Faster by the value, but the interval does not show it.
        (1.4, 1.1, 0.6, False, "decode speedup (lower end): 1.1 < 1.2"),
        (1.4, 1.25, 0.68, False, "peak memory to the baseline's (upper end): 0.73 > 0.7"),
    ],
)
def test_the_lower_end_of_the_speedup_and_the_upper_end_of_the_memory_decide(
    speedup: float, low: float, memory: float, passes: bool, why: str
) -> None:
    policy = Policy().overridden(min_decode_speedup=1.2, max_memory_ratio=0.7)
    passed, said = reasons(policy, served(speedup, low, memory))
    assert passed == passes and why in said


def test_without_a_timing_nothing_passes_and_the_reason_is_told() -> None:
    policy = Policy().overridden(min_decode_speedup=0.1, max_memory_ratio=9)
    simulated = replace(candidate(), absent={"speed/": "the format hqq is only simulated"})
    passed, said = reasons(policy, simulated)
    assert not passed and said.count("is missing (the format hqq is only simulated)") == 2
    assert reasons(Policy(), simulated)[0]  # the default policy does not ask
    ranked = Policy(objective=Objective(by="speed"))
    passed, said = reasons(ranked, simulated)
    assert not passed and f"rank: {SPEEDUP} is missing (the format hqq is only simulated)" in said
    assert gates_of(policy).asks_speed and gates_of(ranked).asks_speed and not gates_of(Policy()).asks_speed


def test_parameters_replace_a_file_s_bounds_and_a_misspelt_speed_is_refused() -> None:
    given = Policy(gates=(MetricGate(metric=SPEEDUP, at_least=2), MetricGate(metric=MEMORY, at_most=0.1)))
    changed = given.overridden(min_decode_speedup=1.5, max_memory_ratio=0.5)
    assert [(gate.metric, gate.limit) for gate in changed.gates] == [(SPEEDUP, 1.5), (MEMORY, 0.5)]
    assert given.overridden(max_flips_pct=3).gates[1:] == given.gates
    with pytest.raises(ConfigError, match="Unknown metric key"):
        gates_of(Policy(gates=(MetricGate(metric="speed/decode_ration", at_least=1),)))


@pytest.mark.parametrize("bound", ["upper", "lower"])
def test_an_end_of_what_has_no_interval_is_refused(bound: str) -> None:
    with pytest.raises(ConfigError, match="reads something that this number does not have"):
        gates_of(Policy(gates=(MetricGate(metric="size/bytes", at_most=1, bound=bound),)))  # type: ignore[arg-type]


def champion(objective: Objective, *candidates: Candidate) -> str | None:
    score, ranked_by = ranking_of(objective)
    found = decide(candidates, standard_gates(), score=score, ranked_by=ranked_by)
    return found.champion.name if found.champion else None


SMALL = candidate("small", **{"size/bytes": 100.0, "distance/kl_mean": 0.02, "speed/decode_ratio_batch_1": 3.0})
NEAR = candidate("near", **{"size/bytes": 200.0, "distance/kl_mean": 0.01, "speed/decode_ratio_batch_1": 0.5})


@pytest.mark.parametrize(
    ("objective", "wins"),
    [
        (Objective(), "small"),
        (Objective(by="kl"), "near"),
        (Objective(by="speed"), "small"),
        (Objective(by="speed", speed_prefer="lower"), "near"),
        # range: small has size 0 and KL 1, near the reverse; the larger weight decides.
        (
            Objective(
                by="utility",
                utility=({"metric": "size/bytes", "weight": 3}, {"metric": "distance/kl_mean", "weight": 2}),
            ),
            "small",
        ),  # type: ignore[arg-type]
        (
            Objective(
                by="utility",
                utility=({"metric": "size/bytes", "weight": 2}, {"metric": "distance/kl_mean", "weight": 3}),
            ),
            "near",
        ),  # type: ignore[arg-type]
        # scale: 100/100 + 0.02/0.001 = 21 against 200/100 + 0.01/0.001 = 12.
        (
            Objective(
                by="utility",
                normalisation="scale",
                utility=(
                    {"metric": "size/bytes", "weight": 1, "scale": 100},
                    {"metric": "distance/kl_mean", "weight": 1, "scale": 0.001},
                ),
            ),
            "near",
        ),  # type: ignore[arg-type]
        # higher is better: the ratio of both is 4, so that only the tie on KL is left.
        (Objective(by="utility", utility=({"metric": "size/ratio", "weight": 1},)), "near"),  # type: ignore[arg-type]
    ],
)
def test_the_objective_ranks_what_passes(objective: Objective, wins: str) -> None:
    assert champion(objective, SMALL, NEAR) == champion(objective, NEAR, SMALL) == wins


def test_what_the_objective_reads_must_be_there() -> None:
    passed, said = reasons(Policy(objective=Objective(by="speed", speed_metric="speed/tokens")), candidate())
    assert not passed and "rank: speed/tokens is missing" in said
