"""Peak memory of compressing a random model of a billion weights, whole and layer by layer from the disk.

The model has the layers of Llama-3.2-1B (hidden 2048, feed-forward 8192, 32 heads, 8 for keys) in bfloat16 and the
demo's small vocabulary: 16 layers are 0.98 billion weights, 2 GB on disk; `--hidden` makes it narrower. Each row is a
process of its own. "above the libraries" is the most anonymous memory that it held (see `anonymous_memory.py`), less
what it held before it loaded the model. "resident" is the peak with pages of mapped files and with the libraries. The
reload check, which runs in a process of its own, is in neither. With several depths the last lines say what a further
layer costs.

Example
-------
python benchmarks/compress_memory.py --work /tmp/billion
python benchmarks/compress_memory.py --work /tmp/depths --layers 4,12 --only rtn --weights disk
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.anonymous_memory import anonymous_peak

FROM_DISK = {"cpu": "1MB"}  # no layer of this size fits, so that all of them stay on the disk
FEW = {"calibration_samples": "4", "calibration_length": "64"}


def make(folder: Path, layers: int, hidden: int) -> Path:
    """Write the model, layer by layer in memory of bfloat16, and return its folder."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from mlflow_compress import demo

    if (folder / "config.json").is_file():
        return folder
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL_DIR)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 256,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=0,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def measure(model: Path, method: str, *, from_disk: bool) -> dict[str, Any]:
    """Compress the model in this process, and return bytes and seconds."""
    from mlflow_compress import demo
    from mlflow_compress.compression import METHODS, compress_model, method_config
    from mlflow_compress.compression.backends import llmcompressor_backend
    from mlflow_compress.models.placement import Offload

    llmcompressor_backend.load_for_llmcompressor()
    texts = [(demo.DATA_DIR / "calibration.txt").read_text()]
    config = method_config(method, **(FEW if METHODS.get(method).needs_calibration else {}))
    with tempfile.TemporaryDirectory(dir=model.parent) as folder, anonymous_peak() as peak:
        offload = Offload(max_memory=FROM_DISK, folder=folder)
        device = "balanced" if from_disk else "cpu"
        manifest = compress_model(
            str(model), method, config, texts, Path(folder) / "out", device=device, offload=offload
        )
    return {
        "method": method,
        "weights": "from the disk" if from_disk else "in memory",
        "layers": json.loads((model / "config.json").read_text())["num_hidden_layers"],
        "model_bytes": manifest.base_size_bytes,
        "added_bytes": peak.added,
        "resident_bytes": manifest.peak_memory_bytes,
        "reload_kl": manifest.reload["kl_max"],
        "seconds": manifest.seconds,
    }


def as_markdown(row: dict[str, Any]) -> str:
    """Return one line of the table."""
    size, added = row["model_bytes"], row["added_bytes"]
    return (
        f"| `{row['method']}` | {row['weights']} | {row['layers']} | {size / 1e9:.2f} | "
        f"**{added / 1e9:.2f}** ({added / size:.2f}x) | {row['resident_bytes'] / 1e9:.2f} | {row['seconds']:.0f} |"
    )


def slope(rows: list[dict[str, Any]]) -> str:
    """Return what a further layer adds to the peak, from the least and the greatest depth."""
    few, many = min(rows, key=lambda row: row["layers"]), max(rows, key=lambda row: row["layers"])
    layers = many["layers"] - few["layers"]
    added = (many["added_bytes"] - few["added_bytes"]) / layers
    stored = (many["model_bytes"] - few["model_bytes"]) / layers
    return (
        f"`{few['method']}`, {few['weights']}: a further layer of {stored / 1e6:.1f} MB ({2 * stored / 1e6:.1f} MB in "
        f"float32) adds {added / 1e6:.1f} MB"
    )


def main() -> None:
    """Print one JSON line a row, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the models, made once, and checkpoints")
    parser.add_argument("--layers", default="16", help="numbers of layers, comma-separated (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=2048, help="width, a multiple of 256 (default: %(default)s)")
    parser.add_argument("--only", default="rtn,gptq", help="methods, comma-separated (default: %(default)s)")
    parser.add_argument("--weights", default="memory,disk", help="where weights are (default: %(default)s)")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        method, layers, where = asked.one
        model = make(asked.work / f"model-{layers}-{asked.hidden}", int(layers), asked.hidden)
        if method != "make":
            print(json.dumps(measure(model, method, from_disk=where == "disk")))
        return
    rows = []
    depths, methods, places = (text.split(",") for text in (asked.layers, asked.only, asked.weights))
    cases = [(method, depth, place) for method in methods for place in places for depth in depths]
    for step in [*(("make", depth, "") for depth in depths), *cases]:
        command = [sys.executable, __file__, "--work", str(asked.work), "--hidden", str(asked.hidden)]
        command += ["--one", *step]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{step} failed:\n{done.stderr[-2000:]}")
        if step[0] != "make":
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(json.dumps(rows[-1]), flush=True)
    print("\n| method | weights | layers | model (GB) | above the libraries (GB) | resident (GB) | seconds |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(as_markdown(row))
    if len(depths) > 1:
        print()
        for number in range(0, len(rows), len(depths)):
            print(slope(rows[number : number + len(depths)]))


if __name__ == "__main__":
    main()
