"""Every compression method on small random models of many architectures: the KL, or why the method refuses.

The models have two layers, a stream 256 wide, and the demo's tokenizer. The KL is the mean over 512 tokens of the
demo's corpus, in nats. It says that a method works on an architecture, not how well: random weights have no structure
to lose.

With ``--lengths``, instead: whether an item's numbers depend on what it is scored with. Items of many lengths, around
those at which some rotary embeddings change, are scored alone, in padded batches, in packs and as answers of a corpus,
and compared with transformers on one sequence at a time. The table has the largest difference of a log-probability in
nats, and the greedy answers that differ from those of transformers' ``generate`` on one prompt.

Example
-------
python benchmarks/architectures.py
python benchmarks/architectures.py --only rtn,gptq --architectures Qwen3,Falcon
python benchmarks/architectures.py --only gptq,awq --settings backend=gptqmodel
python benchmarks/architectures.py --lengths
"""

import argparse
import copy
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

ORIGINAL = 64  # tokens: the length up to which the embeddings of `SCALED` are as they were trained
_HALF = 32  # rotary frequencies of a head of 64
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "short_factor": [1.0] * _HALF,
    "long_factor": [4.0 + n for n in range(_HALF)],
    "original_max_position_embeddings": ORIGINAL,
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
# A context of 256 tokens, though the embedding changes beyond 64.
_STRETCHED = {**GROUPED, "max_position_embeddings": ORIGINAL, "n_positions": 256}
_OF_LAYERS = {**GROUPED, "head_dim": 64, "layer_types": ["sliding_attention", "full_attention"]}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    """Return the settings of a Llama with a rotary embedding of this kind."""
    parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **settings}
    return {**GROUPED, "rope_parameters": parameters}


SCALED: dict[str, tuple[str, dict[str, Any]]] = {
    "Phi3 longrope": (
        "Phi3",
        {**GROUPED, "pad_token_id": 0, "original_max_position_embeddings": ORIGINAL, "rope_parameters": _LONGROPE},
    ),
    "Llama longrope": ("Llama", {**GROUPED, "rope_parameters": _LONGROPE}),
    "Phimoe longrope": (
        "Phimoe",
        {**GROUPED, "num_local_experts": 4, "rope_parameters": {**_LONGROPE, "short_mscale": 1.0, "long_mscale": 1.3}},
    ),
    "Gemma3Text longrope": (
        "Gemma3Text",
        {**_OF_LAYERS, "rope_parameters": {"sliding_attention": _PLAIN_ROPE, "full_attention": _LONGROPE}},
    ),
    "Llama dynamic": ("Llama", {**_STRETCHED, "rope_parameters": _DYNAMIC}),
    "Qwen2 dynamic": ("Qwen2", {**_STRETCHED, "rope_parameters": _DYNAMIC}),
    "Gemma3Text dynamic": (
        "Gemma3Text",
        {
            **_OF_LAYERS,
            "max_position_embeddings": ORIGINAL,
            "n_positions": 256,
            "rope_parameters": {"sliding_attention": _PLAIN_ROPE, "full_attention": _DYNAMIC},
        },
    ),
    "Llama yarn": ("Llama", _rope("yarn", original_max_position_embeddings=ORIGINAL)),
    "Llama linear": ("Llama", _rope("linear")),
    "Llama llama3": ("Llama", _rope("llama3", original_max_position_embeddings=ORIGINAL, **_LLAMA3)),
}
"""Rotary embeddings that are scaled for long sequences: name, configuration class and its settings."""

_BATCH = 4096  # tokens: all items in one batch, where nothing parts them
LENGTHS = (9, 30, 62, 63, 64, 65, 66, 67, 100, 100, 190)  # tokens of the items
NEW_TOKENS = 8
WAYS = ("alone", "padded", "short", "mixed", "corpus")
"""One item at a time; all in padded batches; those up to `ORIGINAL` in packs where the model can; all of them on the
path that is chosen; as answers of a corpus."""

SMALL = {"group_size": "64", "calibration_samples": "8", "calibration_length": "128"}


def random_model(name: str) -> tuple[Any, Any]:
    """Return a random model of `ARCHITECTURES` or `SCALED` in eval mode, and the demo's tokenizer."""
    import torch
    import transformers

    from mlflow_compress import demo

    tokenizer = transformers.AutoTokenizer.from_pretrained(demo.MODEL_DIR)
    kind, settings = SCALED[name] if name in SCALED else (name, ARCHITECTURES[name])
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, **settings
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # the usual start would give nearly uniform predictions, and norms of ones
        if parameter.ndim > 1:
            parameter.data.normal_(0.0, 0.06)
        else:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model.eval(), tokenizer


def make(architecture: str, folder: Path, dtype: Any) -> Path:
    """Write a random model and return its folder."""
    model, tokenizer = random_model(architecture)
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


def _alone(model: Any, ids: Any, targets: Any) -> Any:
    """Return what a copy of a model that has not computed anything yet gives the last tokens of one sequence."""
    import torch

    with torch.inference_mode():
        logits = copy.deepcopy(model)(input_ids=torch.from_numpy(ids).long()[None]).logits[0, -len(targets) :]
    return torch.log_softmax(logits.double(), dim=-1)[range(len(targets)), targets.tolist()]


