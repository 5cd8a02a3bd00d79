"""A model larger than the memory that it may take: layer by layer, batch by batch, and whole in memory.

Each way runs in a process of its own, on the same tokens of the demo's corpus, and must give the same records. Seconds
are those of scoring, without opening the model; on a busy machine compare those of the processor. Memory is the most
that the process held itself (see `anonymous_memory`) from before the model was opened until it was scored. "reads" are
bytes of weights fetched, in sizes of all decoder layers in float32.

Example
-------
python benchmarks/by_layer.py
python benchmarks/by_layer.py --hidden 2560 --layers 20 --allowed 1GB --tokens 4096
python benchmarks/by_layer.py --layers 6,12 --ways layers
python benchmarks/by_layer.py --paper
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WAYS = ("memory", "layers", "batches")


def make(folder: Path, hidden: int, layers: int) -> Path:
    """Write a random Llama in bfloat16 and return its folder."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from mlflow_compress import demo

    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL_DIR)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        bos_token_id=0,
        eos_token_id=0,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def measure(folder: Path, way: str, allowed: str, tokens: int) -> dict[str, Any]:
    """Score in this process and return seconds, memory, reads and a digest of the records."""
    from benchmarks.anonymous_memory import anonymous_peak
    from mlflow_compress import demo
    from mlflow_compress.models import offloading
    from mlflow_compress.models.loading import LoadConfig, load_model
    from mlflow_compress.scoring import engine

    text = (demo.DATA_DIR / "corpus.txt").read_text()
    text *= 1 + 8 * tokens // len(text)
    settings = engine.ScoringConfig(progress=False)
    first = engine.Scorer(load_model(LoadConfig(path=str(demo.MODEL_DIR), device="cpu")), settings)
    first.score_corpus("first", text, max_tokens=1024)  # imports, kernels: any model needs them
    fetched = 0
    fetch = offloading._Fetched.__getitem__

    def counting(weights: Any, name: str) -> Any:
        nonlocal fetched
        weight = fetch(weights, name)
        fetched += weight.nbytes
        return weight

    offloading._Fetched.__getitem__ = counting  # type: ignore[method-assign]
    if way == "batches":
        engine.body_by_layer = lambda body, room: (body, "the benchmark asks for it")
    placed: dict[str, Any] = {"device": "cpu"}
    if way != "memory":
        placed = {"device": "balanced", "max_memory": {"cpu": allowed}, "offload_dir": str(folder)}
    with anonymous_peak() as peak:
        loaded = load_model(LoadConfig(path=str(folder), **placed))
        scorer = engine.Scorer(loaded, settings)
        opening, fetched = fetched, 0
        began, computed = time.perf_counter(), time.process_time()
        scores, _ = scorer.score_corpus("c", text, max_tokens=tokens)
        seconds, computed = time.perf_counter() - began, time.process_time() - computed
    size = 4 * sum(parameter.numel() for parameter in loaded.model.model.layers.parameters())
    digest = hashlib.sha256(json.dumps(scores.table.to_pydict()).encode()).hexdigest()[:12]
    return {
        "way": way,
        "layers_gb": size / 1e9,
        "seconds": seconds,
        "cpu_seconds": computed,
        "held_gb": peak.added / 1e9,
        "reads": fetched / size,
        "reads_when_opened": opening / size,
        "records": digest,
    }


PAPER = {  # hidden size, feed-forward, layers and heads of Llama 3; 8 heads of keys, 128,256 words
    "8B": (4096, 14336, 32, 32),
    "70B": (8192, 28672, 80, 64),
    "405B": (16384, 53248, 126, 128),
}
CARDS = {"24 GB": 120e12, "80 GB": 400e12}  # operations a second in bfloat16
TOKENS, BATCH, GROUP, HOST, DISK = 1_360_000, 4096, 8, 64_000_000_000, 2.5e9


def paper() -> None:
    """Print what the formulas of `plan` say of Llama 3 on one card, for as many tokens as MMLU has with 5 shots."""
    import torch
    from transformers import LlamaConfig

    from mlflow_compress.scoring import costs

    group = (BATCH * GROUP, BATCH * GROUP)
    work = costs.Workload(tokens=TOKENS, states=((group,) * (TOKENS // group[0] + 1),))
    columns = ("", "card", "waits", "opening", "reads", "states in memory", "reading", "computing")
    sys.stdout.write(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n")
    for name, (hidden, inner, layers, heads) in PAPER.items():
        sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
        config = LlamaConfig(vocab_size=128_256, num_attention_heads=heads, num_key_value_heads=8, **sizes)
        shape = costs.model_shape(config)
        for card, flops in CARDS.items():
            room = HOST // 4
            # A tenth of a card is for activations and logits.
            memory = {0: int(0.9e9 * int(card.split()[0])), "cpu": HOST - room}
            found = costs.offloaded(config, torch.bfloat16, memory, room=room)
            seconds = costs.scoring_operations(shape, work) / flops / 60
            cells = [name, card, "nothing", "", "", "", ""]
            if found is not None:
                reads, states = found.reads(work, 2 * hidden)
                read = found.opening + reads * found.waiting
                sizes_gb = (found.waiting, found.opening, states)
                waits, opening, held = (f"{size / 1e9:,.1f} GB" for size in sizes_gb)
                cells = [name, card, waits, opening, str(reads), held, f"{read / DISK / 60:,.1f} min"]
            sys.stdout.write(f"| {' | '.join(cells)} | {seconds:,.1f} min |\n")


def main() -> None:
    """Print a JSON line for each depth and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", default="8", help="depths, comma-separated")
    parser.add_argument("--allowed", default="300MB", help="max_memory of the host")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--ways", default=",".join(WAYS), help="comma-separated")
    parser.add_argument("--paper", action="store_true", help="print what the formulas say of large models")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.paper:
        paper()
        return
    if options.measure:
        row = measure(Path(options.measure), options.ways, options.allowed, options.tokens)
        sys.stdout.write(json.dumps(row) + "\n")
        return
    for layers in map(int, options.layers.split(",")):
        with tempfile.TemporaryDirectory() as scratch:
            folder = make(Path(scratch) / "model", options.hidden, layers)
            for way in options.ways.split(","):
                given = ["--measure", str(folder), "--ways", way, "--allowed", options.allowed]
                command = [sys.executable, __file__, *given, "--tokens", str(options.tokens)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                row = json.loads(done.stdout.splitlines()[-1])
                sys.stdout.write(json.dumps({"layers": layers, **row}) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
