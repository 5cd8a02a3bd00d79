"""Train the demonstration model: tokenizer, packed steps, weighted loss, log of the few-shot accuracy."""

import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .checks import letter_logits, prompts
from .initial import set_start
from .items import choice_rows
from .lettered import LETTERS
from .packing import STEP_TOKENS, packed_steps
from .tokenizer import CONTEXT, VOCABULARY, train_tokenizer
from .training_text import documents
from .world import World

PEAK_RATE = 1e-3
WARMUP_STEPS = 80
EXERCISE_STEPS = 300
DECAY_SHARE = 0.3
LETTER_WEIGHT = 6.0
TOKENIZER_DOCUMENTS = 12_000
LOG_EVERY_TOKENS = 500_000


def new_tokenizer(world: World) -> PreTrainedTokenizerFast:
    """Train the tokenizer on a stream of documents of its own."""
    stream = documents(world, "tokenizer")
    return train_tokenizer(document for _, document in itertools.islice(stream, TOKENIZER_DOCUMENTS))


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return the untrained model."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def new_optimizer(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    """Return AdamW for all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.05, fused=True)


def schedule(step: int, steps: int) -> float:
    """Return the share of the full learning rate at a step: warm-up, plateau, straight line to a twentieth."""
    decay = max(1, round(DECAY_SHARE * steps))
    left = (steps - step) / decay
    return min(1.0, (step + 1) / WARMUP_STEPS, 0.05 + 0.95 * left)


def weighted_loss(logits: Tensor, tokens: Tensor, letters: Tensor, colon: int) -> Tensor:
    """Return the next-token loss, in which a letter after ``Answer:`` weighs more than other tokens."""
    before, target = tokens[:, :-1], tokens[:, 1:]
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), target.flatten(), reduction="none")
    answer = torch.isin(target, letters) & (before == colon)
    weight = torch.where(answer, LETTER_WEIGHT, 1.0).flatten()
    return (loss * weight).sum() / weight.sum()


def accuracy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, world: World, items: int = 300) -> float:
    """Return the five-shot accuracy in percent on so many items, evenly over the categories."""
    asked = prompts(list(choice_rows(world)))
    asked = asked[:: max(1, len(asked) // items)]
    model.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = letter_logits(model, tokenizer, [text for text, _ in asked])
    model.train()
    gold = torch.tensor([answer for _, answer in asked])
    return 100 * (logits.argmax(dim=1) == gold).float().mean().item()


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save a bfloat16 copy of the model with its tokenizer and its generation defaults."""
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    copied = LlamaForCausalLM(model.config).to(torch.bfloat16)
    copied.load_state_dict(weights)
    copied.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|end|>")],
        pad_token_id=tokenizer.pad_token_id,
    )
    copied.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train(seed: int, tokens: int, folder: Path) -> dict[str, Any]:
    """Train from a seed on so many tokens, save into ``folder`` and return the last line of the log."""
    torch.manual_seed(seed)
    started = time.perf_counter()
    world = World(seed)
    tokenizer = new_tokenizer(world)
    letters = torch.tensor([tokenizer.encode(f" {letter}")[0] for letter in LETTERS])
    colon = tokenizer.encode(":")[0]
    model = new_model(tokenizer)
    set_start(model, tokenizer, seed)
    optimizer = new_optimizer(model)
    steps = tokens // STEP_TOKENS
    log: list[dict[str, Any]] = []
    folder.mkdir(parents=True, exist_ok=True)
    progress = tqdm(total=steps * STEP_TOKENS, unit="token", unit_scale=True, mininterval=10)
    for step, rows in enumerate(itertools.islice(packed_steps(world, tokenizer, EXERCISE_STEPS), steps)):
        batch = torch.from_numpy(rows)
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * schedule(step, steps)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=batch).logits
        loss = weighted_loss(logits, batch, letters, colon)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress.update(STEP_TOKENS)
        done = (step + 1) * STEP_TOKENS
        if done // LOG_EVERY_TOKENS > (done - STEP_TOKENS) // LOG_EVERY_TOKENS or step + 1 == steps:
            log.append(
                {
                    "tokens": done,
                    "seconds": round(time.perf_counter() - started),
                    "loss": round(loss.item(), 4),
                    "accuracy_pct": round(accuracy(model, tokenizer, world), 1),
                }
            )
            progress.write(json.dumps(log[-1]))
            save(model, tokenizer, folder)
            (folder / "training_log.jsonl").write_text(
                "".join(json.dumps(line) + "\n" for line in log), encoding="utf-8", newline="\n"
            )
    progress.close()
    return log[-1]
