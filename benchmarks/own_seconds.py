"""What a job takes besides passes: reading, building, hashing and tokenizing all of MMLU, and what grows with weights.

- Questions: each part is timed beside the way before it, in one run: data sets through `datasets`, each prompt
  tokenized alone and with every option. Processor seconds, so that other programs do not count.
- Weights: a main job by parts (see `parts.py`), with a random model of each size, wide and shallow, and what one
  `sha256sum` and one `safetensors` load of the same files take: the baseline's and the checkpoint's. The last line says
  how many seconds a GB of the baseline adds to both.

Example
-------
python benchmarks/own_seconds.py --data HUB_FOLDER --work /tmp/benchmark --questions 285,2850,14042 --gigabytes 0.1,0.5
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gpu_scale
from parts import measure
from safetensors.torch import load_file
from setting import make_model, parser
from transformers import AutoTokenizer

from mlflow_compress.home import VARIABLE
from mlflow_compress.items.named.hub_choice import MMLU, SUBJECTS
from mlflow_compress.items.sources import data_dir
from mlflow_compress.items.suite import Suite, load_suite
from mlflow_compress.items.task import TaskSettings
from mlflow_compress.scoring.plan.encoding import Encoder
from mlflow_compress.scoring.plan.text_cuts import has_cuts

OF_THE_MODEL = ("passes", "compression")  # the parts of a job that compute with the model


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the processor seconds of some work, those of its threads too, and what it returns."""
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def hashed_as_before(suite: Suite) -> list[str]:
    """Hash every request with its whole context, as `Task.content_hash` did."""
    digests = [hashlib.sha256(repr(task.items.table.to_pydict()).encode()) for task in suite.tasks]
    for digest, task in zip(digests, suite.tasks, strict=True):
        for request in task.requests:
            digest.update(repr(request).encode())
    return [digest.hexdigest() for digest in digests]


def characters(encoder: Encoder, suite: Suite) -> int:
    """Return the characters that the tokenizer gets, and let it encode every request."""
    handed, tokenized = 0, encoder._tokenized

    def counted(strings: Any, *, special: bool) -> Any:
        nonlocal handed
        handed += sum(map(len, strings))
        return tokenized(strings, special=special)

    encoder._tokenized = counted  # type: ignore[method-assign]
    encoder.encode(suite.requests)
    return handed


def questions(data: Path, tokenizer: Any, limit: int) -> dict[str, Any]:
    """Return the figures of MMLU with two shuffles and the options E and F; `limit` questions a subject, 0 for all."""
    settings = TaskSettings(data_dir=str(data), limit=limit)
    read_before, _ = seconds(
        lambda: [
            list(data_dir._load(MMLU, str(data), "mmlu", name=subject, split=split))
            for subject in SUBJECTS
            for split in ("dev", "test")
        ]
    )
    read, _ = seconds(
        lambda: [
            list(data_dir.load_split(MMLU, subject, split, data_dir=str(data), task="mmlu"))
            for subject in SUBJECTS
            for split in ("dev", "test")
        ]
    )
    build, suite = seconds(lambda: load_suite("mmlu_lettered", model="", settings=settings))
    n = len(suite.tasks[0].items)
    hash_before, _ = seconds(partial(hashed_as_before, suite))
    content_hash, _ = seconds(lambda: suite.hashes)
    whole, cut = Encoder(tokenizer, 4096), Encoder(tokenizer, 4096)
    whole._has_cuts = False
    tokens_before, handed_before = seconds(partial(characters, whole, suite))
    tokens, handed = seconds(partial(characters, cut, suite))
    before, now = read_before + (build - read) + hash_before + tokens_before, build + content_hash + tokens
    return {
        "questions": n,
        "requests": len(suite.requests),
        "read_s": [round(read_before, 2), round(read, 2)],
        "read_and_build_s": [round(read_before + build - read, 2), round(build, 2)],
        "hash_s": [round(hash_before, 2), round(content_hash, 2)],
        "tokens_s": [round(tokens_before, 2), round(tokens, 2)],
        "characters_a_question": [round(handed_before / n), round(handed / n)],
        "all_s": [round(before, 2), round(now, 2)],
        "ratio": round(now / before, 3),
    }


