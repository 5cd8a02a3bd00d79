"""Processor seconds of everything but compression and passes, for 14,042 questions in all forms and 8 variants.

A sweep of the demo runs as it is, but its models score nothing: their log-likelihoods are drawn, and a variant's are
the baseline's with noise of a known size. Items, records, metrics, tables, pages and the store are the product's own.
Then `report`, `promote` and `compare` read that store. Parallel work counts (threads and ended children).

    python benchmarks/full_size.py --work /tmp/benchmark                      # one JSON line for each number
    python benchmarks/full_size.py --work /tmp/benchmark --profile compare    # and a profile of one command
"""

import argparse
import cProfile
import json
import os
import pstats
import resource
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

import numpy as np
from page_records import CATEGORIES, SHOTS, Words, drawn_question

from mlflow_compress.commands.compare.run import compare
from mlflow_compress.commands.evaluate import run as evaluate_stage
from mlflow_compress.commands.main import summary
from mlflow_compress.commands.promote.parameters import PromoteConfig
from mlflow_compress.commands.promote.run import run_promote
from mlflow_compress.commands.report.parameters import ReportConfig
from mlflow_compress.commands.report.run import run_report
from mlflow_compress.commands.sweep import make_variant
from mlflow_compress.commands.sweep import run as sweep_command
from mlflow_compress.commands.sweep.parameters import SweepConfig
from mlflow_compress.config import parse
from mlflow_compress.engines.file_model import open_request
from mlflow_compress.engines.interface import ModelRequest
from mlflow_compress.engines.local import LocalEngine, LocalModel
from mlflow_compress.home import VARIABLE
from mlflow_compress.records import OptionDistances, OptionScores, Request
from mlflow_compress.scoring.plan.encoding import Encoder

GRID = {"methods": "rtn", "bits": "2,3,4,8", "group_size": "32,64"}
NOISE = 0.1  # nats, of the first variant; each further one has so much more


def write_questions(file: Path, n: int) -> None:
    """Write a lettered file of invented questions of MMLU's length, in 57 categories with five examples each."""
    words = Words(0)
    with file.open("w", encoding="utf-8") as lines:
        for number in range(-CATEGORIES * SHOTS, n):
            text, options = drawn_question(words)
            place = number % CATEGORIES if number < 0 else number * CATEGORIES // n
            row = {
                "id": f"{number:05d}",
                "category": f"category {place}",
                "split": "dev" if number < 0 else "test",
                "question": text,
                "choices": [f"{option} {letter}" for option, letter in zip(options, "abcd", strict=True)],  # all differ
                "answer": int(words.rng.integers(4)),
            }
            lines.write(json.dumps(row) + "\n")


class DrawnScorer:
    """Answers requests with drawn log-likelihoods: the same for a text whenever it is asked, moved by `noise` nats."""

    report = None
    loaded = None
    encoder = None

    def __init__(self, noise: float, seed: int) -> None:
        self.noise, self.seed = noise, seed

    def score(self, requests: Sequence[Request], **baseline: Any) -> tuple[OptionScores, OptionDistances | None]:
        """Return drawn rows; with distances where a baseline is given."""
        columns = {name: [getattr(one, name) for one in requests] for name in (*OptionScores.KEY, "content")}
        lengths = np.ones(len(requests), dtype=np.int32)
        numbers = np.array([int(item_id) for item_id in columns["item_id"]])
        places = (numbers, np.array(columns["content"]))
        loglik = np.random.default_rng(0).normal(-4.0, 1.2, (numbers.max() + 1, 6))[places]
        loglik += 0.4 * np.random.default_rng(1).normal(size=8)[columns["permutation"]]
        moved = np.random.default_rng(self.seed)
        loglik += self.noise * moved.normal(size=len(requests))
        scores = OptionScores.from_columns(
            {
                **columns,
                "loglik": loglik,
                **dict.fromkeys(("n_tokens", "n_chars", "n_bytes"), lengths),
                "greedy": lengths == 0,
            }
        )
        if baseline.get("baseline") is None:
            return scores, None
        kl = moved.exponential(self.noise**2 / 2, len(requests))
        same = np.exp(-kl)
        values = {"kl": kl, "kl_reverse": kl, "js": np.minimum(kl / 4, 0.69), "tv": np.minimum(np.sqrt(kl / 2), 1.0)}
        key = {name: columns[name] for name in OptionDistances.KEY}
        return scores, OptionDistances.from_columns(
            {**key, **values, **dict.fromkeys(("same_top", "top10", "rbo10"), same)}
        )


