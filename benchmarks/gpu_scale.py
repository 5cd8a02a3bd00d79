"""What a job takes at full size on one GPU: a random Llama of Llama-3-8B's shape, in at most four minutes.

It measures the GPU's ceiling (an 8192-cube product in bfloat16), a pass over the questions beside the backend of
lm-evaluation-harness at its best batch, what the pass copies and waits for (torch.profiler), and then the main job,
without judge and speed, by parts: see `parts.py`. Without a GPU it says so and does the same with a tiny model, so that
the script itself is tried.

The questions are MMLU's, five a subject, where `--data` is a folder in hub layout that has it. Else they are made of
random words, with MMLU's lengths and subjects.

On a machine that has CUDA, torch and transformers, and reaches no package index, the rest is carried there: `--wheels`
prints what this environment has besides those two and, with a file, besides what `pip freeze` printed there.

Example
-------
python benchmarks/gpu_scale.py --wheels > wheels.txt
pip download --no-deps -r wheels.txt -d wheels               # here
pip install --no-deps --no-index --find-links wheels -r wheels.txt    # there
python benchmarks/gpu_scale.py --data HUB_FOLDER
"""

import argparse
import gc
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.parts import measure

LLAMA_3_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
}
TINY = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
SECONDS = 240  # of the whole benchmark
TASK = "mmlu_lettered"
SUBJECTS, SHOTS = 57, 5  # as MMLU has them
CUBE, TINY_CUBE, PRODUCTS = 8192, 256, 20


