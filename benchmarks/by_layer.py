"""A model larger than the memory that it may take: layer by layer, batch by batch, and whole in memory.

Each way runs in a process of its own, on the same tokens of the demo's corpus, and must give the same records; then a
model of twice the depth runs layer by layer. Seconds are those of scoring, without opening the model; on a busy machine
compare those of the processor. Memory is the most that the process held itself (see `anonymous_memory`) from before the
model was opened until it was scored. Weights are read from a file in bfloat16; "reads" and "when opened" are bytes of
them fetched in float32, in sizes of all decoder layers. "waits" are the page faults for which the thread that computes
waited for the disk. `serial` is layer by layer without reading ahead; with `--cold` it has to wait.

`--plan` compares what `plan` says of three shapes with what their baseline takes, from opening the model until its
states are stored. The throughput that it needs (`device_tflops`) is that of the whole model in memory on fewer items,
before and after.

Example
-------
python benchmarks/by_layer.py
python benchmarks/by_layer.py --hidden 2560 --layers 14 --allowed 1GB
python benchmarks/by_layer.py --ways serial,layers --cold
python benchmarks/by_layer.py --plan
python benchmarks/by_layer.py --paper
"""

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

WAYS = ("memory", "layers", "batches")
SHAPES = ((512, 12, "24MB"), (768, 6, "200MB"), (1024, 4, "60MB"))  # hidden size, layers, max_memory of the host


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


def measure(folder: Path, way: str, allowed: str, tokens: int, cold: bool) -> dict[str, Any]:
    """Score in this process and return seconds, memory, reads and a digest of the records.

    If `cold`, the system forgets before what it has in memory of the weights' file.
    """
    from anonymous_memory import anonymous_peak

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
    if way == "serial":
        offloading.read_ahead = lambda layer: nullcontext()
    placed: dict[str, Any] = {"device": "cpu"}
    if way != "memory":
        placed = {"device": "balanced", "max_memory": {"cpu": allowed}, "offload_dir": str(folder)}
    with anonymous_peak() as peak:
        loaded = load_model(LoadConfig(path=str(folder), **placed))
        scorer = engine.Scorer(loaded, settings)
        opening, fetched = fetched, 0
        if cold:
            with (folder / "model.safetensors").open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        waited = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
        began, computed = time.perf_counter(), time.process_time()
        scores, _ = scorer.score_corpus("c", text, max_tokens=tokens)
        seconds, computed = time.perf_counter() - began, time.process_time() - computed
        waited = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt - waited
    size = 4 * sum(parameter.numel() for parameter in loaded.model.model.layers.parameters())
    digest = hashlib.sha256(json.dumps(scores.table.to_pydict()).encode()).hexdigest()[:12]
    return {
        "way": way,
        "layers (GB)": size / 1e9,
        "processor seconds": computed,
        "seconds": seconds,
        "held (GB)": peak.added / 1e9,
        "fetched (GB)": fetched / 1e9,
        "reads": fetched / size,
        "when opened": opening / size,
        "waits": waited,
        "records": digest,
    }


