"""Score the same requests at one server with lm-evaluation-harness's `local-completions`, and with this package.

Both send token ids to the same server, with as many requests at a time, and tokenize within the measured time. Each run
puts a word of its own before every prompt, so that it finds no prefix of another in the server's cache. The requests
are the harness's own: MMLU with 5 shots, or cloze tasks without (`--kind`). The model is the demo with room for long
prompts. The harness needs the package tenacity.

Example
-------
python benchmarks/endpoint.py --data HUB_FOLDER --work /tmp/benchmark --prepare
python -m vllm.entrypoints.openai.api_server --model /tmp/benchmark/long-demo --served-model-name long-demo \
    --dtype float32 --enforce-eager --max-model-len 8192 --host 127.0.0.1 --port 8000
python benchmarks/endpoint.py --data HUB_FOLDER --work /tmp/benchmark --url http://127.0.0.1:8000/v1
"""

import gc
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from against_harness import choices, ours
from setting import harness_requests, machine, parser

from mlflow_compress import demo
from mlflow_compress.engines.endpoint.endpoint_scorer import EndpointScorer
from mlflow_compress.engines.endpoint.served_model import ServedModel
from mlflow_compress.engines.endpoint.server_probe import open_served_model
from mlflow_compress.errors import EndpointError
from mlflow_compress.models.loading import LightModel, LoadConfig, open_light
from mlflow_compress.transport.endpoint import EndpointConfig

SUBJECTS = ("high_school_computer_science", "international_law")
KINDS = {
    "lettered": {f"mmlu_{name}": "num_fewshot: 5" for name in SUBJECTS},
    "cloze": {"arc_easy": "training_split: null\nvalidation_split: null", "piqa": "training_split: null"},
}
CONTEXT = 8192
NAME = "long-demo"


def prepare(folder: Path) -> None:
    """Write the demo's checkpoint with a longer context, so that no prompt is cut."""
    shutil.copytree(demo.MODEL_DIR, folder, dirs_exist_ok=True)
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        file = folder / name
        file.write_text(json.dumps({**json.loads(file.read_text()), key: CONTEXT}, indent=2))


def salted(instances: Sequence[Any], salt: str) -> list[Any]:
    """Return the requests with another first word, so that no run finds the prefixes of another in a cache."""
    from copy import copy

    found = []
    for instance in instances:
        fresh = copy(instance)
        fresh.arguments = (f"{salt} {instance.args[0]}", instance.args[1])
        found.append(fresh)
    return found


def time_harness(url: str, folder: Path, instances: Sequence[Any], at_once: int, batch: int) -> tuple[float, Any]:
    """Return seconds and log-likelihoods of the harness."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    backend = LocalCompletionsAPI(
        model=NAME,
        base_url=f"{url}/completions",
        tokenizer=str(folder),
        tokenizer_backend="huggingface",
        num_concurrent=at_once,
        batch_size=batch,
        max_length=CONTEXT,
    )
    gc.collect()
    began = time.perf_counter()
    answers = backend.loglikelihood(list(instances), disable_tqdm=True)
    return time.perf_counter() - began, [loglik for loglik, _ in answers]


def time_ours(served: ServedModel, instances: Sequence[Any], listed: int) -> tuple[float, Any, int]:
    """Return seconds, log-likelihoods, and how many requests that took; `listed` items a task are asked with lists."""
    items = sorted({(i.task_name, str(i.doc_id)) for i in instances}, key=lambda key: (key[0], int(key[1])))
    by_task = {task: [key for key in items if key[0] == task][:listed] for task, _ in items}
    scorer = EndpointScorer(served, listed={key for keys in by_task.values() for key in keys})
    gc.collect()
    began = time.perf_counter()
    scores, _ = scorer.score(ours(instances))
    seconds = time.perf_counter() - began
    return seconds, scores.table["loglik"].to_pylist(), scorer.report.n_asked


def processor_seconds(server: int | None) -> float:
    """Return the processor seconds of this process so far, and of the server's with its children."""
    seconds = time.process_time()
    if server is not None:
        root = psutil.Process(server)
        for process in (root, *root.children(recursive=True)):
            times = process.cpu_times()
            seconds += times.user + times.system
    return seconds


def main() -> None:
    """Measure, and print one line per run."""
    arguments = parser(__doc__)
    arguments.add_argument("--url", help="the server, with /v1")
    arguments.add_argument("--prepare", action="store_true", help="write the model and stop")
    arguments.add_argument("--kind", choices=KINDS, default="lettered", help="of tasks (default: %(default)s)")
    arguments.add_argument("--limit", type=int, default=25, help="questions a subject (default: %(default)s)")
    arguments.add_argument("--at-once", type=int, default=16, help="requests at the same time (default: %(default)s)")
    arguments.add_argument("--harness-at-once", type=int, help="those of the harness (default: as many; its own: 1)")
    arguments.add_argument("--batch", type=int, default=1, help="prompts a request of the harness (its default: 1)")
    arguments.add_argument(
        "--listed", type=int, default=0, help="cloze questions a task asked with lists (default: %(default)s)"
    )
    arguments.add_argument("--server-pid", type=int, help="process of a server here, to count its processor seconds")
    given = arguments.parse_args()
    folder = given.work / NAME
    prepare(folder)
    if given.prepare:
        return
    plain = harness_requests(given.data, KINDS[given.kind], given.limit)
    reader: LightModel = open_light(LoadConfig(path=str(folder), dtype="float32"))
    endpoint = EndpointConfig(base_url=given.url, key="none", concurrency=given.at_once, error=EndpointError)
    served = open_served_model(endpoint, NAME, reader)
    print(machine())
    print(f"{served.can.server}; {len(plain)} requests of {', '.join(KINDS[given.kind])}, {given.at_once} at once")
    ratios, cheaper = [], []
    for run in range(given.runs):
        instances = salted(plain, f"{run}")
        began = processor_seconds(given.server_pid)
        theirs, _ = time_harness(given.url, folder, instances, given.harness_at_once or given.at_once, given.batch)
        their_processor = processor_seconds(given.server_pid) - began
        instances = salted(plain, f"{run}-")
        began = processor_seconds(given.server_pid)
        own, our_answers, n_asked = time_ours(served, instances, given.listed)
        our_processor = processor_seconds(given.server_pid) - began
        _, same = time_harness(given.url, folder, instances[:40], given.at_once, 1)
        apart = max(abs(a - b) for a, b in zip(same, our_answers[:40], strict=True))
        alike = np.mean(np.equal(choices(instances[:40], same), choices(instances[:40], our_answers[:40])))
        ratios.append(theirs / own)
        cheaper.append(their_processor / our_processor)
        print(
            f"run {run}: harness {len(plain) / theirs:.1f} requests/s ({theirs:.1f} s), ours {len(plain) / own:.1f} "
            f"({own:.1f} s, {n_asked} sent), {ratios[-1]:.2f} times, "
            f"processor seconds {their_processor:.1f} and {our_processor:.1f}; largest difference {apart:.1e} nat, "
            f"same choices {alike:.0%}",
            flush=True,
        )
    print(
        f"median: {np.median(ratios):.2f} times the harness's requests a second, "
        f"{np.median(cheaper):.2f} times for the same processor seconds"
    )


if __name__ == "__main__":
    main()
