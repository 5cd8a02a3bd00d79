"""What a job reads: each weight file once for its hash, in all of its processes and in all later jobs; MMLU's files."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from mlflow_compress.home import VARIABLE
from mlflow_compress.items.named.hub_choice import MMLU, SUBJECTS
from tests.task_files import hub_set

pytestmark = pytest.mark.ci  # two main jobs

LARGE = 1_000_000  # bytes; smaller files are not looked up

WATCH = """
import os, sys

LOG = os.environ["OPENED"]

def watch(event, arguments):
    if event == "open" and str(arguments[0]).endswith((".safetensors", ".jsonl")):
        path, frame = os.path.realpath(arguments[0]), sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.endswith(("mlflow_compress/hashes.py", "question_files.py")):
            frame = frame.f_back
        if frame is not None:
            file = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            known = os.stat(path)  # by its inode: a checkpoint's folder gets another name when it is whole
            what = f"{os.path.basename(frame.f_code.co_filename)} {known.st_size} {known.st_ino}"
            os.write(file, f"{what}\\n".encode())
            os.close(file)

sys.addaudithook(watch)
"""


def test_a_job_hashes_a_weight_file_once_and_the_next_variant_none_of_the_baseline(
    workdir: Path, entry_points: Path
) -> None:
    rows = [{"question": f"{i}?", "choices": list("wxyz"), "answer": i % 4} for i in range(5)]
    subjects = {s: [{**row, "question": f"{s} {row['question']}"} for row in rows] for s in SUBJECTS}
    hub_set(workdir / "hub", MMLU, {s: {"dev": asked, "test": asked[:3]} for s, asked in subjects.items()})
    (workdir / "watch").mkdir()
    (workdir / "watch" / "sitecustomize.py").write_text(WATCH)
    log, checkout = workdir / "opened.txt", Path(__file__).parents[2]
    environment = {**os.environ, "OPENED": str(log), VARIABLE: str(workdir / "home")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (workdir / "watch", checkout, entry_points)))

    def main(bits: int) -> Counter[tuple[str, int, str]]:
        """Run a job, and return how often each file was opened: by whom, its size, and which."""
        log.unlink(missing_ok=True)
        command = (
            f"main --method rtn --bits {bits} --tasks mmlu_lettered --limit 1 --data_dir hub --judge false".split()
        )
        done = subprocess.run(
            [sys.executable, "-m", "mlflow_compress", *command],
            cwd=workdir,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        opened = (line.split() for line in log.read_text().splitlines())
        return Counter((by, int(size), inode) for by, size, inode in opened)

    first, second = main(4), main(8)
    hashed = [
        {file: n for (by, size, file), n in job.items() if by == "hashes.py" and size >= LARGE}
        for job in (first, second)
    ]
    assert hashed[0] and set(hashed[0].values()) == {1}
    assert set(hashed[1].values()) == {1} and not hashed[0].keys() & hashed[1].keys()
    read = [{file: n for (by, _, file), n in job.items() if by == "question_files.py"} for job in (first, second)]
    assert len(read[0]) == 2 * len(SUBJECTS) and max(*read[0].values(), *read[1].values()) <= 4
