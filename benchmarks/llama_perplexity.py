"""Perplexity and KL divergence of a corpus, beside llama.cpp's perplexity tool on the same float32 weights and text.

Needs its program `llama-perplexity` (llama-cpp-python's source distribution carries it). Seconds are those of the
windows beyond the first third, so that neither side's start counts.

Example
-------
python benchmarks/llama_perplexity.py --binary bin/llama-perplexity --data HUB_FOLDER --work /tmp/benchmark
"""

import json
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import gguf
import numpy as np
import torch
from setting import machine, make_model, make_variant, parser, texts
from transformers import AutoTokenizer

from mlflow_compress.compression import gguf_model
from mlflow_compress.models import gguf_file
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.scoring.baseline_store import StateStore, StateWriter
from mlflow_compress.scoring.engine import Scorer, ScoringConfig

WINDOW = 512
F32 = gguf.GGMLQuantizationType.F32
QUIET = ScoringConfig(progress=False)


def write_gguf(loaded: LoadedModel, path: Path) -> Path:
    """Write a model's float32 weights for llama.cpp."""
    tensors = gguf_model.tensors_of(loaded.model, lambda name, parameter: F32)
    gguf_file.write_gguf(path, loaded.model.config, "llama", gguf.LlamaFileType.ALL_F32, tensors, loaded.tokenizer)
    return path


def theirs(binary: Path, model: Path, text: Path, base: Path, *, compare: bool) -> tuple[float, str]:
    """Run llama-perplexity; return its seconds and what it printed."""
    threads = str(torch.get_num_threads())
    command = [str(binary), "-m", str(model), "-f", str(text), "-c", str(WINDOW), "-t", threads]
    command += ["--kl-divergence-base", str(base), *(["--kl-divergence"] if compare else [])]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return time.perf_counter() - began, done.stdout + done.stderr


def figure(printed: str, name: str) -> float:
    """Return a figure that llama-perplexity printed."""
    found = re.search(rf"{re.escape(name)}\s*[:=]\s*([-\d.e]+)", printed)
    if found is None:
        raise SystemExit(f"llama-perplexity did not print {name!r}:\n{printed[-2000:]}")
    return float(found.group(1))


def main() -> None:
    """Time both in turn, compare what they found, and print one JSON line."""
    options = parser(str(__doc__))
    options.add_argument("--binary", type=Path, required=True, help="llama-perplexity")
    options.add_argument("--windows", type=int, default=60, help="windows of 512 tokens (default: %(default)s)")
    given = options.parse_args()
    folders = [make_model(given.work / "llama", given.data)]
    folders.append(make_variant(given.work / "variant", folders[0]))
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    ids = tokenizer("\n".join(texts(given.data))[:2_000_000])["input_ids"]
    sizes = (given.windows // 3, given.windows)
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        parts = {n: tokenizer.decode(ids[: n * WINDOW + 8]) for n in sizes}
        baseline, variant = (load_model(LoadConfig(path=str(folder), device="cpu")) for folder in folders)
        files = [write_gguf(m, place / f"{name}.gguf") for m, name in ((baseline, "base"), (variant, "variant"))]
        stores = {}
        for n, part in parts.items():
            (place / f"{n}.txt").write_text(part)
            with StateWriter(place / f"store-{n}", baseline) as writer:
                Scorer(baseline, QUIET).score_corpus("corpus", part, window=WINDOW, capture=writer)
            stores[n] = StateStore.open(place / f"store-{n}")
            theirs(given.binary, files[0], place / f"{n}.txt", place / f"{n}.base", compare=False)
        pairs = []
        for _ in range(given.runs):
            seconds = []
            for n, part in parts.items():
                their_seconds, printed = theirs(
                    given.binary, files[1], place / f"{n}.txt", place / f"{n}.base", compare=True
                )
                began = time.perf_counter()
                scores, distances = Scorer(variant, QUIET).score_corpus(
                    "corpus", part, window=WINDOW, baseline=stores[n]
                )
                seconds.append((their_seconds, time.perf_counter() - began))
            pairs.append((seconds[1][0] - seconds[0][0], seconds[1][1] - seconds[0][1]))
    kl = distances.column("kl")
    n_tokens = (sizes[1] - sizes[0]) * WINDOW
    found = {
        "benchmark": "llama_perplexity",
        "machine": machine(),
        "windows": given.windows,
        "n_scored": len(kl),
        "ppl": float(np.exp(scores.column("nll").mean())),
        "their_ppl": figure(printed, "Mean PPL(Q)"),
        "mean_kl": float(kl.mean()),
        "their_mean_kl": figure(printed, "Mean    KLD"),
        "same_top_percent": 100 * float(distances.column("same_top").mean()),
        "their_same_top_percent": figure(printed, "Same top p"),
        "their_tokens_per_s": round(n_tokens / statistics.median(a for a, _ in pairs)),
        "tokens_per_s": round(n_tokens / statistics.median(b for _, b in pairs)),
        "ratio": round(statistics.median(a / b for a, b in pairs), 2),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
