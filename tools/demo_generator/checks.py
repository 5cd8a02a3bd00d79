"""Quick measurements of the demonstration model: few-shot accuracy, and what rounding the weights changes."""

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from .items import Row
from .lettered import LETTERS, Choice, block


def as_choice(row: Row) -> Choice:
    """Return a row of ``choice.jsonl`` as an item."""
    return Choice(
        category=row["category"], question=row["question"], options=tuple(row["choices"]), answer=row["answer"]
    )


def prompts(rows: Sequence[Row], *, shots: int = 5) -> list[tuple[str, int]]:
    """Return the few-shot prompt and the right option of every test row."""
    examples: dict[str, list[Choice]] = defaultdict(list)
    for row in rows:
        if row["split"] == "dev":
            examples[row["category"]].append(as_choice(row))
    made = []
    for row in rows:
        if row["split"] == "test":
            item = as_choice(row)
            made.append((f"{block(item.category, examples[item.category][:shots])}\n\n{item.body}", item.answer))
    return made


@torch.inference_mode()
def letter_logits(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], *, batch: int = 20
) -> Tensor:
    """Return the logits of the four letters after each text, of shape ``(n_texts, 4)``."""
    letters = [tokenizer.encode(f" {letter}")[0] for letter in LETTERS[:4]]
    made = []
    for start in range(0, len(texts), batch):
        rows = [torch.tensor(tokens) for tokens in tokenizer(list(texts[start : start + batch]))["input_ids"]]
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        last = torch.tensor([len(row) - 1 for row in rows])
        states = model.model(input_ids=tokens).last_hidden_state
        logits = model.lm_head(states[torch.arange(len(rows)), last])
        made.append(logits[:, letters].float())
    return torch.cat(made)


def rounded(model: LlamaForCausalLM, bits: int, group_size: int = 128) -> LlamaForCausalLM:
    """Return a copy whose linear layers are rounded to nearest, symmetric per group; the head stays as it is."""
    made = copy.deepcopy(model)
    top = 2 ** (bits - 1) - 1
    for layer in made.model.modules():
        if isinstance(layer, nn.Linear):
            weight = layer.weight.data.float()
            groups = weight.reshape(-1, group_size)
            scale = groups.abs().amax(dim=1, keepdim=True).clamp_min(1e-8) / top
            layer.weight.data = ((groups / scale).round().clamp(-top - 1, top) * scale).reshape(weight.shape)
    return made


def compare(baseline: Tensor, variant: Tensor, gold: Tensor) -> dict[str, Any]:
    """Compare two arrays of letter logits, in percent of the items."""
    before, after = baseline.argmax(dim=1), variant.argmax(dim=1)
    right, right_after = before == gold, after == gold
    return {
        "accuracy_pct": round(100 * right_after.float().mean().item(), 2),
        "accuracy_change_pct": round(100 * (right_after.float().mean() - right.float().mean()).item(), 2),
        "flips_pct": round(100 * (right != right_after).float().mean().item(), 2),
        "correct_to_wrong_pct": round(100 * (right & ~right_after).float().mean().item(), 2),
        "wrong_to_correct_pct": round(100 * (~right & right_after).float().mean().item(), 2),
        "changed_predictions_pct": round(100 * (before != after).float().mean().item(), 2),
    }
