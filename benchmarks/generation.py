"""How fast answers are generated, side by side with transformers' `generate` at the same batch.

    python benchmarks/generation.py

Three workloads, each with one greedy answer and with five samples a prompt, 60 rows a batch:

demo
    The demo model and its 48 instructions. Answers end by themselves, after at most 128 tokens.
short, long
    A random float32 Llama (hidden 512, 8 layers), 60 rows, prompts of 10 to 40 and of 100 to 300 tokens. No answer ends
    before 128 tokens.

Both sides take turns. Tokens count up to the end token. Prints one JSON line for each workload and number of samples:
medians of tokens a second, the ratio, and the ratio by processor time, which other programs on the machine change less.
The tokens of greedy answers are compared: a difference is an error.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from setting import machine, random_llama
from transformers import GenerationConfig as Settings

from mlflow_compress.demo import DATA_DIR, MODEL_DIR
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.scoring.generation.chat_format import chat_format
from mlflow_compress.scoring.generation.decoding import GenerationJob, decode
from mlflow_compress.scoring.generation.generation_rows import GenerationConfig, GenerationRow, uniforms

BATCH, LENGTH = 60, 128
ENDS = [1, 6]  # the demo model's end tokens
Prompts = list[list[int]]


def demo_prompts(demo: LoadedModel) -> Prompts:
    """Return the demo's instructions as prompts."""
    style = chat_format(demo.tokenizer)
    lines = (DATA_DIR / "instructions.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [style.prompt(json.loads(line)["turns"][:1]) for line in lines]
    return [demo.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def llama_with_demos_words(demo: LoadedModel) -> LoadedModel:
    """Return a random Llama of 27 million parameters with the demo's vocabulary."""
    model = random_llama(vocab_size=demo.vocab_size, max_position_embeddings=1024, eos_token_id=ENDS).eval()
    with torch.no_grad():
        model.lm_head.weight[ENDS] = 0.0  # a logit of 0 is never among the 50 largest
    return LoadedModel(model, demo.tokenizer, Path("nowhere"), torch.float32, torch.device("cpu"))


def random_prompts(n: int, low: int, high: int) -> Prompts:
    """Return n prompts of `low` to `high` tokens."""
    generator = np.random.default_rng(0)
    return [generator.integers(3, 2000, size=generator.integers(low, high + 1)).tolist() for _ in range(n)]


def ours(loaded: LoadedModel, prompts: Prompts, samples: int) -> list[list[int]]:
    """Return the tokens of every answer."""
    temperature = 0.7 if samples > 1 else 0.0
    config = GenerationConfig(
        max_new_tokens=LENGTH, temperature=temperature, samples=samples, batch_rows=BATCH, top_k=50, top_p=0.95
    )
    rows = [
        GenerationRow(prompt, temperature, uniforms(0, str(prompt), sample, LENGTH))
        for prompt in prompts
        for sample in range(samples)
    ]
    decode(loaded, GenerationJob(rows=rows, config=config, end_tokens=ENDS))
    return [row.tokens for row in rows]


def theirs(loaded: LoadedModel, prompts: Prompts, samples: int) -> list[list[int]]:
    """Return the tokens of every answer, from one call of `generate` a batch of prompts of similar length."""
    drawn = {"do_sample": True, "temperature": 0.7, "top_k": 50, "top_p": 0.95, "num_return_sequences": samples}
    settings = Settings(
        max_new_tokens=LENGTH, eos_token_id=ENDS, pad_token_id=0, **(drawn if samples > 1 else {"do_sample": False})
    )
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found: list[list[int]] = [[] for _ in range(len(prompts) * samples)]
    for start in range(0, len(order), BATCH // samples):
        batch = order[start : start + BATCH // samples]
        length = max(len(prompts[i]) for i in batch)
        ids = torch.tensor([[0] * (length - len(prompts[i])) + prompts[i] for i in batch])
        mask = torch.tensor([[0] * (length - len(prompts[i])) + [1] * len(prompts[i]) for i in batch])
        with torch.inference_mode():
            out = loaded.model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
        for row, tokens in enumerate(out[:, length:].tolist()):
            end = next((i for i, token in enumerate(tokens) if token in ENDS), len(tokens))
            found[batch[row // samples] * samples + row % samples] = tokens[:end]
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="paired runs; medians are printed (default: %(default)s)")
    parser.add_argument("--only", choices=["demo", "short", "long"], help="one workload")
    args = parser.parse_args()
    demo = load_model(LoadConfig(path=str(MODEL_DIR), device="cpu"))
    llama = llama_with_demos_words(demo)
    workloads = {
        "demo": (demo, demo_prompts(demo)),
        "short": (llama, random_prompts(BATCH, 10, 40)),
        "long": (llama, random_prompts(BATCH, 100, 300)),
    }
    for name, (loaded, every) in workloads.items():
        for samples in (1, 5):
            if args.only not in (None, name):
                continue
            prompts = every if name == "demo" else every[: BATCH // samples]
            walls: dict[str, list[float]] = {"ours": [], "generate": []}
            processor: dict[str, list[float]] = {"ours": [], "generate": []}
            for _ in range(args.runs):
                answers = {}
                for side, work in (("generate", theirs), ("ours", ours)):
                    wall, used = time.perf_counter(), time.process_time()
                    answers[side] = work(loaded, prompts, samples)
                    n_tokens = sum(map(len, answers[side]))
                    walls[side].append(n_tokens / (time.perf_counter() - wall))
                    processor[side].append(n_tokens / (time.process_time() - used))
                if samples == 1 and answers["ours"] != answers["generate"]:
                    raise SystemExit(f"{name}: greedy tokens differ from those of generate")
            print(
                json.dumps(
                    {
                        "workload": name,
                        "samples": samples,
                        "rows": len(prompts) * samples,
                        "tokens_per_second": {side: round(statistics.median(walls[side]), 1) for side in walls},
                        "ratio": _ratio(walls),
                        "ratio_by_processor_time": _ratio(processor),
                        "machine": machine(),
                    }
                ),
                flush=True,
            )


def _ratio(speeds: dict[str, list[float]]) -> float:
    """Return the median of the paired ratios."""
    return round(statistics.median(a / b for a, b in zip(speeds["ours"], speeds["generate"], strict=True)), 2)


if __name__ == "__main__":
    main()
