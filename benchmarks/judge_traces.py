"""Seconds and bytes that it takes to show judgments as MLflow traces.

    python benchmarks/judge_traces.py                 # a new SQLite store, 160 judged answers
    python benchmarks/judge_traces.py --store http://127.0.0.1:5000

Answers and judgments of MT-Bench's usual length, one judgment each. Prints the seconds, and for a SQLite file the bytes
by which it grew, as one JSON line. Fails if a trace or an assessment is missing.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import mlflow

from mlflow_compress.records import AnswerFeedback, JudgedAnswer
from mlflow_compress.tracking.tracker import Tracker

_WORDS = "The quick brown fox jumps over the lazy dog. "


def judged(n: int) -> list[JudgedAnswer]:
    """Return n answers of 1,500 characters, each with a judgment of 700."""
    return [
        JudgedAnswer(
            model=("baseline", "variant")[place % 2],
            messages=[{"role": "user", "content": f"Question {place // 2}: write a short text about a fox."}],
            answer=(_WORDS * 34)[:1500],
            tags={"item_id": str(place // 2), "turn": "1", "category": "writing"},
            feedback=[
                AnswerFeedback(
                    name="mt_bench",
                    value=float(place % 10 + 1),
                    reason=None,
                    rationale=f"{(_WORDS * 16)[:690]} [[{place % 10 + 1}]]",
                    source="gpt-4 single-v1",
                    details={"repeat": "0"},
                )
            ],
        )
        for place in range(n)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=160, help="judged answers [160]")
    parser.add_argument("--store", help="tracking URI [a new SQLite file, deleted afterwards]")
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mlflow.db"
        mlflow.set_tracking_uri(asked.store or f"sqlite:///{file}")
        tracker = Tracker()
        with tracker.run("judge_traces", "judge", {}) as run:
            run.log_judged_answers(judged(1))  # imports, first connection
            before = file.stat().st_size if file.is_file() else None
            begin = time.perf_counter()
            run.log_judged_answers(judged(asked.answers))
            seconds = time.perf_counter() - begin
        found = mlflow.search_traces(
            locations=[tracker.experiment_id],
            run_id=run.run_id,
            max_results=asked.answers + 1,
            return_type="list",
        )
        assert len(found) == sum(len(trace.info.assessments) for trace in found) == asked.answers + 1
        grown = {} if before is None else {"megabytes": round((file.stat().st_size - before) / 1e6, 2)}
    print(
        json.dumps(
            {
                "answers": asked.answers,
                "seconds": round(seconds, 2),
                "ms_per_answer": round(1000 * seconds / asked.answers, 1),
                **grown,
            }
        )
    )


if __name__ == "__main__":
    main()
