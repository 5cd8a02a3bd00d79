"""Load every method's checkpoint in vLLM, and compare its log-probabilities with transformers' of the same checkpoint.

    python benchmarks/vllm_formats.py --vllm_python vllm-env/bin/python --work WORK

One line per method and bits is added to `mlflow_compress/compression/vllm_formats.jsonl`, with the versions, and the
distances over the whole vocabulary or vLLM's own reason for a refusal; lines that are there stay, unless their versions
are others. `tools/write_methods_table.py` makes the table of docs/how-to/vllm.md and the column "runs in" of them.

The reference is transformers in float32. What vLLM's dtype alone explains is measured beside it: transformers in that
dtype.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mlflow_compress as mc
from mlflow_compress.commands.evaluate.items import suite_of
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.compression import servers
from mlflow_compress.compression.method import METHODS
from mlflow_compress.config import EngineConfig
from mlflow_compress.engines.vllm.vllm_model import VllmModel
from mlflow_compress.engines.vllm.vllm_process import started_engine
from mlflow_compress.errors import MissingDependencyError, MlflowCompressError
from mlflow_compress.items.task import Corpus
from mlflow_compress.models.loading import LoadConfig, load_model, open_light
from mlflow_compress.models.memory_alignment import rounding_identity
from mlflow_compress.records import TokenDistances, TokenScores
from mlflow_compress.scoring.baseline_store import StateStore, StateWriter
from mlflow_compress.scoring.engine import Scorer, ScoringConfig

RESULTS = Path(servers.__file__).with_name("vllm_formats.jsonl")
TOKENS, WINDOW = 2048, 512
FIRST: tuple[tuple[str, int | None], ...] = (
    ("none", None),
    *((name, 4) for name in ("awq", "gptq", "rtn")),
    *((name, 8) for name in ("w8a8", "fp8", "smoothquant")),
    *((name, None) for name in ("wanda", "sparsegpt", "layer-drop")),
    ("rtn", 8),
    ("bnb-nf4", 4),
)
FEWER = {"calibration_samples": 16, "calibration_length": 128}
DTYPE = "bfloat16"  # vLLM's CPU kernels for quantized weights take no other


def variants() -> list[tuple[str, int | None]]:
    """Return every method with every number of bits; those that vLLM is known to take come first."""
    every = [(name, bits) for name, method in METHODS.items() for bits in method.supported_bits or (None,)]
    return [*FIRST, *(one for one in every if one not in FIRST and one[0] != "checkpoint")]


def measured(method: str, bits: int | None, settings: EngineConfig, work: Path) -> dict[str, Any]:
    """Compress the demo, and return how far vLLM is from transformers on it; or why it was not measured."""
    try:
        variant = mc.compress(
            "demo",
            method,
            store=work / "store",
            output_dir=str(work / "checkpoints"),
            **({"bits": bits} if bits is not None else {}),
            **FEWER,
        )
    except MissingDependencyError as error:
        return {"not_run": str(error)}
    reference, store, found = with_transformers(variant.folder, work / "transformers" / variant.name)
    path = str(variant.folder)
    with started_engine(settings) as vllm:
        try:
            model = VllmModel.of(open_light(LoadConfig(path=path, dtype=DTYPE, device="cpu")), vllm=vllm)
            found |= distances("vllm", reference, *score(model, baseline=store))
        except MlflowCompressError as error:
            reason = str(error).removeprefix("vLLM cannot load this checkpoint: ").split(" Got: ")[0]
            found["refused"] = reason.replace(path, "FOLDER")
    return found


def with_transformers(checkpoint: Path, kept: Path) -> tuple[TokenScores, StateStore, dict[str, Any]]:
    """Return what transformers computes in float32, its states, and how far it is from that in vLLM's dtype.

    They are kept in a folder, because a checkpoint may be measured again with another vLLM.
    """
    done = kept / "distances.json"
    if not done.is_file():
        exact = load_model(LoadConfig(path=str(checkpoint), dtype="float32", device="cpu"))
        with StateWriter(kept / "states", exact) as writer:
            reference, _ = score(exact, capture=writer)
        reference.write(kept)
        rounded = load_model(LoadConfig(path=str(checkpoint), dtype=DTYPE, device="cpu"))
        moved = score(rounded, baseline=StateStore.open(kept / "states"))
        done.write_text(json.dumps({"tokens": len(reference), **distances("transformers", reference, *moved)}))
    return TokenScores.read(kept), StateStore.open(kept / "states"), json.loads(done.read_text())


def score(model: Any, **how: Any) -> tuple[TokenScores, TokenDistances | None]:
    """Score the beginning of the demo's corpus."""
    corpus = suite_of(EvaluateConfig(tasks="demo")).corpora[0]
    assert isinstance(corpus, Corpus)
    return Scorer(model, ScoringConfig(progress=False)).score_corpus(
        "demo", corpus.text, window=WINDOW, max_tokens=TOKENS, **how
    )


def distances(who: str, reference: TokenScores, scores: TokenScores, moved: TokenDistances | None) -> dict[str, float]:
    """Return the mean and the largest KL to the reference, and the mean difference of the tokens' log-probabilities."""
    kl = np.asarray(moved.column("kl"))
    ours, theirs = np.asarray(reference.column("nll")), np.asarray(scores.column("nll"))
    return {
        f"{who}_kl": float(kl.mean()),
        f"{who}_kl_max": float(kl.max()),
        f"{who}_difference": float(np.abs(ours - theirs).mean()),
    }


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm_python")
    parser.add_argument("--work", required=True, type=Path)
    parser.add_argument("--most", type=int, default=1000, help="variants to measure now")
    parser.add_argument("--methods", help="of these methods alone, comma-separated")
    options = parser.parse_args()
    settings = EngineConfig(vllm_python=options.vllm_python)
    with started_engine(settings) as vllm:
        versions = {name: v for name, v in vllm.described.items() if name != "arguments"}
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.is_file() else []
    lines = [line for line in lines if line["versions"] == versions]
    done = {(line["method"], line["bits"]) for line in lines}
    named = set(options.methods.split(",")) if options.methods else set(METHODS.names())
    missing = [one for one in variants() if one not in done and one[0] in named]
    for method, bits in missing[: options.most]:
        here = rounding_identity(torch.device("cpu"))
        found = {
            "method": method,
            "bits": bits,
            **measured(method, bits, settings, options.work),
            "versions": versions,
            "processor": f"processor {here['processor']} with {here['instructions']}",
        }
        print(json.dumps(found), flush=True)
        lines.append(found)
        RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