class DrawnModel(LocalModel):
    """A checkpoint that is opened and identified as ever, but whose scores are drawn."""

    numbers: dict[str, int] = {}  # noqa: RUF012  # of the weights, in the order in which they were opened; 0 is the baseline

    def load(self) -> Any:
        return None

    def scorer(self, loaded: Any, *, after: Any = None) -> Any:
        number = self.numbers.setdefault(self.weights, len(self.numbers))
        return DrawnScorer(NOISE * number if after is None else 1e-6, 2 + number)

    def capture(self, folder: Path, loaded: Any) -> Any:
        folder.mkdir(parents=True)
        (folder / "none.txt").write_text("drawn")
        return nullcontext()

    def stored(self, folder: Path) -> Any:
        return folder

    def comparable_with(self, stored: Any) -> Any:
        return stored


def drawn(engine: LocalEngine, request: ModelRequest) -> DrawnModel:
    """Open a model of the engine `local` as one whose scores are drawn."""
    return DrawnModel.of(open_request(request))


def processor_seconds() -> float:
    """Return the processor seconds of this process, its threads, and its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class Watch:
    """Counts processor seconds by what was done, and profiles some parts."""

    def __init__(self, profiled: Sequence[str]) -> None:
        self.seconds, self.profiles = dict[str, float](), {part: cProfile.Profile() for part in profiled}

    def timed(self, part: str, work: Callable[..., Any], *given: Any, **more: Any) -> Any:
        """Do some work, and count it."""
        began = processor_seconds()
        try:
            return self.profiles[part].runcall(work, *given, **more) if part in self.profiles else work(*given, **more)
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + processor_seconds() - began

    def counted(self, holder: Any, name: str, part: str) -> None:
        """Count each call of a function from now on."""
        work = holder[name] if isinstance(holder, dict) else getattr(holder, name)

        @wraps(work)
        def call(*given: Any, **more: Any) -> Any:
            return self.timed(part, work, *given, **more)

        if isinstance(holder, dict):
            holder[name] = call
        else:
            setattr(holder, name, call)


def measure(work: Path, n: int, watch: Watch) -> dict[str, float]:
    """Return the processor seconds by part, for one number of questions in a new store."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{work}/mlflow.db"
    os.environ[VARIABLE] = str(work / "home")
    write_questions(work / "questions.jsonl", n)
    DrawnModel.numbers.clear()
    watch.seconds.clear()
    asked = {**GRID, "tasks": str(work / "questions.jsonl"), "judge": "false", "log_weights": "false"}
    sweep = watch.timed("sweep", sweep_command.run_sweep, parse(SweepConfig, asked))
    runs = [row.run_id for row in sweep.scoreboard.rows]
    page = {"runs": ",".join(runs), "output": str(work / "report.html")}
    watch.timed("report", run_report, parse(ReportConfig, page))
    watch.timed("promote", run_promote, parse(PromoteConfig, {"model": "demo"}))
    watch.timed("compare", compare, runs[0], runs[-1])
    return {part: round(seconds, 2) for part, seconds in watch.seconds.items()}


def main() -> None:
    """Print one JSON line for each number of questions."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--work", type=Path, required=True, help="folder for the stores, which are made anew")
    options.add_argument("--questions", default="2850,14042", help="numbers of questions (default: %(default)s)")
    options.add_argument("--profile", default="", help="parts, comma-separated, whose functions are listed too")
    given = options.parse_args()
    LocalEngine.open = drawn  # type: ignore[method-assign,assignment]
    Encoder.write = Encoder.remember = lambda *given: None  # type: ignore[method-assign]
    watch = Watch(list(filter(None, given.profile.split(","))))
    watch.counted(make_variant._RUNS, "quantize", "quantize")
    watch.counted(make_variant._RUNS, "evaluate", "evaluate")
    watch.counted(sweep_command, "evaluate_baseline", "baseline")
    watch.counted(evaluate_stage, "compute_all", "metrics")
    watch.counted(evaluate_stage, "log_evaluation", "log_evaluation")
    watch.counted(summary, "publish", "publish")
    watch.counted(sweep_command, "publish_sweep", "publish_sweep")
    watch.counted(DrawnScorer, "score", "drawing")
    for n in map(int, given.questions.split(",")):
        print(json.dumps({"questions": n, **measure(given.work / str(n), n, watch)}), flush=True)
    for part, profile in watch.profiles.items():
        print(f"Of {part}:")
        pstats.Stats(profile).sort_stats("cumulative").print_stats(60)


if __name__ == "__main__":
    main()
