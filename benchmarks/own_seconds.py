"""What a job takes besides passes: reading, building, hashing and tokenizing all of MMLU, and hashing weights.

Each part is timed beside the way before it, in one run: data sets through `datasets`, each prompt tokenized alone and
with every option, the weight files read for every hash. Processor seconds, so that other programs do not count.

Example
-------
python benchmarks/own_seconds.py --data HUB_FOLDER --work /tmp/benchmark --questions 285,2850,14042 --gigabytes 0.1,0.5
"""

import hashlib
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from setting import make_model, parser
from transformers import AutoTokenizer

from mlflow_compress import hashes
from mlflow_compress.home import VARIABLE
from mlflow_compress.items.named.hub_choice import MMLU, SUBJECTS
from mlflow_compress.items.sources import data_dir
from mlflow_compress.items.suite import Suite, load_suite
from mlflow_compress.items.task import TaskSettings
from mlflow_compress.scoring.plan.encoding import Encoder
from mlflow_compress.scoring.plan.text_cuts import has_cuts

HASHES_BEFORE = 10  # of each weight file in a main job, half of them the baseline's and half the checkpoint's


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


def weights(work: Path, gigabytes: float) -> dict[str, Any]:
    """Return the seconds of all hashes of a main job, without the ledger and with it."""
    path = work / f"weights-{gigabytes}.safetensors"
    if not path.is_file():
        with path.open("wb") as file:
            for _ in range(int(gigabytes * 1000)):
                file.write(hashlib.shake_256(str(gigabytes).encode()).digest(1_000_000))
    before, _ = seconds(lambda: [hashes.sha256_file(path, again=True) for _ in range(HASHES_BEFORE)])
    hashes._ledger().unlink(missing_ok=True)
    now, _ = seconds(lambda: [hashes.sha256_file(path) for _ in range(HASHES_BEFORE)])
    return {"gigabytes": gigabytes, "hashes_s": [round(before, 2), round(now, 2)], "ratio": round(now / before, 3)}


def main() -> None:
    """Print one JSON line for each number of questions, and each size of weights: [before, now]."""
    options = parser(str(__doc__))
    options.add_argument("--questions", default="285,14042", help="numbers of questions (default: %(default)s)")
    options.add_argument("--gigabytes", default="0.1,0.5,2", help="sizes of weight files (default: %(default)s)")
    given = options.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    os.environ[VARIABLE] = str(given.work / "home")  # its ledger is deleted
    tokenizer = AutoTokenizer.from_pretrained(make_model(given.work / "llama", given.data))
    print(json.dumps({"has_cuts_s": round(seconds(lambda: has_cuts(tokenizer))[0], 2)}))
    for number in map(int, given.questions.split(",")):
        limit = 0 if number >= 14_042 else -(-number // len(SUBJECTS))
        print(json.dumps(questions(given.data, tokenizer, limit)), flush=True)
    for size in map(float, given.gigabytes.split(",")):
        print(json.dumps(weights(given.work, size)), flush=True)


if __name__ == "__main__":
    main()
