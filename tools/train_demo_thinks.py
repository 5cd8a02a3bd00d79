"""Rebuild the embedded model that thinks before it answers, and its problems, from a seed.

The task: the sum of three numbers of two digits. The model adds them digit by digit in a thought, concludes, adds them
again in the other order, and adds them a third time where the two sums differ. Slips are part of the training text,
most of them where 7, 8 or 9 is added, so that the trained model makes them too, as models do. A part of the rows has an
empty thought, after which the sum follows at once.

Example
-------
python -m tools.train_demo_thinks --out rebuilt
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tools.demo_generator.small_models import Batch, fit, rebuild, save

SEED, STEPS, ROWS, PEAK_RATE, THREADS = 31, 3_600, 16, 2e-3, 1
CONTEXT, TEMPERATURE = 1024, 0.8
TEST_PROBLEMS = 100
SLIPS, SLIPS_OF_LARGE_DIGITS = 0.03, 0.18  # Share of additions that are wrong by one; where 7, 8 or 9 is added
WITHOUT_THOUGHT = 0.15  # Share of the training rows
TEMPLATE = (
    "{%- for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>"
    "{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
TURNS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
MARKS = (
    "<think>",
    "</think>",
    "answer is ",
    "check\n",
    "wait\n",
)  # A token each; not special: they stay in decoded text

Numbers = tuple[int, int, int]


def question_of(numbers: Numbers) -> str:
    """Return what the user asks."""
    return "+".join(map(str, numbers)) + "=?"


def test_rows(seed: int = SEED) -> list[dict[str, Any]]:
    """Return the bundled problems, none twice and none in another order. Half of them have three large digits or more.

    A problem's category is "hard" where at least three of its digits are 7, 8 or 9, "easy" elsewhere.
    """
    rng, rows, seen = random.Random(f"test-{seed}"), [], set()
    left = {"easy": TEST_PROBLEMS // 2, "hard": TEST_PROBLEMS // 2}
    while any(left.values()):
        numbers = _drawn(rng)
        category = "hard" if sum(digit in "789" for digit in question_of(numbers)) >= 3 else "easy"
        if tuple(sorted(numbers)) in seen or not left[category]:
            continue
        seen.add(tuple(sorted(numbers)))
        left[category] -= 1
        name, answer = f"thinking-{len(rows):03d}", str(sum(numbers))
        row = {"id": name, "category": category, "question": question_of(numbers), "answer": answer}
        rows.append({**row, "compare": "number"})
    return rows


def _drawn(rng: random.Random) -> Numbers:
    return rng.randint(10, 99), rng.randint(10, 99), rng.randint(10, 99)


def _sum(numbers: Numbers, rng: random.Random) -> tuple[str, int]:
    """Return one written addition, digit by digit, and what it comes to; slips are carried on."""

    def add(total: int, digit: int) -> int:
        slips = rng.random() < (SLIPS_OF_LARGE_DIGITS if digit >= 7 else SLIPS)
        return max(0, total + digit + (rng.choice((-1, 1)) if slips else 0))

    lines, carry, digits = [], 0, ""
    for place in (1, 10):
        total, *others = [number // place % 10 for number in numbers]
        line = str(total)
        for digit in [*others, *([carry] if carry else [])]:
            total = add(total, digit)
            line += f"+{digit}={total}"
        if place == 1:
            carry, digits = total // 10, str(total % 10)
            line += f",{carry}"
        lines.append(line)
    result = int(f"{total}{digits}")
    return "\n".join(lines) + f"\nanswer is {result}\n", result


def thought(numbers: Numbers, rng: random.Random) -> tuple[str, int]:
    """Return a written thought, and what it concludes."""
    text, result = _sum(numbers, rng)
    again, checked = _sum((numbers[2], numbers[1], numbers[0]), rng)
    text += f"check\n{again}"
    if checked != result:
        third, result = _sum(numbers, rng)
        text += f"wait\n{third}"
    return text.rstrip("\n"), result


def training_texts(seed: int) -> Iterator[tuple[str, str]]:
    """Yield prompts and answers, in the chat template's form; the problems are in no test row, in whatever order."""
    held = {tuple(sorted(map(int, row["question"].removesuffix("=?").split("+")))) for row in test_rows(seed)}
    rng = random.Random(f"training-{seed}")
    while True:
        numbers = _drawn(rng)
        if tuple(sorted(numbers)) in held:
            continue
        prompt, said, result = f"<|user|>{question_of(numbers)}<|end|><|assistant|>", "", sum(numbers)
        if rng.random() >= WITHOUT_THOUGHT:
            said, result = thought(numbers, rng)
        yield prompt, f"<think>{said}</think>{result}"


def new_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer: one token a byte, and the marks of turns and thoughts and what thoughts repeat."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>", *TURNS]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + len(alphabet),
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    core.train_from_iterator([], trainer)
    core.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=list(TURNS),
        chat_template=TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def new_model(tokenizer: PreTrainedTokenizerFast, width: int = 128) -> LlamaForCausalLM:
    """Return the untrained model: 0.7 M parameters with the `width` of the embedded one."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield tokens and labels, (rows, tokens); what the user asks, and padding, has the label -100."""
    texts, end = training_texts(seed), tokenizer.convert_tokens_to_ids("<|end|>")
    rng = random.Random(f"batches-{seed}")
    begin = len(tokenizer("<|user|>10+10+10=?<|end|><|assistant|>")["input_ids"])
    while True:
        drawn = []
        for _ in range(4 * ROWS):
            prompt, answer = next(texts)
            # The chat template writes the marks of an empty thought: the model must not learn to begin with them.
            first = begin + (2 if answer.startswith("<think></think>") else 0)
            drawn.append((tokenizer(prompt + answer)["input_ids"] + [end], first))
        drawn.sort(key=lambda row: len(row[0]))  # rows of one length need no padding
        for start in rng.sample(range(0, len(drawn), ROWS), 4):
            rows = drawn[start : start + ROWS]
            tokens = torch.full((ROWS, len(rows[-1][0])), tokenizer.pad_token_id)
            labels = torch.full(tokens.shape, -100)
            for number, (ids, first) in enumerate(rows):
                tokens[number, : len(ids)] = torch.tensor(ids)
                labels[number, first : len(ids)] = torch.tensor(ids[first:])
            yield tokens, labels


def losses(logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of the answers, twice: nothing else is minimised."""
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[1][:, 1:].flatten())
    return loss, loss


def train(out: Path, seed: int, steps: int, width: int = 128) -> None:
    """Train, and save model, tokenizer and log."""
    torch.manual_seed(seed)
    tokenizer = new_tokenizer()
    model = new_model(tokenizer, width)
    log = fit(model, batches(tokenizer, seed), losses, steps=steps, peak_rate=PEAK_RATE)
    save(out / "thinks_model", model, tokenizer, log, do_sample=True, temperature=TEMPERATURE)


if __name__ == "__main__":
    rebuild(str(__doc__), file="thinking.jsonl", rows=test_rows, train=train, seed=SEED, steps=STEPS, threads=THREADS)
