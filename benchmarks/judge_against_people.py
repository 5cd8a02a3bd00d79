"""How often a judge votes as people do, on the votes that FastChat's authors have published.

    python benchmarks/judge_against_people.py human.jsonl --votes gpt4_pair.jsonl
    OPENAI_API_KEY=... python benchmarks/judge_against_people.py human.jsonl --questions data/mt_bench/question.jsonl \
        --judge judge_model=gpt-4.1 --judge judge_prices=prices.yaml --judge judge_max_cost=5

The files are the two parts of the data set lmsys/mt_bench_human_judgments as JSONL, one vote a line: question_id,
model_a, model_b, winner, judge, turn, conversation_a, conversation_b. The first form compares votes that there are. The
second asks a judge model about the same answers, in both orders, where a disagreement of the orders is a tie, and keeps
every reply in the folder --kept. Votes of people are those of judges named "expert...", as in FastChat.

Prints a line per turn, with and without ties: agreement with its interval, and that of people among themselves.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.errors import DataError, JudgeError, MlflowCompressError
from mlflow_compress.items.sources.instructions import Instruction, load_instructions
from mlflow_compress.items.sources.question_files import read_jsonl
from mlflow_compress.items.task import TaskSettings
from mlflow_compress.judges.asking import Question, read_verdict, references
from mlflow_compress.judges.judge_registry import JudgeInputs
from mlflow_compress.judges.prompts import OURS, pair_prompt, read_pair_prompts
from mlflow_compress.judges.session import Session, spending_of
from mlflow_compress.metrics.core.metric_inputs import MetricSettings
from mlflow_compress.metrics.stats.bootstrap import bootstrap, ratio
from mlflow_compress.records import MetricResult

Winner = Literal["one", "other", "tie"]
Pair = tuple[str, int, str, str]
"""Question, turn (0 or 1), and the two models in alphabetical order."""

WINNER_OF: Mapping[str, Winner] = {"model_a": "one", "model_b": "other"}
_SWAPPED: Mapping[Winner, Winner] = {"one": "other", "other": "one", "tie": "tie"}


@dataclass(frozen=True)
class Vote:
    """Which of two models' answers somebody prefers. `winner` is "one" for the first in alphabetical order."""

    pair: Pair
    winner: Winner


def read_vote(row: Mapping[str, Any], where: str) -> Vote:
    """Return the vote in a row of FastChat's published votes: question_id, model_a, model_b, winner, turn (1 or 2).

    A `winner` with "tie" in it is a tie, also "tie (inconsistent)" and "tie (bothbad)". Any other row is a `DataError`
    that names `where`.
    """
    try:
        question, turn = str(row["question_id"]), row["turn"]
        a, b, said = row["model_a"], row["model_b"], row["winner"]
    except KeyError as error:
        raise DataError(f"{where}: a vote needs question_id, model_a, model_b, winner and turn") from error
    if turn not in (1, 2) or not all(isinstance(text, str) for text in (a, b, said)) or a == b:
        raise DataError(f"{where}: this is no vote on two models' answers in turn 1 or 2", got=f"turn {turn}, {a}, {b}")
    winner = "tie" if "tie" in said else WINNER_OF.get(said)
    if winner is None:
        raise DataError(f"{where}: unknown winner", allowed=[*WINNER_OF, "tie"], got=said)
    one, other = sorted((a, b))
    return Vote((question, turn - 1, one, other), winner if a == one else _SWAPPED[winner])


def vote_agreement(judge: Iterable[Vote], people: Iterable[Vote], settings: MetricSettings) -> list[MetricResult]:
    """Return the share of people's votes that are the judge's too, by turn, with and without ties.

    Without ties, pairs that the judge calls a tie and votes that are ties are left out. `task` is "turn 1, with ties"
    and so on; bootstrap over questions.

    The judge has at most one vote on each pair, else DataError; each of the people's votes on such a pair counts.

    FastChat, ``fastchat/llm_judge/compute_agreement.py``, "gpt4-pair" against "human"; Zheng et al., arXiv 2306.05685,
    table 5.
    """
    by_pair: dict[Pair, Winner] = {}
    for vote in judge:
        if by_pair.setdefault(vote.pair, vote.winner) != vote.winner:
            raise DataError("The judge has two different votes on one pair", got=vote.pair)
    compared = [(vote.pair, by_pair[vote.pair], vote.winner) for vote in people if vote.pair in by_pair]
    return _by_turn("votes/agreement", compared, settings)


def agreement_of_people(people: Iterable[Vote], settings: MetricSettings) -> list[MetricResult]:
    """Return the share of equal votes among all pairs of two people's votes on the same answers, as `vote_agreement`.

    This is what a judge's agreement is compared with: FastChat's "human" against "human".
    """
    by_pair: dict[Pair, list[Winner]] = {}
    for vote in people:
        by_pair.setdefault(vote.pair, []).append(vote.winner)
    compared = [
        (pair, votes[i], votes[j]) for pair, votes in by_pair.items() for j in range(len(votes)) for i in range(j)
    ]
    return _by_turn("votes/agreement_of_people", compared, settings)


