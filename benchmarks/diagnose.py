"""What keeping the baseline's states saves `diagnose`: the table with only the layers behind each swap, and with all.

Two models: the embedded demo (5 layers), and a random Llama with the demo's tokenizer, width and vocabulary but more
layers. The variant has its matrices rounded to 15 levels a row. Both ways run in turn in one process; processor seconds
are compared, because other work on the machine does not count there. The two tables must have the same bits.

Example
-------
OMP_NUM_THREADS=2 python benchmarks/diagnose.py --rounds 3
OMP_NUM_THREADS=2 python benchmarks/diagnose.py --command  # wall time of `diagnose` on the demo
"""

import argparse
import copy
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mlflow_compress import demo
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.models.weight_groups import find_differences
from mlflow_compress.scoring.plan.corpus_windows import Windows, cut_windows
from mlflow_compress.scoring.plan.encoding import Encoder
from mlflow_compress.scoring.swap_meter import Swap, SwapMeter


def rounded(loaded: LoadedModel) -> LoadedModel:
    """Return the model with the matrices of its layers rounded to 15 levels a row."""
    model = copy.deepcopy(loaded.model)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and "layers" in name:
                step = module.weight.abs().amax(1, keepdim=True).clamp_min(1e-9) / 7
                module.weight.copy_((module.weight / step).round() * step)
    return LoadedModel(model, loaded.tokenizer, loaded.path, loaded.dtype, loaded.device)


def deeper(loaded: LoadedModel, layers: int) -> LoadedModel:
    """Return a random Llama of the demo's shape with so many layers."""
    torch.manual_seed(0)
    config = LlamaConfig(**{**loaded.model.config.to_dict(), "num_hidden_layers": layers, "dtype": "float32"})
    model = LlamaForCausalLM(config).eval()
    return LoadedModel(model, loaded.tokenizer, loaded.path, torch.float32, torch.device("cpu"))


def texts(loaded: LoadedModel, tokens: int, window: int) -> Windows:
    """Return the first texts of the demo's corpus, of which every token but the first is scored."""
    text = (demo.DATA_DIR / "corpus.txt").read_text(encoding="utf-8")
    ids = cut_windows(Encoder(loaded.tokenizer, loaded.max_length), text, window, tokens).ids
    return Windows(ids, [np.arange(1, window)] * len(ids))


def compare(loaded: LoadedModel, windows: Windows, rounds: int) -> dict[str, object]:
    """Return the median processor seconds of both ways, their ratio in each round, and whether the bits are equal."""
    variant = rounded(loaded)
    found = find_differences(loaded.model, variant.model)
    swaps = [Swap.of(group, variant.model) for group in found.groups]
    meters = {way: SwapMeter(loaded, suffix_only=way == "suffix", progress=False) for way in ("suffix", "full")}
    first = Windows(windows.ids[:1], windows.scored[:1])
    for meter in meters.values():  # compiles the kernels
        meter.measure("warm", first, swaps[:1])
    seconds: dict[str, list[float]] = {way: [] for way in meters}
    tables = {}
    for number in range(rounds):
        for way in sorted(meters, reverse=bool(number % 2)):
            began = time.process_time()
            tables[way] = meters[way].measure("t", windows, swaps).table
            seconds[way].append(time.process_time() - began)
    ratios = [a / b for a, b in zip(seconds["suffix"], seconds["full"], strict=True)]
    return {
        "groups": len(swaps),
        "layers": int(loaded.model.config.num_hidden_layers),
        "tokens": sum(map(len, windows.ids)),
        "suffix_s": round(statistics.median(seconds["suffix"]), 2),
        "full_s": round(statistics.median(seconds["full"]), 2),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "same_bits": tables["suffix"].equals(tables["full"]),
    }


def command(folder: Path) -> dict[str, object]:
    """Return the wall seconds of the whole command on the demo, with compression, noise controls and all items."""
    code = (
        "import mlflow_compress as mc;"
        f"d = mc.diagnose(method='gptq', bits=4, store={str(folder)!r});"
        "print(d.found.whole.value, d.found.additivity.value, d.found.no_swap, d.seconds)"
    )
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    kl, additivity, no_swap, measuring = map(float, done.stdout.split()[-4:])
    wall = round(time.perf_counter() - began, 1)
    return {"wall_s": wall, "measuring_s": measuring, "kl": kl, "additivity": additivity, "no_swap": no_swap}


def main() -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16, help="of the random model")
    parser.add_argument("--command", action="store_true")
    given = parser.parse_args()
    where = {"processor": platform.processor(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    if given.command:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps({"command": command(Path(folder) / "store"), **where}))
        return
    loaded = load_model(LoadConfig(path=str(demo.MODEL_DIR), device="cpu"))
    windows = texts(loaded, given.tokens, given.window)
    found = {
        "demo": compare(loaded, windows, given.rounds),
        "random": compare(deeper(loaded, given.layers), windows, given.rounds),
    }
    print(json.dumps({**found, **where}))


if __name__ == "__main__":
    main()