def job(work: Path, gigabytes: float) -> dict[str, tuple[float, float]]:
    """Print a main job by parts; return seconds and processor seconds: "own", and "peer" of one hash and load."""
    folder = work / f"job-{gigabytes}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    questions_file = gpu_scale.made_questions(
        folder / "made.jsonl", 1, subjects=2
    )  # few, as passes are not what is asked
    heads = round((gigabytes * 1e9 / 2 / 32) ** 0.5 / 128)  # two bfloat16 layers of 16 hidden_size² each
    shape = gpu_scale.TINY | {
        "hidden_size": 128 * heads,
        "intermediate_size": 512 * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }
    model = gpu_scale.make_model(folder / "model", shape, 2, "cpu", questions_file.read_text("utf-8").split("\n"))
    os.sync()  # else the job waits, at each small file of its own, until the disk has the model that was just made
    command = [sys.executable, "-m", "mlflow_compress", "main", "--model", str(model), "--tasks", str(questions_file)]
    command += ["--limit", "1", "--method", "rtn", "--bits", "4", "--judge", "false", "--speed", "false"]
    homes = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", VARIABLE: str(folder / "home")}
    measured = measure(command, folder=folder, environment=homes)
    files = sorted({file.resolve() for file in folder.rglob("*.safetensors") if "states" not in file.parts})
    peer = (0.0, 0.0)
    for work_of_peer in (
        lambda file: subprocess.run(["sha256sum", file], check=True, stdout=subprocess.DEVNULL),
        lambda file: [tensor.sum() for tensor in load_file(file).values()],  # a load alone maps the file
    ):
        for file in files:
            before, began = os.times(), time.perf_counter()
            work_of_peer(file)
            took, after = time.perf_counter() - began, os.times()
            peer = (peer[0] + took, peer[1] + sum(after[:4]) - sum(before[:4]))
    size = (model / "model.safetensors").stat().st_size / 1e9
    print(f"\n{size:.2f} GB, with the checkpoint {sum(file.stat().st_size for file in files) / 1e9:.2f} GB")
    print(f"{measured.as_markdown()}\n| sha256sum and load | {peer[0]:.1f} | {peer[1]:.1f} |", flush=True)
    of_model = [measured.parts[part] for part in OF_THE_MODEL]
    own = (measured.seconds - sum(s for s, _ in of_model), measured.processors - sum(p for _, p in of_model))
    shutil.rmtree(folder)
    return {"size": (size, size), "own": own, "peer": peer}


def main() -> None:
    """Print one JSON line for each number of questions, [before, now], and a table for each size of weights."""
    options = parser(str(__doc__))
    options.add_argument("--questions", default="285,14042", help="numbers of questions (default: %(default)s)")
    options.add_argument("--gigabytes", default="0.1,0.5,2", help="sizes of weight files (default: %(default)s)")
    given = options.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    os.environ[VARIABLE] = str(given.work / "home")
    tokenizer = AutoTokenizer.from_pretrained(make_model(given.work / "llama", given.data))
    print(json.dumps({"has_cuts_s": round(seconds(lambda: has_cuts(tokenizer))[0], 2)}))
    for number in (int(number) for number in given.questions.split(",") if number):
        limit = 0 if number >= 14_042 else -(-number // len(SUBJECTS))
        print(json.dumps(questions(given.data, tokenizer, limit)), flush=True)
    sizes = [float(size) for size in given.gigabytes.split(",") if size]
    if not sizes:
        return
    jobs = [job(given.work, size) for size in sizes]
    gigabytes = jobs[-1]["size"][0] - jobs[0]["size"][0]
    slopes = {
        name: [(large - small) / gigabytes for small, large in zip(jobs[0][name], jobs[-1][name], strict=True)]
        for name in ("own", "peer")
        if len(jobs) > 1
    }
    print(json.dumps({"seconds_and_processor_seconds_a_gb": slopes}))


if __name__ == "__main__":
    main()
