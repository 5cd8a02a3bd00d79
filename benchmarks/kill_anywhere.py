"""Commands killed at random moments and started again: what they find, and what is left of the first attempt.

Each kill starts from the same store. A command begins, gets SIGKILL, SIGTERM or SIGINT at a random moment (alone, or
with the processes it has started), and the same command runs again to its end. Then must hold, against a run that
nobody disturbed: the same metrics and verdicts, the same versions and aliases in the registry, no run RUNNING, no lock
in the way, as many bytes on disk (the database aside, and 64 KiB for the parameters of killed runs), and no call to the
judge repeated but those under way at the kill. Nothing that it has started may run
on. The exit code is 1 if one kill breaks one of these.

A command's first seconds are imports. So one kill in ten is drawn from the time before the command's first write to a
file, and nine from the time after it. A command that has ended before its kill does not count, and another is drawn.

Two thirds of a command's processor time are imports. With `--forked` commands are forks of a process that has imported
everything: they begin at once, and the kills take a third of the time.

With `--rows FILE` each kill is a line of a JSONL file, and the table is that of all lines there: so the kills can be
made in pieces, each with a seed of its own.

Example
-------
python benchmarks/kill_anywhere.py --count 10 --seed 0
python benchmarks/kill_anywhere.py --count 25 --seed 1 --commands evaluate --rows kills.jsonl --minutes 9
python benchmarks/kill_anywhere.py --count 0 --rows kills.jsonl
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.forked_commands import Forks
from benchmarks.killed_store import LOOK_S, Process, Store, differences, ended, left_processes
from tests.judge_server import Answer, FaultyJudge, judge_server

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
TASKS = ("--tasks", "choice.jsonl,text.txt")
STORE = ("resume",)  # it makes the database: otherwise most kills would fall on its migrations
QUANTIZE = ("quantize", "--method", "rtn", "--bits", "4")
# two rounds of short prompts are enough to be killed in
SPEED = ("--speed_args", "repeats=2,prompt_tokens=16,new_tokens=4")
SWEEP = ("sweep", "--methods", "rtn,fp16", "--bits", "4", *TASKS, "--judge", "false", *SPEED)
CHECKPOINT = ("--checkpoint", "CHECKPOINT")  # replaced by the folder that `quantize` has written
CONCURRENCY = 2  # calls to the judge at the same time: so many may be lost at a kill
ANSWERS = ("--instructions", "say.jsonl", "--answer_args", "num_samples=2,max_new_tokens=8,judge_max_tokens=8")
ASKING = ("--judge_args", f"concurrency={CONCURRENCY}", "--judge_model", "gpt-4")
BOUNDS = ("--max_kl", "9", "--max_flips_pct", "100", "--max_accuracy_drop_pct", "100", "--max_kl_outliers_pct", "100")
SLOWER = 10  # a restart that takes this many times as long as an undisturbed run waits for a lock
EARLY = 0.1  # share of the kills before the first write
LONGEST_S, LONGEST_END_S = 1800.0, 120.0
KINDS = ("metrics", "registry", "RUNNING", "restart", "disk", "paid twice", "process")


@dataclass(frozen=True)
class Case:
    """A command that is killed, and the commands before it."""

    name: str
    before: tuple[tuple[str, ...], ...]
    command: tuple[str, ...]


CASES = (
    Case("quantize", (STORE,), QUANTIZE),
    Case("evaluate", (QUANTIZE,), ("evaluate", *CHECKPOINT, *TASKS)),
    Case("judge", (QUANTIZE,), ("judge", *CHECKPOINT, *ANSWERS, *ASKING)),
    Case("promote", (SWEEP,), ("promote", *BOUNDS)),
    Case("sweep", (STORE,), SWEEP),
)


def write_inputs(folder: Path) -> None:
    """Write questions, a text and instructions, so few that a command is soon done."""
    choices = [
        {"id": str(i), "category": "c", "context": f"{i} plus {i} is", "choices": ["two", "four"], "answer": i % 2}
        for i in range(40)
    ]
    says = [
        {"question_id": i, "category": "writing", "turns": [f"Tell of day {i}.", "And of the next day."]}
        for i in range(4)
    ]
    for name, rows in (("choice.jsonl", choices), ("say.jsonl", says)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "text.txt").write_text("The river is old and the bridge is new. " * 120)


class Kills:
    """Kills of one command, each from the same store.

    `judge` is the script of the judge that is asked; it counts what is paid. Without `forks` a command is a process.
    """

    def __init__(self, case: Case, work: Path, judge: FaultyJudge, base_url: str, forks: Forks | None) -> None:
        self._case, self._judge, self._template = case, judge, work / f"before-{case.name}"
        self._store = Store(work / "store", {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": "local"}, forks)
        shutil.rmtree(self._store.folder, ignore_errors=True)
        self._store.folder.mkdir(parents=True)
        write_inputs(self._store.folder)
        for command in case.before:
            self._store.run(command)
        shutil.rmtree(self._template, ignore_errors=True)
        shutil.copytree(self._store.folder, self._template, symlinks=True)
        began, process = self._begin()
        self.first_write = self._until_first_write(process, began)
        if not ended(process, LONGEST_S) or process.returncode or self.first_write is None:
            raise RuntimeError(f"{case.name} fails undisturbed: {self._store.log.read_text()[-2000:]}")
        self.seconds = time.perf_counter() - began
        self.undisturbed, self._paid = self._store.outcome(), judge.paid.total()

    def _begin(self) -> tuple[float, Process]:
        """Start the command in the store as it was, and return when."""
        shutil.rmtree(self._store.folder)
        # at the same paths, which the database names
        shutil.copytree(self._template, self._store.folder, symlinks=True)
        self._judge.paid.clear()
        self._found = self._store.files()
        return time.perf_counter(), self._store.start(self._case.command)

    def _has_written(self) -> bool:
        return self._store.files() != self._found

    def _until_first_write(self, process: Process, began: float) -> float | None:
        """Return after how many seconds the command first wrote to a file; None if it ended before."""
        while not self._has_written():
            if process.poll() is not None:
                return None
            time.sleep(LOOK_S)
        return time.perf_counter() - began

    def one(self, draw: random.Random) -> dict[str, Any] | None:
        """Kill once, start again, and return what was done and what is wrong; None where the kill came too late."""
        number, whom, early = draw.choice(SIGNALS), draw.choice(("process", "group")), draw.random() < EARLY
        pause = draw.uniform(0.0, self.first_write if early else self.seconds - self.first_write)
        began, process = self._begin()
        if not early:
            self._until_first_write(process, began)
        if ended(process, pause):
            return None
        written, after = self._has_written(), time.perf_counter() - began
        open_runs = self._store.open_runs()
        (os.killpg if whom == "group" else os.kill)(process.pid, number)
        has_ended = ended(process, LONGEST_END_S)
        row = {
            "command": self._case.name,
            "signal": number.name,
            "whom": whom,
            "after_s": round(after, 2),
            "written": written,
            "ended": process.returncode,
            "open_runs": open_runs,
            "undisturbed_s": round(self.seconds, 1),
            "first_write_s": round(self.first_write, 1),
        }
        if not has_ended:
            return {**row, "wrong": {"restart": f"it has not ended {LONGEST_END_S} s after the signal"}}
        try:
            again = self._store.run(self._case.command, limit=max(120.0, SLOWER * self.seconds))
        except RuntimeError as error:
            return {**row, "wrong": {"restart": str(error)}}
        wrong = differences(self._store.outcome(), self.undisturbed)
        if (repeated := self._judge.paid.total() - self._paid) > CONCURRENCY:
            wrong["paid twice"] = f"{repeated} calls to the judge repeated"
        if left_processes(process):
            wrong["process"] = "a process that the killed one has started still runs"
        return {**row, "again_s": round(again, 1), "wrong": wrong}

    def keep(self, folder: Path) -> None:
        """Keep the store as it is now, to look into it."""
        shutil.copytree(self._store.folder, folder, symlinks=True, dirs_exist_ok=True)


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table: a line per command, and the kinds of what is wrong."""
    head = ["command", "seconds undisturbed", "kills", "before the first write", "with a run open", "wrong", *KINDS]
    lines = [head, ["---"] * len(head)]
    for case in CASES:
        mine = [row for row in rows if row["command"] == case.name]
        if not mine:
            continue
        signals = Counter(row["signal"] for row in mine)
        lines.append(
            [
                f"`{case.name}`",
                f"{statistics.median(row['undisturbed_s'] for row in mine):.0f}",
                f"{len(mine)} ({', '.join(f'{n} {name}' for name, n in sorted(signals.items()))})",
                str(sum(not row["written"] for row in mine)),
                str(sum(row["open_runs"] > 0 for row in mine)),
                str(sum(bool(row["wrong"]) for row in mine)),
                *(str(sum(kind in row["wrong"] for row in mine)) for kind in KINDS),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class SlowJudge(FaultyJudge):
    """A judge that takes a while, so that kills fall into its calls."""

    def __call__(self, number: int, body: Mapping[str, Any]) -> Answer:
        """Answer one call."""
        answer = super().__call__(number, body)
        time.sleep(0.2)
        return answer


def kill_all(
    count: int, seed: int, cases: list[Case], work: Path, *, until: float, rows: Path, forks: Forks | None
) -> None:
    """Kill `count` commands, in equal shares, and append a line per kill."""
    draw = random.Random(seed)
    judge = SlowJudge(share=0.0)
    with judge_server(judge) as server:
        for index, case in enumerate(cases):
            wanted = count // len(cases) + (index < count % len(cases))
            if not wanted or time.monotonic() > until:
                continue
            kills = Kills(case, work, judge, server.base_url, forks)
            print(
                f"{case.name}: {kills.seconds:.0f} s undisturbed, first write at {kills.first_write:.1f} s", flush=True
            )
            while wanted and time.monotonic() < until:
                row = kills.one(draw)
                if row is None:
                    continue
                wanted -= 1
                if row["wrong"]:
                    kills.keep(work / f"wrong-{case.name}-{seed}-{wanted}")
                with rows.open("a") as sink:
                    sink.write(json.dumps({"seed": seed, "forked": forks is not None, **row}) + "\n")
                told = f"{row['signal']} to the {row['whom']} after {row['after_s']:.1f} s, ended {row['ended']}"
                print(f"  {told}: {'; '.join(row['wrong'].values()) or 'as undisturbed'}", flush=True)


def main() -> None:
    """Kill, print a line per kill and a table; the exit code is 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="kills, over all commands (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", default=",".join(case.name for case in CASES), help="comma-separated")
    parser.add_argument("--keep", type=Path, help="folder for the stores; none: a temporary one")
    parser.add_argument("--rows", type=Path, help="JSONL file that gets a line per kill; none: in the stores' folder")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no kill begins later than this")
    parser.add_argument("--forked", action="store_true", help="fork commands from a process that has imported torch")
    given = parser.parse_args()
    until = time.monotonic() + 60 * given.minutes
    cases = [case for case in CASES if case.name in given.commands.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        work = given.keep or Path(folder)
        rows = given.rows or work / "kills.jsonl"
        with Forks() if given.forked else nullcontext() as forks:
            kill_all(given.count, given.seed, cases, work, until=until, rows=rows, forks=forks)
        made = [json.loads(line) for line in rows.read_text().splitlines()]
    print(f"\n{table(made)}")
    sys.exit(1 if any(row["wrong"] for row in made) else 0)


if __name__ == "__main__":
    main()
