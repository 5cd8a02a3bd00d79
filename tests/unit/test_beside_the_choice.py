"""Beside a choice: ties, and why each smaller variant was not taken."""

from dataclasses import replace

import numpy as np

from mlflow_compress.config.policy import Policy, Requirements
from mlflow_compress.decide.champion import choice_notes, to_compare
from mlflow_compress.decide.gates import published_gate
from mlflow_compress.decide.promotion import Candidate, decide, gates_of
from mlflow_compress.decide.scoreboard import Scoreboard, ScoredVariant, scoreboard
from mlflow_compress.decide.separation import ItemScores

N = 1000
DROP = published_gate("quality/accuracy_delta", 2.0)


def candidate(name: str, size: float, drop: float, upper: float) -> Candidate:
    metrics = {"size/bytes": size, "size/ratio": 4.0, "distance/kl_mean": 0.01}
    metrics |= {"quality/accuracy_delta": -drop / 100, "gate/accuracy_drop_pct_upper": upper}
    return Candidate(name=name, run_id=f"run-{name}", version=None, method="rtn", metrics=metrics)


def board(**right: slice) -> Scoreboard:
    """Return the scoreboard of variants that are right on these items, with the KL 0.01 on all."""
    items = np.array([f"{i}" for i in range(N)], dtype=object)
    variants = []
    for name, place in right.items():
        correct = np.zeros(N)
        correct[place] = 1.0
        task, kl, nothing = np.full(N, "t", dtype=object), np.full(N, 0.01), np.zeros(N)
        scores = ItemScores(task, items, correct, kl, flipped=nothing, group=np.arange(N))
        variants.append(ScoredVariant(name=name, method="rtn", run_id=f"run-{name}", items=scores))
    return scoreboard(variants, baseline="b", evaluation="e")


CHOSEN, TIED, NARROW, FAR = (
    candidate("chosen", 100, 0.2, 1.9),
    candidate("tied", 120, 0.2, 1.2),
    candidate("narrow", 90, 0.4, 2.1),
    candidate("far", 50, 9.0, 11.0),
)


def test_ties_and_smaller_ones_are_told_with_their_difference() -> None:
    decision = decide([CHOSEN, TIED, NARROW, FAR], [DROP])
    assert decision.champion == TIED  # 1.9 passes alone; among four it does not
    one = candidate("chosen", 100, 0.2, 1.0)
    decision = decide([one, TIED, NARROW, FAR], [DROP])
    assert decision.champion == one
    found = choice_notes(
        decision, board(chosen=slice(0, 600), tied=slice(2, 602), narrow=slice(4, 602), far=slice(0, 400))
    )
    assert found == [
        "Tied with tied: neither KL nor right answers tell them apart on these items.",
        "Not narrow, 10 % smaller: accuracy drop in points (upper end): 2.1 > 2, narrowly. Its accuracy differs from "
        "chosen's by -0.20 points [-0.85, +0.37], which chance alone may explain.",
        "Not far, 50 % smaller: accuracy drop in points (upper end): 11 > 2. Its accuracy differs from chosen's by "
        "-20.00 points [-22.59, -17.64].",
    ]
    assert to_compare(decision) == ["run-chosen", "run-tied", "run-narrow", "run-far"]


def test_without_items_the_reasons_are_still_told() -> None:
    decision = decide([candidate("chosen", 100, 0.2, 1.0), NARROW], [DROP])
    assert choice_notes(decision, None) == [
        "Not narrow, 10 % smaller: accuracy drop in points (upper end): 2.1 > 2, narrowly."
    ]


def test_where_nothing_passes_or_nothing_else_is_there_nothing_stands_beside() -> None:
    assert choice_notes(decide([FAR], [DROP]), None) == to_compare(decide([FAR], [DROP])) == []
    alone = decide([candidate("chosen", 100, 0.2, 1.0)], [DROP])
    assert choice_notes(alone, None) == to_compare(alone) == []


def test_what_no_server_reads_is_chosen_only_where_nothing_else_passes() -> None:
    own = replace(candidate("own", 50, 0.0, 0.5), served_by=())
    read = replace(candidate("read", 100, 0.0, 0.5), served_by=("vllm",))
    decision = decide([own, read], [DROP])
    assert decision.champion == read
    assert choice_notes(decision, None) == ["Not own: only this package reads the format, no server does."]
    assert decide([own], [DROP]).champion == own and choice_notes(decide([own], [DROP]), None) == []


def test_a_policy_s_target_must_read_it() -> None:
    gates = gates_of(Policy(kl=None, gates=(), margins=(), require=Requirements(max_cut_pct=100), target="llama.cpp"))
    known = {"items/unscored_pct": 0.0, "items/cut_pct": 0.0, "distance/flips_pct": 1.0}
    for served_by, why in (
        (("vllm",), "read by vllm"),
        ((), "read by this package alone"),
        (None, "nobody knows who reads it"),
        (("llama.cpp", "vllm"), ""),
    ):
        one = replace(CHOSEN, served_by=served_by, metrics={**CHOSEN.metrics, **known})
        [outcome] = decide([one], gates.gates, rules=gates.rules).outcomes
        assert outcome.passed == (not why)
        assert why == "" or outcome.failed == (f"target: llama.cpp does not read it ({why})",)
    assert decide([replace(one, served_by=None, served=True)], gates.gates, rules=gates.rules).champion is not None


def test_of_many_smaller_ones_five_are_told() -> None:
    many = [candidate(f"far{i}", 10 + i, 9.0, 11.0) for i in range(8)]
    decision = decide([candidate("chosen", 100, 0.0, 0.5), *many], [DROP])
    notes = choice_notes(decision, None)
    assert len(notes) == 6 and notes[-1] == "3 more smaller variants fail too." and notes[0].startswith("Not far7")
    assert len(to_compare(decision)) == 6
