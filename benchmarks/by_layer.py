"""A model larger than the memory that it may take: layer by layer, batch by batch, and whole in memory.

Each way runs in a process of its own, on the same tokens of the demo's corpus, and must give the same records; then a
model of twice the depth runs layer by layer. Seconds are those of scoring, without opening the model; on a busy machine
compare those of the processor. Memory is the most that the process held itself (see `anonymous_memory`) from before the
model was opened until it was scored. Weights are read from a file in bfloat16; "reads" and "when opened" are bytes of
them fetched in float32, in sizes of all decoder layers. "waits" are the page faults for which the thread that computes
waited for the disk. `serial` is layer by layer without reading ahead; with `--cold` it has to wait.

`--plan` compares what `plan` says of three shapes with what their baseline takes, from opening the model until its
states are stored, and with what screening two variants of a method takes. The throughput that it needs
(`device_tflops`) is that of the whole model in memory on fewer items, before and after.

Example
-------
python benchmarks/by_layer.py
python benchmarks/by_layer.py --hidden 2560 --layers 14 --allowed 1GB
python benchmarks/by_layer.py --ways serial,layers --cold
python benchmarks/by_layer.py --plan
python benchmarks/by_layer.py --paper
"""

import argparse
import gc
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

WAYS = ("memory", "layers", "batches")
SHAPES = ((512, 12, "24MB"), (768, 6, "200MB"), (1024, 4, "60MB"))  # hidden size, layers, max_memory of the host
SCREENED_SHAPES = ((512, 4, "60MB"), (768, 3, "100MB"), (1024, 2, "120MB"))  # the same, where each layer is made too


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


FORMS = {  # of each method: settings of the variants that are screened, which are stored in equally many bits
    "rtn": ({"bits": 4}, {"bits": 4, "group_size": 64}),
    "magnitude": ({}, {"pattern": "2:4"}),
}


@contextmanager
def counted_bytes(folder: Path) -> Iterator[dict[str, int]]:
    """Within this block, bytes of weights that are fetched are counted as they are stored, and files of forms."""
    from mlflow_compress.compression import one_layer
    from mlflow_compress.models import offloading

    counted = {"fetched": 0, "written": 0}
    fetch, make = offloading._Fetched.__getitem__, one_layer.write_compressed

    def fetching(weights: Any, name: str) -> Any:
        weight = fetch(weights, name)
        counted["fetched"] += weight.nbytes // 2  # stored in bfloat16
        return weight

    def making(*given: Any) -> Any:
        made = make(*given)
        counted["written"] += sum(file.stat().st_size for file in folder.glob("scratch/*/*/*.safetensors"))
        return made

    offloading._Fetched.__getitem__ = fetching  # type: ignore[method-assign]
    one_layer.write_compressed = making
    try:
        yield counted
    finally:
        offloading._Fetched.__getitem__ = fetch  # type: ignore[method-assign]
        one_layer.write_compressed = make


