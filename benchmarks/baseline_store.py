"""Write and read back a baseline store: megabytes a second, and its size beside the bare states.

Example
-------
python benchmarks/baseline_store.py --data HUB_FOLDER --work /tmp/benchmark
"""

import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from setting import machine, make_model, parser

from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.scoring.baseline_store import HEAD_FILE, StateStore, StateWriter

N_TOKENS, CHUNK = 100_000, 512


def write(folder: Path, loaded: LoadedModel, states: torch.Tensor, logits: torch.Tensor) -> float:
    """Return the seconds of writing every state with its key, digests and fsync included.

    The first chunk is not in them: with it the head is stored and checked. Nor is the end, when the model's weights are
    hashed. Both are done once a model, however many tokens there are.
    """
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 256, (len(states), 16), dtype=np.uint8)
    targets = rng.integers(0, 32_000, len(states), dtype=np.int32)
    with StateWriter(folder, loaded) as writer:
        writer.begin({"batch_tokens": CHUNK, "head_rows": CHUNK}, label="corpus", path="plain", plan="none")
        began = time.perf_counter()
        for i in range(0, len(states), CHUNK):
            part = slice(i, i + CHUNK)
            writer.append(i, states[part], logits, keys[part], targets[part])
            if i == 0:
                began = time.perf_counter()
        writer.adopt([writer.take()])
        return time.perf_counter() - began


def read(folder: Path, states: torch.Tensor) -> float:
    """Return the seconds of reading every state, every digest checked; fail if one differs."""
    began = time.perf_counter()
    store = StateStore.open(folder)
    found = [store.states(np.arange(i, min(i + CHUNK, len(states)))) for i in range(0, len(states), CHUNK)]
    seconds = time.perf_counter() - began
    if not torch.equal(torch.cat(found), states):
        raise SystemExit("What was read is not what was written")
    return seconds


def main() -> None:
    """Write and read `--runs` times, and print one JSON line."""
    given = parser(str(__doc__)).parse_args()
    loaded = load_model(LoadConfig(path=str(make_model(given.work / "llama", given.data)), device="cpu"))
    states = torch.randn(N_TOKENS, loaded.model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = loaded.model.get_output_embeddings()(states[:CHUNK])
    bare = states.numel() * states.element_size()
    writes, reads = [], []
    for _ in range(given.runs):
        with tempfile.TemporaryDirectory(dir=given.work) as name:
            folder = Path(name) / "store"
            writes.append(write(folder, loaded, states, logits))
            reads.append(read(folder, states))
            stored = sum(f.stat().st_size for f in folder.iterdir() if f.name != HEAD_FILE)
    result = {
        "benchmark": "baseline_store",
        "machine": machine(),
        "tokens": N_TOKENS,
        "size_ratio": round(stored / bare, 4),
        "write_mb_per_s": round(bare / 1e6 / statistics.median(writes)),
        "read_mb_per_s": round(bare / 1e6 / statistics.median(reads)),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