def closure(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of installed packages and of all that they need here, by name."""
    from packaging.requirements import Requirement

    found: dict[str, str] = {}
    asked = [Requirement(name) for name in names]
    seen: set[tuple[str, frozenset[str]]] = set()
    while asked:
        one = asked.pop()
        name = _name(one.name)
        key = (name, frozenset(one.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue  # an extra that is not installed
        found[name] = package.version
        for text in package.requires or ():
            need = Requirement(text)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *one.extras)):
                asked.append(need)
    return found


def wheels(frozen: str) -> list[str]:
    """Return what this package and the harness need on a machine with torch and transformers, as requirements.

    - `frozen`: A file with what is there too, as `pip freeze` prints it; empty for nothing.
    """
    lines = Path(frozen).read_text(encoding="utf-8").split("\n") if frozen else []
    there = closure(["torch", "transformers"]).keys() | {_name(re.split("[ =@]", line)[0]) for line in lines}
    needed = closure(["mlflow-compress[harness]"])
    return [f"{name}=={needed[name]}" for name in sorted(needed.keys() - there - {"mlflow-compress"})]


def _name(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def made_questions(file: Path, limit: int, subjects: int = SUBJECTS) -> Path:
    """Write questions of random words with MMLU's lengths: five examples and `limit` questions a subject."""
    draw = random.Random(0)
    words = ["".join(draw.choices("aeioubdfgklmnprst", k=draw.randint(2, 8))) for _ in range(3000)]

    def text(n: int) -> str:
        return " ".join(draw.choices(words, k=n))

    rows = []
    for subject in range(subjects):
        for number in range(SHOTS + limit):
            rows.append(
                {
                    "id": f"{subject}-{number}",
                    "category": f"subject {subject}",
                    "split": "dev" if number < SHOTS else "test",
                    "question": text(draw.randint(15, 105)) + "?",
                    "choices": [text(draw.randint(2, 14)) for _ in range(4)],
                    "answer": draw.randrange(4),
                }
            )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def make_model(folder: Path, shape: dict[str, Any], layers: int, device: str, texts: Iterable[str]) -> Path:
    """Write a random bfloat16 Llama of a shape, with a byte-level BPE that is trained on texts; return its folder."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = ByteLevelBPETokenizer()
    size = min(32_000, shape["vocab_size"])
    tokenizer.train_from_iterator(texts, vocab_size=size, special_tokens=["<s>", "</s>"], show_progress=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    config = LlamaConfig(**shape, num_hidden_layers=layers, bos_token_id=0, eos_token_id=1, dtype=torch.bfloat16)
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            LlamaForCausalLM(config).save_pretrained(folder)
    finally:
        torch.set_default_dtype(before)
    return folder


def wait_for(device: str) -> None:
    """Return when a device has computed everything."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def ceiling(device: str, cube: int) -> float:
    """Return how many floating-point operations a second the device does in products of bfloat16 cubes."""
    import torch

    one, other = (torch.randn(cube, cube, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(PRODUCTS):
        wait_for(device)
        began = time.perf_counter()
        torch.mm(one, other)
        wait_for(device)
        seconds.append(time.perf_counter() - began)
    return float(2 * cube**3 / sorted(seconds)[PRODUCTS // 2])


def seconds_of_engine(loaded: Any, requests: Sequence[Any], device: str) -> tuple[float, list[float], Any]:
    """Return the seconds of one pass, the log-likelihoods, and what the engine reports."""
    from mlflow_compress.scoring.engine import Scorer, ScoringConfig

    scorer = Scorer(loaded, ScoringConfig(progress=False))
    wait_for(device)
    began = time.perf_counter()
    scores, _ = scorer.score(requests)
    wait_for(device)
    return time.perf_counter() - began, scores.column("loglik").tolist(), scorer.report


def seconds_of_harness(loaded: Any, requests: Sequence[Any], device: str, batch: int) -> tuple[float, list[float]]:
    """Return the seconds of the harness's backend on the same requests, and its log-likelihoods."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    backend = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=batch, device=device)
    asked = [
        Instance(request_type="loglikelihood", doc={}, arguments=(request.context, request.continuation), idx=number)
        for number, request in enumerate(requests)
    ]
    gc.collect()
    wait_for(device)
    began = time.perf_counter()
    answers = backend.loglikelihood(asked, disable_tqdm=True)
    wait_for(device)
    return time.perf_counter() - began, [loglik for loglik, _ in answers]


def profile(loaded: Any, requests: Sequence[Any], device: str) -> dict[str, Any]:
    """Return how often a pass copies and waits, and where its time goes: the five operations with the most of it."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with recorded(activities=kinds) as record:
        seconds_of_engine(loaded, requests, device)
    events = record.key_averages()
    own = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    first = sorted(events, key=lambda event: -getattr(event, own))[:5]
    counts: Counter[str] = Counter()
    for event in events:
        if event.key.startswith("Memcpy") or "Synchronize" in event.key or event.key == "aten::_local_scalar_dense":
            counts[event.key] += event.count
    whole = sum(getattr(event, own) for event in events)
    return {"counts": dict(counts), "share_of_time": {e.key: round(getattr(e, own) / whole, 3) for e in first}}


def passes(options: argparse.Namespace, folder: Path, device: str, limit: int) -> dict[str, Any]:
    """Return the engine's first and second pass, the harness's best, and the share of the ceiling."""
    from mlflow_compress.commands.evaluate.items import suite_of
    from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
    from mlflow_compress.models.loading import LoadConfig, load_model

    config = EvaluateConfig(model=str(folder), tasks=options.tasks, limit=limit, data_dir=options.data_dir)
    requests = suite_of(config).requests
    began = time.perf_counter()
    loaded = load_model(LoadConfig(path=str(folder), device=device, dtype="bfloat16"))
    wait_for(device)
    load = time.perf_counter() - began
    first, _, _ = seconds_of_engine(loaded, requests, device)
    second, ours, report = seconds_of_engine(loaded, requests, device)
    body = sum(p.numel() for p in loaded.model.model.layers.parameters())
    operations = 2 * report.n_tokens * body + 2 * report.n_rows * loaded.model.lm_head.weight.numel()
    reached = operations / second
    top = ceiling(device, options.cube)
    found: dict[str, Any] = {
        "requests": len(requests),
        "tokens": report.n_tokens,
        "tokens_naive": report.n_tokens_naive,
        "path": report.path,
        "load_s": round(load, 2),
        "first_pass_s": round(first, 3),
        "second_pass_s": round(second, 3),
        "ceiling_tflops": round(top / 1e12, 2),
        "share_of_ceiling": round(reached / top, 3),
        "profile": profile(loaded, requests, device),
    }
    if find_spec("lm_eval") is None:
        found["harness"] = "not compared: lm_eval is not installed"
        return found
    timed = {batch: seconds_of_harness(loaded, requests, device, batch) for batch in options.batches}
    best = min(timed, key=lambda batch: timed[batch][0])
    apart = [abs(one - other) for one, other in zip(ours, timed[best][1], strict=True)]
    return {
        **found,
        "harness_s": {str(batch): round(seconds, 2) for batch, (seconds, _) in timed.items()},
        "harness_best_batch": best,
        "times_the_harness": round(timed[best][0] / second, 2),
        "most_nats_apart": float(f"{max(apart):.1e}"),
    }


def main() -> None:
    """Print one JSON line of the passes, and the main job's table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of data sets in hub layout (default: made questions)")
    parser.add_argument("--layers", type=int, default=12, help="of 32; 16 where there is time (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=5, help="questions a subject (default: %(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64], help="tried for the harness")
    parser.add_argument("--tiny", action="store_true", help="a tiny model although there is a GPU")
    parser.add_argument("--wheels", nargs="?", const="", metavar="FILE", help="print what has to be carried elsewhere")
    options = parser.parse_args()
    if options.wheels is not None:
        print("\n".join(wheels(options.wheels)))
        return
    began = time.perf_counter()

    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    tiny = options.tiny or device == "cpu"
    if device == "cpu":
        print("There is no GPU here: a tiny model runs on the CPU, which tries this script and measures nothing.\n")
    shape, layers, limit = (TINY, 2, 1) if tiny else (LLAMA_3_8B, options.layers, options.limit)
    options.cube = TINY_CUBE if tiny else CUBE
    with tempfile.TemporaryDirectory() as work:
        own = made_questions(Path(work, "made.jsonl"), options.limit)
        options.tasks, options.data_dir = (str(own), "none") if options.data is None else (TASK, str(options.data))
        texts = own.read_text(encoding="utf-8").split("\n")
        if options.data is not None:
            texts = [f.read_text(encoding="utf-8") for f in sorted((options.data / "cais").rglob("*.jsonl"))]
        folder = make_model(Path(work, "model"), shape, layers, device, texts)
        made = time.perf_counter() - began
        found = passes(options, folder, device, limit)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        setting = {"device": f"{name}, torch {torch.__version__}", "layers": layers, "questions": limit * SUBJECTS}
        setting |= {"made": options.data is None, "model_made_s": round(made, 1)}
        print(json.dumps({"benchmark": "gpu_scale", **setting, **found}), flush=True)
        job = Path(work, "job")
        job.mkdir()
        command = [sys.executable, "-m", "mlflow_compress", "main", "--model", str(folder), "--tasks", options.tasks]
        command += ["--limit", str(limit), "--method", "rtn", "--bits", "4", "--judge", "false", "--speed", "false"]
        command += ["--device", device, "--data_dir", options.data_dir]
        homes = {"MLFLOW_TRACKING_URI": f"sqlite:///{job}/mlflow.db", "MLFLOW_COMPRESS_HOME": str(job / "home")}
        left = None if tiny else max(10.0, SECONDS - (time.perf_counter() - began))
        try:
            print(f"\n{measure(command, folder=job, environment=homes, timeout=left).as_markdown()}")
        except subprocess.TimeoutExpired:
            raise SystemExit(f"The main job had not ended after {left:.0f} s, at the end of the {SECONDS} s") from None
    print(f"\nAll of it: {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