def check(folder: Path, allowed: str, method: str) -> dict[str, Any]:
    """Return what `plan` says and what it took in this process, each as a pair: of a baseline, and of screening.

    With a `method`, two variants of it are screened; the baseline's states are then there before.
    """
    from anonymous_memory import anonymous_peak

    import mlflow_compress as mc
    from mlflow_compress import demo
    from mlflow_compress.commands.evaluate.outputs import run_model
    from mlflow_compress.commands.plan.run import scored_work
    from mlflow_compress.compression import one_layer
    from mlflow_compress.compression.method import method_config
    from mlflow_compress.items.suite import load_suite
    from mlflow_compress.items.task import TaskSettings
    from mlflow_compress.models import offloading
    from mlflow_compress.models.loading import LoadConfig, load_model
    from mlflow_compress.models.source_model import resolve
    from mlflow_compress.scoring import costs, engine
    from mlflow_compress.scoring.baseline_store import StateStore, StateWriter

    settings, states = engine.ScoringConfig(progress=False), folder / "states"

    def suite(limit: int) -> Any:
        return load_suite(tasks, model=str(folder), settings=TaskSettings(limit=limit))

    def known_seconds() -> float:
        scorer = in_memory()
        run_model(scorer, suite(1))  # compiles the kernels
        began = time.process_time()
        run_model(scorer, suite(4))
        return time.process_time() - began

    def in_memory() -> engine.Scorer:
        return engine.Scorer(load_model(LoadConfig(path=str(folder), device="cpu")), settings)

    def capture(scorer: engine.Scorer) -> None:
        with StateWriter(states, scorer.loaded) as writer:
            run_model(scorer, asked, capture=writer)

    offloading.return_freed_memory()
    tasks = str(demo.DATA_DIR / "choice.jsonl")
    before, asked = known_seconds(), suite(12)
    balanced: dict[str, Any] = {"device": "balanced", "max_memory": {"cpu": allowed}, "offload_dir": str(folder)}
    if variants := [method_config(method, **given) for given in FORMS.get(method, ())]:
        capture(in_memory())
        (folder / "scratch").mkdir(exist_ok=True)
        one_layer.seconds_of_a_form(method, variants[0])  # imports
    gc.collect()  # what is left of models before is not freed meanwhile
    began = time.process_time()
    with counted_bytes(folder) as counted, anonymous_peak() as peak:
        loaded = load_model(LoadConfig(path=str(folder), **balanced))
        if variants:
            maker = one_layer.LayerMaker(loaded, resolve(str(folder)), folder / "scratch")
            forms = [maker.forms(method, given) for given in variants]
            for scorer in engine.scorers_of_forms(loaded, forms, settings):
                run_model(scorer, asked, baseline=StateStore.open(states), generations=False)
        else:
            scorer = engine.Scorer(loaded, settings)
            capture(scorer)
    seconds = time.process_time() - began
    written = counted["written"] + sum(file.stat().st_size for file in states.iterdir()) * (not variants)
    shape = costs.model_shape(scorer.loaded.configuration())
    work = scored_work(suite(4), scorer.encoder, **engine.default_limits(shape.vocabulary, on_gpu=False))
    flops = 2 * costs.scoring_operations(shape, work) / (before + known_seconds())
    given = {"device": "balanced", "max_memory": f"cpu={allowed}", "machine_args": {"device_tflops": flops / 1e12}}
    if variants:
        given |= {"method": method, "bits": 4 if method == "rtn" else 16, "variants": len(variants), "save": "passing"}
    plan = mc.plan(model=str(folder), tasks=tasks, limit=12, task_args={"noise_items": 0}, judge=False, **given)
    planned = next(stage for stage in plan.stages if stage.stage == ("screen" if variants else "baseline"))
    whole = sum(file.stat().st_size for file in (states if variants else folder).glob("*.safetensors"))
    pairs = {
        "seconds": (planned.seconds, seconds),
        "memory (MB)": (planned.memory / 1e6, peak.added / 1e6),
        "read (MB)": (planned.bytes_read / 1e6, (whole + counted["fetched"]) / 1e6),
        "written (MB)": (planned.bytes_written / 1e6, written / 1e6),
    }
    return {
        "screened": method,
        "reads": planned.reads,
        "gflops": flops / 1e9,
        **{name: f"{said:.1f} / {took:.1f} = {said / took:.2f}" for name, (said, took) in pairs.items()},
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
    parser.add_argument(
        "--screened", default="none,rtn,magnitude", help="with --plan: methods of screened variants; none: the baseline"
    )
    parser.add_argument("--paper", action="store_true", help="print what the formulas say of large models")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--check", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if options.paper:
            paper()
        elif options.measure:
            folder, way, allowed, tokens = options.measure
            row = measure(Path(folder), way, allowed, int(tokens), options.cold)
            sys.stdout.write(json.dumps(row) + "\n")
        elif options.check:
            sys.stdout.write(json.dumps(check(Path(options.check[0]), *options.check[1:])) + "\n")
        elif options.plan:
            for method in options.screened.split(","):
                shapes = SHAPES if method == "none" else SCREENED_SHAPES
                for hidden, layers, allowed in shapes:
                    folder = make(Path(scratch) / f"{method}-{hidden}", hidden, layers)
                    row = child("--check", str(folder), allowed, method)
                    row = {"hidden": hidden, "layers": layers, "max_memory": allowed, **row}
                    show(row, head=hidden == shapes[0][0])
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
