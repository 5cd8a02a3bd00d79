"""What the trainings of the small embedded models share: the loop, what is saved, and the command."""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Batch = tuple[torch.Tensor, torch.Tensor]  # Tokens, and what the loss makes of each
Losses = Callable[[torch.Tensor, Batch], tuple[torch.Tensor, torch.Tensor]]
"""From logits, (rows, tokens - 1, vocabulary), and a batch: what is minimised, and the mean loss of the answers."""


def fit(
    model: LlamaForCausalLM, batches: Iterator[Batch], losses: Losses, *, steps: int, peak_rate: float
) -> list[dict[str, Any]]:
    """Train for so many steps, and return the log: a line each hundred."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_rate, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 100, 0.02 + 2 * (1 - (step + 1) / steps))
    )
    begun, log = time.perf_counter(), []
    for step, batch in zip(range(steps), batches, strict=False):
        loss, answers = losses(model(input_ids=batch[0]).logits[:, :-1].float(), batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 100 == 0:
            seconds = round(time.perf_counter() - begun)
            log.append({"step": step + 1, "seconds": seconds, "answer_loss": round(answers.item(), 4)})
            print(json.dumps(log[-1]), flush=True)
    return log


def save(
    folder: Path,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    log: list[dict[str, Any]],
    **generation: Any,
) -> None:
    """Save model, tokenizer and log; `generation` are further generation settings."""
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|end|>")],
        pad_token_id=tokenizer.pad_token_id,
        **generation,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "training_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log), newline="\n")


def rebuild(
    about: str,
    *,
    file: str,
    rows: Callable[[int], list[dict[str, Any]]],
    train: Callable[[Path, int, int], None],
    seed: int,
    steps: int,
    threads: int,
) -> None:
    """Parse the arguments, write the data `file`, and train."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=seed)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--data-only", action="store_true", help=f"write data/{file} and train nothing")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model and data/ into")
    arguments = parser.parse_args()
    torch.set_num_threads(threads)
    (arguments.out / "data").mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows(arguments.seed))
    (arguments.out / "data" / file).write_text(lines, encoding="utf-8", newline="\n")
    if not arguments.data_only:
        train(arguments.out, arguments.seed, arguments.steps)
