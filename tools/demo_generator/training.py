"""Train the demonstration model: tokenizer, stages of packed steps, weighted loss, log of the five-shot accuracy."""

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .checks import letter_logits, prompts
from .initial import set_start
from .items import choice_rows
from .lettered import LETTERS
from .packing import packed, token_documents
from .stages import Stage
from .tokenizer import CONTEXT, VOCABULARY, train_tokenizer
from .training_text import documents
from .world import World

Rows = NDArray[np.int64]

PEAK_RATE = 1e-3
WARMUP_STEPS = 100
LETTER_WEIGHT = 4.0
TOKENIZER_DOCUMENTS = 12_000
LOG_EVERY_TOKENS = 250_000
HINT_LAYER = 3
"""Whose output the second loss reads: two layers are left to find the option and its letter."""


@dataclass(frozen=True)
class Marks:
    """Tokens that the lettered format is recognised by."""

    letters: Tensor
    colon: int
    dot: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> "Marks":
        """Look them up."""
        letters = torch.tensor([tokenizer.encode(f" {letter}")[0] for letter in LETTERS])
        return cls(letters, tokenizer.encode(":")[0], tokenizer.encode("A.")[1])


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
        num_hidden_layers=5,
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


def rate(stage: Stage, step: int) -> float:
    """Return the share of the full learning rate: warm-up, plateau, and with a decay a line to a twentieth."""
    steps = stage.tokens // stage.step_tokens
    left = (steps - step) / max(1.0, stage.decay * steps)
    return min(1.0, (step + 1) / WARMUP_STEPS, 0.05 + 0.95 * left)


def batches(stage: Stage, tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Rows]:
    """Yield the rows of tokens of every step of a stage."""
    world = World(seed, disputed=stage.disputed)
    stream = token_documents(world, tokenizer, stage.name, stage.kinds)
    return itertools.islice(packed(stream, stage.lengths, stage.step_tokens), stage.tokens // stage.step_tokens)


def weighted_loss(logits: Tensor, tokens: Tensor, letters: Tensor, colon: int) -> Tensor:
    """Return the next-token loss, in which a letter after ``Answer:`` weighs more than other tokens."""
    before, target = tokens[:, :-1], tokens[:, 1:]
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), target.flatten(), reduction="none")
    answer = torch.isin(target, letters) & (before == colon)
    weight = torch.where(answer, LETTER_WEIGHT, 1.0).flatten()
    return (loss * weight).sum() / weight.sum()


def accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, world: World, *, shots: int, items: int = 300
) -> float:
    """Return the few-shot accuracy in percent on so many items, evenly over the categories."""
    asked = prompts(list(choice_rows(world)), shots=shots)
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


def hints(rows: Rows, letters: Tensor, colon: int, dot: int) -> Tensor:
    """Return the option behind each letter that follows ``Answer:``, at the colon; -100 elsewhere.

    An option is known by its first token: it stands two tokens behind its letter, after a full stop.
    """
    found = np.full(rows.shape, -100)
    known = set(letters.tolist())
    for row, tokens in enumerate(rows.tolist()):
        option: dict[int, int] = {}
        for place in range(len(tokens) - 2):
            if tokens[place] in known and tokens[place + 1] == dot:
                option[tokens[place]] = tokens[place + 2]
            if tokens[place] == colon and tokens[place + 1] in option:
                found[row, place] = option[tokens[place + 1]]
    return torch.from_numpy(found)


def losses(model: LlamaForCausalLM, rows: Rows, marks: Marks, hint: float) -> Tensor:
    """Return the loss of one step: the next token's, and with a ``hint`` that of the middle layer (see `Stage`)."""
    tokens = torch.from_numpy(rows)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        body = model.model(input_ids=tokens, output_hidden_states=hint > 0)
        loss = weighted_loss(model.lm_head(body.last_hidden_state), tokens, marks.letters, marks.colon)
        if hint > 0:
            option = hints(rows, marks.letters, marks.colon, marks.dot)
            states = body.hidden_states[HINT_LAYER][option >= 0]
            if len(states):
                logits = model.lm_head(model.model.norm(states)).float()
                loss = loss + hint * torch.nn.functional.cross_entropy(logits, option[option >= 0])
    return loss


class Trainer:
    """Trains through the stages and keeps the log.

    `folder` receives ``model/`` and, after each stage, its weights in float32.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        torch.manual_seed(seed)
        self.seed, self.folder = seed, folder
        self.world = World(seed)
        self.tokenizer = new_tokenizer(self.world)
        self.marks = Marks.of(self.tokenizer)
        self.model = new_model(self.tokenizer)
        set_start(self.model, self.tokenizer, seed)
        self.log: list[dict[str, Any]] = []
        self.started = time.perf_counter()
        (folder / "model").mkdir(parents=True, exist_ok=True)

    def run(self, stage: Stage) -> None:
        """Train one stage, with an optimizer of its own."""
        optimizer = new_optimizer(self.model)
        done = 0
        with tqdm(total=stage.tokens, unit="token", unit_scale=True, desc=stage.name, mininterval=10) as progress:
            for step, rows in enumerate(batches(stage, self.tokenizer, self.seed)):
                for group in optimizer.param_groups:
                    group["lr"] = PEAK_RATE * rate(stage, step)
                loss = losses(self.model, rows, self.marks, stage.hint)
                torch.autograd.backward(loss)
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                progress.update(rows.size)
                before, done = done, done + rows.size
                last = done + rows.size > stage.tokens
                if last or done // LOG_EVERY_TOKENS > before // LOG_EVERY_TOKENS:
                    self.note(stage, done, loss.item())
        save_file(self.model.state_dict(), self._weights(stage))

    def resume(self, stage: Stage) -> None:
        """Take the weights and the log that an earlier run had after a stage."""
        self.model.load_state_dict(load_file(self._weights(stage)))
        lines = [json.loads(line) for line in self._log_file.read_text(encoding="utf-8").splitlines()]
        last = max(number for number, line in enumerate(lines) if line["stage"] == stage.name)
        self.log = lines[: last + 1]

    @property
    def _log_file(self) -> Path:
        return self.folder / "model" / "training_log.jsonl"

    def _weights(self, stage: Stage) -> Path:
        return self.folder / f"after {stage.name}.safetensors"

    def note(self, stage: Stage, done: int, loss: float) -> None:
        """Measure, add a line to the log, and save the model."""
        shots = {n: round(accuracy(self.model, self.tokenizer, self.world, shots=n), 1) for n in (0, 5)}
        line = {
            "stage": stage.name,
            "tokens": done,
            "seconds": round(time.perf_counter() - self.started),
            "loss": round(loss, 4),
            "accuracy_0_shot_pct": shots[0],
            "accuracy_5_shot_pct": shots[5],
        }
        self.log.append(line)
        tqdm.write(json.dumps(line))
        save(self.model, self.tokenizer, self.folder / "model")
        lines = "".join(json.dumps(line) + "\n" for line in self.log)
        self._log_file.write_text(lines, encoding="utf-8", newline="\n")