def check(folder: Path, allowed: str) -> dict[str, Any]:
    """Return what `plan` says of a baseline and what it took in this process, each as a pair."""
    from anonymous_memory import anonymous_peak

    import mlflow_compress as mc
    from mlflow_compress import demo
    from mlflow_compress.commands.evaluate.outputs import run_model
    from mlflow_compress.commands.plan.run import scored_work
    from mlflow_compress.items.suite import load_suite
    from mlflow_compress.items.task import TaskSettings
    from mlflow_compress.models import offloading
    from mlflow_compress.models.loading import LoadConfig, load_model
    from mlflow_compress.scoring import costs, engine
    from mlflow_compress.scoring.baseline_store import StateWriter

    def placed(**given: Any) -> engine.Scorer:
        return engine.Scorer(load_model(LoadConfig(path=str(folder), **given)), engine.ScoringConfig(progress=False))

    def suite(limit: int) -> Any:
        return load_suite(tasks, model=str(folder), settings=TaskSettings(limit=limit))

    def known_seconds() -> float:
        scorer = placed(device="cpu")
        run_model(scorer, suite(1))  # compiles the kernels
        began = time.process_time()
        run_model(scorer, suite(4))
        return time.process_time() - began

    offloading.return_freed_memory()
    tasks = str(demo.DATA_DIR / "choice.jsonl")
    before, asked = known_seconds(), suite(12)
    began = time.process_time()
    with anonymous_peak() as peak:
        scorer = placed(device="balanced", max_memory={"cpu": allowed}, offload_dir=str(folder))
        with StateWriter(folder / "states", scorer.loaded) as writer:
            run_model(scorer, asked, capture=writer)
    seconds = time.process_time() - began
    shape = costs.model_shape(scorer.loaded.configuration())
    work = scored_work(suite(4), scorer.encoder, **engine.default_limits(shape.vocabulary, on_gpu=False))
    flops = 2 * costs.scoring_operations(shape, work) / (before + known_seconds())
    given: dict[str, Any] = {
        "device": "balanced",
        "max_memory": f"cpu={allowed}",
        "machine_args": {"device_tflops": flops / 1e12},
    }
    planned = mc.plan(
        model=str(folder), tasks=tasks, limit=12, task_args={"noise_items": 0}, judge=False, **given
    ).stages[0]
    pairs = {"seconds": (planned.seconds, seconds), "memory (MB)": (planned.memory / 1e6, peak.added / 1e6)}
    text = {name: f"{said:.1f} / {took:.1f} = {said / took:.2f}" for name, (said, took) in pairs.items()}
    return {"reads": planned.reads, "gflops": flops / 1e9, **text}


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


def child(*arguments: str) -> dict[str, Any]:
    """Return what this file prints in a process of its own."""
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def show(row: dict[str, Any], *, head: bool) -> None:
    """Print a row of a table."""
    cells = [f"{value:,.2f}" if isinstance(value, float) else str(value) for value in row.values()]
    titles = f"| {' | '.join(row)} |\n|{'---|' * len(row)}\n" if head else ""
    sys.stdout.write(f"{titles}| {' | '.join(cells)} |\n")
    sys.stdout.flush()


def main() -> None:
    """Print a table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--allowed", default="300MB", help="max_memory of the host")
    parser.add_argument("--tokens", default="4096")
    parser.add_argument("--ways", default=",".join((*WAYS, "deep")), help="comma-separated")
    parser.add_argument(
        "--cold", action="store_true", help="read the weights from the disk, not from the system's cache"
    )
    parser.add_argument("--plan", action="store_true", help="compare `plan` with what three shapes take")
    parser.add_argument("--paper", action="store_true", help="print what the formulas say of large models")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--check", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if options.paper:
            paper()
        elif options.measure:
            folder, way, allowed, tokens = options.measure
            row = measure(Path(folder), way, allowed, int(tokens), options.cold)
            sys.stdout.write(json.dumps(row) + "\n")
        elif options.check:
            sys.stdout.write(json.dumps(check(Path(options.check[0]), options.check[1])) + "\n")
        elif options.plan:
            for hidden, layers, allowed in SHAPES:
                folder = make(Path(scratch) / str(hidden), hidden, layers)
                row = {"hidden": hidden, "layers": layers, "max_memory": allowed, **child("--check", folder, allowed)}
                show(row, head=hidden == SHAPES[0][0])
        else:
            cold, first, models = ["--cold"] if options.cold else [], None, {}
            for way in options.ways.split(","):
                layers = options.layers * (1 + (way == "deep"))
                if layers not in models:
                    models[layers] = make(Path(scratch) / str(layers), options.hidden, layers)
                given = (models[layers], "layers" if way == "deep" else way, options.allowed, options.tokens)
                row = {"depth": layers, **child("--measure", *map(str, given), *cold)}
                head, first = first is None, first or row
                row["of the first"] = row["processor seconds"] / first["processor seconds"]
                show(row, head=head)


if __name__ == "__main__":
    main()
