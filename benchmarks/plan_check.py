"""Does `plan` predict what a pass really takes? Rows, bytes of states, memory and seconds, side by side.

    OMP_NUM_THREADS=1 python benchmarks/plan_check.py [--work DIR --data HUB] [--items N]

The demo is planned and scored; with `--work` and `--data` the random Llama of 59 million parameters too. Each model is
scored twice, in a process each: as a baseline whose states are stored, and against that store. The throughput that the
prediction needs (`device_tflops` of `plan`) is measured before and after, on other items; that of a bare product of
matrices as wide as the model is printed beside it. Seconds are processor time, so that other work disturbs less.
Memory is what the pass itself holds at its peak, above libraries, items and weights: anonymous memory (Linux), where
freed blocks go back to the system. By default the C library keeps many of them for later, so that a process takes more.
"""

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import setting
import torch
from anonymous_memory import anonymous_peak

from mlflow_compress import demo
from mlflow_compress.commands.evaluate.outputs import run_model
from mlflow_compress.commands.plan.run import scored_work
from mlflow_compress.items.suite import Suite, load_suite
from mlflow_compress.items.task import TaskSettings
from mlflow_compress.kept import keeping
from mlflow_compress.models.loading import LoadConfig, load_model
from mlflow_compress.models.offloading import return_freed_memory
from mlflow_compress.scoring import costs as formulas
from mlflow_compress.scoring.baseline_store import StateStore, StateWriter
from mlflow_compress.scoring.costs import ModelShape, model_shape
from mlflow_compress.scoring.engine import Scorer, ScoringConfig, default_limits

Spec = tuple[str, int, int]
SIZES: dict[str, tuple[Spec, Spec]] = {  # tasks, items a category, shots: of the throughput, and of the prediction
    "demo": (("auto", 60, 0), ("auto", 100, 5)),
    "llama-59m": (("arc_easy", 200, 0), ("mmlu,piqa", 30, 5)),
}


def suite_of(model: str, spec: Spec, data: str) -> Suite:
    """Return the suite of a specification."""
    tasks, limit, shots = spec
    return load_suite(tasks, model=model, settings=TaskSettings(seed=1, limit=limit, num_fewshot=shots, data_dir=data))


def give_back() -> None:
    """Give freed memory back to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def product_flops(shape: ModelShape, tokens: int) -> float:
    """Return the operations a second of matrix products as wide as the model, of as many rows as a batch."""
    states, weight = torch.randn(tokens, shape.hidden), torch.randn(3 * shape.hidden, shape.hidden)
    began, done = time.process_time(), 0
    while (spent := time.process_time() - began) < 1:
        torch.nn.functional.linear(states, weight)
        done += 2 * states.numel() * len(weight)
    return done / spent


def pass_seconds(scorer: Scorer, suite: Suite) -> float:
    """Return the processor time of scoring a suite."""
    began = time.process_time()
    run_model(scorer, suite, generations=False)
    return time.process_time() - began


def score(model: str, folder: str, data: str, items: str, store: str) -> dict[str, object]:
    """Score one model, as a baseline if there is no store yet, and return predicted and measured figures."""
    states, captures = Path(store), not Path(store).exists()
    (tasks, _, _), (others, most, shots) = SIZES[model]
    specs = ((tasks, 2, 0), SIZES[model][0], (others, int(items) or most, shots))
    return_freed_memory()
    warm, known, asked = (suite_of(model, spec, data) for spec in specs)
    loaded = load_model(LoadConfig(path=folder, device="cpu", dtype="float32"))
    shape = model_shape(loaded.model.config)
    limits, scoring = default_limits(shape.vocabulary, on_gpu=False), ScoringConfig(progress=False)
    scorer = Scorer(loaded, scoring)
    run_model(scorer, warm, generations=False)  # compiles the kernels
    work = scored_work(asked, scorer.encoder, **limits)
    first = scored_work(known, scorer.encoder, **limits)
    before = pass_seconds(scorer, known)
    scorer = Scorer(loaded, scoring)  # a scorer keeps the memory of its products, which is part of what a pass needs
    give_back()
    began, heads = time.process_time(), 1 if captures else 2
    with anonymous_peak() as peak:
        if captures:
            with StateWriter(states, loaded) as writer:
                run_model(scorer, asked, generations=False, capture=writer)
        else:
            run_model(scorer, asked, generations=False, baseline=StateStore.open(states, baseline=loaded))
    seconds = time.process_time() - began
    flops = 2 * formulas.scoring_operations(shape, first) / (before + pass_seconds(scorer, known))
    size = formulas.states_bytes(shape, work, 4)
    memory = formulas.scoring_memory(shape, work, 4, weights=0.0, heads=heads, captures=captures)
    pairs = {
        "rows": (work.rows, StateStore.open(states).n_rows),
        "bytes of states": (size, sum(f.stat().st_size for f in states.iterdir())),
        "seconds": (formulas.scoring_operations(shape, work, heads=heads) / flops, seconds),
        "memory": (memory, peak.added),
    }
    return {
        "model": model,
        "pass": "baseline" if captures else "variant",
        "tokens": work.tokens,
        "gflops of other items": round(flops / 1e9, 1),
        "gflops of a product": round(product_flops(shape, limits["batch_tokens"]) / 1e9, 1),
        **{name: [round(a, 2), round(b, 2), f"ratio {a / b:.3f}"] for name, (a, b) in pairs.items()},
    }


def main() -> None:
    """Check each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder for the random model, made once")
    parser.add_argument("--data", type=Path, help="folder of data sets in hub layout")
    parser.add_argument("--items", type=int, default=0, help="items a category to predict (default: 100 and 30)")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        with keeping():  # the tokens of the items
            print(json.dumps(score(*given.one)))
        return
    models = [("demo", str(demo.MODEL_DIR), "")]
    if given.work and given.data:
        folder = setting.make_model(given.work / "model", given.data)
        models.append(("llama-59m", str(folder), str(given.data.resolve())))
    for model in models:
        with tempfile.TemporaryDirectory() as store:
            for _ in range(2):
                command = [sys.executable, __file__, "--one", *model, str(given.items), f"{store}/states"]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                print(
                    json.dumps({**json.loads(done.stdout.splitlines()[-1]), "machine": setting.machine()}), flush=True
                )


if __name__ == "__main__":
    main()
