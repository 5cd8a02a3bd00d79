"""Divergences of a corpus from a stored baseline, 128k vocabulary, against the bare cost.

The bare cost is the variant's body and the two head products at the scored rows, timed alone. Also the most memory that
the pass takes beyond the loaded model.

Example
-------
python benchmarks/corpus_divergence.py --data HUB_FOLDER --work /tmp/benchmark
"""

import argparse
import gc
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from setting import machine, make_model, make_variant, parser, texts

from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.scoring.baseline_store import StateStore, StateWriter
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from mlflow_compress.scoring.plan.corpus_windows import cut_windows
from mlflow_compress.scoring.plan.encoding import Encoder

VOCAB_SIZE = 131_072
WINDOW = 512
QUIET = ScoringConfig(progress=False)


class PeakMemory:
    """The most resident memory of this process inside the block, in MiB above its start."""

    def __enter__(self) -> "PeakMemory":
        gc.collect()
        self._process = psutil.Process()
        self._start = self._most = self._process.memory_info().rss
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self._most = max(self._most, self._process.memory_info().rss)

    def __exit__(self, *rest: object) -> None:
        self._stop.set()
        self._thread.join()
        self.mib = (self._most - self._start) / 2**20


def bare(loaded: LoadedModel, other_head: torch.Tensor, text: str) -> float:
    """Return the seconds of body and two head products, on the engine's batches."""
    windows = cut_windows(Encoder(loaded.tokenizer, loaded.max_length), text, WINDOW)
    head = loaded.model.get_output_embeddings().weight
    began = time.perf_counter()
    with torch.inference_mode():
        for ids, scored in zip(windows.ids, windows.scored, strict=True):
            states = loaded.model.model(torch.from_numpy(ids).long()[None], use_cache=False).last_hidden_state[0]
            for rows in states[torch.from_numpy(scored - 1)].split(128):
                torch.nn.functional.linear(rows, head)
                torch.nn.functional.linear(rows, other_head)
    return time.perf_counter() - began


def divergences(loaded: LoadedModel, store: StateStore, text: str) -> float:
    """Return the seconds of one pass with every divergence of every scored token."""
    scorer = Scorer(loaded, QUIET)
    began = time.perf_counter()
    scorer.score_corpus("corpus", text, window=WINDOW, baseline=store)
    return time.perf_counter() - began


def main() -> None:
    """Time both in turn, and print one JSON line."""
    options: argparse.ArgumentParser = parser(str(__doc__))
    options.add_argument("--windows", type=int, default=12, help="windows of 512 tokens (default: %(default)s)")
    given = options.parse_args()
    baseline = make_model(given.work / "llama-128k", given.data, VOCAB_SIZE)
    variant = make_variant(given.work / "variant-128k", baseline)
    loaded = load_model(LoadConfig(path=str(baseline), device="cpu"))
    text = "\n".join(texts(given.data))[:4_000_000]
    ids = loaded.tokenizer(text)["input_ids"]
    found: dict[str, Any] = {"benchmark": "corpus_divergence", "machine": machine(), "windows": given.windows}
    with tempfile.TemporaryDirectory() as folder:
        parts = {n: loaded.tokenizer.decode(ids[: n * WINDOW + 8]) for n in (given.windows, 4 * given.windows)}
        for n, part in parts.items():
            with StateWriter(Path(folder) / str(n), loaded) as writer:
                Scorer(loaded, QUIET).score_corpus("corpus", part, window=WINDOW, capture=writer)
        other_head = loaded.model.get_output_embeddings().weight.detach().clone()
        del loaded
        loaded = load_model(LoadConfig(path=str(variant), device="cpu"))
        stores = {n: StateStore.open(Path(folder) / str(n)) for n in parts}
        short = parts[given.windows]
        divergences(loaded, stores[given.windows], short)
        pairs = [
            (divergences(loaded, stores[given.windows], short), bare(loaded, other_head, short))
            for _ in range(given.runs)
        ]
        for n, part in parts.items():
            store = StateStore.open(Path(folder) / str(n))
            with PeakMemory() as peak:
                divergences(loaded, store, part)
            found[f"extra_memory_mib_{n}_windows"] = round(peak.mib)
    found |= {
        "bare_seconds": round(statistics.median(b for _, b in pairs), 2),
        "seconds": round(statistics.median(a for a, _ in pairs), 2),
        "ratio": round(statistics.median(a / b for a, b in pairs), 2),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
