"""Score the same requests with lm-evaluation-harness's own backend at its best batch size, and with this engine.

Both get one loaded model, the harness's requests as texts, and tokenize them within the measured time.

Example
-------
python benchmarks/against_harness.py --data HUB_FOLDER --work /tmp/benchmark
"""

import gc
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from setting import harness_requests, machine, make_model, parser

from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.records import Request
from mlflow_compress.scoring.engine import Scorer, ScoringConfig

SUBJECTS = (
    "high_school_computer_science",
    "international_law",
    "professional_psychology",
    "professional_medicine",
)
"""One of each group of MMLU; with 5 shots about 820 tokens a prompt."""

WORK: dict[str, tuple[dict[str, str], int]] = {
    "mmlu": ({f"mmlu_{name}": "num_fewshot: 5" for name in SUBJECTS}, 50),
    "arc_easy": ({"arc_easy": "training_split: null\nvalidation_split: null"}, 200),
    "piqa": ({"piqa": "training_split: null"}, 200),
}


def ours(instances: Sequence[Any]) -> list[Request]:
    """Return the harness's requests as this engine's."""
    return [
        Request(
            task=i.task_name,
            item_id=str(i.doc_id),
            permutation=0,
            option=i.idx,
            content=i.idx,
            context=i.args[0],
            continuation=i.args[1],
            n_chars=len(i.args[1]),
            n_bytes=len(i.args[1].encode()),
        )
        for i in instances
    ]


def time_stock(loaded: LoadedModel, instances: Sequence[Any], batch_size: int) -> tuple[float, list[float]]:
    """Return seconds and log-likelihoods of the harness's backend."""
    from lm_eval.models.huggingface import HFLM

    backend = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=batch_size, device="cpu")
    gc.collect()
    began = time.perf_counter()
    answers = backend.loglikelihood(list(instances), disable_tqdm=True)
    return time.perf_counter() - began, [loglik for loglik, _ in answers]


def time_ours(loaded: LoadedModel, requests: Sequence[Request]) -> tuple[float, list[float], Any]:
    """Return seconds, log-likelihoods and what the engine reports of itself."""
    scorer = Scorer(loaded, ScoringConfig(progress=False))
    gc.collect()
    began = time.perf_counter()
    scores, _ = scorer.score(requests)
    return time.perf_counter() - began, scores.table["loglik"].to_pylist(), scorer.report


def choices(instances: Sequence[Any], logliks: Sequence[float]) -> list[int]:
    """Return the option with the highest log-likelihood of every document."""
    best: dict[tuple[str, int], tuple[float, int]] = {}
    for instance, loglik in zip(instances, logliks, strict=True):
        key = (instance.task_name, instance.doc_id)
        best[key] = max(best.get(key, (-np.inf, 0)), (loglik, -instance.idx))
    return [-index for _, index in best.values()]


def compare(
    loaded: LoadedModel, name: str, instances: Sequence[Any], sizes: Sequence[int], runs: int
) -> dict[str, Any]:
    """Find the stock backend's best batch size, then time both in turn."""
    requests = ours(instances)
    sweep = {size: time_stock(loaded, instances, size)[0] for size in sizes}
    best = min(sweep, key=sweep.__getitem__)
    pairs = []
    for _ in range(runs):
        stock_seconds, stock = time_stock(loaded, instances, best)
        seconds, found, report = time_ours(loaded, requests)
        pairs.append((stock_seconds, seconds))
    n_tokens = [max(1, len(loaded.tokenizer(i.args[1], add_special_tokens=False)["input_ids"])) for i in instances]
    apart = np.abs(np.subtract(stock, found)) / n_tokens
    same = np.mean(np.equal(choices(instances, stock), choices(instances, found)))
    return {
        "task": name,
        "stock_batch_size": best,
        "stock_sweep_seconds": {str(size): round(seconds, 1) for size, seconds in sweep.items()},
        "stock_seconds": round(float(np.median([a for a, _ in pairs])), 2),
        "seconds": round(float(np.median([b for _, b in pairs])), 2),
        "ratio": round(float(np.median([a / b for a, b in pairs])), 2),
        "tokens": report.n_tokens,
        "tokens_naive": report.n_tokens_naive,
        "path": report.path,
        "most_nats_apart_a_token": float(f"{apart.max():.1e}"),
        "same_choices": float(same),
    }


def main() -> None:
    """Run the tasks asked for and print a table and one JSON line."""
    options = parser(str(__doc__))
    options.add_argument("--tasks", nargs="+", choices=tuple(WORK), default=tuple(WORK))
    options.add_argument(
        "--batch-sizes", nargs="+", type=int, default=(1, 4, 8, 16), help="tried for the stock backend"
    )
    given = options.parse_args()
    folder = make_model(given.work / "llama", given.data)
    loaded = load_model(LoadConfig(path=str(folder), device="cpu"))
    results = []
    for name in given.tasks:
        tasks, limit = WORK[name]
        instances = harness_requests(given.data, tasks, limit)
        results.append(compare(loaded, name, instances, given.batch_sizes, given.runs))
        print("  ".join(f"{key}: {value}" for key, value in results[-1].items()), flush=True)
    print(json.dumps({"benchmark": "against_harness", "machine": machine(), "results": results}))


if __name__ == "__main__":
    main()
