"""A judge's agreement with people's votes: FastChat's definition, on files of the layout that its authors publish.

The published files are not here, and may not be downloaded; these are made by hand.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.judge_against_people import agreement_of_people, main, read_vote, vote_agreement
from mlflow_compress.errors import DataError
from mlflow_compress.metrics.core.metric_inputs import MetricSettings
from tests.judge_server import judge_server
from tests.judging import KEY
from tests.task_files import write_rows as write

Row = Mapping[str, Any]
WINNERS = ("model_a", "model_b", "tie", "tie (inconsistent)", "tie (bothbad)")


def vote(question: int, a: str, b: str, winner: str, judge: object = "expert_0", turn: int = 1) -> dict[str, Any]:
    return {"question_id": question, "model_a": a, "model_b": b, "winner": winner, "judge": judge, "turn": turn}


def values(judge: Sequence[Row], people: Sequence[Row]) -> dict[str | None, tuple[float, int]]:
    found = vote_agreement(
        [read_vote(row, "here") for row in judge], [read_vote(row, "here") for row in people], MetricSettings()
    )
    return {result.task: (result.value, result.n) for result in found}


def test_agreement_by_hand() -> None:
    gpt = ["gpt-4", "pair-v2"]
    judge = [
        vote(1, "x", "y", "model_a", gpt),
        vote(2, "x", "y", "tie (inconsistent)", gpt),
        vote(3, "x", "y", "model_b", gpt),
        vote(1, "x", "y", "model_b", gpt, turn=2),
    ]
    people = [
        vote(1, "x", "y", "model_a"),
        vote(1, "y", "x", "model_b", "expert_1"),  # the other order of the same preference
        vote(1, "x", "y", "tie"),
        vote(2, "x", "y", "tie (bothbad)"),  # any tie is a tie
        vote(2, "x", "y", "model_a"),
        vote(3, "x", "y", "model_a"),
        vote(9, "x", "y", "model_a"),  # the judge has no vote on it
        vote(1, "x", "y", "model_b", turn=2),
    ]
    assert values(judge, people) == {
        "turn 1, with ties": (3 / 6, 6),  # both votes for x, and the tie of question 2
        "turn 1, without ties": (2 / 3, 3),  # questions 1 (twice) and 3
        "turn 2, with ties": (1.0, 1),
        "turn 2, without ties": (1.0, 1),
    }
    # Question 1: (x, x), (x, tie), (x, tie); question 2: (tie, x).
    among = agreement_of_people([read_vote(row, "here") for row in people], MetricSettings())
    assert {r.task: (r.value, r.n) for r in among} == {
        "turn 1, with ties": (1 / 4, 4),
        "turn 1, without ties": (1.0, 1),
    }


def reference(judge: Sequence[Row], people: Sequence[Row], turn: int, *, ties: bool) -> tuple[int, int]:
    """Return agreeing and all votes, by the sentences of the definition, one vote after the other."""

    def preferred(row: Row) -> str:
        return "" if "tie" in row["winner"] else row[row["winner"]]

    agree = total = 0
    for one in judge:
        for other in people:
            same = one["question_id"] == other["question_id"] and one["turn"] == other["turn"] == turn
            same = same and {one["model_a"], one["model_b"]} == {other["model_a"], other["model_b"]}
            if same and (ties or (preferred(one) and preferred(other))):
                total += 1
                agree += preferred(one) == preferred(other)
    return agree, total


votes_of_people = st.lists(
    st.builds(
        lambda q, pair, winner, turn: vote(q, *pair, winner, turn=turn),
        st.integers(1, 4),
        st.permutations(["x", "y", "z"]).map(lambda names: names[:2]),
        st.sampled_from(WINNERS),
        st.sampled_from([1, 2]),
    ),
    max_size=20,
)


@given(votes_of_people, votes_of_people)
def test_agreement_is_counted_vote_by_vote(given_judge: list[dict[str, Any]], people: list[dict[str, Any]]) -> None:
    judge = list(
        {(r["question_id"], frozenset((r["model_a"], r["model_b"])), r["turn"]): r for r in given_judge}.values()
    )
    found = values(judge, people)
    for turn in (1, 2):
        for ties in (True, False):
            agree, total = reference(judge, people, turn, ties=ties)
            task = f"turn {turn}, {'with' if ties else 'without'} ties"
            assert found.get(task) == ((pytest.approx(agree / total), total) if total else None)


def test_two_votes_of_the_judge_and_broken_rows_are_refused() -> None:
    with pytest.raises(DataError, match="two different votes on one pair"):
        values([vote(1, "x", "y", "model_a"), vote(1, "y", "x", "model_a")], [])
    for bad in ({"winner": "model_c"}, {"turn": 3}, {"model_b": "x"}):
        with pytest.raises(DataError, match="here"):
            read_vote({**vote(1, "x", "y", "tie"), **bad}, "here")
    with pytest.raises(DataError, match="a vote needs"):
        read_vote({"question_id": 1}, "here")


def test_published_votes_are_compared_by_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    people = [vote(i, "x", "y", "model_a" if i % 2 else "model_b") for i in range(8)]
    people += [vote(1, "x", "y", "model_b", "author_1")]  # not counted, as in FastChat
    judge = [vote(i, "y", "x", "model_b", ["gpt-4", "pair-v2"]) for i in range(8)]
    arguments = [write(tmp_path / "human.jsonl", people), "--votes", write(tmp_path / "gpt4_pair.jsonl", judge)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "agreement, turn 1, with ties: 0.500 [" in out and "8 votes" in out
    assert main([arguments[0], "--votes", write(tmp_path / "bad.jsonl", [{"a": 1}])]) == 1
    assert "bad.jsonl, line 1: a vote needs" in capsys.readouterr().err


def test_a_judge_model_is_asked_about_the_same_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def talk(name: str) -> list[dict[str, str]]:
        return [{"role": role, "content": f"{name} {role}"} for role in ("user", "assistant") * 2]

    talks = {"conversation_a": talk("good"), "conversation_b": talk("bad")}
    people = [{**vote(i, "x", "y", "model_a", turn=1 + i % 2), **talks} for i in range(6)]
    human = write(tmp_path / "human.jsonl", people + people[:2])
    questions = [{"question_id": i, "category": "writing", "turns": ["Write.", "More."]} for i in range(6)]
    asked = ["--questions", write(tmp_path / "question.jsonl", questions), "--kept", str(tmp_path / "kept")]

    def prefer_good(number: int, body: Mapping[str, Any]) -> str:
        text = body["messages"][1]["content"]
        return "It is. [[A]]" if text.index("good assistant") < text.index("bad assistant") else "It is. [[B]]"

    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert main([human, *asked]) == 1 and "OPENAI_API_KEY is not set" in capsys.readouterr().err
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with judge_server(prefer_good) as server:
        for _ in range(2):  # the second time every reply is kept
            assert main([human, *asked, "--judge", f"judge_base_url={server.base_url}"]) == 0
        assert len(server.bodies) == 12  # six pairs in both orders, each once
    out = capsys.readouterr().out
    assert "agreement, turn 1, with ties: 1.000" in out and "agreement, turn 2, without ties: 1.000" in out
    with judge_server(lambda number, body: "First. [[A]]") as server:  # a judge that prefers a place: all ties
        assert main([human, *asked[:3], str(tmp_path / "other"), "--judge", f"judge_base_url={server.base_url}"]) == 0
    out = capsys.readouterr().out
    assert "agreement, turn 1, with ties: 0.000" in out and "agreement, turn 1, without" not in out
