"""Every compression method on small random models of many architectures: the KL, or why the method refuses.

The models have two layers, a stream 256 wide, and the demo's tokenizer. The KL is the mean over 512 tokens of the
demo's corpus, in nats. It says that a method works on an architecture, not how well: random weights have no structure
to lose.

Example
-------
python benchmarks/architectures.py
python benchmarks/architectures.py --only rtn,gptq --architectures Qwen3,Falcon
python benchmarks/architectures.py --only gptq,awq --settings backend=gptqmodel
"""

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROWS, LENGTH = 4, 128

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": GROUPED,
    "Mistral": {**GROUPED, "sliding_window": None},
    "Qwen2": {**GROUPED, "tie_word_embeddings": True},
    "Qwen3": {**GROUPED, "head_dim": 64},
    "Gemma2": {**GROUPED, "head_dim": 64},
    "Gemma3Text": {**GROUPED, "head_dim": 64},
    "Phi3": {**GROUPED, "pad_token_id": 0},
    "Olmo2": GROUPED,
    "OPT": {**SIZES, "ffn_dim": 256, "word_embed_proj_dim": 256},
    "GPTNeoX": SIZES,
    "Bloom": SIZES,
    "Falcon": SIZES,
    "Mixtral": {**GROUPED, "num_local_experts": 4},
    "Qwen3Moe": {**GROUPED, **EXPERTS, "head_dim": 64},
}
"""transformers' configuration classes (without "Config") and their settings."""

SMALL = {"group_size": "64", "calibration_samples": "8", "calibration_length": "128"}


def make(architecture: str, folder: Path, dtype: Any) -> Path:
    """Write a random model and return its folder."""
    import torch
    import transformers

    from mlflow_compress import demo

    tokenizer = transformers.AutoTokenizer.from_pretrained(demo.MODEL_DIR)
    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, **ARCHITECTURES[architecture]
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # the usual start would give nearly uniform predictions, and norms of ones
        if parameter.ndim > 1:
            parameter.data.normal_(0.0, 0.06)
        else:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def measure(base: Path, method: str, settings: dict[str, str]) -> dict[str, Any]:
    """Compress one model and return the KL and the bits of all its weights, or the refusal."""
    import torch
    from transformers import AutoTokenizer

    from mlflow_compress import demo
    from mlflow_compress.compression import METHODS, compress_model, method_config
    from mlflow_compress.errors import MlflowCompressError
    from mlflow_compress.models.loading import LoadConfig, load_model

    known = METHODS.get(method).Config.model_fields
    config = method_config(method, **{**{k: v for k, v in SMALL.items() if k in known}, **settings})
    texts = [(demo.DATA_DIR / "calibration.txt").read_text()]
    ids = AutoTokenizer.from_pretrained(base)((demo.DATA_DIR / "corpus.txt").read_text())["input_ids"]
    batch = torch.tensor(ids[: ROWS * LENGTH]).reshape(ROWS, LENGTH)

    def log_probs(folder: Path) -> torch.Tensor:
        model = load_model(LoadConfig(path=str(folder), device="cpu", dtype="float32")).model
        with torch.inference_mode():
            return torch.log_softmax(model(input_ids=batch).logits.double(), dim=-1)

    with tempfile.TemporaryDirectory() as folder:
        try:
            manifest = compress_model(str(base), method, config, texts, Path(folder) / "out")
        except MlflowCompressError as error:
            return {"refused": str(error)}
        p, q = log_probs(base), log_probs(Path(folder) / "out")
    kl = float((p.exp() * (p - q)).sum(-1).mean())
    return {"kl_nats": kl, "bits_per_weight_model": manifest.bits_per_weight_model}


def installed(methods: Any) -> list[str]:
    """Return the methods whose packages are there and that make their own checkpoint."""
    found = (name for name, method in methods.items() if all(map(importlib.util.find_spec, method.requires)))
    return [name for name in found if name != "checkpoint"]


def main() -> None:
    """Print one JSON line a method and architecture, and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="methods, comma-separated (default: all that are installed)")
    parser.add_argument("--architectures", default=",".join(ARCHITECTURES), help="comma-separated")
    parser.add_argument("--settings", default="", help="settings of every method: name=value,name=value")
    options = parser.parse_args()

    import torch
    from tqdm import tqdm

    from mlflow_compress.compression import METHODS

    extra = dict(pair.split("=", 1) for pair in options.settings.split(",") if pair)
    methods = options.only.split(",") if options.only else installed(METHODS)
    architectures = options.architectures.split(",")
    pairs = [(architecture, method) for architecture in architectures for method in methods]
    cells: dict[tuple[str, str], str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for architecture, method in tqdm(pairs):
            dtype = torch.float32 if method in ("bf16", "fp16") else torch.bfloat16
            base = Path(scratch) / f"{architecture}-{dtype}"
            if not base.exists():
                make(architecture, base, dtype)
            row = measure(base, method, extra)
            sys.stdout.write(json.dumps({"architecture": architecture, "method": method, **row}) + "\n")
            cells[method, architecture] = "no" if "refused" in row else f"{row['kl_nats']:.1g}"
    sys.stdout.write(f"\n| method | {' | '.join(architectures)} |\n|---{'|---' * len(architectures)}|\n")
    for method in methods:
        sys.stdout.write(f"| `{method}` | {' | '.join(cells[method, a] for a in architectures)} |\n")


if __name__ == "__main__":
    main()
