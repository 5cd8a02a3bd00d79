"""Every compression method on the demonstration model: seconds, peak memory, bytes and KL in one table.

Each variant is made in a process of its own, so that its peak memory is not that of the ones before. The KL is the mean
over 4,096 held-out tokens of the demo's corpus, in nats, both models in float32. Where a method rounds weights and
activations, a second table has the KL of each alone, and their interaction: what both cost beyond the sum.

Example
-------
python benchmarks/methods.py
python benchmarks/methods.py --only rtn,gptq,awq
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROWS, LENGTH = 16, 256
SCHEMES = ("nvfp4", "mxfp4", "mxfp8", "w4a8", "w4afp8", "fp8-block")

VARIANTS: list[tuple[str, dict[str, str]]] = [
    ("none", {}),
    ("fp16", {}),
    *((method, {"bits": bits}) for method in ("rtn", "gptq") for bits in ("8", "4", "3", "2")),
    *(("gptq", {"bits": bits, "backend": "gptqmodel"}) for bits in ("8", "4", "3", "2")),
    *(("awq", {"bits": bits}) for bits in ("8", "4", "3")),
    *(("autoround", {"bits": bits, "iters": "50"}) for bits in ("8", "4", "3", "2")),
    *(("awq", {"bits": bits, "backend": "gptqmodel"}) for bits in ("4", "3")),
    *(("hqq", {"bits": bits}) for bits in ("8", "4", "3", "2")),
    ("bnb-int8", {}),
    *((method, {"double_quant": on}) for method in ("bnb-nf4", "bnb-fp4") for on in ("false", "true")),
    ("torchao-int8", {}),
    ("torchao-int8", {"activations": "dynamic"}),
    *(("gguf", {"bits": bits}) for bits in ("8", "5", "4")),
    *((method, {"bits": bits}) for method in ("gguf-k", "gguf-imatrix") for bits in ("6", "5", "4", "3", "2")),
    ("w8a8", {}),
    ("smoothquant", {}),
    ("fp8", {}),
    *((method, {"activations": on}) for method in SCHEMES for on in ("true", "false")),
    *((method, {"scheme": scheme}) for method in ("gptq", "awq") for scheme in ("nvfp4", "mxfp4", "w4a8")),
    *(
        (method, settings)
        for method in ("magnitude", "wanda", "sparsegpt")
        for settings in ({"sparsity": "0.5"}, {"pattern": "2:4"})
    ),
    ("layer-drop", {}),
    ("layer-drop-angular", {}),
    ("slicegpt", {"slicing": "0.125"}),
    ("slicegpt", {"slicing": "0.25"}),
    *(("kv-cache", {"key_bits": bits, "value_bits": bits}) for bits in ("8", "4", "3", "2", "fp8")),
    *(("kv-cache", {"key_bits": keys, "value_bits": values}) for keys, values in (("4", "16"), ("16", "4"))),
    *(("kv-cache", {"key_bits": bits, "value_bits": bits, "keys_per": "channel"}) for bits in ("4", "2")),
    ("kv-cache-fp8", {}),
    ("gaussian-noise", {}),
]


def missing(method: str, settings: dict[str, str]) -> str | None:
    """Return the extra that a variant needs and that is not installed, or None."""
    from mlflow_compress.compression import METHODS, method_config
    from mlflow_compress.errors import MissingDependencyError

    config = method_config(method, **settings)
    try:
        METHODS.get(method).require_backend(config)
    except MissingDependencyError:
        return METHODS.get(method).packages(config)[1]
    return None


def measure(method: str, settings: dict[str, str]) -> dict[str, Any]:
    """Compress the demonstration model and return one row of the table."""
    import torch
    from compressed_tensors.quantization import disable_quantization, enable_quantization
    from transformers import AutoTokenizer

    from mlflow_compress import demo
    from mlflow_compress.compression import METHODS, compress_model, method_config
    from mlflow_compress.models.loading import LoadConfig, load_model

    calibration = [(demo.DATA_DIR / "calibration.txt").read_text()]
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL_DIR)
    ids = tokenizer((demo.DATA_DIR / "corpus.txt").read_text())["input_ids"][: ROWS * LENGTH]
    batch = torch.tensor(ids).reshape(ROWS, LENGTH)

    def log_probs(model: Any) -> torch.Tensor:
        with torch.inference_mode():
            return torch.log_softmax(model(input_ids=batch).logits.double(), dim=-1)

    def kl(model: Any) -> float:
        return float((p.exp() * (p - log_probs(model))).sum(-1).mean())

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        config = method_config(method, **settings)
        manifest = compress_model(str(demo.MODEL_DIR), method, config, calibration, out)
        base, variant = (load_model(LoadConfig(path=str(path), device="cpu")).model for path in (demo.MODEL_DIR, out))
    p, alone = log_probs(base), {}
    both = kl(variant)
    if METHODS.get(method).rounds(config) and method in (*SCHEMES, "w8a8", "fp8"):  # others move scales or layers too
        layers = {n: m for n, m in variant.named_modules() if hasattr(m, "quantization_scheme")}
        variant.apply(disable_quantization)  # the weights stay as they were loaded
        alone["kl_weights"] = kl(variant)
        variant.apply(enable_quantization)
        for name, layer in layers.items():
            layer.weight.data = base.get_submodule(name).weight.data
        alone["kl_activations"] = kl(variant)
    return {
        **alone,
        "variant": manifest.label,
        "seconds": manifest.seconds,
        "peak_memory_bytes": manifest.peak_memory_bytes,
        "size_bytes": manifest.size_bytes,
        "size_ratio": manifest.size_ratio,
        "bits_per_weight": manifest.bits_per_weight,
        "sparsity": manifest.sparsity,
        "kl_nats": both,
    }


def in_child(method: str, settings: dict[str, str]) -> dict[str, Any]:
    """Run `measure` in a fresh process."""
    command = [sys.executable, __file__, "--one", method, "--settings", json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{method} {settings} failed:\n{done.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def as_markdown(row: dict[str, Any]) -> str:
    """Return one line of the table."""
    sparsity = "" if not row["sparsity"] else f"{100 * row['sparsity']:.1f} %"
    return (
        f"| `{row['variant']}` | {row['seconds']:.1f} | {row['peak_memory_bytes'] / 2**20:.0f} | "
        f"{row['size_bytes'] / 2**20:.2f} | {row['size_ratio']:.2f}x | {row['bits_per_weight']:.2f} | {sparsity} | "
        f"{row['kl_nats']:.2g} |"
    )


def main() -> None:
    """Print the table, one line as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated methods; all when empty")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--settings", default="{}", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, json.loads(arguments.settings))))
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    only = {name for name in arguments.only.split(",") if name}
    print("| variant | seconds | peak memory (MiB) | size (MiB) | smaller | bits per weight | zeros | KL (nats) |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for method, settings in VARIANTS:
        if only and method not in only:
            continue
        extra = missing(method, settings)
        if extra is None:
            rows.append(in_child(method, settings))
            print(as_markdown(rows[-1]), flush=True)
        else:
            print(
                f"| `{method}` {settings} | needs the extra `{extra}`, which is not installed | | | | | | |", flush=True
            )
    apart = [row for row in rows if "kl_weights" in row]
    if apart:
        print("\n| variant | KL of weights | KL of activations | KL of both | interaction |\n|---|---|---|---|---|")
    for row in apart:
        weights, activations, both = row["kl_weights"], row["kl_activations"], row["kl_nats"]
        more = both - weights - activations
        print(f"| `{row['variant']}` | {weights:.2g} | {activations:.2g} | {both:.2g} | {more:+.2g} |")


if __name__ == "__main__":
    main()