def _by_turn(
    name: str, compared: Sequence[tuple[Pair, Winner, Winner]], settings: MetricSettings
) -> list[MetricResult]:
    results = []
    for turn in (0, 1):
        for ties in (True, False):
            equal: dict[str, list[int]] = {}
            for pair, left, right in compared:
                if pair[1] == turn and (ties or "tie" not in (left, right)):
                    sums = equal.setdefault(pair[0], [0, 0])
                    sums[0] += left == right
                    sums[1] += 1
            if not equal:
                continue
            columns = np.array([equal[question] for question in sorted(equal)], dtype=np.float64)
            s = settings
            interval = bootstrap(columns, ratio, resamples=s.resamples, level=s.level, seed=s.seed, method=s.method)
            low, high = (None, None) if interval is None else interval
            agree, n = columns.sum(axis=0)
            task = f"turn {turn + 1}, {'with' if ties else 'without'} ties"
            results.append(
                MetricResult(name=name, value=float(agree / n), low=low, high=high, level=s.level, n=int(n), task=task)
            )
    return results


_WINNERS = {1.0: "model_a", 0.0: "model_b", 0.5: "tie"}


def read_votes(path: Path) -> list[tuple[Vote, Mapping[str, Any]]]:
    """Return the votes of a file, each with its row."""
    return [(read_vote(row, f"{path}, line {row['line']}"), row) for row in read_jsonl(path)]


def of_people(votes: Sequence[tuple[Vote, Mapping[str, Any]]]) -> list[tuple[Vote, Mapping[str, Any]]]:
    """Return the votes of people, which FastChat's file names "expert_0" and so on."""
    found = [(vote, row) for vote, row in votes if str(row.get("judge", "")).startswith("expert")]
    if not found:
        raise DataError("There is no vote of people", allowed="rows whose judge begins with 'expert'")
    return found


def asked_votes(
    people: Sequence[tuple[Vote, Mapping[str, Any]]],
    questions: Sequence[Instruction],
    settings: JudgeConfig,
    kept: Path,
) -> list[Vote]:
    """Return a judge model's votes on the pairs of answers that people have voted on; unreadable ones are left out.

    JudgeError: there is no key, or more judgments are without a verdict than `judge_max_unscored` allows.
    """
    session = Session.open(settings.judging, kept)
    if isinstance(session, str):
        raise JudgeError(session)
    prompts = settings.judging.judge_prompts
    templates = OURS if prompts is None else read_pair_prompts(Path(prompts))
    items = {item.item_id: item for item in questions}
    rows = list({vote.pair: row for vote, row in people}.values())
    asked = []
    for row in rows:
        item = items.get(str(row["question_id"]))
        if item is None:
            raise DataError("A vote is on a question that the file of questions lacks", got=row["question_id"])
        turn = row["turn"] - 1
        a, b = (said(row, name, turn) for name in ("conversation_a", "conversation_b"))
        for order, (first, second) in enumerate(((a, b), (b, a))):
            prompt = pair_prompt(templates, item.category, turn, item.turns, first, second, references(item))
            asked.append(Question(f"{item.item_id} {row['model_a']} {row['model_b']}", prompt, order))
    inputs = JudgeInputs(
        instructions=(),
        graded={},
        samples={},
        spending=spending_of(settings.judging),
        say=lambda line: print(line, file=sys.stderr),
    )
    found = session.ask(asked, read_verdict, inputs)
    print("; ".join(f"{name} {value:g}" for name, value in inputs.spending.values().items()), file=sys.stderr)
    if failed := session.account()["failed"]:
        raise JudgeError(failed)
    [verdicts] = found.values()
    votes = []
    for row, first, second in zip(rows, verdicts[::2], verdicts[1::2], strict=True):
        if first.value is not None and second.value is not None:
            value = first.value if first.value == 1 - second.value else 0.5
            votes.append(read_vote({**row, "winner": _WINNERS[value]}, "judge"))
    return votes


def said(row: Mapping[str, Any], conversation: str, turn: int) -> list[str]:
    """Return a model's answers up to a turn."""
    try:
        answers = [str(message["content"]) for message in row[conversation] if message["role"] == "assistant"]
        return [answers[t] for t in range(turn + 1)]
    except (KeyError, IndexError, TypeError) as error:
        raise DataError(f"A vote has no {conversation} with {turn + 1} answers", got=row["question_id"]) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("people", type=Path, help="votes of people, JSONL")
    judge = parser.add_mutually_exclusive_group(required=True)
    judge.add_argument("--votes", type=Path, help="votes of a judge, JSONL")
    judge.add_argument("--questions", type=Path, help="FastChat's question.jsonl: a judge model is asked")
    parser.add_argument("--judge", action="append", default=[], metavar="NAME=VALUE", help="parameters of the judge")
    parser.add_argument("--kept", type=Path, default=Path("judged_votes"), help="folder of the judge's replies")
    given = parser.parse_args(argv)
    try:
        people = of_people(read_votes(given.people))
        if given.votes is not None:
            votes = [vote for vote, _ in read_votes(given.votes)]
        else:
            parameters = dict(pair.partition("=")[::2] for pair in given.judge)
            questions = load_instructions(given.questions, TaskSettings())
            votes = asked_votes(people, questions, JudgeConfig(**parameters), given.kept)
        settings = MetricSettings()
        results = [
            *vote_agreement(votes, [vote for vote, _ in people], settings),
            *agreement_of_people([vote for vote, _ in people], settings),
        ]
    except MlflowCompressError as error:
        print(error, file=sys.stderr)
        return 1
    for result in results:
        interval = "" if result.low is None else f" [{result.low:.3f}, {result.high:.3f}]"
        print(f"{result.name.removeprefix('votes/')}, {result.task}: {result.value:.3f}{interval}, {result.n} votes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