def length_differences(name: str) -> dict[str, Any]:
    """Return the largest difference from transformers in nats, by the way in which the items were computed (`WAYS`).

    ``path`` is what was chosen for the short ones, ``answers`` the number of greedy answers that differ; None where
    transformers' `generate` fails.
    """
    import numpy as np
    import torch

    from mlflow_compress import demo
    from mlflow_compress.models.loading import LoadedModel
    from mlflow_compress.records import Request, TokenAnswers
    from mlflow_compress.scoring.engine import Scorer, ScoringConfig
    from mlflow_compress.scoring.generation.decoding import GenerationJob, decode
    from mlflow_compress.scoring.generation.generation_rows import GenerationConfig, GenerationRow
    from mlflow_compress.scoring.plan.encoding import Encoder

    model, tokenizer = random_model(name)
    text, last = (demo.DATA_DIR / "corpus.txt").read_text(), " the moon"
    encoder = Encoder(tokenizer, 256)
    requests = [Request("t", str(n), 0, 0, 0, text[:n], last, len(last), len(last)) for n in range(1, 1200)]
    by_length = {len(e.inputs): (r, e) for r, e in zip(requests, encoder.encode(requests), strict=True)}
    # Two of the longest but one: a batch has them both, whatever else it may have.
    requests, encoded = zip(*(by_length[length] for length in LENGTHS), strict=True)
    wanted = [float(_alone(model, e.inputs, e.targets).sum()) for e in encoded]
    answers = TokenAnswers.from_rows(
        {
            "task": "t",
            "item_id": f"{number:02}",
            "sample": 0,
            "prompt_tokens": e.inputs[:4].tolist(),
            "tokens": e.inputs[4:].tolist(),
            "text": "",
            "reasoning_begin": None,
            "reasoning_end": None,
        }
        for number, e in enumerate(encoded)
    )
    nlls = {f"{n:02}/0": -_alone(model, e.inputs[:-1], e.inputs[4:]).numpy() for n, e in enumerate(encoded)}
    rows = [GenerationRow(e.inputs.tolist(), 0.0, np.empty(0)) for e in encoded]
    greedy: list[list[int]] | None = []
    for row in rows:
        ids = torch.tensor([row.prompt])
        try:
            out = copy.deepcopy(model).generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None)
        except UnboundLocalError:  # transformers 5.17, at the second step of some models
            greedy = None
            break
        greedy.append(out[0, len(row.prompt) :].tolist())

    loaded = LoadedModel(model, tokenizer, Path("nowhere"), torch.float32, torch.device("cpu"))

    def worst(path: str, chosen: slice | list[int]) -> tuple[float, str]:
        numbers = np.arange(len(requests))[chosen].tolist()
        scorer = Scorer(loaded, ScoringConfig(path=path, batch_tokens=_BATCH, progress=False))
        scores, _ = scorer.score([requests[n] for n in numbers])
        logliks = scores.column("loglik").tolist()
        return max(abs(x - wanted[n]) for n, x in zip(numbers, logliks, strict=True)), scorer.report.path

    # The longest first: what it leaves behind would be seen.
    found: dict[str, Any] = {"alone": max(worst("plain", [n])[0] for n in range(len(requests))[::-1])}
    found["padded"], _ = worst("plain", slice(None))
    found["short"], found["path"] = worst("auto", [n for n, length in enumerate(LENGTHS) if length <= ORIGINAL])
    found["mixed"], _ = worst("auto", slice(None))
    scorer = Scorer(loaded, ScoringConfig(batch_tokens=_BATCH, progress=False))
    tokens, _ = scorer.score_corpus("t", answers)
    items, computed = np.asarray(tokens.column("item_id")), np.asarray(tokens.column("nll"))
    found["corpus"] = max(float(abs(computed[items == item] - nlls[item]).max()) for item in nlls)
    settings = GenerationConfig(max_new_tokens=NEW_TOKENS, temperature=0.0, samples=1, top_k=0, top_p=1.0)
    tokenizer.eos_token = None
    decode(loaded, GenerationJob(rows=rows, config=settings))
    found["answers"] = greedy and sum(row.tokens != tokens for row, tokens in zip(rows, greedy, strict=True))
    return found


def installed(methods: Any) -> list[str]:
    """Return the methods whose packages are there and that make their own checkpoint."""
    found = (name for name, method in methods.items() if all(map(importlib.util.find_spec, method.requires)))
    return [name for name in found if name != "checkpoint"]


def print_lengths(names: list[str]) -> None:
    """Print a row per architecture: `length_differences`, in units of a nat."""
    from tqdm import tqdm

    sys.stdout.write(f"| architecture | {' | '.join(WAYS)} | path of the short | other answers |\n|---{'|---' * 7}|\n")
    for name in tqdm(names):
        found = length_differences(name)
        cells = [f"{found[way]:.0e}" for way in WAYS]
        other = "generate fails" if found["answers"] is None else f"{found['answers']} of {len(LENGTHS)}"
        sys.stdout.write(f"| {name} | {' | '.join(cells)} | {found['path']} | {other} |\n")


def main() -> None:
    """Print one JSON line a method and architecture, and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="methods, comma-separated (default: all that are installed)")
    parser.add_argument("--architectures", default="", help="comma-separated (default: all)")
    parser.add_argument("--lengths", action="store_true", help="compare items alone and together instead")
    parser.add_argument("--settings", default="", help="settings of every method: name=value,name=value")
    options = parser.parse_args()
    if options.lengths:
        print_lengths(options.architectures.split(",") if options.architectures else [*ARCHITECTURES, *SCALED])
        return

    import torch
    from tqdm import tqdm

    from mlflow_compress.compression import METHODS

    extra = dict(pair.split("=", 1) for pair in options.settings.split(",") if pair)
    methods = options.only.split(",") if options.only else installed(METHODS)
    architectures = options.architectures.split(",") if options.architectures else list(ARCHITECTURES)
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
