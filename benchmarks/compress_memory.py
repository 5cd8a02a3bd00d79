"""Peak memory of compressing a random model of a billion weights, whole and layer by layer from the disk.

The model has the layers of Llama-3.2-1B (hidden 2048, feed-forward 8192, 32 heads, 8 for keys) in bfloat16 and the
demo's small vocabulary: 16 layers are 0.98 billion weights, 2 GB on disk. Each row is a process of its own. "above the
libraries" is its peak resident memory less what the process had before it loaded the model. The reload check, which
runs in a process of its own, is not in it.

Example
-------
python benchmarks/compress_memory.py --work /tmp/billion
python benchmarks/compress_memory.py --work /tmp/two-layers --layers 2 --only gptq
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

FROM_DISK = {"cpu": "1MB"}  # no layer of this size fits, so that all of them stay on the disk
FEW = {"calibration_samples": "4", "calibration_length": "64"}


def make(folder: Path, layers: int) -> Path:
    """Write the model, layer by layer in memory of bfloat16, and return its folder."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from mlflow_compress import demo

    if (folder / "config.json").is_file():
        return folder
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL_DIR)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
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
    from mlflow_compress.compression import compress_model, method_config
    from mlflow_compress.compression.backends import llmcompressor_backend
    from mlflow_compress.compression.memory import peak_memory
    from mlflow_compress.models.placement import Offload

    llmcompressor_backend.load()
    with peak_memory("cpu") as before:
        pass
    texts = [(demo.DATA_DIR / "calibration.txt").read_text()]
    config = method_config(method, **(FEW if method == "gptq" else {}))
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        offload = Offload(max_memory=FROM_DISK, folder=folder)
        device = "balanced" if from_disk else "cpu"
        manifest = compress_model(
            str(model), method, config, texts, Path(folder) / "out", device=device, offload=offload
        )
    return {
        "method": method,
        "weights": "from the disk" if from_disk else "in memory",
        "model_bytes": manifest.base_size_bytes,
        "peak_bytes": manifest.peak_memory_bytes,
        "above_libraries_bytes": manifest.peak_memory_bytes - before.n_bytes,
        "reload_kl": manifest.reload["kl_max"],
        "seconds": manifest.seconds,
    }


def as_markdown(row: dict[str, Any]) -> str:
    """Return one line of the table."""
    above = row["above_libraries_bytes"]
    return (
        f"| `{row['method']}` | {row['weights']} | {row['model_bytes'] / 1e9:.2f} | {row['peak_bytes'] / 1e9:.2f} | "
        f"{above / 1e9:.2f} ({above / row['model_bytes']:.2f}x) | "
        f"{row['seconds']:.0f} |"
    )


def main() -> None:
    """Print one JSON line a row, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the model, made once, and for checkpoints")
    parser.add_argument("--layers", type=int, default=16, help="layers (default: %(default)s)")
    parser.add_argument("--only", default="rtn,gptq", help="methods, comma-separated (default: %(default)s)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    model = asked.work / f"model-{asked.layers}"
    if asked.one == "make":
        make(model, asked.layers)
        return
    if asked.one:
        method, weights = asked.one.split(":")
        print(json.dumps(measure(model, method, from_disk=weights == "disk")))
        return
    rows = []
    for step in ["make", *(f"{method}:{where}" for method in asked.only.split(",") for where in ("memory", "disk"))]:
        command = [sys.executable, __file__, "--work", str(asked.work), "--layers", str(asked.layers), "--one", step]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{step} failed:\n{done.stderr[-2000:]}")
        if step != "make":
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(json.dumps(rows[-1]), flush=True)
    print("\n| method | weights | model (GB) | peak (GB) | above the libraries (GB) | seconds |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(as_markdown(row))


if __name__ == "__main__":
    main()
